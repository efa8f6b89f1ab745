"""Launch the kernels of the backward: by segments of chunks, last first, so that scratch stays small.

B batch, T time, N sequences, H key heads, HV value heads, K key width, V value width, C chunk
"""

from typing import NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.triton.config import LaunchConfig, cdiv, key_tiles, least_keys
from deltazoo.backends.triton.forward import (
    SHARED_OUT,
    Cut,
    OnSegment,
    decay_of,
    empty,
    join,
    part_states,
    precision,
    scan,
    value_tile,
)
from deltazoo.backends.triton.kernels.gradients import gate_gradients_kernel, gradients_kernel, sum_groups_kernel
from deltazoo.backends.triton.kernels.reverse import reverse_kernel
from deltazoo.backends.triton.launcher import launcher
from deltazoo.backends.triton.operands import Gradients, Prepared, ScanKind, ScanOperands, Sizes
from deltazoo.backends.triton.zero_tail import zero_tail

_WALK = 16  # chunks that a program of the replay keeps, without parts: enough to make up for its start


class _Scratch:
    """What a segment keeps for its gradients: states and their gradients [held, HV, V, K], x and du [held, C, HV, V]
    where v and dv do not tell them, with grouped heads or several tiles of values each one's share of the keys'
    gradients. float32 where two terms feed back. together: the reverse scan makes the gradients, and keeps nothing for
    them."""

    def __init__(self, x: ScanOperands, kind: ScanKind, s: Sizes, held: int, dv: Tensor, together: bool) -> None:
        dtype = kind.kept(x.q.dtype)
        self.held = held
        states, values = (held, s.HV, s.V, s.K), (held, s.C, s.HV, s.V)
        self.states = empty(x.q, *states, dtype=dtype)
        self.xs = empty(x.q, *values, dtype=dtype) if kind.delta else None
        self.dstates = None if together else empty(x.q, *states, dtype=dtype)
        self.du = empty(x.q, *values, dtype=dtype) if kind.keeps_du(x) and not together else dv
        self.shares = s.HV * _value_tiles(s, together)
        parts = (3 if x.e is not None else 2, held, s.C, self.shares, s.K)
        self.partial = empty(x.q, *parts, dtype=dtype) if self.shares > s.H else None


def _value_tiles(s: Sizes, together: bool) -> int:
    """Tiles of values whose gradients programs of their own make."""
    return cdiv(s.V, 128) if together else 1


def bytes_a_place(x: ScanOperands, kind: ScanKind, s: Sizes, together: bool) -> int:
    """What a chunk of a segment takes, but for grouped heads' shares."""
    numbers = s.K + kind.delta * s.C
    if not together:
        numbers += s.K + kind.keeps_du(x) * s.C
    return s.HV * s.V * numbers * kind.kept(x.q.dtype).itemsize


class _Sums:
    """What a chunk's gates need of each tile, of_K tiles of `keys` columns for each of the values that has programs of
    its own: dgates [tiles, slots, HV, rows, C] and state_products [tiles, slots, HV]."""

    def __init__(self, x: ScanOperands, kind: ScanKind, s: Sizes, config: LaunchConfig) -> None:
        together, K0 = config.together(s.K, s.V), key_tiles(s.K)[0]
        wanted = 64 if together or config.gradients.hopper else config.gradients.keys or K0
        self.keys = min(max(wanted, least_keys(kind.kept(x.q.dtype))), K0)
        self.of_K = cdiv(s.K, self.keys)
        self.tiles = tiles = self.of_K * _value_tiles(s, together)
        self.early = kind.erase_early or kind.read_early
        self.dgates = empty(x.q, tiles, s.slots, s.HV, 4 if self.early else 3, s.C)
        self.state_products = empty(x.q, tiles, s.slots, s.HV)


class _Work(NamedTuple):
    """What the launches of one backward share. carry [N, HV, K, V]: the gradient of the state, from the final one on,
    which ends as that of the initial one; d: the gradients that they make."""

    x: ScanOperands
    kind: ScanKind
    s: Sizes
    config: LaunchConfig
    prepared: Prepared
    checkpoints: Tensor
    do: Tensor
    carry: Tensor
    sums: _Sums
    d: Gradients


def backward(
    x: ScanOperands, kind: ScanKind, prepared: Prepared, checkpoints: Tensor, do: Tensor, dfinal: Tensor | None,
    config: LaunchConfig,
) -> Gradients:  # fmt: skip
    """The gradients of the operands; None where there is no such operand."""
    s = Sizes.of(x, config.chunk)
    d = Gradients.empty(x, kind)
    carry = empty(x.q, s.N, s.HV, s.K, s.V) if d.state is None else d.state
    work = _Work(x, kind, s, config, prepared, checkpoints, do, carry, _Sums(x, kind, s, config), d)
    if config.reverse.replays:
        _give(carry, dfinal)
        _replay_and_walk(work)
    else:
        _by_segments(work, dfinal)
    _gate_gradients(work)
    return d


def _give(carry: Tensor, dfinal: Tensor | None) -> None:
    carry.zero_() if dfinal is None else carry.copy_(dfinal)


def _by_segments(work: _Work, dfinal: Tensor | None) -> None:
    """Replay a segment and scan it backwards, launch by launch, the last segment first."""
    x, kind, s, config, prepared, checkpoints, _, carry, _, d = work
    together = config.together(s.K, s.V)
    places = config.scratch // max(bytes_a_place(x, kind, s, together), 1)
    chunks = cdiv(s.T, s.C)
    split = config.split if config.split and chunks > config.split else 0
    unit, segments, held = segments_of(s, config.every, split, places)
    most = cdiv(cdiv(chunks, unit), segments) * unit  # chunks of a sequence in a segment
    parts = cdiv(most, split) if split else 1
    walk = config.every if split else max(config.every, _WALK)
    scratch = _Scratch(x, kind, s, held, d.v, together)
    replay = scan(
        x, kind, prepared, s, config.replay, "replay",
        Cut(cdiv(most, walk), walk, config.every, unit, segments),
        checkpoints=checkpoints, states=scratch.states, xs=scratch.xs,
    )  # fmt: skip
    replay(segments - 1)  # which keeps the device busy while the host goes on

    _give(carry, dfinal)
    begins, ends = part_states(x, s, parts) if split else (None, None)
    cut = Cut(parts, split, 0, unit, segments)
    steps: list[OnSegment] = []
    if begins is not None and ends is not None:
        steps += [
            scan(x, kind, prepared, s, config.scan, "maps", cut, ends=ends),
            _reverse(work, cut, scratch, begins, ends, hands_on=True),
            join(prepared, s, carry, begins, ends, x.cu_seqlens, cut, reverse=True),
        ]
    if together:
        steps.append(_walk(work, cut, scratch, begins))
    else:
        steps.append(_reverse(work, cut, scratch, begins, ends, hands_on=False))
        steps.append(_gradients(work, cut, scratch))
    if scratch.partial is not None:
        steps.append(_sum_groups(work, cut, scratch))
    for segment in reversed(range(segments)):
        if segment < segments - 1:
            replay(segment)
        for step in steps:
            step(segment)


def segments_of(s: Sizes, every: int, split: int, places: int) -> tuple[int, int, int]:
    """The unit of chunks that the backward's segments are cut between, how many segments, the chunks that one holds.

    No more than there are places for; but a segment is at least a unit of each sequence: a part, or what a
    checkpoint leaves. The lengths of packed sequences are unknown here, so that a unit of each may go to waste. Where
    that is more than a sixteenth, a pack's units are smaller, and the replay comes to a segment's first chunk from the
    checkpoint before it. All segments are of use whatever the lengths are, as long as they are long.
    """
    unit = max(every, split)
    if places >= s.slots:
        return unit, 1, s.slots
    if s.packed:
        if not split and places >= 8 * s.N:
            unit = min(every, 1 << (max(places // (16 * s.N), 1).bit_length() - 1))
        units = cdiv(cdiv(s.T, s.C), unit)
        # beyond a unit of each sequence: as much as there is room for, or as much again where there is none
        segments = min(max(units, 1), cdiv(s.slots + 1, max(places - s.N * unit, s.N * unit)))
        held = (s.slots + 1) // segments + s.N * unit
    else:
        units = cdiv(cdiv(s.T, s.C), unit)
        segments = cdiv(units, max(places // (s.N * unit), 1))
        held = s.N * cdiv(units, segments) * unit
    return (unit, segments, held) if held < s.slots else (unit, 1, s.slots)


def _reverse(
    work: _Work, cut: Cut, scratch: _Scratch, begins: Tensor | None, ends: Tensor | None, hands_on: bool
) -> OnSegment:
    x, kind, s, config, prepared, _, do, carry, _, d = work
    launch = config.reverse
    if launch.hopper and not hands_on:
        from deltazoo.backends.triton.kernels.hopper.reverse import hopper_reverse_kernel

        on_hopper = launcher(
            hopper_reverse_kernel,
            (
                x.q, x.k, do, prepared.gates, prepared.squares, carry, scratch.dstates, scratch.du, d.v, begins,
                x.cu_seqlens,
            ),
            (
                s.H, s.HV, s.K, s.V, s.C, *key_tiles(s.K), decay_of(x), kind.delta, x.w is not None, kind.read_early,
                s.packed, kind.shares(x), cut.unit, cut.split, kind.least(x.q.dtype),
            ),
            registers=SHARED_OUT,
        )  # fmt: skip
        programs = s.N * cut.parts * s.HV * cdiv(s.V, 128)
        return lambda segment: on_hopper(programs, kind.scale, s.T, segment, cut.segments, cut.parts)
    BV = value_tile(launch.tile, s.V)
    go = launcher(
        reverse_kernel,
        (
            x.q, x.k, x.e, do, *prepared, carry, scratch.dstates, scratch.du, d.v, begins, ends,
            x.cu_seqlens,
        ),
        (
            s.H, s.HV, s.K, s.V, s.C, *key_tiles(s.K), BV, decay_of(x), kind.delta, x.e is not None, x.w is not None,
            kind.read_early, s.packed, kind.shares(x), cut.unit, cut.split,
            kind.least(x.q.dtype), hands_on, kind.terms(x.q.dtype), precision(x.q.dtype), launch.stages,
        ),
        launch.warps,
        launch.stages,
        # left to itself ptxas 12.8 took 32 for float32, and spilled 20 KB
        registers=255 if x.q.dtype == torch.float32 else None,
    )  # fmt: skip
    number = s.N * cut.parts * s.HV * cdiv(s.V, BV)
    return lambda segment: go(number, kind.scale, s.T, segment, cut.segments, cut.parts)


def _gradients(work: _Work, cut: Cut, scratch: _Scratch) -> OnSegment:
    x, kind, s, config, prepared, _, do, _, sums, d = work
    launch, own = config.gradients, x.e is not None
    held, programs = scratch.held, scratch.held * s.HV * sums.tiles
    if launch.hopper:
        from deltazoo.backends.triton.kernels.hopper.gradients import hopper_gradients_kernel

        on_hopper = launcher(
            hopper_gradients_kernel,
            (
                x.q, x.k, x.v, x.b, do, prepared.gates, scratch.states, scratch.dstates, scratch.xs, scratch.du, d.q,
                d.k, sums.dgates, sums.kepts, scratch.partial, x.cu_seqlens,
            ),
            (
                s.H, s.HV, s.K, s.V, s.C, sums.keys, decay_of(x), kind.delta, d.b is not None, x.w is not None,
                kind.erase_early, kind.read_early, s.packed, kind.shares(x), kind.least(x.q.dtype), cut.unit,
            ),
        )  # fmt: skip
        return lambda segment: on_hopper(programs, s.N, s.slots, held, kind.scale, s.T, segment, cut.segments)
    small = scratch.states.itemsize == 2 and max(sums.keys, launch.tile) <= 64 and launch.warps == 4
    of_chunks = launcher(
        gradients_kernel,
        (
            x.q, x.k, x.e, x.v, x.b, do, prepared.gates, scratch.states, scratch.dstates, scratch.xs,
            scratch.du, d.q, d.k, d.e, sums.dgates, sums.state_products, scratch.partial, x.cu_seqlens,
        ),
        (
            s.H, s.HV, s.K, s.V, s.C, sums.keys, value_tile(launch.tile, s.V), decay_of(x), kind.delta, own,
            d.b is not None, x.w is not None, kind.erase_early, kind.read_early, s.packed,
            kind.shares(x), kind.least(x.q.dtype), cut.unit, precision(x.q.dtype), launch.stages,
        ),
        launch.warps,
        launch.stages,
        registers=168 if small and not kind.delta else None,  # three programs a processor
    )  # fmt: skip
    return lambda segment: of_chunks(programs, s.N, s.slots, held, kind.scale, s.T, segment, cut.segments)


def _walk(work: _Work, cut: Cut, scratch: _Scratch, begins: Tensor | None) -> OnSegment:
    from deltazoo.backends.triton.kernels.hopper.sweep import hopper_backward_sweep_kernel

    x, kind, s, _, prepared, _, do, carry, sums, d = work
    go = launcher(
        hopper_backward_sweep_kernel,
        (
            x.q, x.k, x.v, x.b, do, prepared.gates, prepared.wy_tiles, carry, scratch.states, scratch.xs, d.q, d.k, d.v,
            sums.dgates, sums.state_products, scratch.partial, begins, x.cu_seqlens,
        ),
        (
            s.H, s.HV, s.K, s.V, s.C, decay_of(x), kind.delta, d.b is not None, x.w is not None, kind.erase_early,
            kind.read_early, s.packed, kind.shares(x), cut.unit, cut.split, kind.least(x.q.dtype),
        ),
        warps=8,
        registers=SHARED_OUT,
    )  # fmt: skip
    programs, held = s.N * cut.parts * scratch.shares, scratch.held
    return lambda segment: go(programs, s.slots, held, kind.scale, s.T, segment, cut.segments, cut.parts)


def _replay_and_walk(work: _Work) -> None:
    """All segments in one launch, where each program has a sequence and head to itself. What it keeps of a chunk lies
    where the chunk's gradients will, but for the state before a sequence's last chunk."""
    from deltazoo.backends.triton.kernels.hopper.fused_backward import hopper_fused_backward_kernel

    x, kind, s, config, prepared, checkpoints, do, carry, sums, d = work
    spare = empty(x.q, s.N, 128, s.H, s.K, dtype=kind.kept(x.q.dtype))
    go = launcher(
        hopper_fused_backward_kernel,
        (
            x.q, x.k, x.v, x.b, do, prepared.gates, prepared.wy_tiles, x.state, checkpoints, carry, spare,
            d.q, d.k, d.v, sums.dgates, sums.state_products, x.cu_seqlens,
        ),
        (
            s.H, s.HV, s.K, s.V, s.C, decay_of(x), kind.delta, d.b is not None, x.w is not None, kind.erase_early,
            kind.read_early, s.packed, kind.shares(x), x.state is not None, config.every, kind.least(x.q.dtype),
        ),
        warps=8,
        registers=SHARED_OUT,
    )  # fmt: skip
    go(s.N * s.HV, s.slots, kind.scale, s.T)


def _sum_groups(work: _Work, cut: Cut, scratch: _Scratch) -> OnSegment:
    x, s, d = work.x, work.s, work.d
    go = launcher(
        sum_groups_kernel,
        (scratch.partial, d.q, d.k, d.e, x.cu_seqlens),
        (s.H, scratch.shares, s.K, s.C, key_tiles(s.K)[0], x.e is not None, s.packed, cut.unit),
        warps=8,
    )
    held = scratch.held
    return lambda segment: go(held * s.H, s.N, s.T, segment, cut.segments, held)


def _gate_gradients(work: _Work) -> None:
    x, kind, s, sums, d = work.x, work.kind, work.s, work.sums, work.d
    fixed = decay_of(x) == "fixed"
    of_tokens = empty(x.q, *x.v.shape[:3]) if fixed else d.log_decay
    wanted = (of_tokens is not None, d.b is not None, d.w is not None)
    if not any(wanted):
        zero_tail(s, x.cu_seqlens, v=d.v, q=d.q, k=d.k, e=d.e)
        return
    launch = launcher(
        gate_gradients_kernel,
        (sums.dgates, sums.state_products, x.v, x.b, of_tokens, d.b, d.w, d.v, x.cu_seqlens),
        (
            s.HV, s.V, s.C, sums.tiles, sums.of_K, *wanted, kind.tied, kind.shares(x), kind.least(x.q.dtype),
            sums.early, s.packed,
        ),
        warps=1,
    )  # fmt: skip
    launch(s.slots * s.HV, s.N, s.slots, s.T)
    zero_tail(s, x.cu_seqlens, v=d.v, q=d.q, k=d.k, e=d.e, log_decay=of_tokens, b=d.b, w=d.w)
    if of_tokens is not None and fixed:
        torch.sum(of_tokens, (0, 1), out=d.log_decay)
