"""Plans of an update whose sequences start from the states of other ranks, and the launches of its four steps.

The segments of a segment-parallel scan do not depend on the state before the sequence. So the exchange between ranks
lies between the segments and their combination:

    forward:   prepare, segment ends, total  |  exchange  |  combine, scan
    backward:  segment gradients, total backward  |  exchange  |  the backward of an ordinary update

`total` [N, HV, V + K, K] holds what a sequence produces from a zero state, transposed, above the map M of the sequence:
S'^T = S^T M + total. Its backward is dS^T = dS'^T M^T + total.

N sequences, HV value heads, K key width, V value width
"""

import torch
from torch import Tensor

from deltazoo.backends.triton import problem as problems
from deltazoo.backends.triton.chunk.heuristic import SMALLEST_SEGMENT, segments_fit
from deltazoo.backends.triton.chunk.plan import KernelLaunch, Plan, launches_of, make_plan
from deltazoo.backends.triton.chunk.registry import CHUNK, COMBINE, SEGMENT_ENDS, SEGMENT_GRADIENTS, TAIL
from deltazoo.backends.triton.config import parse
from deltazoo.backends.triton.operands import Prepared, ScanKind, ScanOperands, problem_of
from deltazoo.backends.triton.problem import Problem
from deltazoo.backends.triton.runtime import table
from deltazoo.backends.triton.support import Span, Tiles
from deltazoo.backends.triton.tiles import cdiv, power_of_two

_SCRATCH = 2**30  # bytes; one window of 40,000 tokens with 32 heads of 128 x 128 needs no segments of its own


def _per_row_of_total(problem: Problem, span: Span, tiles: Tiles) -> int:
    return int(problem.N * problem.HV * cdiv(problem.V + problem.K, tiles.values))


_TOTAL = COMBINE._replace(programs=_per_row_of_total)


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
    plan = make_plan(problem, device, config.changed(**changes), True)
    plan = plan._replace(forward_segment_chunks=split, segment_chunks=split, forward_narrow_min_chunks=0, carried=True)
    span = segments_span(plan)
    stored = span._replace(checkpoint_chunks=plan.checkpoint_chunks)
    forward = launches_of(plan, ("combine", COMBINE, span, ""), ("scan", plan.kernels["scan"], stored, ""))
    if problem.packed:
        forward += launches_of(plan, ("tail", TAIL, span, ""))
    return plan._replace(forward=forward)


def _segment_chunks(problem: Problem, processors: int) -> int:
    """Return the chunks per segment with which the tokens of all sequences occupy the device.

    The longest sequence of a pack may have most of its tokens.
    """
    segments = max(processors // (problem.HV * cdiv(problem.V, 128)), 1)
    chunks = max(cdiv(problem.T, CHUNK), 1)
    return min(max(SMALLEST_SEGMENT, power_of_two(cdiv(chunks, segments))), segments_fit(problem, segments, _SCRATCH))


def without_segments(plan: Plan) -> tuple[Plan, bool]:
    """Return the plan with a backward that reads the segments of `summary_backward_launches`, if it has one window.

    Returns: the plan, and whether it reads them.
    """
    if any(launch.span.windows > 1 for launch in plan.backward):
        return plan, False
    computed = ("segment maps", "segment gradients")
    return plan._replace(backward=tuple(launch for launch in plan.backward if launch.step not in computed)), True


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
        plan, ("segment gradients", SEGMENT_GRADIENTS, span, "reverse"), ("total backward", COMBINE, span, "")
    )


def ends_shape(plan: Plan) -> tuple[int, int, int, int]:
    """Return the shape of the segments' contributions and maps."""
    p = plan.problem
    return p.slots(plan.config.chunk) // plan.forward_segment_chunks + p.N, p.HV, p.V + p.K, p.K


def total_shape(problem: Problem) -> tuple[int, int, int, int]:
    """Return the shape of the sequences' contributions and maps."""
    return problem.N, problem.HV, problem.V + problem.K, problem.K


def prepared_layout(plan: Plan) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return the layout of the results of prepare, with what the backward reads."""
    return Prepared.layout(plan.problem, plan.config.chunk, True)


def checkpoints_of(plan: Plan, like: Tensor) -> Tensor:
    """Allocate the checkpoints of the forward."""
    p = plan.problem
    slots = p.checkpoint_slots(plan.config.chunk, plan.checkpoint_chunks)
    return like.new_empty(slots, p.HV, p.V, p.K, dtype=p.saved_dtype)
