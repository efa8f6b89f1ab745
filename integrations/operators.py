"""What functions of other libraries need beside the update: their layouts of states and histories.

B batch, T time, C channels, W taps, H key heads, HV value heads, K key width, V value width, N sequences
"""

from typing import NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.io.errors import UnsupportedError
from deltazoo.backends.ops.rms_norm import GateActivation, apply_gate, gated_rms_norm, refusals, rms_norm
from deltazoo.backends.ops.short_conv import EPS, ConvInputs, ConvPart, shifted_taps
from deltazoo.backends.update import registry
from deltazoo.backends.update.base import UpdateInputs, UpdateOutput, state_dtype
from deltazoo.backends.update.dispatch import BoundConv, BoundUpdate, requested_backend
from deltazoo.backends.update.spec import UpdateSpec


class Sequences(NamedTuple):
    """How the tokens of a call continue and are divided.

    Args:
        state: initial state [N, HV, K, V]; None means zeros.
        cu_seqlens: [N + 1], bounds of packed sequences, of any integer dtype; then B = 1.
        v_first: the states have the layout [N, HV, V, K].
    """

    state: Tensor | None = None
    cu_seqlens: Tensor | None = None
    v_first: bool = False


def run_update(
    spec: UpdateSpec, inputs: UpdateInputs, sequences: Sequences, scale: float | None = None
) -> UpdateOutput:
    """Compute the update of operands whose decays, strengths and states may have any float dtype.

    One token per sequence without gradients takes the decode step, on a copy of the state.

    Args: spec: with `scale` None; scale: factor on the output, None: K ** -0.5.
    Returns: o [B, T, HV, V] in the dtype of v, and the final state in the layout of `sequences`.
    """
    bound, K = bound_update(spec), inputs.q.shape[-1]
    dtype = state_dtype(inputs.q.dtype)
    state, bounds, v_first = sequences
    if state is not None:
        state = state.to(dtype)
        state = state.transpose(-1, -2) if v_first else state
    decays = {name: x.to(dtype) for name in ("log_decay", "step", "rate") if (x := getattr(inputs, name)) is not None}
    inputs = inputs._replace(**decays)
    if scale is not None and scale != K**-0.5:  # q is scaled, because torch.compile cannot trace a new spec
        inputs = inputs._replace(q=inputs.q * (scale * K**0.5))
    if state is not None and bounds is None and inputs.q.shape[1] == 1 and not torch.is_grad_enabled():
        state = state.clone(memory_format=torch.contiguous_format)
        out = UpdateOutput(bound.step_(inputs, state), state)
    else:
        out = bound(inputs._replace(state=state, cu_seqlens=as_bounds(bounds)))
    return UpdateOutput(out.o, out.state.transpose(-1, -2)) if v_first else out


def bound_update(spec: UpdateSpec) -> BoundUpdate:
    """Bind the spec, also while torch.compile traces. Refusals of preferred backends are not logged."""
    requested = requested_backend(None)
    return BoundUpdate(spec, registry.candidates_of(requested), requested)


def bound_conv(parts: tuple[ConvPart, ...]) -> BoundConv:
    """Bind the convolution of these parts, also while torch.compile traces."""
    requested = requested_backend(None)
    return BoundConv(parts, registry.candidates_of(requested), requested)


def as_bounds(cu_seqlens: Tensor | None) -> Tensor | None:
    """Return the bounds of packed sequences as int32, the dtype that operators take."""
    return None if cu_seqlens is None else cu_seqlens.to(torch.int32)


def has_silu(activation: str | None, owner: str) -> bool:
    """Return whether a convolution ends with a SiLU. Raises: UnsupportedError for another activation."""
    if activation not in (None, "silu", "swish"):
        raise UnsupportedError(f"{owner}: activation must be None, 'silu' or 'swish', got {activation!r}")
    return activation is not None


def convolve(inputs: ConvInputs, parts: tuple[ConvPart, ...]) -> tuple[Tensor, ...]:
    """Compute the short causal convolution; returns [B, T, channels] for each part."""
    history = inputs.history
    if history is not None:
        history = history.to(inputs.x.dtype)
    return bound_conv(parts)(inputs._replace(history=history, cu_seqlens=as_bounds(inputs.cu_seqlens)))


def convolve_step_(x_BC: Tensor, cache_BCW: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """Append one token per row to the cache of the last W inputs, in place, and return the convolution [B, C] there.

    The cache may hold more than the W taps; the sum is in float32 (float64 for float64).
    """
    cache_BCW.copy_(torch.cat([cache_BCW[..., 1:], x_BC[..., None].to(cache_BCW.dtype)], -1))
    dtype = state_dtype(x_BC.dtype)
    taps = cache_BCW[..., -weight.shape[1] :].to(dtype)
    y = (taps * weight.to(dtype)).sum(-1)
    if bias is not None:
        y = y + bias.to(dtype)
    return (torch.nn.functional.silu(y) if silu else y).to(x_BC.dtype)


def last_inputs(x_BTC: Tensor, history: Tensor | None, taps: int, cu_seqlens: Tensor | None) -> Tensor:
    """Return the last inputs of each sequence [N, C, taps], oldest first, with zeros before the first token.

    Args: history: [N, P, C], the inputs before each sequence.
    """
    if cu_seqlens is None:
        past = x_BTC.new_zeros(x_BTC.shape[0], taps, x_BTC.shape[2]) if history is None else history.to(x_BTC.dtype)
        return torch.cat([past, x_BTC], 1)[:, -taps:].transpose(1, 2)
    before = shifted_taps(x_BTC, None if history is None else history[:, 1:], taps - 1, as_bounds(cu_seqlens))
    lengths = cu_seqlens.diff()
    last_N = (cu_seqlens[1:].long() - 1).clamp(min=0)
    latest = torch.stack([tap[0, last_N] for tap in before], -1)
    unchanged = torch.zeros_like(latest) if history is None else history.transpose(1, 2).to(latest.dtype)
    return torch.where((lengths > 0)[:, None, None], latest, unchanged)


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Return x / sqrt(sum x^2 + eps) over the last dimension, in the dtype of x.

    Where a kernel computes the norm of the short convolution, it computes this one, as a convolution of one tap.
    """
    if x.dim() == 4 and x.shape[1] > 1 and eps == EPS and x.device.type == "cuda":
        K = x.shape[-1]
        rows = x.flatten(2)
        conv = bound_conv((ConvPart(rows.shape[2], unit=K),))
        if conv.backend_for("cuda", x.dtype, 1) is not None:
            return conv(ConvInputs(rows, rows.new_ones(rows.shape[2], 1)))[0].view(x.shape)
    wide = x.to(state_dtype(x.dtype))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def norm_and_gate(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, activation: GateActivation = "silu"
) -> Tensor:
    """Return weight x / sqrt(mean(x^2) + eps) phi(gate), in the dtype of x. gate: shaped like x."""
    gate = gate.reshape(x.shape)
    if weight is not None and gate.dtype == x.dtype and not refusals(x, weight):
        rows = x.reshape(-1, 1, x.shape[-1])
        return gated_rms_norm(rows, gate.reshape(-1, x.shape[-1]), weight, eps, activation).view(x.shape)
    return apply_gate(rms_norm(x, weight, eps), gate, activation)
