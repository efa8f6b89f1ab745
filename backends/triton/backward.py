"""Launch the kernels of the backward pass: window by window of chunks, last first, so that scratch stays small.

B batch, T time, N sequences, H key heads, HV value heads, K key width, V value width, C chunk
"""

from collections.abc import Callable

import torch
from torch import Tensor

from deltazoo.backends.triton.backward_pass import (
    GateSums,
    Pass,
    Scratch,
    bytes_per_slot,
    keeps_states_in_gradients,
    set_state,
    tensors_of_pairs,
    windows_of,
)
from deltazoo.backends.triton.config import LaunchConfig
from deltazoo.backends.triton.forward import (
    MARKED_HEADS,
    WARP_SPECIALIZED_REGISTERS,
    Span,
    WindowLaunch,
    combine,
    empty,
    scan,
    scan_operands,
    segment_states,
    tf32_precision,
    zero_tail,
)
from deltazoo.backends.triton.kernels.channel.gradients import channel_gradients_kernel
from deltazoo.backends.triton.kernels.channel.pair_gradients import pair_gradients_kernel
from deltazoo.backends.triton.kernels.gradients import gate_gradients_kernel, gradients_kernel, sum_groups_kernel
from deltazoo.backends.triton.kernels.reverse import reverse_kernel
from deltazoo.backends.triton.launcher import launcher
from deltazoo.backends.triton.operands import Gradients, ScanKind, ScanOperands, Sizes
from deltazoo.backends.triton.plan import Plan
from deltazoo.backends.triton.saved import Saved
from deltazoo.backends.triton.tiles import cdiv, key_tiles, most_registers, power_of_two, value_tile

_RECOMPUTED_CHUNKS = 16  # per program of the recomputation, without segments; amortises the load of a checkpoint


def backward(
    x: ScanOperands, kind: ScanKind, saved: Saved, d_o: Tensor, d_final: Tensor | None, plan: Plan,
    config: LaunchConfig,
) -> Gradients:  # fmt: skip
    """Compute the gradients of the operands."""
    s = Sizes.of(x, config.chunk)
    d = Gradients.empty(x, kind)
    if kind.reparam != "none":
        x = x._replace(b=saved.prepared.strengths, w=saved.prepared.strengths)
    d_state = empty(x.q, s.N, s.HV, s.K, s.V) if d.state is None else d.state
    sums = GateSums.empty(x, kind, s, plan, config)
    run = Pass(x, kind, s, plan, config, saved.prepared, saved.checkpoints, d_o, d_state, sums, d)
    if plan.backward == "fused":
        set_state(d_state, d_final)
        _fused(run)
    else:
        _by_windows(run, d_final)
    _gate_gradients(run)
    return d


def _by_windows(run: Pass, d_final: Tensor | None) -> None:
    """Recompute the states of a window and scan it backwards, the last window first."""
    x, kind, s, plan, config = run.x, run.kind, run.s, run.plan, run.config
    sweep = plan.backward == "sweep"
    in_gradients = keeps_states_in_gradients(s, plan)
    max_slots = config.scratch // max(bytes_per_slot(x, kind, s, sweep, in_gradients), 1)
    unit, windows, slots = windows_of(s, config.every, plan.split, max_slots)
    chunks = cdiv(cdiv(cdiv(s.T, s.C), unit), windows) * unit  # of one sequence in a window, at most
    segments = cdiv(chunks, plan.split) if plan.split else 1
    scratch = Scratch.empty(x, kind, s, slots, run.d, sweep, in_gradients)

    assert plan.recompute is not None
    stored = config.every if plan.split else max(config.every, _RECOMPUTED_CHUNKS)
    recompute = scan(
        plan.recompute, x, kind, run.prepared, s, config.recompute, "recompute",
        Span(cdiv(chunks, stored), stored, config.every, unit, windows),
        in_gradients=in_gradients, checkpoints=run.checkpoints, states=scratch.states, xs=scratch.xs,
    )  # fmt: skip
    recompute(windows - 1)  # keeps the GPU busy while the host prepares the other launches
    # With segments only `combine` reads the gradient of the state after the window; it takes None for zero.
    is_zero = d_final is None and run.d.state is None and plan.split > 0 and windows == 1
    if not is_zero:
        set_state(run.d_state, d_final)
    span = Span(segments, plan.split, 0, unit, windows, plan.halved_from)
    starts, ends = segment_states(x, s, slots, plan.split) if plan.split else (None, None)
    launches: list[WindowLaunch] = []
    if starts is not None and ends is not None:
        launches += [
            scan("portable", x, kind, run.prepared, s, config.scan, "maps", span, ends=ends),
            _reverse(run, span, scratch, starts, ends),
            combine(run.prepared, s, None if is_zero else run.d_state, starts, ends, x.cu_seqlens, span, reverse=True),
        ]
    if sweep:
        launches.append(_sweep(run, span, scratch, starts))
    else:
        reverse = _reverse_on_hopper if plan.reverse == "hopper" else _reverse
        assert plan.gradients is not None
        gradients = {
            "channel": _gradients_of_channels, "hopper channel": _gradients_of_channels_on_hopper,
            "hopper additive": _gradients_of_additive_channels_on_hopper,
            "pair": _gradients_of_pairs, "hopper pair": _gradients_of_pairs_on_hopper,
            "portable": _gradients, "hopper": _gradients_on_hopper,
        }[plan.gradients]  # fmt: skip
        launches += [reverse(run, span, scratch, starts), gradients(run, span, scratch)]
    if scratch.partial is not None:
        launches.append(_sum_groups(run, span, scratch))
    for window in reversed(range(windows)):
        if window < windows - 1:
            recompute(window)
        for launch in launches:
            launch(window)


def _reverse(
    run: Pass, span: Span, scratch: Scratch, starts: Tensor | None, ends: Tensor | None = None
) -> WindowLaunch:
    """The portable reverse scan; with `ends` the contributions of the segments, before they are combined."""
    kind, launch, dtype = run.kind, run.config.reverse, run.x.q.dtype
    x, s = scan_operands(run.x, run.prepared, run.s)
    BV = value_tile(launch.tile, s.V)
    reverse = launcher(
        reverse_kernel,
        (
            x.q, x.k, x.e, x.v_key, run.d_o, run.prepared.gates, run.prepared.decay_bounds, run.prepared.wy_tiles,
            run.d_state, scratch.dstates, scratch.du, run.d.v, starts, ends, x.cu_seqlens,
        ),
        (
            s.H, s.HV, s.K, s.V, s.C, *key_tiles(s.K), BV, x.decay, kind.delta, x.e is not None, x.w is not None,
            kind.read_early, s.packed, kind.dv_holds_du(x), span.unit, span.split, kind.min_b(dtype),
            ends is not None, kind.terms(dtype), tf32_precision(dtype), launch.stages,
        ),
        launch.warps,
        launch.stages,
        registers=most_registers(launch.warps),
    )  # fmt: skip
    programs = s.N * span.segments * s.HV * cdiv(s.V, BV)
    return lambda window: reverse(programs, kind.scale, s.T, window, span.windows, span.segments)


def _reverse_on_hopper(run: Pass, span: Span, scratch: Scratch, starts: Tensor | None) -> WindowLaunch:
    from deltazoo.backends.triton.kernels.hopper.reverse import hopper_reverse_kernel

    kind, dtype = run.kind, run.x.q.dtype
    x, s = scan_operands(run.x, run.prepared, run.s)
    reverse = launcher(
        hopper_reverse_kernel,
        (
            x.q, x.k, x.e, run.d_o, run.prepared.gates, run.prepared.wy_tiles, run.d_state, scratch.dstates,
            run.d.k if scratch.in_gradients else None, scratch.du, run.d.v, starts, x.cu_seqlens,
        ),
        (
            s.H, s.HV, s.K, s.V, s.C, *key_tiles(s.K), x.decay, kind.delta, x.w is not None, kind.read_early, s.packed,
            kind.dv_holds_du(x), span.unit, span.split, kind.min_b(dtype), kind.terms(dtype), scratch.in_gradients,
            span.halves,
        ),
        registers=WARP_SPECIALIZED_REGISTERS,
    )  # fmt: skip
    programs = s.N * span.segments * s.HV * cdiv(s.V, 128) * span.halves
    return lambda window: reverse(programs, kind.scale, s.T, window, span.windows, span.segments, span.halved_from)


def _gradients(run: Pass, span: Span, scratch: Scratch) -> WindowLaunch:
    x, kind, s, launch, sums, d = run.x, run.kind, run.s, run.config.gradients, run.sums, run.d
    small = scratch.states.itemsize == 2 and max(sums.keys, launch.tile) <= 64 and launch.warps == 4
    gradients = launcher(
        gradients_kernel,
        (
            x.q, x.k, x.e, x.v, x.b, run.d_o, run.prepared.gates, scratch.states, scratch.dstates, scratch.xs,
            scratch.du, d.q, d.k, d.e, sums.dgates, sums.state_products, scratch.partial, run.slopes, x.cu_seqlens,
        ),
        (
            s.H, s.HV, s.K, s.V, s.C, sums.keys, value_tile(launch.tile, s.V), x.decay, kind.delta, x.e is not None,
            d.b is not None, x.w is not None, kind.erase_early, kind.read_early, s.packed, kind.dv_holds_du(x),
            kind.min_b(x.q.dtype), span.unit, tf32_precision(x.q.dtype), launch.stages,
        ),
        launch.warps,
        launch.stages,
        registers=168 if small and not kind.delta else most_registers(launch.warps),  # 168: three programs per SM
    )  # fmt: skip
    return _launch_gradients(gradients, run, span, scratch)


def _gradients_of_channels(run: Pass, span: Span, scratch: Scratch) -> WindowLaunch:
    x, kind, s, launch, sums, d = run.x, run.kind, run.s, run.config.gradients, run.sums, run.d
    gradients = launcher(
        channel_gradients_kernel,
        (
            x.q, x.k, x.e, x.v, x.log_decay, x.b, x.w, run.d_o, scratch.states, scratch.dstates, scratch.xs,
            scratch.du, d.q, d.k, d.e, d.log_decay, sums.dgates, scratch.partial, x.cu_seqlens,
        ),
        (
            s.H, s.HV, s.K, s.V, s.C, sums.keys, value_tile(launch.tile, s.V), kind.delta, x.e is not None,
            kind.erase_channels, d.b is not None, x.w is not None, kind.stores_du(x), kind.erase_early, kind.read_early,
            x.state is not None, s.packed, kind.min_b(x.q.dtype), span.unit, x.q.dtype == torch.float32,
            tf32_precision(x.q.dtype), launch.stages,
        ),
        launch.warps,
        launch.stages,
        registers=most_registers(launch.warps),
    )  # fmt: skip
    return _launch_gradients(gradients, run, span, scratch)


def _gradients_of_pairs(run: Pass, span: Span, scratch: Scratch, marked: bool = False) -> WindowLaunch:
    """The portable kernel. marked: only for the chunks that prepare has marked."""
    kind, s, launch, sums = run.kind, run.s, run.config.gradients, run.sums
    heads = min(power_of_two(s.HV), MARKED_HEADS) if marked else 1
    gradients = launcher(
        pair_gradients_kernel,
        tensors_of_pairs(run, scratch),
        (
            s.HV, s.K, s.V, s.C, sums.keys, value_tile(launch.tile, s.V), kind.read_early, run.x.state is not None,
            s.packed, span.unit, run.x.q.dtype == torch.float32, tf32_precision(run.x.q.dtype), launch.stages, heads,
            marked,
        ),
        launch.warps,
        launch.stages,
        registers=most_registers(launch.warps),
    )  # fmt: skip
    programs = scratch.slots * cdiv(s.HV, heads) * sums.key_tiles
    return lambda window: gradients(programs, s.N, kind.scale, s.T, window, span.windows)


def _gradients_of_pairs_on_hopper(run: Pass, span: Span, scratch: Scratch) -> WindowLaunch:
    """The Hopper kernel, and the portable one for the chunks that prepare has marked."""
    from deltazoo.backends.triton.kernels.hopper.pair_gradients import hopper_pair_gradients_kernel

    kind, s = run.kind, run.s
    gradients = launcher(
        hopper_pair_gradients_kernel,
        tensors_of_pairs(run, scratch),
        (s.HV, s.K, s.V, s.C, kind.read_early, run.x.state is not None, s.packed, span.unit),
        warps=8,
        registers=128 if s.V == 64 else None,  # two programs per SM
    )
    programs = scratch.slots * s.HV * run.sums.key_tiles
    marked = _gradients_of_pairs(run, span, scratch, marked=True)

    def launch(window: int) -> None:
        gradients(programs, s.N, kind.scale, s.T, window, span.windows)
        marked(window)

    return launch


def _gradients_of_channels_on_hopper(run: Pass, span: Span, scratch: Scratch) -> WindowLaunch:
    from deltazoo.backends.triton.kernels.hopper.channel_gradients import hopper_channel_gradients_kernel

    x, kind, s, sums, d = run.x, run.kind, run.s, run.sums, run.d
    gradients = launcher(
        hopper_channel_gradients_kernel,
        (
            x.q, x.k, x.e, x.v, x.log_decay, x.b, run.d_o, scratch.states, scratch.dstates, scratch.xs,
            scratch.du, d.q, d.k, d.e, d.log_decay, sums.dgates, scratch.partial, x.cu_seqlens,
        ),
        (
            s.H, s.HV, s.K, s.V, s.C, sums.keys, x.e is not None, kind.erase_channels, d.b is not None,
            x.w is not None, kind.stores_du(x), kind.erase_early, kind.read_early, x.state is not None, s.packed,
            kind.min_b(x.q.dtype), span.unit, scratch.in_gradients,
        ),
    )  # fmt: skip
    return _launch_gradients(gradients, run, span, scratch)


def _gradients_of_additive_channels_on_hopper(run: Pass, span: Span, scratch: Scratch) -> WindowLaunch:
    from deltazoo.backends.triton.kernels.hopper.additive_gradients import hopper_additive_gradients_kernel

    x, kind, s, sums, d = run.x, run.kind, run.s, run.sums, run.d
    gradients = launcher(
        hopper_additive_gradients_kernel,
        (
            x.q, x.k, x.v, x.log_decay, x.w, run.d_o, scratch.states, scratch.dstates, scratch.du, d.q, d.k,
            d.log_decay, sums.dgates, scratch.partial, x.cu_seqlens,
        ),
        (
            s.H, s.HV, s.K, s.V, s.C, sums.keys, x.w is not None, kind.read_early, x.state is not None, s.packed,
            span.unit, scratch.in_gradients,
        ),
    )  # fmt: skip
    return _launch_gradients(gradients, run, span, scratch)


def _gradients_on_hopper(run: Pass, span: Span, scratch: Scratch) -> WindowLaunch:
    from deltazoo.backends.triton.kernels.hopper.gradients import hopper_gradients_kernel

    x, kind, s, sums, d = run.x, run.kind, run.s, run.sums, run.d
    gradients = launcher(
        hopper_gradients_kernel,
        (
            x.q, x.k, x.e, x.v, x.b, run.d_o, run.prepared.gates, scratch.states, scratch.dstates, scratch.xs,
            scratch.du, d.q, d.k, d.e, sums.dgates, sums.state_products, scratch.partial, run.slopes, x.cu_seqlens,
        ),
        (
            s.H, s.HV, s.K, s.V, s.C, sums.keys, x.decay, kind.delta, d.b is not None, x.w is not None,
            kind.erase_early, kind.read_early, s.packed, kind.dv_holds_du(x), kind.min_b(x.q.dtype), span.unit,
        ),
    )  # fmt: skip
    return _launch_gradients(gradients, run, span, scratch)


def _launch_gradients(gradients: Callable[..., None], run: Pass, span: Span, scratch: Scratch) -> WindowLaunch:
    s, programs = run.s, scratch.slots * run.s.HV * run.sums.tiles
    return lambda window: gradients(programs, s.N, s.slots, scratch.slots, run.kind.scale, s.T, window, span.windows)


def _sweep(run: Pass, span: Span, scratch: Scratch, starts: Tensor | None) -> WindowLaunch:
    """The reverse scan and the gradients in one launch."""
    from deltazoo.backends.triton.kernels.hopper.sweep import hopper_backward_sweep_kernel

    x, kind, s, sums, d = run.x, run.kind, run.s, run.sums, run.d
    sweep = launcher(
        hopper_backward_sweep_kernel,
        (
            x.q, x.k, x.v, x.b, run.d_o, run.prepared.gates, run.prepared.wy_tiles, run.d_state, scratch.states,
            scratch.xs, d.q, d.k, d.v, sums.dgates, sums.state_products, scratch.partial, starts, run.slopes,
            x.cu_seqlens,
        ),
        (
            s.H, s.HV, s.K, s.V, s.C, x.decay, kind.delta, d.b is not None, x.w is not None, kind.erase_early,
            kind.read_early, s.packed, kind.dv_holds_du(x), span.unit, span.split, kind.min_b(x.q.dtype),
            kind.terms(x.q.dtype),
        ),
        warps=8,
        registers=WARP_SPECIALIZED_REGISTERS,
    )  # fmt: skip
    programs = s.N * span.segments * scratch.programs
    return lambda window: sweep(programs, s.slots, scratch.slots, kind.scale, s.T, window, span.windows, span.segments)


def _fused(run: Pass) -> None:
    """Recompute the states, scan back and compute the gradients in one launch, one program per sequence and head.

    The recomputed state before each chunk is stored where the chunk's gradients will be written, except the state
    before the last chunk of a sequence, which is stored in `spare`.
    """
    from deltazoo.backends.triton.kernels.hopper.fused_backward import hopper_fused_backward_kernel

    x, kind, s, sums, d = run.x, run.kind, run.s, run.sums, run.d
    spare = empty(x.q, s.N, 128, s.H, s.K, dtype=kind.saved_dtype(x.q.dtype))
    fused = launcher(
        hopper_fused_backward_kernel,
        (
            x.q, x.k, x.v, x.b, run.d_o, run.prepared.gates, run.prepared.wy_tiles, x.state, run.checkpoints,
            run.d_state, spare, d.q, d.k, d.v, sums.dgates, sums.state_products, run.slopes, x.cu_seqlens,
        ),
        (
            s.H, s.HV, s.K, s.V, s.C, x.decay, kind.delta, d.b is not None, x.w is not None, kind.erase_early,
            kind.read_early, s.packed, kind.dv_holds_du(x), x.state is not None, run.config.every,
            kind.min_b(x.q.dtype), kind.terms(x.q.dtype),
        ),
        warps=8,
        registers=WARP_SPECIALIZED_REGISTERS,
    )  # fmt: skip
    fused(s.N * s.HV, s.slots, kind.scale, s.T)


def _sum_groups(run: Pass, span: Span, scratch: Scratch) -> WindowLaunch:
    x, s, d = run.x, run.s, run.d
    sum_groups = launcher(
        sum_groups_kernel,
        (scratch.partial, d.q, d.k, d.e, x.cu_seqlens),
        (s.H, scratch.programs, s.K, s.C, key_tiles(s.K)[0], x.e is not None, s.packed, span.unit),
        warps=8,
    )
    slots = scratch.slots
    return lambda window: sum_groups(slots * s.H, s.N, s.T, window, span.windows, slots)


def _gate_gradients(run: Pass) -> None:
    x, s, d = run.x, run.s, run.d
    d_log_decay = empty(x.q, *x.v.shape[:3]) if x.decay == "fixed" else d.log_decay
    by_chunk = d_log_decay is not None and x.decay != "channel"  # else the gradients kernel has written it
    if any(needed := (by_chunk, d.b is not None, d.w is not None)):
        _sum_gate_gradients(run, d_log_decay, needed)
    zero_tail(s, x.cu_seqlens, v=d.v, q=d.q, k=d.k, e=d.e, log_decay=d_log_decay, b=d.b, w=d.w)
    if d.v_key is not None:
        zero_tail(s._replace(V=s.K), x.cu_seqlens, v=d.v_key)
    if d_log_decay is not None and x.decay == "fixed":
        torch.sum(d_log_decay, (0, 1), out=d.log_decay)


def _sum_gate_gradients(run: Pass, d_log_decay: Tensor | None, needed: tuple[bool, bool, bool]) -> None:
    x, kind, s, sums, d = run.x, run.kind, run.s, run.sums, run.d
    gate_gradients = launcher(
        gate_gradients_kernel,
        (sums.dgates, sums.state_products, x.v, x.b, d_log_decay, d.b, d.w, d.v, run.slopes, x.cu_seqlens),
        (
            s.HV, s.V, s.C, sums.tiles, sums.key_tiles, *needed, kind.tied, kind.dv_holds_du(x),
            kind.min_b(x.q.dtype), sums.early, x.state is not None, s.packed,
        ),
        warps=1,
    )  # fmt: skip
    gate_gradients(s.slots * s.HV, s.N, s.slots, s.T)
