"""Plans of an update whose sequences start from the states of other ranks, and the launches of its four steps.

The segments of a segment-parallel scan do not depend on the state before the sequence. So the exchange between ranks
lies between the segments and their combination:

    forward:   prepare, segment ends, total  |  exchange  |  combine, scan
    backward:  segment gradients, total backward  |  exchange, recompute  |  the backward of an ordinary update

`total` [N, HV, V + K, K] holds the state after a sequence without the other ranks, transposed, above the map M of the
sequence: S'^T = S^T M + total. Its backward is dS^T = dS'^T M^T + total. combine_kernel combines those of all ranks.

N sequences, HV value heads, K key width, V value width
"""

import torch
from torch import Tensor

from deltazoo.backends.triton import problem as problems
from deltazoo.backends.triton.chunk.heuristic import SMALLEST_SEGMENT, segments_fit
from deltazoo.backends.triton.chunk.plan import KernelLaunch, Plan, launches_of, make_plan
from deltazoo.backends.triton.chunk.registry import CHUNK, COMBINE, SEGMENT_ENDS, SEGMENT_GRADIENTS
from deltazoo.backends.triton.config import Launch, parse
from deltazoo.backends.triton.operands import Prepared, ScanKind, ScanOperands, problem_of
from deltazoo.backends.triton.problem import Problem
from deltazoo.backends.triton.runtime import table
from deltazoo.backends.triton.support import Span, Tiles, fixed_options
from deltazoo.backends.triton.tiles import cdiv, key_tiles, power_of_two, value_tile

# Least scratch of the backward, in bytes: up to 160,000 tokens with 32 heads of 128 x 128 are one window, which reuses
# the segments of the exchange.
_SCRATCH = 2**32
# Approximate time in which combine_kernel applies the map of one segment to a key tile, in scanned chunks.
_COMBINED_CHUNKS = 4


def _per_row_of_total(problem: Problem, span: Span, tiles: Tiles) -> int:
    return int(problem.N * problem.HV * cdiv(problem.V + problem.K, tiles.values))


def _combined_values(problem: Problem, launch: Launch | None) -> Tiles:
    """Return narrower tiles than those of an ordinary update: the maps of the other ranks make the loop longer."""
    return Tiles(values=value_tile(16 if key_tiles(problem.K)[1] else 32, problem.V))


# Without the limit of registers ptxas takes 32 for two key tiles, and spills 37 KB per thread.
_COMBINE = COMBINE._replace(tiles=_combined_values, options=fixed_options(warps=8, registers=255))
_TOTAL = _COMBINE._replace(programs=_per_row_of_total)


def carried_plan(x: ScanOperands, kind: ScanKind) -> Plan:
    """Return the plan of an update whose sequences are divided into segments, forward and backward."""
    device = problems.device_spec_of(x.q)
    problem = problem_of(x, kind, device)
    config = parse(kind.config) if kind.config else table.launch_config(problem, device)
    split = config.segment_chunks if kind.config else _segment_chunks(problem, device.processors)
    split = max(split, config.checkpoint_chunks)
    changes: dict[str, object] = {"segment_chunks": split, "scratch": max(config.scratch, _SCRATCH)}
    if config.reverse.kernel == "fused":
        changes["reverse"] = config.reverse.model_copy(update={"kernel": "sm90"})
    plan = make_plan(problem, device, config.changed(**changes), grad=True, divided=True)
    plan = plan._replace(forward_segment_chunks=split, segment_chunks=split, forward_narrow_min_chunks=0, carried=True)
    span = segments_span(plan)
    stored = span._replace(checkpoint_chunks=plan.checkpoint_chunks)
    forward = launches_of(plan, ("combine", _COMBINE, span, ""), ("scan", plan.kernels["scan"], stored, ""))
    backward: list[KernelLaunch] = []
    for launch in plan.backward:
        if launch.step == "combine backward":
            backward += launches_of(plan, (launch.step, _COMBINE, launch.span, ""))
        elif "tail" not in launch.step:  # the segments of a rank hold all of its tokens
            backward.append(launch)
    return plan._replace(forward=forward, backward=tuple(backward))


def _segment_chunks(problem: Problem, processors: int) -> int:
    """Return the chunks per segment that minimise the estimated time of all sequences.

    Assumes that one sequence of a pack may hold most of its tokens, and that an SM runs one program of 128 values at a
    time, or four of 64: 32,768 tokens of Mamba-2, 64 heads of 64 values, take 3.04 ms on an H200 in segments of 256
    chunks, 2.84 of 64, and 3.00 of 32; of RWKV-7, 64 heads of 64, 10.8 ms of 256 and 9.55 of 32 (64 was not timed).
    """
    processors *= 4 if problem.V <= 64 else 1
    tiles = problem.HV * cdiv(problem.V, 128)
    chunks = max(cdiv(problem.T, CHUNK), 1)
    fit = segments_fit(problem, max(processors // tiles, 1), _SCRATCH)
    combined = _COMBINED_CHUNKS * (2 if key_tiles(problem.K)[1] else 1)

    def duration(split: int) -> int:
        segments = cdiv(chunks, split)
        return cdiv(segments * tiles, processors) * split + segments * combined

    splits = [SMALLEST_SEGMENT << i for i in range(power_of_two(chunks).bit_length())]
    return min((split for split in splits if split <= fit), key=duration)


def is_one_window(plan: Plan) -> bool:
    """Whether the backward processes all chunks at once, and so reuses the results of `summary_backward_launches`."""
    return all(launch.span.windows == 1 for launch in plan.backward)


def recompute_launches(plan: Plan) -> tuple[KernelLaunch, ...]:
    """Return the launches of the backward of one window that need no gradient."""
    return tuple(launch for launch in plan.backward if launch.step == "recompute")


def backward_after_exchange(plan: Plan) -> Plan:
    """Return the plan whose backward has the launches after the exchange."""
    plan = plan._replace(carried=False)  # the backward of an ordinary update
    if not is_one_window(plan):
        return plan
    computed = ("recompute", "segment maps", "segment gradients")
    return plan._replace(backward=tuple(launch for launch in plan.backward if launch.step not in computed))


def segments_span(plan: Plan) -> Span:
    """Return the span of the segments of all sequences."""
    C, split = plan.config.chunk, plan.forward_segment_chunks
    return Span(segments=cdiv(cdiv(plan.problem.T, C), split), chunks=split, slots=plan.problem.slots(C))


def summary_launches(plan: Plan) -> tuple[KernelLaunch, ...]:
    """Return the launches before the exchange of the forward."""
    span = segments_span(plan)
    return launches_of(
        plan,
        ("prepare", plan.kernels["prepare"], span, "prepare"),
        ("segment ends", SEGMENT_ENDS, span, "scan"),
        ("total", _TOTAL, span, ""),
    )


def summary_backward_launches(plan: Plan) -> tuple[KernelLaunch, ...]:
    """Return the launches before the exchange of the backward."""
    span = segments_span(plan)
    return launches_of(
        plan, ("segment gradients", SEGMENT_GRADIENTS, span, "reverse"), ("total backward", _COMBINE, span, "")
    )


def ends_shape(plan: Plan) -> tuple[int, int, int, int]:
    """Return the shape of the segments' contributions and maps."""
    p = plan.problem
    return p.slots(plan.config.chunk) // plan.forward_segment_chunks + p.N, p.HV, p.V + p.K, p.K


def total_shape(problem: Problem, reverse: bool) -> tuple[int, int, int, int]:
    """Return the shape of the sequences' contributions, and without `reverse` their maps."""
    return problem.N, problem.HV, problem.V if reverse else problem.V + problem.K, problem.K


def prepared_layout(plan: Plan) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return the layout of the results of prepare, with what the backward reads."""
    return Prepared.layout(plan.problem, plan.config.chunk, True)


def checkpoints_of(plan: Plan, like: Tensor) -> Tensor:
    """Allocate the checkpoints of the forward."""
    p = plan.problem
    slots = p.checkpoint_slots(plan.config.chunk, plan.checkpoint_chunks)
    return like.new_empty(slots, p.HV, p.V, p.K, dtype=p.saved_dtype)
