"""The launch config for a problem on a device, from its sizes alone; a table of measured launches overrides it.

N sequences, T tokens, H key heads, HV value heads, K key width, V value width
"""

import torch

from deltazoo.backends.torch_ext.devices import DeviceSpec
from deltazoo.backends.triton.chunk.plan import occupies
from deltazoo.backends.triton.chunk.registry import CHUNK, PHASES, sweeps, takes, versions
from deltazoo.backends.triton.config import Launch, LaunchConfig
from deltazoo.backends.triton.problem import Problem
from deltazoo.backends.triton.tiles import cdiv, power_of_two

# With a decay per channel portable kernels compute the maps of segments. KDA, 1 x 8192 tokens on an H100, ms forward
# and with backward, segments against none: 8 heads (16 SMs for each) 0.255 and 0.759 against 0.287 and 0.923, 16 heads
# 0.398 and 1.145 against 0.341 and 1.152, 32 heads 0.566 and 1.851 against 0.451 and 1.646.
_CHANNEL_SMS_PER_PROGRAM = 12  # the fewest with which segments are worth it
SMALLEST_SEGMENT = 16  # chunks
_SEGMENT_SCRATCH = 2**29  # bytes for recomputed states and their gradients of segments that occupy the device


def heuristic(problem: Problem, device: DeviceSpec, segment_chunks: int | None = None) -> LaunchConfig:
    """Choose a launch config that is valid everywhere and near the best on a Hopper GPU for K = V = 128.

    Args: segment_chunks: chunks per segment, if a table gives them.
    Source: docs/kernels.md, docs/decisions.md and docs/benchmarks (measurements on an H200).
    """
    segment_chunks = _segment_chunks(problem, device) if segment_chunks is None else segment_chunks
    scan, gradients = _portable_launches(problem, device)
    reverse = Launch(tile=32, stages=1) if _is_tight(problem, device) and problem.decay != "channel" else scan
    channel = problem.decay == "channel"
    prepare = Launch(tile=16, warps=4 if problem.dplr else 8, stages=1) if channel else LaunchConfig().prepare
    launches: dict[str, Launch] = {
        "prepare": prepare, "scan": scan, "recompute": scan, "reverse": reverse, "gradients": gradients,
    }  # fmt: skip
    for phase in PHASES:
        launches[phase] = in_version(_preferred(phase, problem, device), phase, launches[phase])
    if not segment_chunks and takes("reverse", "fused", problem, device) and _fills(problem, device):
        launches["reverse"] = launches["reverse"].model_copy(update={"kernel": "fused"})
    few_rows = problem.N * problem.HV < 64
    return LaunchConfig(
        checkpoint_chunks=checkpoint_distance(problem),
        segment_chunks=segment_chunks,
        scratch=_scratch(problem, device, segment_chunks),
        **launches,
        decode=Launch(tile=16, warps=2, stages=1)
        if few_rows
        else Launch(tile=64, warps=4 if problem.K > 64 else 2, stages=1),
        # one warp per 32 keys, so that two tiles stay in registers
        fused_step=Launch(tile=64, warps=max(1, min(8, power_of_two(problem.K) // 32)), stages=1),
    )


def in_version(version: str, phase: str, launch: Launch) -> Launch:
    """Return the launch of a version; a portable kernel that runs beside it keeps the parameters of `launch`."""
    if version == "portable":
        return launch
    launch = Launch(tile=64, keys=64, stages=1) if phase == "gradients" else launch
    return launch.model_copy(update={"kernel": version})


def _preferred(phase: str, problem: Problem, device: DeviceSpec) -> str:
    """Return the first version that takes the problem, in the registry's order; the fused backward is chosen apart."""
    if _portable_is_faster(phase, problem):
        return "portable"
    return next(v for v in versions(phase) if v != "fused" and takes(phase, v, problem, device))


def checkpoint_distance(problem: Problem) -> int:
    """Chunks between two checkpoints of the state.

    Fewer for packed sequences: a window of the backward may need the chunks of one checkpoint for every sequence. Fewer
    for DPLR, whose many narrow heads have large scratch buffers per chunk.
    """
    return 8 if problem.packed or problem.dplr else 16


def _portable_launches(problem: Problem, device: DeviceSpec) -> tuple[Launch, Launch]:
    """Return the launches of the scans and of the gradients."""
    if problem.dtype == torch.float32:
        return Launch(tile=32, stages=1), Launch(tile=32, stages=1, keys=32)
    if problem.split_terms:
        return Launch(tile=64, stages=1), Launch(tile=32, stages=1, keys=32)
    if problem.dplr:  # two programs per SM instead of loads ahead, for which the buffers of eight tiles are too large
        return Launch(tile=64, stages=1), Launch(tile=64, keys=64, stages=1)
    if problem.K <= 128 and problem.V > 64 and device.shared_memory >= 220 * 1024:
        # one program per SM with loads two chunks ahead; beside an erase key there is space for one chunk ahead
        third_operand = problem.erase_key or (problem.decay == "channel" and problem.delta)
        scan = Launch(tile=128, warps=8, stages=2 if third_operand else 3)
        # both V tiles at once where two programs per SM still fit: without decay their buffers are wider, and
        # without an erase term three programs fit
        if problem.decay == "channel":
            return scan, Launch(tile=64, keys=64, warps=8)
        gradients = Launch(tile=64, keys=64, stages=3 if problem.decay != "none" and problem.delta else 2)
        return scan, gradients
    # no loads ahead where the buffers of two stages would not fit
    stages = 1 if _is_tight(problem, device) or (problem.K > 128 and problem.extra_keys) else 2
    if problem.decay == "channel":
        return Launch(tile=64, stages=stages), Launch(tile=64, keys=64, warps=8)
    return Launch(tile=64, stages=stages), Launch(tile=64, keys=64, stages=stages)


def _is_tight(problem: Problem, device: DeviceSpec) -> bool:
    """Whether shared memory (99 KiB per block on RTX GPUs) is too small for the usual tiles of these keys."""
    return problem.K > 192 and problem.dtype.itemsize == 2 and device.shared_memory < 144 * 1024


def _portable_is_faster(phase: str, problem: Problem) -> bool:
    """Gates alone need no kernel for sm90; with few values and no erase term smaller programs finish sooner."""
    if phase == "prepare":
        return not problem.delta and problem.decay != "channel"
    return phase in ("scan", "recompute") and problem.V <= 64 and not problem.delta


def _fills(problem: Problem, device: DeviceSpec) -> bool:
    """Whether one program per sequence and head keeps at least 90 % of the SMs busy to the end.

    Otherwise a separate recomputation, which has more programs, finishes sooner.
    """
    programs = problem.N * problem.HV
    return programs >= 0.9 * cdiv(programs, device.processors) * device.processors


def _scratch(problem: Problem, device: DeviceSpec, segment_chunks: int) -> int:
    """Bytes for the recomputed states and their gradients.

    KDA on an H200, 8 x 4096 tokens, 16 heads: 32 MiB, four windows, take 2.08 ms and 1298 MiB in all, 160 MiB, one
    window, 1.95 and 1394. With fewer programs the windows leave more SMs idle: 1 x 8192 tokens, 32 heads 1.40 ms and
    665 MiB against 1.35 and 697.
    """
    if segment_chunks and not (problem.packed and occupies(problem, device)):
        return _SEGMENT_SCRATCH
    is_kda = problem.decay == "channel" and problem.delta and not (problem.erase_key or problem.dplr or problem.packed)
    return 2**25 if is_kda and _fills(problem, device) else LaunchConfig().scratch


def _segment_chunks(problem: Problem, device: DeviceSpec) -> int:
    """Chunks per segment, a power of two, or 0: the sequences are not divided.

    They are divided where sequences, heads and V tiles leave SMs idle. Sequences of a pack are also divided if they are
    longer than the average, because the longest alone would determine the time of the backward. With more than three
    programs per SM only a sequence several times as long as the average would, and segments cost more than they save.
    """
    programs = problem.N * problem.HV * cdiv(problem.V, 128)
    chunks = problem.T // 64 // (max(problem.N, 1) if problem.packed else 1)
    busy = occupies(problem, device)
    if busy and problem.packed:
        fused = takes("reverse", "fused", problem, device) and _fills(problem, device)
        if fused or not problem.delta or chunks < 32 or programs > 3 * device.processors:
            return 0
        return power_of_two(chunks + 1) // 2  # at most the average, so that packs of 2^n chunks remain whole
    if chunks < 32 or (busy and _segments_do_not_pay(problem, programs, chunks, device)):
        return 0
    segments = max(2, device.processors // max(programs, 1) * (2 if busy and problem.V <= 64 else 1))
    if problem.decay == "channel" and not problem.dplr and segments < _CHANNEL_SMS_PER_PROGRAM:
        return 0
    fit = segments_fit(problem, segments, _SEGMENT_SCRATCH)
    return max(SMALLEST_SEGMENT, min(power_of_two(cdiv(chunks, segments)), fit))


def _segments_do_not_pay(problem: Problem, programs: int, chunks: int, device: DeviceSpec) -> bool:
    """Whether two segments do not fit on the device that half of the programs occupy, or sequences are short.

    One sequence on an H200 (132 SMs), ms of forward and backward, divided against whole. Gated delta rule, 64 heads of
    128: 4,096 tokens 0.576 against 0.773, 8,192 1.08 against 1.55, 32,768 4.19 against 6.08; 96 heads: 1.80 against
    1.88 and 7.51 against 7.33 for the last two. RWKV-7, 64 heads of 64: 1.34 against 1.49, 2.55 against 2.95, 9.95
    against 11.9; 96 heads: 2.06 against 2.00, 4.04 against 3.96. Mamba-2, heads of 64 values, several of whose programs
    share an SM: 64 heads 0.609 against 0.831, 0.909 against 1.44, 2.68 against 5.68; 128 heads, 1.47 against 1.79 for
    8,192 tokens.
    """
    most = device.processors // (1 if problem.V <= 64 and not problem.delta else 2)
    return chunks < 64 or programs > most


def segments_fit(problem: Problem, segments: int, scratch: int) -> int:
    """Return the most chunks per segment, a power of two, with which a backward window holds `segments` segments.

    Otherwise a window of a long sequence has too few segments to occupy the device.
    """
    return max(SMALLEST_SEGMENT, power_of_two(scratch // _slot_bytes(problem) // segments + 1) // 2)


def _slot_bytes(problem: Problem) -> int:
    """Scratch of a chunk: the state before it and x, and without the sweep also their gradients."""
    in_sweep = sweeps(problem.K, problem.V) and not problem.extra_keys
    numbers = (1 if in_sweep else 2) * (problem.K + CHUNK)
    return int(problem.HV * problem.V * numbers * problem.saved_dtype.itemsize)
