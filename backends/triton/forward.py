"""Launch the kernels of the forward and of decoding, and what the backward shares with them.

B batch, T time, N sequences, H key heads, HV value heads, K key width, V value width, C chunk
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from deltazoo.backends.devices import tf32_allowed
from deltazoo.backends.triton import config as configs
from deltazoo.backends.triton.config import LaunchConfig, Problem, cdiv, key_tiles, power_of_two
from deltazoo.backends.triton.kernels.combine import combine_kernel
from deltazoo.backends.triton.kernels.decode.step import decode_kernel
from deltazoo.backends.triton.kernels.prepare import gates_kernel, prepare_kernel
from deltazoo.backends.triton.kernels.scan import scan_kernel
from deltazoo.backends.triton.launcher import launcher
from deltazoo.backends.triton.operands import Prepared, ScanKind, ScanOperands, Sizes
from deltazoo.backends.triton.precompile import device_of
from deltazoo.backends.triton.zero_tail import zero_tail

SHARED_OUT = 168  # registers a thread, which three warp groups share out anew: 232, 232 and 40, or 240, 240 and 24
OnSegment = Callable[..., None]  # launches a kernel, on one of a cut's segments


class Cut(NamedTuple):
    """Which chunks launches walk: one by one the `segments` of every sequence, cut between units of `unit` chunks, in
    parts of `split` chunks (0: in one), with the state kept every `every` (0: never)."""

    parts: int = 1
    split: int = 0
    every: int = 0
    unit: int = 1
    segments: int = 1


def resolve(x: ScanOperands, kind: ScanKind) -> LaunchConfig:
    """The config that was given as JSON, or the one for these sizes on this device."""
    problem, index = _problem(x, kind)
    return configs.given_config(kind.config, problem, index) if kind.config else configs.launch_config(problem, index)


def resolve_decode(x: ScanOperands, kind: ScanKind) -> configs.Launch:
    """The launch of a decode step, whose operands are not padded: what its config says of the others is not asked."""
    problem, index = _problem(x, kind)
    return (configs.parse(kind.config) if kind.config else configs.launch_config(problem, index)).decode


def _problem(x: ScanOperands, kind: ScanKind) -> tuple[Problem, int | None]:
    s, device = Sizes.of(x, configs.CHUNK), device_of(x.q)
    problem = Problem(
        device.type, x.q.dtype, s.N, s.T, s.H, s.HV, s.K, s.V, kind.delta, x.e is not None,
        x.log_decay is not None, s.packed, kind.precise,
    )  # fmt: skip
    return problem, device.index


def decay_of(x: ScanOperands) -> str:
    """The kernels' DECAY."""
    return "none" if x.log_decay is None else "fixed" if x.log_decay.dim() == 1 else "head"


def precision(dtype: torch.dtype) -> str:
    """Of products of float32 operands: tf32 where the user allows it, else three of them, as good as float32."""
    return "tf32" if dtype != torch.float32 or tf32_allowed() else "tf32x3"


def value_tile(widest: int, V: int) -> int:
    """Value columns a program: no more than there are, and enough for a product."""
    return min(widest, max(16, power_of_two(V)))


def empty(like: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A new tensor beside another."""
    return torch.empty(shape, device=like.device, dtype=dtype)


def part_states(x: ScanOperands, s: Sizes, parts: int) -> tuple[Tensor, Tensor]:
    """Room for where each part begins [N parts, HV, V, K], and for what it hands on with its map below it."""
    return empty(x.q, s.N * parts, s.HV, s.V, s.K), empty(x.q, s.N * parts, s.HV, s.V + s.K, s.K)


def prepare(x: ScanOperands, kind: ScanKind, config: LaunchConfig, keep: bool) -> Prepared:
    """Launch what each chunk decides alone; keep: for a backward, too."""
    s = Sizes.of(x, config.chunk)
    out = Prepared.empty(x, kind, s, keep)
    if not kind.delta:
        heads = min(power_of_two(s.HV), 16)
        gates = launcher(
            gates_kernel,
            (out.gates, out.decay_bounds, x.log_decay, x.w, x.cu_seqlens),
            (s.HV, s.C, heads, decay_of(x), x.w is not None, s.packed),
        )
        gates(s.slots * cdiv(s.HV, heads), s.N, s.T)
        return out
    exact = kind.terms(x.q.dtype) == 2 or x.q.dtype == torch.float32
    grouped = s.HV > s.H
    if config.prepare.hopper:
        from deltazoo.backends.triton.kernels.hopper.prepare import hopper_prepare_kernel

        launch = launcher(
            hopper_prepare_kernel,
            (x.q, x.k, x.log_decay, x.b, x.w, *out, x.cu_seqlens),
            (
                s.H, s.HV, s.K, s.C, decay_of(x), x.b is not None, x.w is not None, kind.erase_early, kind.read_early,
                s.packed, bool(config.split) and cdiv(s.T, s.C) > config.split,
            ),
            registers=168 if grouped else None,  # three programs a processor, else five
        )  # fmt: skip
        launch(s.slots * s.H, s.N, s.T, kind.scale)
        return out
    launch = launcher(
        prepare_kernel,
        (x.q, x.k, x.e, x.log_decay, x.b, x.w, *out, x.cu_seqlens),
        (
            s.H, s.HV, s.K, s.C, *key_tiles(s.K), decay_of(x), x.e is not None, x.b is not None,
            x.w is not None, kind.erase_early, kind.read_early, s.packed, tl.float32 if exact else tl.float16,
            precision(x.q.dtype), "tf32x3" if exact else "tf32", min(config.prepare.tile, s.C), kind.terms(x.q.dtype),
            bool(config.split) and cdiv(s.T, s.C) > config.split,
        ),
        config.prepare.warps,
        config.prepare.stages,
        registers=None if exact or grouped or s.C != 64 else 160,  # three programs a processor
    )  # fmt: skip
    launch(s.slots * s.H, s.N, s.T, kind.scale)
    return out


def scan(
    x: ScanOperands, kind: ScanKind, prepared: Prepared, s: Sizes, launch: configs.Launch, mode: str, cut: Cut,
    **tensors: Tensor | None,
) -> OnSegment:  # fmt: skip
    """What launches scan_kernel in one of its modes, or the one for Hopper GPUs."""
    BV = value_tile(launch.tile, s.V)
    columns = 0 if mode == "maps" else cdiv(s.V, BV)
    columns += cdiv(s.K, BV) if mode in ("ends", "maps") else 0
    t = tensors.get
    # parts hand on less than all, by a kernel that is not for one kind of GPU
    if launch.hopper and mode in ("output", "replay"):
        from deltazoo.backends.triton.kernels.hopper.scan import hopper_scan_kernel

        on_hopper = launcher(
            hopper_scan_kernel,
            (
                x.q, x.k, x.v, prepared.gates, prepared.squares, x.state, t("o"), t("final"), t("checkpoints"),
                t("states"), t("xs"), t("begins"), x.cu_seqlens,
            ),
            (
                s.H, s.HV, s.K, s.V, s.C, *key_tiles(s.K), decay_of(x), kind.delta, x.w is not None,
                x.state is not None, kind.read_early, s.packed, cut.every, cut.unit, cut.split, mode,
            ),
            registers=SHARED_OUT,
        )  # fmt: skip
        programs = s.N * cut.parts * s.HV * cdiv(s.V, 128)
        return lambda segment=0: on_hopper(programs, kind.scale, s.T, segment, cut.segments, cut.parts)
    # the tensor memory accelerator takes tiles where rows are multiples of 16 bytes
    tiled = x.v.numel() > 0 and s.V * x.v.itemsize % 16 == 0
    # by its sizes: a contiguous tensor may have any stride where there is one of something
    strides = [s.T * s.HV * s.V, s.HV * s.V, s.V, 1]
    v = TensorDescriptor(x.v, [*x.v.shape], strides, [1, s.C, 1, BV]) if tiled else x.v
    go = launcher(
        scan_kernel,
        (
            x.q, x.k, x.e, v, *prepared, x.state, t("o"), t("final"), t("checkpoints"),
            t("states"), t("xs"), t("begins"), t("ends"), x.cu_seqlens,
        ),
        (
            s.H, s.HV, s.K, s.V, s.C, *key_tiles(s.K), BV, decay_of(x), kind.delta, x.e is not None, x.w is not None,
            x.state is not None, kind.read_early, s.packed, cut.every, cut.unit, cut.split, mode,
            kind.terms(x.q.dtype), precision(x.q.dtype), launch.stages, tiled,
        ),
        launch.warps,
        launch.stages,
    )  # fmt: skip
    number = s.N * cut.parts * s.HV * columns
    return lambda segment=0: go(number, kind.scale, s.T, segment, cut.segments, cut.parts)


def join(
    prepared: Prepared, s: Sizes, given: Tensor | None, begins: Tensor, ends: Tensor, cu: Tensor | None, cut: Cut,
    reverse: bool,
) -> OnSegment:  # fmt: skip
    """What chains the parts: from what each hands on, with what is given before the first, where each begins."""
    BV = value_tile(64, s.V)
    go = launcher(
        combine_kernel,
        (prepared.decay_bounds, given, begins, ends, cu),
        (
            s.HV, s.K, s.V, s.C, *key_tiles(s.K), BV, given is not None, s.packed, cut.split, cut.unit, reverse,
            "tf32x3",
        ),
    )  # fmt: skip
    programs = s.N * s.HV * cdiv(s.V, BV)
    return lambda segment=0: go(programs, s.T, segment, cut.segments, cut.parts)


def forward(x: ScanOperands, kind: ScanKind, keep: bool, config: LaunchConfig) -> tuple[Tensor, ...]:
    """Returns o, the final state, what was prepared, and with `keep` the checkpoints [places, HV, V, K] of S^T."""
    s = Sizes.of(x, config.chunk)
    chunks = cdiv(s.T, s.C)
    parts = max(1, cdiv(chunks, config.split)) if config.split else 1
    split = config.split if parts > 1 else 0
    prepared = prepare(x, kind, config, keep)
    o = x.v.new_empty(x.v.shape)
    final = empty(x.q, s.N, s.HV, s.K, s.V)
    every = config.every if keep else 0
    checkpoints = empty(x.q, *((s.places(every), s.HV, s.V, s.K) if keep else (0,)), dtype=kind.kept(x.q.dtype))
    begins = None
    if split:
        begins, ends = part_states(x, s, parts)
        scan(x, kind, prepared, s, config.scan, "ends", Cut(parts, split), ends=ends)()
        join(prepared, s, x.state, begins, ends, x.cu_seqlens, Cut(parts, split), reverse=False)()
    scan(
        x, kind, prepared, s, config.scan, "output", Cut(parts, split, every), o=o,
        final=final, checkpoints=checkpoints, begins=begins,
    )()  # fmt: skip
    zero_tail(s, x.cu_seqlens, v=o)
    return o, final, *(prepared if keep else Prepared.nothing(x.q)), checkpoints


def step_(x: ScanOperands, states: Tensor, slots: Tensor | None, kind: ScanKind, launch: configs.Launch) -> Tensor:
    """Decode in place: q [B, H, K]; k, e [B, n, H, K]; v [B, n, HV, V]; log_decay [B, HV] or [HV]; b, w [B, n, HV].

    Returns o [B, HV, V].
    """
    B, n, H, K = x.k.shape
    HV, V = x.v.shape[2:]
    BV = min(launch.tile, power_of_two(V))
    o = x.v.new_empty(B, HV, V)
    go = launcher(
        decode_kernel,
        (x.q, x.k, x.e, x.v, x.log_decay, x.b, x.w, states, slots, o),
        (
            H, HV, K, V, power_of_two(K), BV, n, decay_of(x), kind.delta, x.e is not None, x.b is not None,
            x.w is not None, kind.erase_early, kind.read_early, slots is not None,
        ),
        configs.warps_apart(launch.warps, power_of_two(K) * BV),
        launch.stages,
    )  # fmt: skip
    go(B * HV * cdiv(V, BV), kind.scale, states.shape[0])
    return o
