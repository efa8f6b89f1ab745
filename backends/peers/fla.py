"""FlaBackend: adapter to the Triton kernels of flash-linear-attention.

B batch, T time, H key heads, HV value heads, K key width, V value width
"""

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.peers.common import common_reasons, missing_packages, strength, strength_or_ones, violations
from deltazoo.backends.update.base import Backend, UpdateInputs, UpdateMeta, UpdateOutput
from deltazoo.backends.update.lowering import log_decay, strengths
from deltazoo.backends.update.slots import step_in_slots
from deltazoo.backends.update.spec import UpdateSpec


class _Operator(NamedTuple):
    """Functions of fla.ops.MODULE, chunked and recurrent, and whether they take more value heads than key heads."""

    module: str
    chunked: str
    recurrent: str
    grouped: bool = False


_GATED_DELTA = _Operator("gated_delta_rule", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", grouped=True)
_DELTA = _Operator("delta_rule", "chunk_delta_rule", "fused_recurrent_delta_rule")
_SIMPLE_GLA = _Operator("simple_gla", "chunk_simple_gla", "fused_recurrent_simple_gla")
_GLA = _Operator("gla", "chunk_gla", "fused_recurrent_gla")
_KDA = _Operator("kda", "chunk_kda", "fused_recurrent_kda", grouped=True)
_GDN2 = _Operator("gdn2", "chunk_gdn2", "fused_recurrent_gdn2")
_DPLR = _Operator("generalized_delta_rule", "chunk_dplr_delta_rule", "fused_recurrent_dplr_delta_rule")


class FlaBackend(Backend):
    """Compute the update with flash-linear-attention's Triton kernels, if that package is installed.

    The operator follows from the spec: `gated_delta_rule`, `delta_rule` without a decay, `kda` with a decay per
    channel, `gdn2` with a beta per channel, `simple_gla` and `gla` for additive updates, `dplr_delta_rule`. Decoding
    calls `fused_recurrent_*` and copies the result into the states. torch.compile breaks the graph at these functions,
    and they autotune at the first call of a shape. On Hopper the backward of the gated delta rule raises unless
    Triton >= 3.7.1, or TileLang and nvcc, are installed. If FlashQLA is installed, the package silently forwards whole
    calls to it; this adapter unwraps its functions so that their own code runs.

    Source: https://github.com/fla-org/flash-linear-attention, 0.6.0.
    """

    name = "fla"

    def unsupported(self, spec: UpdateSpec, meta: UpdateMeta) -> list[str]:
        operator = _operator(spec, spec.decay == "channel" or meta.decay_channels)
        ungrouped = meta.HV != meta.H and not operator.grouped
        rules = {
            f"K must be at most 256, got {meta.K}.": meta.K > 256,
            f"{operator.chunked} needs HV = H, got HV={meta.HV}, H={meta.H}.": ungrouped,
            f"scale must be above 0, got {spec.scale}.": spec.scale is not None and spec.scale <= 0,
        }
        return missing_packages({"fla": "fla-core"}) + common_reasons(spec, meta) + violations(rules)

    def forward(self, spec: UpdateSpec, inputs: UpdateInputs) -> UpdateOutput:
        operator = _operator(spec, _by_channel(inputs))
        run = _unwrapped(operator.module, operator.chunked)
        operands = _operands(spec, inputs, operator)
        if operator is _DPLR:
            operands["gk"] = operands.pop("g")
        return UpdateOutput(*run(**operands, initial_state=inputs.state, cu_seqlens=inputs.cu_seqlens))

    def step_(self, spec: UpdateSpec, inputs: UpdateInputs, states: Tensor, slots: Tensor | None) -> Tensor:
        operator = _operator(spec, _by_channel(inputs))
        if operator is _DELTA:  # the recurrent gated delta rule takes no decay, too
            operator = _GATED_DELTA
        run = _unwrapped(operator.module, operator.recurrent)
        operands = _operands(spec, inputs, operator)
        if operator in (_DPLR, _GLA):
            operands["gk"] = operands.pop("g")

        def step(state: Tensor) -> tuple[Tensor, Tensor]:
            return run(**operands, initial_state=state)

        with torch.no_grad():
            return step_in_slots(step, states, slots)


def _by_channel(inputs: UpdateInputs) -> bool:
    return inputs.log_decay is not None and inputs.log_decay.dim() in (2, 4)


def _operator(spec: UpdateSpec, by_channel: bool) -> _Operator:
    if spec.transition == "dplr":
        return _DPLR
    if spec.transition == "additive":
        return _GLA if by_channel or spec.beta == "channel" else _SIMPLE_GLA
    if spec.beta == "channel":
        return _GDN2
    if by_channel:
        return _KDA
    return _DELTA if spec.decay == "none" else _GATED_DELTA


def _operands(spec: UpdateSpec, inputs: UpdateInputs, operator: _Operator) -> dict[str, Any]:
    """Return the arguments of an operator but the initial state, by the names of the chunked functions."""
    q, k, v = inputs.q, inputs.k, inputs.v
    x: dict[str, Any] = {"q": q, "k": k, "v": v, "scale": spec.scale_of(q.shape[-1]), "output_final_state": True}
    if operator in (_SIMPLE_GLA, _GLA, _DPLR):
        x["v"] = _scaled_values(spec, inputs)
    elif operator is _GDN2:
        erase, write = strengths(spec, inputs)
        x |= {"b": _like(erase, (*v.shape[:3], q.shape[-1]), v), "w": _like(write, v.shape, v)}
    else:
        x["beta"] = strength_or_ones(spec, inputs)
    if operator is _DPLR:
        x |= {"a": inputs.a, "b": inputs.b}
    if operator is _SIMPLE_GLA:
        return x | _decay(spec, inputs)
    decay = log_decay(spec, inputs)
    if operator in (_GLA, _DPLR, _GDN2, _KDA):
        sizes = (*v.shape[:3], q.shape[-1])
        decay = v.new_zeros(sizes, dtype=torch.float32) if decay is None else decay
        decay = (decay if decay.dim() == 4 else decay.unsqueeze(-1)).expand(sizes).contiguous()
    return x | ({"g": decay} if operator is not _DELTA else {})


_functions: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {}


def _unwrapped(module: str, name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function of the package, without the wrapper that may forward its calls to another package."""
    if name not in _functions:
        function = inspect.unwrap(getattr(import_module(f"fla.ops.{module}"), name))
        _functions[name] = torch.compiler.disable(function)
    return _functions[name]


def _like(x: Tensor | None, sizes: tuple[int, ...], v: Tensor) -> Tensor:
    """Return a strength of these sizes in the dtype of v; ones if there is none."""
    return v.new_ones(sizes) if x is None else x.to(v.dtype)


def _scaled_values(spec: UpdateSpec, inputs: UpdateInputs) -> Tensor:
    """Return the values times the write strength, for which the operators without erase term have no operand."""
    write = strength(spec, inputs)
    if write is None:
        return inputs.v
    return (inputs.v * (write if write.dim() == 4 else write.unsqueeze(-1))).to(inputs.v.dtype)


def _decay(spec: UpdateSpec, inputs: UpdateInputs) -> dict[str, Tensor | None]:
    """Return the decay as g [B, T, H], or a fixed one as g_gamma [H], for which the package has no gradient."""
    if spec.decay == "fixed" and inputs.log_decay is not None and not inputs.log_decay.requires_grad:
        return {"g_gamma": inputs.log_decay}
    return {"g": log_decay(spec, inputs)}
