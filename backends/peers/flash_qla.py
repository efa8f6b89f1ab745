"""FlashQlaBackend: adapter to the gated delta rule of FlashQLA."""

from importlib import import_module

from deltazoo.backends.peers.common import (
    common_reasons,
    missing_packages,
    scalar_reasons,
    strength_or_ones,
    violations,
)
from deltazoo.backends.update.base import Backend, UpdateInputs, UpdateMeta, UpdateOutput
from deltazoo.backends.update.lowering import log_decay
from deltazoo.backends.update.spec import UpdateSpec


class FlashQlaBackend(Backend):
    """Compute the gated delta rule with FlashQLA's TileLang kernels, if that package is installed.

    It supports K = V = 128 on Hopper and Blackwell. The kernels compile at the first call, and torch.compile breaks the
    graph there. A decoded token is processed as a chunk.

    Source: https://pypi.org/project/flash-qla, 0.1.3.
    """

    name = "flash_qla"

    def unsupported(self, spec: UpdateSpec, meta: UpdateMeta) -> list[str]:
        negative = spec.negative_eigenvalues
        rules = {
            f"decay must be 'fixed' or 'head', got '{spec.decay}'.": spec.decay == "none",
            f"transition must be 'delta', got '{spec.transition}'.": spec.transition == "additive",
            f"negative_eigenvalues must be 'off', got '{negative}'.": negative == "both",
            f"reparam must be 'none', got '{spec.reparam}'.": spec.reparam != "none",
            f"K and V must be 128, got K={meta.K}, V={meta.V}.": (meta.K, meta.V) != (128, 128),
            f"scale must be above 0, got {spec.scale}.": spec.scale is not None and spec.scale <= 0,
        }
        reasons = common_reasons(spec, meta) + scalar_reasons(spec, meta)
        return missing_packages({"flash_qla": "flash-qla"}) + reasons + violations(rules)

    def forward(self, spec: UpdateSpec, inputs: UpdateInputs) -> UpdateOutput:
        o, state = import_module("flash_qla").chunk_gated_delta_rule(
            inputs.q, inputs.k, inputs.v, log_decay(spec, inputs), strength_or_ones(spec, inputs),
            scale=spec.scale_of(inputs.q.shape[-1]), initial_state=inputs.state, output_final_state=True,
            cu_seqlens=inputs.cu_seqlens,
        )  # fmt: skip
        return UpdateOutput(o, state)
