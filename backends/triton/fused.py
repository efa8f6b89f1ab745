"""The fused decode step behind an operator, and how it is launched.

B batch, W taps, H key heads, HV value heads, K key width, V value width, S rows of the states
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.fused_step import FusedInputs, FusedStep
from deltazoo.backends.operator import operator
from deltazoo.backends.triton.ahead import compiled_ahead
from deltazoo.backends.triton.config import cdiv, power_of_two, warps_apart

MOST_TAPS = 8
WIDEST_VALUE = 512
_PUSHED = 256  # channels a program of what pushes shared ones


class StepKind(NamedTuple):
    """What the kernel is compiled for, as lists of an operator's schema.

    heads: H. silu: of q, k and v; unit: of q and k. flags: delta, erase_early, read_early, writes, bounded, gate_first.
    words: reparam, norm, gate. numbers: scale, top, bound, eps, and what erase and write are multiplied by.
    """

    heads: int
    silu: list[bool]
    unit: list[bool]
    flags: list[bool]
    words: list[str]
    numbers: list[float]

    @classmethod
    def of(cls, step: FusedStep) -> "StepKind":
        spec = step.spec
        delta = spec.transition == "delta"
        flags = [
            delta, spec.erase_from == "previous", spec.read == "before", step.writes, step.bound is not None,
            step.gate_first,
        ]  # fmt: skip
        erase_by = 1.0 if spec.negative_eigenvalues == "off" else 2.0
        write_by = 2.0 if spec.negative_eigenvalues == "both" else 1.0
        scale = step.K**-0.5 if spec.scale is None else spec.scale
        return cls(
            step.H,
            [part.silu for part in step.parts],
            [part.unit > 0 for part in step.parts[:2]],
            flags,
            [spec.reparam, step.norm, step.gate],
            [scale, step.top, step.bound or 0.0, step.eps, erase_by, write_by],
        )


class FusedLaunch(NamedTuple):
    """A program takes `tile` columns of a head's state at a time.

    registers: the most that a thread may have; 0: as many as it takes.
    """

    tile: int
    warps: int
    registers: int = 0


def unsupported(step: FusedStep) -> list[str]:
    """Why the kernel does not take a step, beyond what the update's spec says; [] means it does."""
    reasons = []
    if step.spec.decay not in ("none", "head"):
        reasons.append(f"decay must be 'none' or 'head' in a fused step, got '{step.spec.decay}'.")
    if step.taps > MOST_TAPS:
        reasons.append(f"a short convolution must have at most {MOST_TAPS} taps, got {step.taps}.")
    if step.V > WIDEST_VALUE:
        reasons.append(f"V must be at most {WIDEST_VALUE} in a fused step, got {step.V}.")
    units = [part.unit for part in step.parts]
    if any(size not in (0, step.K) for size in units[:2]) or units[2]:
        reasons.append(f"heads of q and k alone, of K = {step.K} channels, may have a norm, got {units}.")
    return reasons


def fused_step_(step: FusedStep, inputs: FusedInputs, states: Tensor, slots: Tensor | None) -> Tensor:
    """Run the kernel; `inputs.history` and `states` change in place. Returns o [B, 1, HV, V]."""
    return _fused_op(*inputs, states, slots, *StepKind.of(step))


def launch_of(K: int, V: int) -> FusedLaunch:
    """Tiles of 16 KB or so, two of which stay in the registers of few warps, and at most eight of a head."""
    BK = power_of_two(K)
    tile = min(power_of_two(V), max(16, min(4096 // BK, 64), power_of_two(V) // 8))
    return FusedLaunch(tile, max(1, min(8, BK * tile // 1024)))


_INPUTS = (
    "Tensor qkv, Tensor? weight, Tensor? bias, Tensor(a!)? history, Tensor? beta, Tensor? decay, Tensor? A_log, "
    "Tensor? dt_bias, Tensor? feedback, Tensor? correction, Tensor? skip, Tensor? norm_weight, Tensor? norm_bias, "
    "Tensor? gate"
)
_KIND = "int heads, bool[] silu, bool[] unit, bool[] flags, str[] words, float[] numbers"


def _fused_impl(*arguments: Any) -> Tensor:
    inputs, (states, slots), kind = FusedInputs(*arguments[:14]), arguments[14:16], StepKind(*arguments[16:])
    spread = ("qkv", "beta", "decay", "gate")  # their rows may lie apart, as those of a product of several maps
    x = FusedInputs(**{
        name: t if t is None or (name in spread and t.stride(2) == 1) else t.contiguous()
        for name, t in inputs._asdict().items()
    })  # fmt: skip
    written = states.contiguous()
    _, HV, _, V = states.shape
    o = x.qkv.new_empty(x.qkv.shape[0], 1, HV, V)
    with torch.cuda.device_of(x.qkv):
        _launch(x, written, slots, o, kind)
    if written is not states:
        states.copy_(written)
    if x.history is not None and inputs.history is not None and x.history is not inputs.history:
        inputs.history.copy_(x.history)
    return o


def _launch(x: FusedInputs, states: Tensor, slots: Tensor | None, o: Tensor, kind: StepKind) -> None:
    from deltazoo.backends.triton.kernels.fused_step import fused_step_kernel, push_kernel
    from deltazoo.backends.triton.run import launcher

    (B, _, C), (_, HV, K, V), H = x.qkv.shape, states.shape, kind.heads
    n = (C - H * K) // (H * K + HV * V)
    W = 0 if x.weight is None else x.weight.shape[1]
    delta, erase_early, read_early, writes, bounded, gate_first = kind.flags
    reparam, norm, gate = kind.words
    scale, top, bound, eps, erase_by, write_by = kind.numbers
    each = x.norm_weight is not None and x.norm_weight.numel() != V
    launch = launch_of(K, V)
    step = launcher(
        fused_step_kernel,
        (*x, states, slots, o),
        (
            *(_apart(t) for t in (x.qkv, x.beta, x.decay, x.gate)), H, HV, K, V, power_of_two(K), power_of_two(V),
            launch.tile, n, W,
            x.bias is not None, *kind.silu, *kind.unit, x.beta is not None, top, x.decay is not None,
            bound if bounded else None, writes, delta, reparam, erase_by, write_by, x.feedback is not None, erase_early,
            read_early, x.skip is not None, norm, each, x.norm_bias is not None, eps, gate, gate_first,
            slots is not None,
        ),
        warps_apart(launch.warps, power_of_two(K) * launch.tile),
        registers=launch.registers or None,
    )  # fmt: skip
    step(B * HV, scale)
    if H < HV and W > 1:
        shared = (1 + n) * H * K
        push = launcher(
            push_kernel, (x.qkv, x.history, slots), (_apart(x.qkv), C, shared, W, _PUSHED, slots is not None)
        )
        push(B * cdiv(shared, _PUSHED))


def _fused_fake(*arguments: Any) -> Tensor:
    qkv, states = arguments[0], arguments[14]
    return qkv.new_empty(qkv.shape[0], 1, states.shape[1], states.shape[3])


def _apart(x: Tensor | None) -> int:
    """From row to row; of one row alone a stride says nothing."""
    return 0 if x is None else x.stride(0) if x.shape[0] > 1 else x.shape[2]


_fused_op = operator(
    f"triton_fused_step_({_INPUTS}, Tensor(b!) states, Tensor? slots, {_KIND}) -> Tensor",
    _fused_impl,
    compiled_ahead(_fused_impl, _fused_fake),
)
