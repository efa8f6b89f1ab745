"""Launch the kernels of the forward pass, and those that the backward shares with it.

A sequence is a row of chunks. If one program per sequence and head leaves the GPU idle, the chunks of a sequence are
divided into segments, computed in parallel and combined in order. The backward visits long inputs window by window,
last first, so that the scratch for recomputed states stays small.

B batch, T time, N sequences, H key heads, HV value heads, K key width, V value width, C chunk
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from deltazoo.backends.devices import tf32_allowed
from deltazoo.backends.triton.config import Launch, LaunchConfig
from deltazoo.backends.triton.kernels.channel.pair_prepare import pair_prepare_kernel
from deltazoo.backends.triton.kernels.channel.prepare import channel_prepare_kernel
from deltazoo.backends.triton.kernels.combine import combine_kernel
from deltazoo.backends.triton.kernels.prepare import gates_kernel, prepare_kernel
from deltazoo.backends.triton.kernels.scan import scan_kernel
from deltazoo.backends.triton.kernels.zero_tail import zero_tail_kernel
from deltazoo.backends.triton.launcher import launcher
from deltazoo.backends.triton.operands import ScanKind, ScanOperands, Sizes
from deltazoo.backends.triton.plan import Plan, Version
from deltazoo.backends.triton.saved import Prepared, Saved
from deltazoo.backends.triton.tiles import cdiv, key_tiles, most_registers, power_of_two, value_tile

# Registers per thread at the launch of a warp-specialised kernel. Its three warp groups reallocate them (setmaxnreg):
# 232, 232 and 40 (224, 224 and 56, or 216, 216 and 72, with a decay per channel), or 240, 240 and 24.
WARP_SPECIALIZED_REGISTERS = 168
_KEY_TILE = 64  # keys per step of the portable preparations for decays per channel; ptxas miscompiled narrower products
MARKED_HEADS = 8  # heads per program of the portable DPLR kernels that compute marked chunks alone
WindowLaunch = Callable[..., None]  # launches a kernel for one window, by its number; 0 by default


class Span(NamedTuple):
    """The chunks that one launch covers: one window of every sequence, divided into segments.

    Args:
        segments: segments of a window, computed in parallel. split: chunks per segment; 0: the window is one segment.
        every: chunks between two checkpoints that are stored or loaded; 0: none.
        unit: windows end at multiples of so many chunks. windows: windows of a sequence.
        halved_from: as in `Plan`.
    """

    segments: int = 1
    split: int = 0
    every: int = 0
    unit: int = 1
    windows: int = 1
    halved_from: int = 0

    @property
    def halves(self) -> int:
        """Programs of the Hopper scans for each tile of 128 values."""
        return 2 if self.halved_from else 1


def tf32_precision(dtype: torch.dtype) -> str:
    """The precision of float32 products: tf32 if torch allows it, else three tf32 products, accurate as float32."""
    return "tf32" if dtype != torch.float32 or tf32_allowed() else "tf32x3"


def empty(like: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Allocate a tensor on the device of another."""
    return torch.empty(shape, device=like.device, dtype=dtype)


def segment_states(x: ScanOperands, s: Sizes, slots: int, split: int) -> tuple[Tensor, Tensor]:
    """Allocate the states at the start of each segment, [segments, HV, V, K], and its contribution and map.

    The second tensor [segments, HV, V + K, K] holds what a segment adds to the state above the map from the state at
    its start to the one at its end. `slots` chunks of N sequences are at most slots / split + N segments.
    """
    segments = slots // split + s.N
    return empty(x.q, segments, s.HV, s.V, s.K), empty(x.q, segments, s.HV, s.V + s.K, s.K)


def forward(x: ScanOperands, kind: ScanKind, plan: Plan, config: LaunchConfig) -> tuple[Tensor, ...]:
    """Run prepare and the scan.

    Returns: o, the final state, and with plan.every what `Saved` describes, else an empty tensor.
    """
    s = Sizes.of(x, config.chunk)
    segments = cdiv(cdiv(s.T, s.C), plan.forward_split) if plan.forward_split else 1
    if plan.every:
        saved = Saved.empty(x, kind, s, plan.every)
        prepared, checkpoints = Saved.of(saved, x, kind, s, plan.every)
    else:
        prepared = Prepared.empty(x, kind, s, False)
        saved = checkpoints = empty(x.q, 0, dtype=kind.saved_dtype(x.q.dtype))
    prepare(x, kind, plan, config, prepared)
    o = x.v.new_empty(x.v.shape)
    final = empty(x.q, s.N, s.HV, s.K, s.V)
    starts = None
    if plan.forward_split:
        starts, ends = segment_states(x, s, s.slots, plan.forward_split)
        span = Span(segments, plan.forward_split)
        scan("portable", x, kind, prepared, s, config.scan, "ends", span, ends=ends)()
        combine(prepared, s, x.state, starts, ends, x.cu_seqlens, span, reverse=False)()
    scan(
        plan.forward, x, kind, prepared, s, config.scan, "output",
        Span(segments, plan.forward_split, plan.every, halved_from=plan.forward_halved_from),
        o=o, final=final, checkpoints=checkpoints, starts=starts,
    )()  # fmt: skip
    zero_tail(s, x.cu_seqlens, v=o)
    return o, final, saved


def zero_tail(
    s: Sizes, cu_seqlens: Tensor | None, *, v: Tensor, q: Tensor | None = None, k: Tensor | None = None,
    e: Tensor | None = None, log_decay: Tensor | None = None, b: Tensor | None = None, w: Tensor | None = None,
) -> None:  # fmt: skip
    """Zero the rows from cu_seqlens[-1] on of tensors shaped like the operands of these names.

    Only packed sequences have such rows. cu_seqlens[-1] = T, the normal case, costs one launch that writes nothing.
    """
    if cu_seqlens is None:
        return
    block, programs = 1024, 64
    decays = s.HV * s.K if log_decay is not None and log_decay.dim() == 4 else s.HV
    zero = launcher(zero_tail_kernel, (v, q, k, e, log_decay, b, w, cu_seqlens), (s.H * s.K, s.HV, s.V, decays, block))
    zero(programs, s.N, s.T)


def prepare(x: ScanOperands, kind: ScanKind, plan: Plan, config: LaunchConfig, out: Prepared) -> None:
    """Launch the prepare step of the plan, which computes what depends on a single chunk."""
    s = Sizes.of(x, config.chunk)
    launch = {
        "gates": _gates, "channel": _prepare_channels, "hopper channel": _prepare_channels_on_hopper,
        "pair": _prepare_pairs, "hopper pair": _prepare_pairs_on_hopper, "portable": _prepare,
        "hopper": _prepare_on_hopper,
    }[plan.prepare]  # fmt: skip
    launch(x, kind, s, out, config.prepare, plan.split > 0)


def _gates(x: ScanOperands, kind: ScanKind, s: Sizes, out: Prepared, launch: Launch, segments: bool) -> None:
    heads = min(power_of_two(s.HV), 16)
    gates = launcher(
        gates_kernel,
        (out.gates, out.decay_bounds, x.log_decay, x.w, x.cu_seqlens),
        (s.HV, s.C, heads, x.decay, x.w is not None, s.packed),
    )
    gates(s.slots * cdiv(s.HV, heads), s.N, s.T)


def _prepare_channels(x: ScanOperands, kind: ScanKind, s: Sizes, out: Prepared, launch: Launch, segments: bool) -> None:
    exact = x.q.dtype == torch.float32
    prepare = launcher(
        channel_prepare_kernel,
        (
            x.q, x.k, x.e, x.log_decay, x.b, x.w, out.gates, out.decay_bounds, out.wy_tiles, out.scaled, x.cu_seqlens,
        ),
        (
            s.H, s.HV, s.K, s.C, _KEY_TILE, kind.delta, x.e is not None,
            kind.erase_channels, x.b is not None, x.w is not None, kind.erase_early, kind.read_early, s.packed,
            tl.float32 if exact else tl.float16, tf32_precision(x.q.dtype), "tf32x3" if exact else "tf32",
            min(launch.tile, s.C),
        ),
        launch.warps,
        launch.stages,
        registers=most_registers(launch.warps),
    )  # fmt: skip
    prepare(s.slots * s.HV, s.N, s.T, kind.scale)


def _prepare_pairs(
    x: ScanOperands, kind: ScanKind, s: Sizes, out: Prepared, launch: Launch, segments: bool, marked: bool = False
) -> None:
    exact = x.q.dtype == torch.float32
    heads = min(power_of_two(s.HV), MARKED_HEADS) if marked else 1
    prepare = launcher(
        pair_prepare_kernel,
        (x.q, x.k, x.e, x.v_key, x.log_decay, out.gates, out.decay_bounds, out.wy_tiles, out.scaled, x.cu_seqlens),
        (
            s.HV, s.K, s.C, _KEY_TILE, kind.read_early, s.packed,
            tl.float32 if exact else tl.float16, tf32_precision(x.q.dtype), "tf32x3" if exact else "tf32",
            min(launch.tile, s.C), heads, marked,
        ),
        launch.warps,
        launch.stages,
        registers=most_registers(launch.warps),
    )  # fmt: skip
    prepare(s.slots * cdiv(s.HV, heads), s.N, s.T, kind.scale)


def _prepare_pairs_on_hopper(
    x: ScanOperands, kind: ScanKind, s: Sizes, out: Prepared, launch: Launch, segments: bool
) -> None:
    """Launch the Hopper kernel, and the portable one for the chunks that it marks."""
    from deltazoo.backends.triton.kernels.hopper.pair_prepare import hopper_pair_prepare_kernel

    prepare = launcher(
        hopper_pair_prepare_kernel,
        (x.q, x.k, x.e, x.v_key, x.log_decay, out.gates, out.decay_bounds, out.wy_tiles, out.scaled, x.cu_seqlens),
        (s.HV, s.K, s.C, kind.read_early, s.packed),
    )
    prepare(s.slots * s.HV, s.N, s.T, kind.scale)
    _prepare_pairs(x, kind, s, out, launch, segments, marked=True)


def _prepare_channels_on_hopper(
    x: ScanOperands, kind: ScanKind, s: Sizes, out: Prepared, launch: Launch, segments: bool
) -> None:
    from deltazoo.backends.triton.kernels.hopper.channel_prepare import hopper_channel_prepare_kernel

    # three programs per SM, or two if the kernel would spill at that
    three = s.K <= 128 and x.e is None and not (kind.erase_early or kind.read_early)
    prepare = launcher(
        hopper_channel_prepare_kernel,
        (
            x.q, x.k, x.e, x.log_decay, x.b, x.w, out.gates, out.decay_bounds, out.wy_tiles, out.scaled, x.cu_seqlens,
        ),
        (
            s.H, s.HV, s.K, s.C, kind.delta, x.e is not None, kind.erase_channels, x.b is not None, x.w is not None,
            kind.erase_early, kind.read_early, s.packed,
        ),
        registers=168 if three else None,
    )  # fmt: skip
    prepare(s.slots * s.HV, s.N, s.T, kind.scale)


def _prepare(x: ScanOperands, kind: ScanKind, s: Sizes, out: Prepared, launch: Launch, segments: bool) -> None:
    exact = kind.terms(x.q.dtype) == 2 or x.q.dtype == torch.float32
    registers = None
    if exact:
        registers = most_registers(launch.warps)
    elif s.HV == s.H and s.C == 64:
        registers = 160  # three programs per SM
    prepare = launcher(
        prepare_kernel,
        (
            x.q, x.k, x.e, x.log_decay, x.b, x.w, out.gates, out.decay_bounds, out.wy_tiles, *out.derivatives(),
            x.cu_seqlens,
        ),
        (
            s.H, s.HV, s.K, s.C, *key_tiles(s.K), x.decay, x.e is not None, x.b is not None, x.w is not None,
            kind.erase_early, kind.read_early, s.packed, tl.float32 if exact else tl.float16,
            tf32_precision(x.q.dtype), "tf32x3" if exact else "tf32", min(launch.tile, s.C), kind.terms(x.q.dtype),
            segments, kind.reparam, kind.dv_holds_du(x),
        ),
        launch.warps,
        launch.stages,
        registers=registers,
    )  # fmt: skip
    prepare(s.slots * s.H, s.N, s.T, kind.scale)


def _prepare_on_hopper(
    x: ScanOperands, kind: ScanKind, s: Sizes, out: Prepared, launch: Launch, segments: bool
) -> None:
    from deltazoo.backends.triton.kernels.hopper.prepare import hopper_prepare_kernel

    prepare = launcher(
        hopper_prepare_kernel,
        (
            x.q, x.k, x.e, x.log_decay, x.b, x.w, out.gates, out.decay_bounds, out.wy_tiles, *out.derivatives(),
            x.cu_seqlens,
        ),
        (
            s.H, s.HV, s.K, s.C, x.decay, x.b is not None, x.w is not None, kind.erase_early, kind.read_early,
            s.packed, segments, kind.reparam, kind.dv_holds_du(x), kind.terms(x.q.dtype),
        ),
        registers=_prepare_registers(s.HV > s.H, kind.terms(x.q.dtype), kind.reparam),
    )  # fmt: skip
    prepare(s.slots * s.H, s.N, s.T, kind.scale)


def _prepare_registers(grouped: bool, terms: int, reparam: str) -> int | None:
    """Registers per thread: for three programs per SM with grouped heads, else five.

    With one term five need no limit, except with the step sizes of EFLA and Longhorn, which take a few registers more.
    """
    if grouped:
        return 168
    return 96 if terms == 2 or reparam != "none" else None


def scan_operands(x: ScanOperands, prepared: Prepared, s: Sizes) -> tuple[ScanOperands, Sizes]:
    """The operands that the scans read, and their sizes: for a decay per channel q, k and e scaled, per value head."""
    if x.decay != "channel":
        return x, s
    q, k, *others = prepared.scaled.unbind()
    e, v_key = (*others, None, None)[:2]
    return x._replace(q=q, k=k, e=e, v_key=v_key), s._replace(H=s.HV)


def scan(
    version: Version, x: ScanOperands, kind: ScanKind, prepared: Prepared, s: Sizes, launch: Launch, mode: str,
    span: Span, in_gradients: bool = False, **tensors: Tensor | None,
) -> WindowLaunch:  # fmt: skip
    """Build the launch of the scan.

    Args:
        mode: "output": o and the final state. "recompute": recompute the state before each chunk from checkpoints.
            "ends": the contribution and map of each segment. "maps": the maps alone. The last two are portable only.
        in_gradients: states are the rows of d_log_decay (backward_pass.Scratch).
        tensors: o, final, checkpoints, states, xs, starts, ends (kernels/scan.py), as far as the mode uses them.
    """
    if version == "hopper":
        return _scan_on_hopper(x, kind, prepared, s, mode, span, in_gradients, tensors)
    t = tensors.get
    x, s = scan_operands(x, prepared, s)
    BV = value_tile(launch.tile, s.V)
    # the tensor memory accelerator loads tiles if rows are multiples of 16 bytes
    tiled = x.v.numel() > 0 and s.V * x.v.itemsize % 16 == 0
    # computed from the sizes: a contiguous tensor may have any stride in a dimension of size 1
    strides = [s.T * s.HV * s.V, s.HV * s.V, s.V, 1]
    v = TensorDescriptor(x.v, [*x.v.shape], strides, [1, s.C, 1, BV]) if tiled else x.v
    run = launcher(
        scan_kernel,
        (
            x.q, x.k, x.e, x.v_key, v, prepared.gates, prepared.decay_bounds, prepared.wy_tiles, x.state, t("o"),
            t("final"), t("checkpoints"), t("states"), t("xs"), t("starts"), t("ends"), x.cu_seqlens,
        ),
        (
            s.H, s.HV, s.K, s.V, s.C, *key_tiles(s.K), BV, x.decay, kind.delta, x.e is not None, x.w is not None,
            x.state is not None, kind.read_early, s.packed, span.every, span.unit, span.split, mode,
            kind.terms(x.q.dtype), tf32_precision(x.q.dtype), launch.stages, tiled,
        ),
        launch.warps,
        launch.stages,
        registers=most_registers(launch.warps),
    )  # fmt: skip
    columns = 0 if mode == "maps" else cdiv(s.V, BV)
    columns += cdiv(s.K, BV) if mode in ("ends", "maps") else 0
    programs = s.N * span.segments * s.HV * columns
    return lambda window=0: run(programs, kind.scale, s.T, window, span.windows, span.segments)


def _scan_on_hopper(
    x: ScanOperands, kind: ScanKind, prepared: Prepared, s: Sizes, mode: str, span: Span, in_gradients: bool,
    tensors: Mapping[str, Tensor | None],
) -> WindowLaunch:  # fmt: skip
    from deltazoo.backends.triton.kernels.hopper.scan import hopper_scan_kernel

    t = tensors.get
    x, s = scan_operands(x, prepared, s)
    run = launcher(
        hopper_scan_kernel,
        (
            x.q, x.k, x.e, x.v, prepared.gates, prepared.wy_tiles, x.state, t("o"), t("final"), t("checkpoints"),
            t("states"), t("xs"), t("starts"), x.cu_seqlens,
        ),
        (
            s.H, s.HV, s.K, s.V, s.C, *key_tiles(s.K), x.decay, kind.delta, x.w is not None,
            x.state is not None, kind.read_early, s.packed, span.every, span.unit, span.split, mode,
            kind.terms(x.q.dtype), in_gradients, span.halves,
        ),
        registers=WARP_SPECIALIZED_REGISTERS,
    )  # fmt: skip
    programs = s.N * span.segments * s.HV * cdiv(s.V, 128) * span.halves
    return lambda window=0: run(programs, kind.scale, s.T, window, span.windows, span.segments, span.halved_from)


def combine(
    prepared: Prepared, s: Sizes, initial: Tensor | None, starts: Tensor, ends: Tensor, cu: Tensor | None, span: Span,
    reverse: bool,
) -> WindowLaunch:  # fmt: skip
    """Build the launch that computes the state (its gradient if reverse) at the start of each segment, in order."""
    BV = value_tile(64, s.V)
    run = launcher(
        combine_kernel,
        (prepared.decay_bounds, initial, starts, ends, cu),
        (
            s.HV, s.K, s.V, s.C, *key_tiles(s.K), BV, initial is not None, s.packed, span.split, span.unit, reverse,
            "tf32x3",
        ),
    )  # fmt: skip
    programs = s.N * s.HV * cdiv(s.V, BV)
    return lambda window=0: run(programs, s.T, window, span.windows)
