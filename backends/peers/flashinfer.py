"""FlashInferBackend: adapter to the prefill kernels of flashinfer's gated delta rule.

B batch, T time, N sequences, HV value heads, K key width, V value width
"""

from importlib import import_module

import torch

from deltazoo.backends.peers.common import (
    common_reasons,
    missing_packages,
    scalar_reasons,
    strength,
    violations,
)
from deltazoo.backends.update.base import Backend, UpdateInputs, UpdateMeta, UpdateOutput
from deltazoo.backends.update.lowering import log_decay
from deltazoo.backends.update.spec import UpdateSpec


class FlashInferBackend(Backend):
    """Compute the forward of the gated delta rule with flashinfer's CuTe DSL kernels, if that package is installed.

    It supports K = V = 128 on Hopper and Blackwell. Decoding uses the prefill kernel, because the decode kernels of
    the package expect the gates before their activation.

    Source: https://github.com/flashinfer-ai/flashinfer, 0.7.
    """

    name = "flashinfer"

    def unsupported(self, spec: UpdateSpec, meta: UpdateMeta) -> list[str]:
        negative = spec.negative_eigenvalues
        rules = {
            "it has no backward, and a gradient is required.": meta.grad,
            f"transition must be 'delta', got '{spec.transition}'.": spec.transition == "additive",
            f"negative_eigenvalues must be 'off', got '{negative}'.": negative == "both",
            f"reparam must be 'none', got '{spec.reparam}'.": spec.reparam != "none",
            f"K and V must be 128, got K={meta.K}, V={meta.V}.": (meta.K, meta.V) != (128, 128),
            "scale must not be 0, which the package replaces by K ** -0.5.": spec.scale == 0,
        }
        packages = {"flashinfer": "flashinfer-python", "cutlass": "nvidia-cutlass-dsl"}
        return missing_packages(packages) + common_reasons(spec, meta) + scalar_reasons(spec, meta) + violations(rules)

    def forward(self, spec: UpdateSpec, inputs: UpdateInputs) -> UpdateOutput:
        B, T, _, K = inputs.q.shape
        HV, V = inputs.v.shape[2:]
        cu, device = inputs.cu_seqlens, inputs.q.device
        bounds = torch.arange(B + 1, dtype=torch.int32, device=device) * T if cu is None else cu
        decay, beta = log_decay(spec, inputs), strength(spec, inputs)
        state = torch.empty(bounds.shape[0] - 1, HV, V, K, dtype=torch.float32, device=device)
        q, k, v = (x.flatten(0, 1).contiguous() for x in (inputs.q, inputs.k, inputs.v))
        o, state = import_module("flashinfer.gdn_prefill").chunk_gated_delta_rule(
            q, k, v,
            g=None if decay is None else decay.exp().flatten(0, 1).contiguous(),
            beta=None if beta is None else beta.float().flatten(0, 1).contiguous(),
            scale=spec.scale_of(inputs.q.shape[-1]),
            initial_state=None if inputs.state is None else inputs.state.transpose(-1, -2).contiguous(),
            output_final_state=True,
            cu_seqlens=bounds,
            output_state=state,
            max_seqlen=T if cu is None else None,
        )  # fmt: skip
        return UpdateOutput(o.view(B, T, HV, V), state.transpose(-1, -2).contiguous())
