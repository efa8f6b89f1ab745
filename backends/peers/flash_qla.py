"""FlashQlaBackend: FlashQLA's gated delta rule."""

from importlib import import_module

from deltazoo.backends.base import Backend, UpdateInputs, UpdateMeta, UpdateOutput
from deltazoo.backends.peers.common import decay_of, missing, ones, refused, strength, unusual
from deltazoo.backends.spec import UpdateSpec


class FlashQlaBackend(Backend):
    """Compute the gated delta rule with FlashQLA's TileLang kernels, where that package is installed.

    K = V = 128 on Hopper and Blackwell; compiles at the first call, breaks graphs; a token is a chunk.

    Source: https://pypi.org/project/flash-qla, 0.1.3.
    """

    name = "flash_qla"

    def unsupported(self, spec: UpdateSpec, meta: UpdateMeta) -> list[str]:
        other = spec.negative_eigenvalues
        rules = {
            f"decay must be 'fixed' or 'head', got '{spec.decay}'.": spec.decay == "none",
            f"transition must be 'delta', got '{spec.transition}'.": spec.transition == "additive",
            f"negative_eigenvalues must be 'off', got '{other}'.": other == "both",
            f"reparam must be 'none', got '{spec.reparam}'.": spec.reparam != "none",
            f"K and V must be 128, got K={meta.K}, V={meta.V}.": (meta.K, meta.V) != (128, 128),
            f"scale must be above 0, got {spec.scale}.": spec.scale is not None and spec.scale <= 0,
        }
        return missing({"flash_qla": "flash-qla"}) + unusual(spec, meta) + refused(rules)

    def forward(self, spec: UpdateSpec, inputs: UpdateInputs) -> UpdateOutput:
        beta = strength(spec, inputs)
        o, state = import_module("flash_qla").chunk_gated_delta_rule(
            inputs.q, inputs.k, inputs.v, decay_of(spec, inputs), ones(inputs) if beta is None else beta,
            scale=spec.scale_of(inputs.q.shape[-1]), initial_state=inputs.state, output_final_state=True,
            cu_seqlens=inputs.cu_seqlens,
        )  # fmt: skip
        return UpdateOutput(o, state)
