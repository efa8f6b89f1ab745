"""Launch the elementwise kernels.

Programs own a block of channels of one sequence. If these are too few for the GPU, each sequence is divided into
segments: one pass computes the map of each segment from the state at its start to the one at its end, a second combines
them in order, and the last computes the results of all segments in parallel. The backward does the same in reverse.

B batch, T time, N sequences, H key heads, HV value heads (channels), K key width, V value width
"""

from typing import NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.triton.element.config import (
    ElementConfig,
    ElementLaunch,
    checkpoint_slots,
    element_heuristic,
    parse_element,
    segment_length,
    tiling,
)
from deltazoo.backends.triton.element.op import ElementKind, ElementOperands, ElementStepCall, empty_gradients
from deltazoo.backends.triton.kernels.element.backward import element_backward_kernel, element_reverse_kernel
from deltazoo.backends.triton.kernels.element.combine import element_combine_kernel
from deltazoo.backends.triton.kernels.element.scan import element_scan_kernel
from deltazoo.backends.triton.kernels.element.step import element_step_kernel
from deltazoo.backends.triton.kernels.element.tile import ElementTraits
from deltazoo.backends.triton.kernels.zero_tail import zero_tail_kernel
from deltazoo.backends.triton.launcher import launcher
from deltazoo.backends.triton.plan import device_spec
from deltazoo.backends.triton.precompile import device_of
from deltazoo.backends.triton.tiles import cdiv, limit_warps, power_of_two

_COMBINED = 256  # elements of the state that a program combines
_STEP_ELEMENTS = 2048  # elements of the state that a program of the decode step updates


class Sizes(NamedTuple):
    """The sizes of a problem. split: tokens per segment, or 0. segments: of each sequence, an upper bound if packed."""

    N: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    packed: bool
    split: int
    segments: int


def resolve(x: ElementOperands, kind: ElementKind) -> tuple[Sizes, ElementConfig]:
    """Return the sizes of the operands and the launch config."""
    (B, T, H, K), (HV, V) = x.q.shape, x.v.shape[2:]
    N = B if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    config = parse_element(kind.config) if kind.config else element_heuristic(K, V)
    processors = device_spec(device_of(x.q).index).processors
    split = segment_length(config, tiling(config.forward, H, HV, K, V), N, T, processors)
    return Sizes(N, T, H, HV, K, V, x.cu_seqlens is not None, split, cdiv(T, split) if split else 1), config


def _traits(
    x: ElementOperands, kind: ElementKind, s: Sizes, launch: ElementLaunch, every: int, **others: bool
) -> ElementTraits:
    tile = tiling(launch, s.H, s.HV, s.K, s.V)
    channels = s.HV // s.H if tile.SHARED else s.HV
    return ElementTraits(
        H=s.H, HV=s.HV, K=s.K, V=s.V, **tile._asdict(), DECAY=x.decay, READ_EARLY=kind.read_early, PACKED=s.packed,
        EVERY=every, SPLIT=s.split, GROUP=launch.group, KEYS=tile.RN if s.K % tile.RN == 0 else 1,
        CHANNELS=tile.RC if s.V == 1 and channels % tile.RC == 0 else 1,
        PREFETCH=device_spec(device_of(x.q).index).platform == "cuda", **others,
    )  # fmt: skip


def forward(x: ElementOperands, kind: ElementKind, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return o, the final state, and with `save` the checkpoints [slots, K, V, HV], else an empty tensor."""
    s, config = resolve(x, kind)
    x = _kernel_operands(x, s, config)
    o, final = x.v.new_empty(x.v.shape), _empty(x, s.N, s.HV, s.K, s.V)
    slots = checkpoint_slots(s.N, s.T, config.every, s.packed)
    checkpoints = _empty(x, slots, s.K, s.V, s.HV) if save else _empty(x, 0)
    starts = _states_before_segments(x, kind, s, config) if s.split else None
    _scan(x, kind, s, config, o=o, final=final, checkpoints=checkpoints if save else None, starts=starts)
    _zero_tail(x, s, v=o)
    return o, final, checkpoints


def backward(
    x: ElementOperands, kind: ElementKind, checkpoints: Tensor, d_o: Tensor, d_final: Tensor | None, key_gradients: bool
) -> list[Tensor]:
    """Return the gradients that `empty_gradients` lists."""
    s, config = resolve(x, kind)
    grads = empty_gradients(x, key_gradients)
    key_dtype = x.q.dtype
    x = _kernel_operands(x, s, config)
    traits = _traits(x, kind, s, config.backward, config.every, KEY_GRADIENTS=key_gradients, LOADED_BY_ALL=True)
    starts = _gradients_after_segments(x, kind, s, config, d_o, d_final) if s.split else None
    rows = x.q.shape[0] * s.T
    programs = s.N * s.segments * traits.BLOCKS
    d_q = d_k = d_rate = scratch = None
    if key_gradients:
        # the gradient of a key head from each block of channels, or from each channel; summed below
        shape = (traits.BLOCKS // s.H, rows, s.H, s.K) if traits.SHARED else (rows, s.H, s.HV // s.H, s.K)
        d_q, d_k = _empty(x, *shape), _empty(x, *shape)
        if traits.SHARED:
            scratch = _empty(x, programs, 2, traits.W, config.every, 2, traits.RN * traits.TN)
    decay_name = "step" if x.step is not None else "log_decay"
    if x.decay in ("rate", "fixed", "fixed_channel"):
        decay = x.rate if x.rate is not None else x.log_decay
        assert decay is not None
        d_rate = _empty(x, s.N * s.segments, *decay.shape)
    run = launcher(
        element_backward_kernel,
        (
            x.q, x.k, x.v, x.log_decay, x.step, x.rate, d_o, d_final, checkpoints, starts, scratch, d_q, d_k,
            grads["v"], None if x.decay.startswith("fixed") else grads.get(decay_name), d_rate, grads.get("state"),
            x.cu_seqlens,
        ),
        (traits, traits._replace(EVERY=1, GROUP=1)),
        traits.W,
    )  # fmt: skip
    run(programs, kind.scale, s.T, s.N, s.segments, rows)
    if d_q is not None and d_k is not None:
        axis = 0 if traits.SHARED else 2
        for name, partial in (("q", d_q), ("k", d_k)):
            total = partial.sum(axis) if partial.shape[axis] > 1 else partial
            grads[name] = total.view(x.q.shape).to(key_dtype)
    if d_rate is not None:
        name = "rate" if x.rate is not None else "log_decay"
        total = d_rate.sum(0)
        grads[name] = total.t().contiguous() if total.dim() == 2 else total
    _zero_tail(
        x, s, v=grads["v"], q=grads.get("q"), k=grads.get("k"),
        log_decay=None if x.decay.startswith("fixed") else grads.get("log_decay"), b=grads.get("step"),
    )  # fmt: skip
    return list(grads.values())


def step_(call: ElementStepCall) -> Tensor:
    """Decode one token per row, updating the states in place. Returns o [B, 1, HV, V]."""
    (B, _, H, K), (HV, V) = call.q.shape, call.v.shape[2:]
    decay = ElementOperands(call.q, call.k, call.v, call.log_decay, call.step, call.rate).decay
    KP, VP = power_of_two(K), power_of_two(V)
    BC = min(power_of_two(HV), max(1, _STEP_ELEMENTS // (KP * VP)))
    while BC > 32 and B * cdiv(HV, BC) < 256:
        BC //= 2
    o = call.v.new_empty(call.v.shape)
    run = launcher(
        element_step_kernel,
        (call.q, call.k, call.v, call.log_decay, call.step, call.rate, call.states, call.slots, o),
        (H, HV, K, V, KP, VP, BC, decay, call.read_early, call.slots is not None),
        limit_warps(4, KP * VP * BC),
    )
    run(B * cdiv(HV, BC), call.scale, call.states.shape[0])
    return o


def _kernel_operands(x: ElementOperands, s: Sizes, config: ElementConfig) -> ElementOperands:
    """Convert the operands to the layouts and dtypes that the kernels read.

    The rate and a fixed decay per channel become [K, HV], so that lanes read adjacent channels. q and k become float32
    if the channels of a program share them: they are small then, and every program would convert them again, which
    takes as many instructions as the update of the state.
    """
    if x.rate is not None:
        x = x._replace(rate=x.rate.t().contiguous())
    elif x.decay == "fixed_channel":
        assert x.log_decay is not None
        x = x._replace(log_decay=x.log_decay.t().contiguous())
    if not tiling(config.forward, s.H, s.HV, s.K, s.V).SHARED:
        return x
    return x._replace(q=x.q.float(), k=x.k.float())


def _states_before_segments(x: ElementOperands, kind: ElementKind, s: Sizes, config: ElementConfig) -> Tensor:
    """Return the states before the segments of all sequences, [N segments, K, V, HV]."""
    starts, ends, maps = _segment_states(x, s)
    _scan(x, kind, s, config, ends=ends, maps=maps)
    _combine(x, s, maps, ends, x.state, starts, reverse=False)
    return starts


def _gradients_after_segments(
    x: ElementOperands, kind: ElementKind, s: Sizes, config: ElementConfig, d_o: Tensor, d_final: Tensor | None
) -> Tensor:
    """Return the gradients of the states after the segments of all sequences, [N segments, K, V, HV]."""
    starts, ends, maps = _segment_states(x, s)
    _scan(x, kind, s, config, ends=ends, maps=maps)  # only for the maps; the next kernel overwrites ends
    traits = _traits(x, kind, s, config.forward, 0)
    run = launcher(
        element_reverse_kernel,
        (x.q, x.log_decay, x.step, x.rate, d_o, ends, x.cu_seqlens),
        (traits,),
        traits.W,
    )
    run(s.N * s.segments * traits.BLOCKS, kind.scale, s.T, s.N, s.segments)
    _combine(x, s, maps, ends, d_final, starts, reverse=True)
    return starts


def _scan(
    x: ElementOperands, kind: ElementKind, s: Sizes, config: ElementConfig, *, o: Tensor | None = None,
    final: Tensor | None = None, checkpoints: Tensor | None = None, starts: Tensor | None = None,
    ends: Tensor | None = None, maps: Tensor | None = None,
) -> None:  # fmt: skip
    """Launch the forward scan; with `ends` and `maps` it computes only these."""
    traits = _traits(x, kind, s, config.forward, config.every)
    initial = x.state if ends is None and starts is None else None
    save = checkpoints is not None
    if checkpoints is None:
        checkpoints = final if ends is None else ends  # any tensor: the kernel does not write it, because save is 0
    run = launcher(
        element_scan_kernel,
        (
            x.q, x.k, x.v, x.log_decay, x.step, x.rate, initial, o, final, checkpoints, starts, ends, maps,
            x.cu_seqlens,
        ),
        (traits,),
        traits.W,
    )  # fmt: skip
    run(s.N * s.segments * traits.BLOCKS, kind.scale, s.T, s.N, s.segments, int(save))


def _combine(
    x: ElementOperands, s: Sizes, maps: Tensor, ends: Tensor, initial: Tensor | None, starts: Tensor, reverse: bool
) -> None:
    """Launch the combination of the segments."""
    run = launcher(
        element_combine_kernel,
        (maps, ends, initial, starts, x.cu_seqlens),
        (s.HV, s.K * s.V, _COMBINED, s.split, s.packed, reverse),
    )
    run(s.N * cdiv(s.HV * s.K * s.V, _COMBINED), s.T, s.segments)


def _segment_states(x: ElementOperands, s: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate `starts`, `ends` and `maps` of the kernels, [N segments, K, V, HV] each."""
    starts, ends, maps = (_empty(x, s.N * s.segments, s.K, s.V, s.HV) for _ in range(3))
    return starts, ends, maps


def _empty(x: ElementOperands, *shape: int) -> Tensor:
    return torch.empty(shape, device=x.q.device, dtype=torch.float32)


def _zero_tail(
    x: ElementOperands, s: Sizes, v: Tensor, q: Tensor | None = None, k: Tensor | None = None,
    log_decay: Tensor | None = None, b: Tensor | None = None,
) -> None:  # fmt: skip
    """Zero the rows from cu_seqlens[-1] on of tensors with the shapes of these operands; b: [T, HV]."""
    if x.cu_seqlens is None:
        return
    block, programs = 1024, 64
    decays = s.HV * s.K if x.decay == "channel" else s.HV
    tensors = (v, q, k, None, log_decay, b, None, x.cu_seqlens)
    launcher(zero_tail_kernel, tensors, (s.H * s.K, s.HV, s.V, decays, block))(programs, s.N, s.T)
