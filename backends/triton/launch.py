"""Launch the kernels: the forward, the backward by segments of chunks, and the decode step.

B batch, T time, N sequences, H key heads, HV value heads, K key width, V value width, C chunk
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltazoo.backends.triton import config as configs
from deltazoo.backends.triton.config import LaunchConfig, Problem
from deltazoo.backends.triton.kernels.decode import decode_kernel
from deltazoo.backends.triton.kernels.gradients import (
    gate_gradients_kernel,
    gradients_kernel,
    sum_groups_kernel,
)
from deltazoo.backends.triton.kernels.join import join_kernel
from deltazoo.backends.triton.kernels.layout import key_tiles
from deltazoo.backends.triton.kernels.prepare import prepare_kernel
from deltazoo.backends.triton.kernels.reverse import reverse_kernel
from deltazoo.backends.triton.kernels.scan import scan_kernel
from deltazoo.backends.triton.operands import ScanKind, ScanOperands, Sizes

cdiv = triton.cdiv


class Prepared(NamedTuple):
    """gates [slots, HV, 3, C]; fades [slots, HV]; inverse, reads [slots, HV, terms, C, C]. Empty where nothing is
    prepared."""

    gates: Tensor
    fades: Tensor
    inverse: Tensor
    reads: Tensor


class _Cut(NamedTuple):
    """Which chunks a launch walks: one of `segments` of every sequence, cut between units of `unit` chunks, in parts of
    `split` chunks (0: in one), with the state kept every `every` (0: never)."""

    parts: int = 1
    split: int = 0
    every: int = 0
    unit: int = 1
    segment: int = 0
    segments: int = 1


def _decay(x: ScanOperands) -> str:
    return "none" if x.log_decay is None else "fixed" if x.log_decay.dim() == 1 else "head"


def resolve(x: ScanOperands, kind: ScanKind) -> LaunchConfig:
    """The config that was given as JSON, or the one for these sizes on this device."""
    if kind.config:
        return configs.parse(kind.config)
    s = Sizes.of(x, LaunchConfig().chunk)
    problem = Problem(
        x.q.device.type, x.q.dtype, s.N, s.T, s.H, s.HV, s.K, s.V, kind.delta, x.e is not None,
        x.log_decay is not None, s.packed, kind.precise,
    )  # fmt: skip
    return configs.launch_config(problem, x.q.device.index)


def _precision(dtype: torch.dtype) -> str:
    """Of products of float32 operands: tf32 where the user allows it, else three of them, as good as float32."""
    return "tf32" if dtype != torch.float32 or torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


def _tile(widest: int, V: int) -> int:
    """Value columns a program: no more than there are, and enough for a product."""
    return min(widest, max(16, triton.next_power_of_2(V)))


def _empty(like: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, device=like.device, dtype=dtype)


def prepare(x: ScanOperands, kind: ScanKind, config: LaunchConfig) -> Prepared:
    """Launch what each chunk decides alone."""
    s = Sizes.of(x, config.chunk)
    C, terms = config.chunk, kind.terms(x.q.dtype)
    out = Prepared(
        _empty(x.q, s.slots, s.HV, 3, C),
        _empty(x.q, s.slots, s.HV),
        _empty(x.q, *((s.slots, s.HV, terms, C, C) if kind.delta else (0,)), dtype=x.q.dtype),
        _empty(x.q, s.slots, s.HV, terms, C, C, dtype=x.q.dtype),
    )
    if s.slots:
        precision = _precision(x.q.dtype)
        exact = terms == 2 or x.q.dtype == torch.float32
        prepare_kernel[(s.slots * s.H,)](
            x.q, x.k, x.e, x.log_decay, x.b, x.w, *out, x.cu_seqlens, s.N, s.T, kind.scale, s.H, s.HV, s.K, C,
            *key_tiles(s.K), _decay(x), kind.delta, x.e is not None, x.b is not None, x.w is not None,
            kind.erase_early, kind.read_early, s.packed,
            tl.float32 if exact else tl.float16, precision, "tf32x3" if exact else precision,
            min(config.prepare.tile, C), terms,
            num_warps=config.prepare.warps, num_stages=config.prepare.stages,
        )  # fmt: skip
    return out


def nothing_prepared(like: Tensor) -> Prepared:
    """For an additive update in one part: its scan makes what it needs."""
    return Prepared(*(_empty(like, 0) for _ in Prepared._fields))


def _scan(
    x: ScanOperands, kind: ScanKind, prepared: Prepared, s: Sizes, launch: configs.Launch, mode: str, cut: _Cut,
    **tensors: Tensor | None,
) -> None:  # fmt: skip
    """Launch scan_kernel in one of its modes."""
    BV = _tile(launch.tile, s.V)
    tiles = 0 if mode == "maps" else cdiv(s.V, BV)
    tiles += cdiv(s.K, BV) if mode in ("ends", "maps") else 0
    t = tensors.get
    if s.N * cut.parts * s.HV * tiles == 0:
        return
    scan_kernel[(s.N * cut.parts * s.HV * tiles,)](
        x.q, x.k, x.e, x.v, x.log_decay, x.w, *prepared, x.state, t("o"), t("final"), t("checkpoints"), t("states"),
        t("xs"), t("begins"), t("ends"), x.cu_seqlens, kind.scale, s.T, cut.segment, cut.segments, cut.parts,
        s.H, s.HV, s.K, s.V, s.C, *key_tiles(s.K), BV, _decay(x), kind.delta, x.e is not None, x.w is not None,
        x.state is not None, kind.read_early, s.packed, prepared.gates.numel() > 0, cut.every, cut.unit, cut.split,
        mode, kind.terms(x.q.dtype), _precision(x.q.dtype), launch.stages,
        num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip


def _join(
    prepared: Prepared, s: Sizes, given: Tensor | None, begins: Tensor, ends: Tensor, cu: Tensor | None, cut: _Cut,
    reverse: bool,
) -> None:  # fmt: skip
    BV = _tile(64, s.V)
    join_kernel[(s.N * s.HV * cdiv(s.V, BV),)](
        prepared.fades, given, begins, ends, cu, s.T, cut.segment, cut.segments, cut.parts, s.HV, s.K, s.V,
        s.C, *key_tiles(s.K), BV, given is not None, cu is not None, cut.split, cut.unit, reverse, "tf32x3",
        num_warps=4, num_stages=1,
    )  # fmt: skip


def forward(x: ScanOperands, kind: ScanKind, keep: bool, config: LaunchConfig) -> tuple[Tensor, ...]:
    """Returns o, the final state, what was prepared, and with `keep` the checkpoints [places, HV, V, K] of S^T."""
    s = Sizes.of(x, config.chunk)
    chunks = cdiv(s.T, s.C)
    parts = cdiv(chunks, config.split) if config.split else 1
    split = config.split if parts > 1 else 0
    prepared = prepare(x, kind, config) if kind.delta or split else nothing_prepared(x.q)
    o = torch.empty_like(x.v)
    final = _empty(x.q, s.N, s.HV, s.K, s.V)
    every = config.every if keep else 0
    checkpoints = _empty(x.q, *((s.places(every), s.HV, s.V, s.K) if keep else (0,)))
    begins = None
    if split and s.N * s.HV:
        begins, ends = _empty(x.q, s.N * parts, s.HV, s.V, s.K), _empty(x.q, s.N * parts, s.HV, s.V + s.K, s.K)
        _scan(x, kind, prepared, s, config.scan, "ends", _Cut(parts, split), ends=ends)
        _join(prepared, s, x.state, begins, ends, x.cu_seqlens, _Cut(parts, split), reverse=False)
    _scan(
        x, kind, prepared, s, config.scan, "output", _Cut(parts, split, every), o=o,
        final=final, checkpoints=checkpoints, begins=begins,
    )  # fmt: skip
    return o, final, *(prepared if kind.delta else nothing_prepared(x.q)), checkpoints


def backward(
    x: ScanOperands, kind: ScanKind, prepared: Prepared, checkpoints: Tensor, do: Tensor, dfinal: Tensor | None,
    config: LaunchConfig,
) -> dict[str, Tensor | None]:  # fmt: skip
    """The gradients of q, k, v, log_decay, b, w, e and state; None where there is no such operand."""
    s = Sizes.of(x, config.chunk)
    C, every = config.chunk, config.every
    chunks = cdiv(s.T, C)
    split = config.split if config.split and chunks > config.split else 0
    if split and not kind.delta:
        prepared = prepare(x, kind, config)
    dtype = x.q.dtype
    own, delta = x.e is not None, kind.delta
    K0, _ = key_tiles(s.K)
    BK = min(config.gradients.keys or K0, K0)
    tiles = cdiv(s.K, BK)

    unit = max(every, split)
    segments, held = _segments(s, unit, config.scratch, dtype.itemsize * kind.terms(x.q.dtype))
    most = cdiv(cdiv(chunks, unit), segments) * unit  # chunks of a sequence in a segment
    dq, dk, dv = torch.empty_like(x.q), torch.empty_like(x.k), torch.empty_like(x.v)
    de = torch.empty_like(x.e) if x.e is not None else None
    B, T = x.q.shape[:2]
    dlog_decay = _empty(x.q, B, T, s.HV) if x.log_decay is not None else None
    db = _empty(x.q, B, T, s.HV) if x.b is not None and delta else None
    dw = _empty(x.q, B, T, s.HV) if x.w is not None else None
    dgates = _empty(x.q, tiles, s.slots, s.HV, 5, C)
    kepts = _empty(x.q, tiles, s.slots, s.HV)
    kept = dtype if kind.terms(x.q.dtype) == 1 else torch.float32
    states, dstates = (_empty(x.q, held, s.HV, s.V, s.K, dtype=kept) for _ in range(2))
    xs, du = (_empty(x.q, held, C, s.HV, s.V, dtype=kept) for _ in range(2))
    grouped = s.HV > s.H
    partial = _empty(x.q, 3 if own else 2, held, C, s.HV, s.K, dtype=kept) if grouped else None
    carry = _empty(x.q, s.N, s.HV, s.V, s.K)
    carry.zero_() if dfinal is None else carry.copy_(dfinal.transpose(2, 3))
    parts = cdiv(most, split) if split else 1
    begins = ends = None
    if split:
        begins, ends = _empty(x.q, s.N * parts, s.HV, s.V, s.K), _empty(x.q, s.N * parts, s.HV, s.V + s.K, s.K)
    flags = (s.packed, prepared.gates.numel() > 0)

    def reverse(segment: int, hands_on: bool) -> None:
        launch = config.reverse
        BV = _tile(launch.tile, s.V)
        reverse_kernel[(s.N * parts * s.HV * cdiv(s.V, BV),)](
            x.q, x.k, x.e, do, x.log_decay, x.w, *prepared, carry, dstates, du, dv, begins, ends, x.cu_seqlens,
            kind.scale, s.T, segment, segments, parts, s.H, s.HV, s.K, s.V, C, *key_tiles(s.K), BV, _decay(x), delta,
            own, x.w is not None, kind.read_early, *flags, unit, split, hands_on, kind.terms(dtype),
            _precision(dtype), launch.stages, num_warps=launch.warps, num_stages=launch.stages,
        )  # fmt: skip

    for segment in reversed(range(segments if s.slots * s.HV else 0)):
        _scan(
            x, kind, prepared, s, config.replay, "replay",
            _Cut(cdiv(most, every), 0, every, unit, segment, segments),
            checkpoints=checkpoints, states=states, xs=xs,
        )  # fmt: skip
        if begins is not None and ends is not None:
            cut = _Cut(parts, split, 0, unit, segment, segments)
            _scan(x, kind, prepared, s, config.scan, "maps", cut, ends=ends)
            reverse(segment, hands_on=True)
            _join(prepared, s, carry, begins, ends, x.cu_seqlens, cut, reverse=True)
        reverse(segment, hands_on=False)
        gradients_kernel[(held * s.HV * tiles,)](
            x.q, x.k, x.e, x.v, x.log_decay, x.b, do, prepared.gates, states, dstates, xs, du, dq, dk, de, dgates,
            kepts, partial, x.cu_seqlens, s.N, s.slots, held, kind.scale, s.T, segment, segments, s.H, s.HV, s.K, s.V,
            C, BK, _tile(config.gradients.tile, s.V), _decay(x), delta, own,
            x.b is not None and delta, x.w is not None, kind.erase_early, kind.read_early, *flags, unit,
            _precision(dtype), config.gradients.stages,
            num_warps=config.gradients.warps, num_stages=config.gradients.stages,
        )  # fmt: skip
        if grouped:
            sum_groups_kernel[(held * s.H,)](
                partial, dq, dk, de, x.cu_seqlens, s.N, s.T, segment, segments, held, s.H, s.HV, s.K, C, K0, own,
                s.packed, unit, num_warps=8,
            )  # fmt: skip
    if s.slots * s.HV and (dlog_decay is not None or db is not None or dw is not None):
        gate_gradients_kernel[(s.slots * s.HV,)](
            dgates, kepts, dlog_decay, db, dw, x.cu_seqlens, s.N, s.slots, s.T, s.HV, C, tiles, dlog_decay is not None,
            db is not None, dw is not None, kind.erase_early or kind.read_early, s.packed, num_warps=1,
        )  # fmt: skip
    if dlog_decay is not None and _decay(x) == "fixed":
        dlog_decay = dlog_decay.sum((0, 1))
    dstate = None if x.state is None else carry.transpose(2, 3).contiguous()
    return {"q": dq, "k": dk, "v": dv, "log_decay": dlog_decay, "b": db, "w": dw, "e": de, "state": dstate}


def _segments(s: Sizes, unit: int, scratch: int, itemsize: int) -> tuple[int, int]:
    """In how many segments the backward goes through the sequences, and the chunks that one holds at most.

    No more than the scratch has room for; but a segment is at least a unit of each sequence. The lengths of packed
    sequences are unknown here, and all segments are of use whatever they are, as long as they are long.
    """
    a_place = s.HV * 2 * (s.K + s.C) * s.V * itemsize
    units = cdiv(cdiv(s.T, s.C), unit)
    places = min(s.slots, scratch // max(a_place, 1))
    if places >= s.slots:
        return 1, s.slots
    if s.packed:
        # beyond a unit of each sequence: as much as there is room for, or as much again where there is none
        segments = min(max(units, 1), cdiv(s.slots + 1, max(places - s.N * unit, s.N * unit)))
        held = (s.slots + 1) // segments + s.N * unit
    else:
        segments = cdiv(units, max(places // (s.N * unit), 1))
        held = s.N * cdiv(units, segments) * unit
    return (segments, held) if held < s.slots else (1, s.slots)


def step_(x: ScanOperands, states: Tensor, slots: Tensor | None, kind: ScanKind, launch: configs.Launch) -> Tensor:
    """Decode in place: q [B, H, K]; k, e [B, n, H, K]; v [B, n, HV, V]; log_decay [B, HV] or [HV]; b, w [B, n, HV].

    Returns o [B, HV, V].
    """
    B, n, H, K = x.k.shape
    HV, V = x.v.shape[2:]
    BV = min(launch.tile, triton.next_power_of_2(V))
    o = x.v.new_empty(B, HV, V)
    if o.numel():
        decode_kernel[(B * HV * cdiv(V, BV),)](
            x.q, x.k, x.e, x.v, x.log_decay, x.b, x.w, states, slots, o, kind.scale, H, HV, K, V,
            triton.next_power_of_2(K), BV, n, _decay(x), kind.delta, x.e is not None, x.b is not None, x.w is not None,
            kind.erase_early, kind.read_early, slots is not None, num_warps=launch.warps, num_stages=launch.stages,
        )  # fmt: skip
    return o
