"""Kernel plans: every launch of one update in order, decided once from the problem, the device and the launch config.

The launch code iterates the launches (execute.py), `explain` prints them, and `watch` records them. registry.py lists
the kernels; README.md describes the routes.

B batch, T time, N sequences, H key heads, HV value heads, K key width, V value width
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.torch_ext.devices import DeviceSpec
from deltazoo.backends.triton.chunk.registry import (
    CHUNK,
    COMBINE,
    GATE_GRADIENTS,
    KERNELS,
    PHASES,
    SEGMENT_ENDS,
    SEGMENT_GRADIENTS,
    SEGMENT_MAPS,
    SUM_GROUPS,
    TAIL,
    choose,
)
from deltazoo.backends.triton.config import LaunchConfig
from deltazoo.backends.triton.problem import Problem
from deltazoo.backends.triton.support import Kernel, Options, Span, Tiles
from deltazoo.backends.triton.tiles import cdiv

Step = Literal[
    "prepare", "marked prepare", "segment ends", "combine", "scan", "tail",
    "recompute", "segment maps", "segment gradients", "combine backward", "fused", "sweep", "reverse", "gradients",
    "marked gradients", "group sums", "gate gradients", "gradient tail", "gradient tail of v_key", "decode",
    "total", "total backward",
]  # fmt: skip
_RECOMPUTED_CHUNKS = 16  # per program of the recomputation, without segments; amortises the load of a checkpoint


class KernelLaunch(NamedTuple):
    """One launch of a plan: its step, kernel, number of programs, chunks, tiles and options."""

    step: Step
    kernel: Kernel
    programs: int
    span: Span
    tiles: Tiles
    options: Options

    @property
    def record(self) -> tuple[str, int, int]:
        """Name, programs and warps, as `watch` records them."""
        return self.kernel.name, self.programs, self.options.warps


class GateSums(NamedTuple):
    """The tiles whose partial sums gate_gradients_kernel adds.

    Args: keys: key columns per tile. key_tiles: number of key tiles. tiles: times the value tiles of the sweep.
    """

    keys: int
    key_tiles: int
    tiles: int


class Windows(NamedTuple):
    """The windows in which the backward processes the chunks.

    Args:
        slots: chunk slots of a window. states_in_gradients: a chunk's states are stored in the rows of its gradients
            (backward.Scratch). programs: programs per chunk that add to key gradients.
    """

    slots: int
    states_in_gradients: bool
    programs: int


class Plan(NamedTuple):
    """The kernels and launches of one update.

    Args:
        kernels: the chosen kernel of each phase that runs.
        forward, backward: the launches in order; no backward without gradients.
        checkpoint_chunks: chunks between two checkpoints of the state; 0: none is stored.
        forward_segment_chunks, segment_chunks: chunks per segment in the forward and in the backward if the segments of
            a sequence are computed in parallel, else 0.
        forward_narrow_min_chunks, narrow_min_chunks: the least chunks of a sequence for which the scan and the reverse
            scan have a program for every narrow tile of values; a shorter one has them for wide tiles; 0: wide alone.
        windows: of the backward; None: it has none, because one launch does without scratch.
        sums: None without a backward.
        carried: the state before each sequence comes from other ranks, after the segments are computed (carried.py).
    """

    problem: Problem
    config: LaunchConfig
    kernels: dict[str, Kernel]
    forward: tuple[KernelLaunch, ...]
    backward: tuple[KernelLaunch, ...] = ()
    checkpoint_chunks: int = 0
    forward_segment_chunks: int = 0
    segment_chunks: int = 0
    forward_narrow_min_chunks: int = 0
    narrow_min_chunks: int = 0
    windows: Windows | None = None
    sums: GateSums | None = None
    carried: bool = False

    @property
    def launches(self) -> tuple[KernelLaunch, ...]:
        """All launches, the forward's first."""
        return self.forward + self.backward

    def names(self) -> dict[str, str]:
        """Return the name of each phase's kernel."""
        return {phase: kernel.name for phase, kernel in self.kernels.items()}


def occupies(problem: Problem, device: DeviceSpec) -> bool:
    """Whether one program per sequence, head and 128 values occupies at least 40 % of the SMs."""
    return bool(problem.N * problem.HV * cdiv(problem.V, 128) * 5 >= device.processors * 2)


def _divides_forward(problem: Problem, device: DeviceSpec) -> bool:
    """Whether segments shorten the forward, too, and not the backward alone.

    One sequence of 8,192 tokens with 64 heads on an H200, ms of the forward, divided against whole: Mamba-2 with 64
    values 0.173 against 0.417, with 128 values 0.201 against 0.179; gated delta rule, whose segments need maps, 0.295
    against 0.261; RWKV-7 with 64 values 0.871 against 1.07.
    """
    if not occupies(problem, device):
        return True
    return not problem.packed and problem.V <= 64 and (problem.dplr or not problem.delta)


def make_plan(problem: Problem, device: DeviceSpec, config: LaunchConfig, grad: bool, divided: bool = False) -> Plan:
    """Decide which kernels run, and list their launches.

    Args: divided: whether a sequence that is not longer than a segment is one, instead of having none.
    Raises: ConfigError if the config asks for a kernel that does not take the problem.
    """
    kernels = {phase: _chosen(phase, problem, device, config) for phase in PHASES}
    for replaced in kernels["reverse"].replaces:
        del kernels[replaced]
    if not grad:
        kernels = {phase: kernels[phase] for phase in ("prepare", "scan")}
    chunks = cdiv(problem.T, config.chunk)
    segment_chunks = config.segment_chunks if divided or chunks > config.segment_chunks else 0
    forward_segment_chunks = segment_chunks if _divides_forward(problem, device) else 0
    plan = Plan(
        problem, config, kernels, (),
        checkpoint_chunks=config.checkpoint_chunks if grad else 0,
        forward_segment_chunks=forward_segment_chunks,
        segment_chunks=segment_chunks,
        forward_narrow_min_chunks=_narrow_min_chunks(
            problem, device, kernels["scan"].tiles(problem, config.scan), forward_segment_chunks
        ),
    )  # fmt: skip
    plan = plan._replace(forward=_launches(_forward(plan)))
    if not grad:
        return plan
    reverse = kernels["reverse"]
    reverse_tiles = reverse.tiles(problem, config.reverse)
    plan = plan._replace(
        narrow_min_chunks=_narrow_min_chunks(problem, device, reverse_tiles, segment_chunks), sums=_gate_sums(plan)
    )
    steps = _whole_backward(plan) if "recompute" in reverse.replaces else None
    if steps is None:
        plan = plan._replace(windows=_windows(plan)[0])
        steps = _backward_by_windows(plan)
    return plan._replace(backward=_launches(steps))


def _chosen(phase: str, problem: Problem, device: DeviceSpec, config: LaunchConfig) -> Kernel:
    version = getattr(config, phase).kernel
    kernel = choose(phase, version, problem, device, config.chunk)
    if kernel is None:
        raise ConfigError(_refusal(phase, version, problem, device, config.chunk))
    return kernel


def _narrow_min_chunks(problem: Problem, device: DeviceSpec, widths: Tiles, segment_chunks: int) -> int:
    """Return the chunks of the shortest sequence whose scan has a program for every narrow tile; 0: none is as long.

    The time of a scan is that of its longest sequence if that has more than twice the mean number of chunks per SM.
    Programs of 64 values take 30 % less time per chunk, but twice as many SMs. In a pack every sequence gets the
    programs, although those of short ones have no work, so a pack of many sequences keeps programs of 128 values.
    Segments are parallel already.
    """
    if not widths.narrow or segment_chunks or widths.narrow >= problem.V:
        return 0
    chunks, tiles = cdiv(problem.T, CHUNK), problem.HV * cdiv(problem.V, widths.values)
    if problem.packed and problem.N * tiles > 3 * device.processors:
        return 0
    all_chunks = chunks * tiles * problem.rows
    shortest = 2 * all_chunks // device.processors + 1
    return int(shortest) if chunks >= shortest else 0


def _launches(launches: Iterator[KernelLaunch]) -> tuple[KernelLaunch, ...]:
    """Return the launches that have programs."""
    return tuple(launch for launch in launches if launch.programs)


def launches_of(plan: Plan, *steps: tuple[Step, Kernel, Span, str]) -> tuple[KernelLaunch, ...]:
    """Return the launches of these steps, each with the phase whose config it has ("": its own)."""
    return _launches(
        launch for step, kernel, span, phase in steps for launch in _launch(plan, step, kernel, span, phase)
    )


def _launch(plan: Plan, step: Step, kernel: Kernel, span: Span, phase: str = "") -> Iterator[KernelLaunch]:
    """Return the launch of a kernel, and of the one for the chunks that it marks; phase: whose config it has."""
    problem, chunk = plan.problem, plan.config.chunk
    launch = getattr(plan.config, phase or step, None)
    tiles = kernel.tiles(problem, launch)
    programs = kernel.programs(problem, span, tiles)
    yield KernelLaunch(step, kernel, programs, span, tiles, kernel.options(problem, launch, chunk))
    if kernel.marked is not None:
        marked: Step = "marked prepare" if step == "prepare" else "marked gradients"
        yield from _launch(plan, marked, kernel.marked, span, phase or step)


def _forward(plan: Plan) -> Iterator[KernelLaunch]:
    problem, C, split = plan.problem, plan.config.chunk, plan.forward_segment_chunks
    span = Span(segments=cdiv(cdiv(problem.T, C), split) if split else 1, chunks=split, slots=problem.slots(C))
    yield from _launch(plan, "prepare", plan.kernels["prepare"], span)
    if split:
        yield from _launch(plan, "segment ends", SEGMENT_ENDS, span, "scan")
        yield from _launch(plan, "combine", COMBINE, span)
    stored = span._replace(
        checkpoint_chunks=plan.checkpoint_chunks, narrow_tile_min_chunks=plan.forward_narrow_min_chunks
    )
    yield from _launch(plan, "scan", plan.kernels["scan"], stored)
    if problem.packed:
        yield from _launch(plan, "tail", TAIL, span)


def _whole_backward(plan: Plan) -> Iterator[KernelLaunch]:
    span = Span(checkpoint_chunks=plan.checkpoint_chunks, slots=plan.problem.slots(plan.config.chunk))
    yield from _launch(plan, "fused", plan.kernels["reverse"], span, "reverse")
    yield from _after_windows(plan)


def _backward_by_windows(plan: Plan) -> Iterator[KernelLaunch]:
    problem, kernels, split = plan.problem, plan.kernels, plan.segment_chunks
    windows, span, chunks = _windows(plan)
    recomputed = plan.checkpoint_chunks if split else max(plan.checkpoint_chunks, _RECOMPUTED_CHUNKS)
    for window in reversed(range(span.windows)):
        span = span._replace(window=window)
        yield from _launch(
            plan, "recompute", kernels["recompute"],
            span._replace(
                segments=cdiv(chunks, recomputed), chunks=recomputed, checkpoint_chunks=plan.checkpoint_chunks
            ),
        )  # fmt: skip
        scan = span._replace(
            segments=cdiv(chunks, split) if split else 1, chunks=split, narrow_tile_min_chunks=plan.narrow_min_chunks
        )
        if split:
            yield from _launch(plan, "segment maps", SEGMENT_MAPS, scan, "scan")
            yield from _launch(plan, "segment gradients", SEGMENT_GRADIENTS, scan, "reverse")
            yield from _launch(plan, "combine backward", COMBINE, scan)
        if "gradients" in kernels:
            yield from _launch(plan, "reverse", kernels["reverse"], scan)
            yield from _launch(plan, "gradients", kernels["gradients"], span)
        else:
            yield from _launch(plan, "sweep", kernels["reverse"], scan, "reverse")
        if windows.programs > problem.H:
            yield from _launch(plan, "group sums", SUM_GROUPS, span)
    yield from _after_windows(plan)


def _after_windows(plan: Plan) -> Iterator[KernelLaunch]:
    problem = plan.problem
    span = Span(slots=problem.slots(plan.config.chunk))
    if any(gate_gradients(problem).values()):
        yield from _launch(plan, "gate gradients", GATE_GRADIENTS, span)
    if problem.packed:
        yield from _launch(plan, "gradient tail", TAIL, span)
        if problem.dplr:
            yield from _launch(plan, "gradient tail of v_key", TAIL, span)


def gate_gradients(problem: Problem) -> dict[str, bool]:
    """Return for each gate whether gate_gradients_kernel computes its gradient.

    The gradient of a decay per channel is computed by the gradients kernel.
    """
    exists = problem.gradients
    return {
        "log_decay": exists["log_decay"] and not problem.by_channel,
        "b": exists["b"],
        "w": exists["w"],
    }


def _gate_sums(plan: Plan) -> GateSums:
    problem, config = plan.problem, plan.config
    phase = "gradients" if "gradients" in plan.kernels else "reverse"
    tiles = plan.kernels[phase].tiles(problem, getattr(config, phase))
    key_tiles = cdiv(problem.K, tiles.keys)
    return GateSums(tiles.keys, key_tiles, key_tiles * _value_tiles(plan))


def _value_tiles(plan: Plan) -> int:
    """Return the value tiles whose gradients separate programs compute."""
    if "gradients" in plan.kernels:
        return 1
    reverse = plan.kernels["reverse"]
    return cdiv(plan.problem.V, reverse.tiles(plan.problem, plan.config.reverse).values)


def _states_in_gradients(plan: Plan) -> bool:
    """Whether states and their gradients are stored in the rows of d_log_decay, d_q and d_k of their chunk.

    For a decay per channel and 128 values these rows have exactly as many bytes. Each chunk needs all of its rows.
    """
    p = plan.problem
    phases = ("recompute", "reverse", "gradients")
    take_rows = all(phase in plan.kernels and plan.kernels[phase].takes_rows for phase in phases)
    fits = p.V == 128 and p.K % 64 == 0 and not p.grouped and not p.packed and p.T % plan.config.chunk == 0
    return take_rows and not plan.segment_chunks and bool(fits)


def _bytes_per_slot(plan: Plan, in_gradients: bool) -> int:
    """Return the scratch of one chunk slot, without the key gradients of grouped heads."""
    p, C, sweep = plan.problem, plan.config.chunk, "gradients" not in plan.kernels
    numbers = p.delta * C
    if not in_gradients:
        numbers += p.K * (1 if sweep else 2)
    if not sweep:
        numbers += p.stores_du * C
    return p.HV * p.V * numbers * p.saved_dtype.itemsize


def _windows(plan: Plan) -> tuple[Windows, Span, int]:
    """Return the windows of the backward, their span, and the most chunks of one sequence in a window."""
    p, config = plan.problem, plan.config
    in_gradients = _states_in_gradients(plan)
    max_slots = config.scratch // max(_bytes_per_slot(plan, in_gradients), 1)
    unit, windows, slots = windows_of(p, config.chunk, config.checkpoint_chunks, plan.segment_chunks, max_slots)
    chunks = cdiv(cdiv(cdiv(p.T, config.chunk), unit), windows) * unit
    return (
        Windows(slots, in_gradients, p.HV * _value_tiles(plan)),
        Span(unit=unit, windows=windows, slots=slots),
        chunks,
    )


def windows_of(
    problem: Problem, C: int, checkpoint_chunks: int, segment_chunks: int, max_slots: int
) -> tuple[int, int, int]:
    """Divide the chunks into windows that fit `max_slots` chunk slots of scratch.

    A window has at least one unit of each sequence: a segment, or the chunks between two checkpoints. Lengths of packed
    sequences are unknown on the host, so that one unit of each may be unused. If that exceeds a sixteenth of the slots,
    the units of a pack are smaller, and the recomputation starts from the checkpoint before the window.

    Returns: the unit that windows end at, the number of windows, the slots of a window.
    """
    N, all_slots = problem.N, problem.slots(C)
    unit = max(checkpoint_chunks, segment_chunks)
    if max_slots >= all_slots:
        return unit, 1, all_slots
    if problem.packed:
        if not segment_chunks and max_slots >= 8 * N:
            unit = min(checkpoint_chunks, 1 << (max(max_slots // (16 * N), 1).bit_length() - 1))
        units = cdiv(cdiv(problem.T, C), unit)
        # beside one unit of each sequence: the slots that are left, or as many again if none are left
        windows = min(max(units, 1), cdiv(all_slots + 1, max(max_slots - N * unit, N * unit)))
        slots = (all_slots + 1) // windows + N * unit
    else:
        units = cdiv(cdiv(problem.T, C), unit)
        windows = cdiv(units, max(max_slots // (N * unit), 1))
        slots = N * cdiv(units, windows) * unit
    return (unit, windows, slots) if slots < all_slots else (unit, 1, all_slots)


def _refusal(phase: str, version: str, problem: Problem, device: DeviceSpec, chunk: int) -> str:
    """Return the sentence that refuses a version: its conditions, and the problem and device."""
    kernels = [kernel for kernel in KERNELS[phase] if kernel.version == version]
    support = next((k.support for k in kernels if k.support.is_for(problem)), kernels[0].support)
    return (
        f"{phase}.kernel = {version!r} needs {', '.join(support.needs())}; got {device.name}, {problem.dtype} saved in "
        f"{problem.saved_dtype}, {'an' if problem.erase_key else 'no'} erase key, chunks of {chunk}, K = {problem.K}, "
        f"V = {problem.V}, transition {problem.transition}, decay {problem.decay}, H = {problem.H}, HV = {problem.HV}"
    )
