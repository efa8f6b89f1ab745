"""torch.library operators of an update whose sequences start from the states of other ranks (carried.py).

N sequences, HV value heads, K key width, V value width
"""

from typing import Any

import torch
from torch import Tensor

from deltazoo.backends.context_parallel.exchange import begin_gather, end_gather
from deltazoo.backends.context_parallel.plan import Links
from deltazoo.backends.torch_ext.autograd import differentiable_once
from deltazoo.backends.torch_ext.custom_op import operator
from deltazoo.backends.triton.gather.op import begin_symmetric_gather
from deltazoo.backends.triton.operands import (
    CarriedBackwardCall,
    CarriedCall,
    Gradients,
    Prepared,
    RecomputeCall,
    Saved,
    ScanKind,
    ScanOperands,
    SummaryBackwardCall,
    SummaryCall,
    allocate,
    gradients_of,
    problem_of,
    schema,
    unflatten,
    views,
)
from deltazoo.backends.triton.runtime.precompile import compiled_ahead
from deltazoo.backends.triton.runtime.replay import replayed

_OPERANDS, _KIND = len(ScanOperands._fields), len(ScanKind._fields)


def carried_scan(operands: ScanOperands, kind: ScanKind, links: Links) -> tuple[Tensor, Tensor]:
    """Run the update of the local segments; differentiable once.

    Args: operands: `state` holds that before the segments that begin a document [N, HV, K, V], else zero.
    Returns: o [1, T, HV, V] and the final states [N, HV, K, V].
    """
    return _CarriedScan.apply(*operands, *kind, *links)[:2]


@replayed
def _summary_impl(*arguments: Any) -> tuple[Tensor, ...]:
    from deltazoo.backends.triton.chunk import carried
    from deltazoo.backends.triton.chunk.execute import execute
    from deltazoo.backends.triton.chunk.forward import empty, tensors_of

    operands, kind, carries = unflatten(SummaryCall, arguments)
    x, plan = kind.with_write(operands), carried.carried_plan(operands, kind)
    layout = carried.prepared_layout(plan)
    prepared = allocate(x.q, layout)
    ends = empty(x.q, *carried.ends_shape(plan))
    total = empty(x.q, *carried.total_shape(plan.problem, False))
    tensors = tensors_of(x, Prepared(*views(prepared, layout)))
    tensors = tensors._replace(ends=ends, starts=total, initial=x.state, carries=carries)
    with torch.cuda.device_of(x.q):
        execute(carried.summary_launches(plan), plan, kind.scale, tensors)
    return prepared, ends, total


@replayed
def _scan_impl(*arguments: Any) -> tuple[Tensor, ...]:
    from deltazoo.backends.triton.chunk import carried
    from deltazoo.backends.triton.chunk.execute import execute
    from deltazoo.backends.triton.chunk.forward import empty, tensors_of

    operands, kind, prepared, ends, pieces, before = unflatten(CarriedCall, arguments)
    x, plan = kind.with_write(operands), carried.carried_plan(operands, kind)
    p = plan.problem
    o = x.v.new_empty(x.v.shape)
    state, final = empty(x.q, p.N, p.HV, p.K, p.V), empty(x.q, p.N, p.HV, p.K, p.V)
    checkpoints = carried.checkpoints_of(plan, x.q)
    starts = empty(x.q, ends.shape[0], p.HV, p.V, p.K)
    tensors = tensors_of(x, Prepared(*views(prepared, carried.prepared_layout(plan))))
    tensors = tensors._replace(o=o, final=final, checkpoints=checkpoints, starts=starts, ends=ends, initial=x.state)
    tensors = tensors._replace(pieces=pieces, piece_maps=pieces, chain=before, carried=state)
    with torch.cuda.device_of(x.q):
        execute(plan.forward, plan, kind.scale, tensors)
    return o, final, state, checkpoints


@replayed
def _summary_backward_impl(*arguments: Any) -> tuple[Tensor, ...]:
    from deltazoo.backends.triton.chunk import carried
    from deltazoo.backends.triton.chunk.execute import execute
    from deltazoo.backends.triton.chunk.forward import empty, tensors_of

    operands, kind, prepared, ends, carries, d_o, d_final = unflatten(SummaryBackwardCall, arguments)
    x, plan = kind.with_write(operands), carried.carried_plan(operands, kind)
    total = empty(x.q, *carried.total_shape(plan.problem, True))
    d_ends = ends.new_empty(ends.shape)
    tensors = tensors_of(x, Prepared(*views(prepared, carried.prepared_layout(plan))))
    tensors = tensors._replace(
        do=d_o, ends=d_ends, maps=ends, starts=total, initial=d_final, carries=carries,
        dstate=total, dstates=total, du=d_o, dv=d_o,
    )  # fmt: skip
    with torch.cuda.device_of(x.q):
        execute(carried.summary_backward_launches(plan), plan, kind.scale, tensors)
    return total, d_ends


@replayed
def _recompute_impl(*arguments: Any) -> tuple[Tensor, ...]:
    from deltazoo.backends.triton.chunk import carried
    from deltazoo.backends.triton.chunk.execute import execute
    from deltazoo.backends.triton.chunk.forward import tensors_of

    operands, kind, prepared, checkpoints = unflatten(RecomputeCall, arguments)
    x, plan = kind.with_write(operands), carried.carried_plan(operands, kind)
    states, v_new = _recomputed(plan, x.q)
    if carried.is_one_window(plan):
        tensors = tensors_of(x, Prepared(*views(prepared, carried.prepared_layout(plan))))
        tensors = tensors._replace(checkpoints=checkpoints, initial=None, states=states)
        tensors = tensors._replace(v_new=v_new if plan.problem.delta else None)
        with torch.cuda.device_of(x.q):
            execute(carried.recompute_launches(plan), plan._replace(carried=False), kind.scale, tensors)
    return states, v_new


@replayed
def _backward_impl(*arguments: Any) -> list[Tensor]:
    from deltazoo.backends.triton.chunk import carried
    from deltazoo.backends.triton.chunk.backward import backward

    call = unflatten(CarriedBackwardCall, arguments)
    plan = carried.carried_plan(call.x, call.kind)
    saved = Saved(Prepared(*views(call.prepared, carried.prepared_layout(plan))), call.checkpoints)
    given = {"pieces": call.d_pieces, "piece_maps": call.pieces, "chain": call.after}
    if carried.is_one_window(plan):
        given |= {"ends": call.d_ends, "maps": call.ends, "states": call.states}
        given |= {"v_new": call.v_new} if plan.problem.delta else {}
    plan = carried.backward_after_exchange(plan)
    with torch.cuda.device_of(call.x.q):
        return backward(call.x, call.kind, saved, call.d_o, call.d_final, plan, given).present()


def _recomputed(plan: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate the states and values of all chunks; empty if the backward has several windows, which compute them."""
    from deltazoo.backends.triton.chunk import carried

    p, C = plan.problem, plan.config.chunk
    slots = plan.windows.slots if carried.is_one_window(plan) else 0
    states = like.new_empty((slots, p.HV, p.V, p.K), dtype=p.saved_dtype)
    return states, like.new_empty((slots if p.delta else 0, C, p.HV, p.V), dtype=p.saved_dtype)


def _summary_fake(*arguments: Any) -> tuple[Tensor, ...]:
    from deltazoo.backends.triton.chunk import carried

    x, kind, _ = unflatten(SummaryCall, arguments)
    plan = carried.carried_plan(x, kind)
    prepared = allocate(x.q, carried.prepared_layout(plan))
    shapes = carried.ends_shape(plan), carried.total_shape(plan.problem, False)
    return prepared, *(x.q.new_empty(shape, dtype=torch.float32) for shape in shapes)


def _scan_fake(*arguments: Any) -> tuple[Tensor, ...]:
    from deltazoo.backends.triton.chunk import carried

    x, kind, *_ = unflatten(CarriedCall, arguments)
    p = problem_of(x, kind)
    final, state = (x.q.new_empty((p.N, p.HV, p.K, p.V), dtype=torch.float32) for _ in range(2))
    return x.v.new_empty(x.v.shape), final, state, carried.checkpoints_of(carried.carried_plan(x, kind), x.q)


def _summary_backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    from deltazoo.backends.triton.chunk import carried

    x, kind, _, ends, *_ = unflatten(SummaryBackwardCall, arguments)
    total = x.q.new_empty(carried.total_shape(problem_of(x, kind), True), dtype=torch.float32)
    return total, ends.new_empty(ends.shape)


def _recompute_fake(*arguments: Any) -> tuple[Tensor, ...]:
    from deltazoo.backends.triton.chunk import carried

    x, kind, *_ = unflatten(RecomputeCall, arguments)
    return _recomputed(carried.carried_plan(x, kind), x.q)


def _backward_fake(*arguments: Any) -> list[Tensor]:
    call = unflatten(CarriedBackwardCall, arguments)
    return Gradients.empty(call.x, call.kind).present()


_summary_op = operator(
    f"triton_carried_summary({schema(SummaryCall)}) -> (Tensor, Tensor, Tensor)",
    _summary_impl, compiled_ahead(_summary_impl, _summary_fake),
)  # fmt: skip
_scan_op = operator(
    f"triton_carried_scan({schema(CarriedCall)}) -> (Tensor, Tensor, Tensor, Tensor)",
    _scan_impl, compiled_ahead(_scan_impl, _scan_fake),
)  # fmt: skip
_summary_backward_op = operator(
    f"triton_carried_summary_backward({schema(SummaryBackwardCall)}) -> (Tensor, Tensor)",
    _summary_backward_impl, compiled_ahead(_summary_backward_impl, _summary_backward_fake),
)  # fmt: skip
_recompute_op = operator(
    f"triton_carried_recompute({schema(RecomputeCall)}) -> (Tensor, Tensor)",
    _recompute_impl, compiled_ahead(_recompute_impl, _recompute_fake),
)  # fmt: skip
_backward_op = operator(
    f"triton_carried_backward({schema(CarriedBackwardCall)}) -> Tensor[]",
    _backward_impl, compiled_ahead(_backward_impl, _backward_fake),
)  # fmt: skip


class _CarriedScan(torch.autograd.Function):
    """The update of the local segments, with an exchange between ranks in the forward and in the backward."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        operands, kind, links = _split(arguments)
        prepared, ends, total = _summary_op(*operands, *kind, links.is_outer)
        own = total if links.segments == 1 else total.index_select(0, links.tails)
        pieces = end_gather(_begin_gather(own, links, beside=False))
        o, final, state, checkpoints = _scan_op(*operands, *kind, prepared, ends, pieces, links.before)
        return o, final, state, prepared, checkpoints, ends, pieces

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        operands, ctx.kind, links = _split(inputs)
        ctx.links = links[: Links._fields.index("tails")]
        _, _, state, *saved = output
        ctx.mark_non_differentiable(state, *saved)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands._replace(state=state), *saved, *links[len(ctx.links) :])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, d_o: Tensor | None, d_final: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        saved, kind = ctx.saved_tensors, ctx.kind
        operands = ScanOperands(*saved[:_OPERANDS])
        prepared, checkpoints, ends, pieces, *links = saved[_OPERANDS:]
        links = Links(*ctx.links, *links)
        d_o = torch.zeros_like(operands.v) if d_o is None else d_o.contiguous()
        total, d_ends = _summary_backward_op(*operands, *kind, prepared, ends, links.is_head, d_o, d_final)
        pending = _begin_gather(total[:: links.segments], links, beside=True)
        recomputed = _recompute_op(*operands, *kind, prepared, checkpoints)  # while the ranks exchange
        d_pieces = end_gather(pending)
        exchanged = ends, d_ends, pieces, d_pieces, links.after
        present = iter(_backward_op(*operands, *kind, prepared, checkpoints, *recomputed, *exchanged, d_o, d_final))
        grads = [next(present) if exists else None for exists in gradients_of(operands, kind).values()]
        grads.append(None)  # of cu_seqlens
        needed = [g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=False)]
        return *needed, *(None for _ in kind), *(None for _ in links)


def _begin_gather(x: Tensor, links: Links, beside: bool) -> Tensor:
    """Start to gather tensors of equal shape along dimension 0. Args: beside: while other kernels run."""
    if links.symmetric:
        return begin_symmetric_gather(x, links.ranks, links.group, beside)
    return begin_gather(x, links)


def _split(arguments: tuple[Any, ...]) -> tuple[ScanOperands, ScanKind, Links]:
    operands, rest = arguments[:_OPERANDS], arguments[_OPERANDS:]
    return ScanOperands(*operands), ScanKind(*rest[:_KIND]), Links(*rest[_KIND:])
