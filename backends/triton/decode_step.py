"""The fused decode step behind an operator, and how it is launched.

B batch, C channels of the projection, W taps, H key heads, HV value heads, K key width, V value width
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.decode_step import FusedDecodeInputs, FusedDecodeStep, beyond
from deltazoo.backends.short_conv import EPS
from deltazoo.backends.torch_ext.custom_op import operator, written
from deltazoo.backends.triton.config import (
    Launch,
    LaunchConfig,
    Problem,
    cdiv,
    heuristic,
    launch_config,
    parse,
    power_of_two,
    warps_apart,
)
from deltazoo.backends.triton.config import device_of as properties
from deltazoo.backends.triton.precompile import compiled_ahead, device_of
from deltazoo.backends.triton.short_conv import too_many_taps

WIDEST_VALUE = 512
_PUSHED = 256  # channels a program of what pushes shared ones
_MANY = 4  # householders, whose keys take as many registers as a tile of 64 columns
_MOST_STEPS = 16  # micro-steps times tiles: the kernel has each by itself, and takes seconds to compile


def _widest_tile(householders: int) -> int:
    """The columns beside which the keys of so many householders have room in registers."""
    return 64 if householders < _MANY else 32


def _tile(launch: Launch, V: int, householders: int) -> int:
    """The columns that a launch takes at a time: no more than there are or than have room beside many keys, and no
    fewer than the kernel has tiles for."""
    most = launch.tile if householders < _MANY else min(launch.tile, _widest_tile(householders))
    return max(min(most, power_of_two(V)), power_of_two(cdiv(householders * V, _MOST_STEPS)))


def unsupported(step: FusedDecodeStep) -> list[str]:
    """Why the kernel does not take a step, beyond what the update's spec says; [] means it does."""
    reasons = beyond(step.spec) + too_many_taps(step.taps)
    if step.V > WIDEST_VALUE:
        reasons.append(f"V must be at most {WIDEST_VALUE} in a fused step, got {step.V}.")
    n = step.spec.householders
    most = max(m for m in range(n + 1) if m * cdiv(step.V, _widest_tile(m)) <= _MOST_STEPS)
    if n > most > 0:
        reasons.append(f"householders must be at most {most} in a fused step with V = {step.V}, got {n}.")
    units = [part.unit for part in step.parts]
    if any(size not in (0, step.K) for size in units[:2]) or any(units[2:]):
        reasons.append(f"heads of q and k alone, of K = {step.K} channels, may have a norm, got {units}.")
    return reasons


class StepKind(NamedTuple):
    """What the kernel is compiled for, beside sizes and operands: of a `FusedDecodeStep` and its spec, in plain words.

    silu: of q, k and v; unit: of q and k; erase_by, write_by: what the strengths are multiplied by.
    """

    heads: int
    silu: list[bool]
    unit: list[bool]
    delta: bool
    erase_early: bool
    read_early: bool
    writes: bool
    gate_first: bool
    reparam: str
    norm: str
    gate: str
    scale: float
    erase_by: float
    write_by: float
    top: float
    eps: float
    bound: float | None

    @classmethod
    def of(cls, step: FusedDecodeStep) -> "StepKind":
        spec = step.spec
        return cls(
            heads=step.H,
            silu=[part.silu for part in step.parts],
            unit=[part.unit > 0 for part in step.parts[:2]],
            delta=spec.transition == "delta",
            erase_early=spec.erase_from == "previous",
            read_early=spec.read == "before",
            writes=step.writes,
            gate_first=step.gate_first,
            reparam=spec.reparam,
            norm=step.norm,
            gate=step.gate,
            scale=spec.scale_of(step.K),
            erase_by=1.0 if spec.negative_eigenvalues == "off" else 2.0,
            write_by=2.0 if spec.negative_eigenvalues == "both" else 1.0,
            top=step.top,
            eps=step.eps,
            bound=step.bound,
        )


_INPUTS = (
    "Tensor qkv, Tensor? weight, Tensor? bias, Tensor(a!)? history, Tensor? beta, Tensor? decay, Tensor? A_log, "
    "Tensor? dt_bias, Tensor? feedback, Tensor? correction, Tensor? skip, Tensor? norm_weight, Tensor? norm_bias, "
    "Tensor? gate"
)
_KIND = (
    "int heads, bool[] silu, bool[] unit, bool delta, bool erase_early, bool read_early, bool writes, bool gate_first, "
    "str reparam, str norm, str gate_by, float scale, float erase_by, float write_by, float top, float eps, "
    "float? bound, str config"
)


def fused_decode_step_(
    step: FusedDecodeStep, inputs: FusedDecodeInputs, states: Tensor, slots: Tensor | None, config: str = ""
) -> Tensor:
    """Run the kernel; `inputs.history` and `states` change in place. Returns o [B, 1, HV, V].

    Args: config: a launch config as JSON; "" is the tables', else the heuristic's.
    """
    return _fused_op(*inputs, states, slots, *StepKind.of(step), config)


def _fused_impl(*arguments: Any) -> Tensor:
    inputs, (states, slots), kind = FusedDecodeInputs(*arguments[:14]), arguments[14:16], StepKind(*arguments[16:-1])
    spread = ("qkv", "beta", "decay", "gate")  # their rows may lie apart, as those of a product of several maps
    x = FusedDecodeInputs(**{
        name: t if t is None or (name in spread and t.stride(2) == 1) else t.contiguous()
        for name, t in inputs._asdict().items()
    })  # fmt: skip
    o = x.qkv.new_empty(x.qkv.shape[0], 1, states.shape[1], states.shape[3])
    stepped = states.contiguous()
    with torch.cuda.device_of(x.qkv):
        _launch(x, stepped, None if slots is None else slots.contiguous(), o, kind, arguments[-1])
    written(states, stepped)
    if inputs.history is not None and x.history is not None:
        written(inputs.history, x.history)
    return o


def _launch(x: FusedDecodeInputs, states: Tensor, slots: Tensor | None, o: Tensor, kind: StepKind, config: str) -> None:
    from deltazoo.backends.triton.kernels.decode.fused_step import fused_step_kernel, push_kernel
    from deltazoo.backends.triton.launcher import launcher

    (B, _, C), (_, HV, K, V), H = x.qkv.shape, states.shape, kind.heads
    n = (C - H * K) // (H * K + HV * V)
    W = 0 if x.weight is None else x.weight.shape[1]
    launch = _resolve(x, states, kind, n, config)
    tile = _tile(launch, V, n)
    constants = {
        "X_ROW": x.qkv.stride(0), "BETA_ROW": _apart(x.beta), "DECAY_ROW": _apart(x.decay), "GATE_ROW": _apart(x.gate),
        "H": H, "HV": HV, "K": K, "V": V, "BK": power_of_two(K), "PV": power_of_two(V), "BV": tile, "STEPS": n,
        "W": W, "BIAS": x.bias is not None, "SILU_Q": kind.silu[0], "SILU_K": kind.silu[1], "SILU_V": kind.silu[2],
        "UNIT_Q": kind.unit[0], "UNIT_K": kind.unit[1], "UNIT_EPS": EPS, "BETA": x.beta is not None, "TOP": kind.top,
        "DECAY": x.decay is not None, "BOUND": kind.bound, "WRITES": kind.writes, "DELTA": kind.delta,
        "REPARAM": kind.reparam, "ERASE_BY": kind.erase_by, "WRITE_BY": kind.write_by, "OWN": x.feedback is not None,
        "ERASE_EARLY": kind.erase_early, "READ_EARLY": kind.read_early, "SKIP": x.skip is not None, "NORM": kind.norm,
        "EACH": x.norm_weight is not None and x.norm_weight.numel() != V, "NORM_BIAS": x.norm_bias is not None,
        "EPS": kind.eps, "GATE": kind.gate, "GATE_FIRST": kind.gate_first, "SLOTS": slots is not None,
    }  # fmt: skip
    warps = warps_apart(launch.warps, power_of_two(K) * tile)
    tensors = (*x, states, slots, o)
    names = fused_step_kernel.arg_names[len(tensors) + 1 :]
    ordered = [constants[name] for name in names]
    launcher(fused_step_kernel, tensors, ordered, warps)(B * HV, kind.scale)
    if H < HV and W > 1:
        shared = (1 + n) * H * K
        push = launcher(
            push_kernel, (x.qkv, x.history, slots), (x.qkv.stride(0), C, shared, W, _PUSHED, slots is not None)
        )
        push(B * cdiv(shared, _PUSHED))


def _resolve(x: FusedDecodeInputs, states: Tensor, kind: StepKind, n: int, config: str) -> Launch:
    """The launch of the config that was given as JSON, else the tables' (of one key a token) or the heuristic's."""
    given = parse(config).fused_step if config else None
    if given is not None:
        return given
    B, (_, HV, K, V), device = x.qkv.shape[0], states.shape, device_of(x.qkv)
    own, decayed = x.feedback is not None, x.decay is not None
    problem = Problem(device.type, x.qkv.dtype, B, 1, kind.heads, HV, K, V, kind.delta, own, decayed, packed=False)
    chosen = launch_config if n == 1 and not config else _by_sizes
    launch = chosen(problem, device.index).fused_step
    assert launch is not None
    return launch


@functools.lru_cache(maxsize=1024)
def _by_sizes(problem: Problem, index: int | None) -> LaunchConfig:
    """The heuristic's config, without a table's."""
    return heuristic(problem, properties(index))


def _fused_fake(*arguments: Any) -> Tensor:
    qkv, states = arguments[0], arguments[14]
    return qkv.new_empty(qkv.shape[0], 1, states.shape[1], states.shape[3])


def _apart(x: Tensor | None) -> int:
    """From row to row."""
    return 0 if x is None else x.stride(0)


_fused_op = operator(
    f"triton_fused_step_({_INPUTS}, Tensor(b!) states, Tensor? slots, {_KIND}) -> Tensor",
    _fused_impl,
    compiled_ahead(_fused_impl, _fused_fake),
)
