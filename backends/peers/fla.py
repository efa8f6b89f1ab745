"""FlaBackend: adapter to the Triton kernels of flash-linear-attention.

B batch, T time, H key heads, HV value heads, K key width, V value width
"""

import inspect
from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from deltazoo.backends.base import Backend, UpdateInputs, UpdateMeta, UpdateOutput
from deltazoo.backends.lowering import log_decay
from deltazoo.backends.peers.common import common_reasons, missing_packages, strength, strength_or_ones, violations
from deltazoo.backends.slots import step_in_slots
from deltazoo.backends.spec import UpdateSpec


class FlaBackend(Backend):
    """Compute the update with flash-linear-attention's Triton kernels, if that package is installed.

    It calls `chunk_gated_delta_rule` with a decay, `chunk_delta_rule` without one, and `chunk_simple_gla` for additive
    updates. Decoding calls `fused_recurrent_*` and copies the result into the states. torch.compile breaks the graph at
    these functions, and they autotune at the first call of a shape. On Hopper the backward with a decay raises unless
    Triton >= 3.7.1, or TileLang and nvcc, are installed. If FlashQLA is installed, the package silently forwards whole
    calls to it; this adapter unwraps its functions so that their own code runs.

    Source: https://github.com/fla-org/flash-linear-attention, 0.6.0.
    """

    name = "fla"

    def unsupported(self, spec: UpdateSpec, meta: UpdateMeta) -> list[str]:
        grouped = meta.HV != meta.H and (spec.transition == "additive" or spec.decay == "none")
        rules = {
            f"K must be at most 256, got {meta.K}.": meta.K > 256,
            f"without a decay, or additive, HV must be H, got HV={meta.HV}, H={meta.H}.": grouped,
            f"scale must be above 0, got {spec.scale}.": spec.scale is not None and spec.scale <= 0,
        }
        return missing_packages({"fla": "fla-core"}) + common_reasons(spec, meta) + violations(rules)

    def forward(self, spec: UpdateSpec, inputs: UpdateInputs) -> UpdateOutput:
        q, k, v = inputs.q, inputs.k, inputs.v
        options = {
            "scale": spec.scale_of(q.shape[-1]),
            "initial_state": inputs.state,
            "output_final_state": True,
            "cu_seqlens": inputs.cu_seqlens,
        }
        if spec.transition == "additive":
            run = _unwrapped("simple_gla", "chunk_simple_gla")
            return UpdateOutput(*run(q, k, _scaled_values(spec, inputs), **_decay(spec, inputs), **options))
        beta = strength_or_ones(spec, inputs)
        if spec.decay == "none":
            return UpdateOutput(*_unwrapped("delta_rule", "chunk_delta_rule")(q, k, v, beta, **options))
        run = _unwrapped("gated_delta_rule", "chunk_gated_delta_rule")
        return UpdateOutput(*run(q, k, v, log_decay(spec, inputs), beta, **options))

    def step_(self, spec: UpdateSpec, inputs: UpdateInputs, states: Tensor, slots: Tensor | None) -> Tensor:
        def step(state: Tensor) -> tuple[Tensor, Tensor]:
            q, k, v = inputs.q, inputs.k, inputs.v
            options = {"scale": spec.scale_of(q.shape[-1]), "initial_state": state, "output_final_state": True}
            if spec.transition == "additive":
                run = _unwrapped("simple_gla", "fused_recurrent_simple_gla")
                return run(q, k, _scaled_values(spec, inputs), **_decay(spec, inputs), **options)
            run = _unwrapped("gated_delta_rule", "fused_recurrent_gated_delta_rule")
            return run(q, k, v, g=log_decay(spec, inputs), beta=strength_or_ones(spec, inputs), **options)

        with torch.no_grad():
            return step_in_slots(step, states, slots)


_functions: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {}


def _unwrapped(module: str, name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """A function of the package, without the wrapper that may forward its calls to another package."""
    if name not in _functions:
        function = inspect.unwrap(getattr(import_module(f"fla.ops.{module}"), name))
        _functions[name] = torch.compiler.disable(function)
    return _functions[name]


def _scaled_values(spec: UpdateSpec, inputs: UpdateInputs) -> Tensor:
    """The values times the write strength, for which the additive kernels have no operand."""
    write = strength(spec, inputs)
    return inputs.v if write is None else (inputs.v * write.unsqueeze(-1)).to(inputs.v.dtype)


def _decay(spec: UpdateSpec, inputs: UpdateInputs) -> dict[str, Tensor | None]:
    """The decay as g [B, T, H], or a fixed one as g_gamma [H], for which the package has no gradient."""
    if spec.decay == "fixed" and inputs.log_decay is not None and not inputs.log_decay.requires_grad:
        return {"g_gamma": inputs.log_decay}
    return {"g": log_decay(spec, inputs)}
