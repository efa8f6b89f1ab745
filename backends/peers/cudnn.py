"""CudnnBackend: adapter to Kimi Delta Attention of NVIDIA's cuDNN frontend.

B batch, T time, N sequences, HV value heads, K key width, V value width
"""

from importlib import import_module

import torch

from deltazoo.backends.peers.common import common_reasons, missing_packages, strength_or_ones, violations
from deltazoo.backends.update.base import Backend, UpdateInputs, UpdateMeta, UpdateOutput
from deltazoo.backends.update.lowering import log_decay
from deltazoo.backends.update.spec import UpdateSpec


class CudnnBackend(Backend):
    """Compute the delta rule with a decay per channel with cuDNN's kernels, if the package is installed.

    On Hopper the package compiles CUDA kernels with NVRTC at the first call. They restart a sequence where the decay of
    a chunk falls below 2^-20, so that their time depends on the decays, and they take beta in [0, 1] only.

    Source: https://pypi.org/project/nvidia-cudnn-frontend, 1.32.
    """

    name = "cudnn"

    def unsupported(self, spec: UpdateSpec, meta: UpdateMeta) -> list[str]:
        by_channel = spec.decay == "channel" or meta.decay_channels
        rules = {
            f"decay must be per channel, got '{spec.decay}'.": not by_channel,
            f"transition must be 'delta', got '{spec.transition}'.": spec.transition != "delta",
            f"beta must be 'none' or 'head', got '{spec.beta}'.": spec.beta == "channel",
            "negative_eigenvalues='both' needs beta above 1.": spec.negative_eigenvalues == "both",
            f"K and V must be 128, got K={meta.K}, V={meta.V}.": (meta.K, meta.V) != (128, 128),
        }
        packages = {"cudnn": "nvidia-cudnn-frontend", "cutlass": "nvidia-cutlass-dsl", "tvm_ffi": "apache-tvm-ffi"}
        reasons = common_reasons(spec, meta, (torch.bfloat16,))
        return missing_packages(packages) + reasons + violations(rules)

    def forward(self, spec: UpdateSpec, inputs: UpdateInputs) -> UpdateOutput:
        B, T = inputs.q.shape[:2]
        cu, decay = inputs.cu_seqlens, log_decay(spec, inputs)
        assert decay is not None  # refused by `unsupported`
        if cu is None:
            cu = torch.arange(B + 1, dtype=torch.int32, device=inputs.q.device) * T
        q, k, v, g, beta = (
            x.flatten(0, 1).contiguous()
            for x in (inputs.q, inputs.k, inputs.v, decay, strength_or_ones(spec, inputs).float())
        )
        o, state = import_module("cudnn.linear_attention.ops").kimi_delta_attention(
            q, k, v, g, beta, cu,
            scale=spec.scale_of(inputs.q.shape[-1]),
            initial_state=None if inputs.state is None else inputs.state.transpose(-1, -2).contiguous(),
            output_final_state=True,
        )  # fmt: skip
        return UpdateOutput(o.view(inputs.v.shape), state.transpose(-1, -2).contiguous())
