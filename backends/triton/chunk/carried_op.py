"""torch.library operators of an update whose sequences start from the states of other ranks (carried.py).

P local pieces, N sequences, HV value heads, K key width, V value width
"""

from typing import Any

import torch
from torch import Tensor

from deltazoo.backends.context_parallel.carry import incoming_gradients, incoming_matrices, with_incoming
from deltazoo.backends.context_parallel.plan import Links
from deltazoo.backends.torch_ext.autograd import differentiable_once
from deltazoo.backends.torch_ext.custom_op import operator
from deltazoo.backends.triton.operands import (
    CarriedBackwardCall,
    CarriedCall,
    Gradients,
    Prepared,
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
from deltazoo.backends.update.base import without_autocast

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
    total = empty(x.q, *carried.total_shape(plan.problem))
    tensors = tensors_of(x, Prepared(*views(prepared, layout)))
    tensors = tensors._replace(ends=ends, starts=total, initial=None, carries=carries)
    with torch.cuda.device_of(x.q):
        execute(carried.summary_launches(plan), plan, kind.scale, tensors)
    return prepared, ends, total


@replayed
def _scan_impl(*arguments: Any) -> tuple[Tensor, ...]:
    from deltazoo.backends.triton.chunk import carried
    from deltazoo.backends.triton.chunk.execute import execute
    from deltazoo.backends.triton.chunk.forward import empty, tensors_of

    operands, kind, prepared, ends = unflatten(CarriedCall, arguments)
    x, plan = kind.with_write(operands), carried.carried_plan(operands, kind)
    p = plan.problem
    o, final = x.v.new_empty(x.v.shape), empty(x.q, p.N, p.HV, p.K, p.V)
    checkpoints = carried.checkpoints_of(plan, x.q)
    starts = empty(x.q, ends.shape[0], p.HV, p.V, p.K)
    tensors = tensors_of(x, Prepared(*views(prepared, carried.prepared_layout(plan))))
    tensors = tensors._replace(o=o, final=final, checkpoints=checkpoints, starts=starts, ends=ends, initial=x.state)
    with torch.cuda.device_of(x.q):
        execute(plan.forward, plan, kind.scale, tensors)
    return o, final, checkpoints


@replayed
def _summary_backward_impl(*arguments: Any) -> tuple[Tensor, ...]:
    from deltazoo.backends.triton.chunk import carried
    from deltazoo.backends.triton.chunk.execute import execute
    from deltazoo.backends.triton.chunk.forward import empty, tensors_of

    operands, kind, prepared, ends, carries, d_o = unflatten(SummaryBackwardCall, arguments)
    x, plan = kind.with_write(operands), carried.carried_plan(operands, kind)
    total = empty(x.q, *carried.total_shape(plan.problem))
    tensors = tensors_of(x, Prepared(*views(prepared, carried.prepared_layout(plan))))
    # the maps stay, the contributions of the gradients replace those of the forward
    d_ends = ends.new_empty(ends.shape).copy_(ends)
    tensors = tensors._replace(
        do=d_o, ends=d_ends, starts=total, initial=None, carries=carries, dstate=total, dstates=total, du=d_o, dv=d_o
    )
    with torch.cuda.device_of(x.q):
        execute(carried.summary_backward_launches(plan), plan, kind.scale, tensors)
    return total, d_ends


@replayed
def _backward_impl(*arguments: Any) -> list[Tensor]:
    from deltazoo.backends.triton.chunk import carried
    from deltazoo.backends.triton.chunk.backward import backward

    operands, kind, prepared, ends, checkpoints, d_o, d_final = unflatten(CarriedBackwardCall, arguments)
    plan = carried.carried_plan(operands, kind)._replace(carried=False)  # the backward of an ordinary update
    plan, has_ends = carried.without_segments(plan)
    saved = Saved(Prepared(*views(prepared, carried.prepared_layout(plan))), checkpoints)
    with torch.cuda.device_of(operands.q):
        return backward(operands, kind, saved, d_o, d_final, plan, ends if has_ends else None).present()


def _summary_fake(*arguments: Any) -> tuple[Tensor, ...]:
    from deltazoo.backends.triton.chunk import carried

    x, kind, _ = unflatten(SummaryCall, arguments)
    plan = carried.carried_plan(x, kind)
    prepared = allocate(x.q, carried.prepared_layout(plan))
    shapes = carried.ends_shape(plan), carried.total_shape(plan.problem)
    return prepared, *(x.q.new_empty(shape, dtype=torch.float32) for shape in shapes)


def _scan_fake(*arguments: Any) -> tuple[Tensor, ...]:
    from deltazoo.backends.triton.chunk import carried

    x, kind, _, _ = unflatten(CarriedCall, arguments)
    p = problem_of(x, kind)
    final = x.q.new_empty((p.N, p.HV, p.K, p.V), dtype=torch.float32)
    return x.v.new_empty(x.v.shape), final, carried.checkpoints_of(carried.carried_plan(x, kind), x.q)


def _summary_backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    from deltazoo.backends.triton.chunk import carried

    x, kind, _, ends, *_ = unflatten(SummaryBackwardCall, arguments)
    total = x.q.new_empty(carried.total_shape(problem_of(x, kind)), dtype=torch.float32)
    return total, ends.new_empty(ends.shape)


def _backward_fake(*arguments: Any) -> list[Tensor]:
    call = unflatten(CarriedBackwardCall, arguments)
    return Gradients.empty(call.x, call.kind).present()


_summary_op = operator(
    f"triton_carried_summary({schema(SummaryCall)}) -> (Tensor, Tensor, Tensor)",
    _summary_impl, compiled_ahead(_summary_impl, _summary_fake),
)  # fmt: skip
_scan_op = operator(
    f"triton_carried_scan({schema(CarriedCall)}) -> (Tensor, Tensor, Tensor)",
    _scan_impl, compiled_ahead(_scan_impl, _scan_fake),
)  # fmt: skip
_summary_backward_op = operator(
    f"triton_carried_summary_backward({schema(SummaryBackwardCall)}) -> (Tensor, Tensor)",
    _summary_backward_impl, compiled_ahead(_summary_backward_impl, _summary_backward_fake),
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
        first = operands.state
        assert first is not None
        prepared, ends, total = _summary_op(*operands, *kind, links.is_outer)
        V, tails = first.shape[-1], total.index_select(0, links.tails)
        tails[:, :, :V] += first.index_select(0, links.tails).mT @ tails[:, :, V:]
        carried, maps = incoming_matrices(tails, V, links)
        state = with_incoming(first, carried.mT, links)
        o, final, checkpoints = _scan_op(*operands._replace(state=state), *kind, prepared, ends)
        return o, final, state, prepared, ends, checkpoints, maps, total

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
        operands, kind = ScanOperands(*ctx.saved_tensors[:_OPERANDS]), ctx.kind
        prepared, ends, checkpoints, maps, total, *links = ctx.saved_tensors[_OPERANDS:]
        links, V = Links(*ctx.links, *links), operands.v.shape[-1]
        assert operands.state is not None
        d_o = torch.zeros_like(operands.v) if d_o is None else d_o.contiguous()
        d_total, d_ends = _summary_backward_op(*operands, *kind, prepared, ends, links.is_head, d_o)
        first = slice(None, None, links.segments)
        with without_autocast(d_o):
            contribution = d_total[first, :, :V]
            if d_final is not None:
                contribution = contribution + d_final[first].mT @ total[first, :, V:].mT
            after = incoming_gradients(contribution, maps, links).mT
        d_final = torch.zeros_like(operands.state) if d_final is None else d_final
        d_final = d_final.index_add(0, links.tails, after)
        present = iter(_backward_op(*operands, *kind, prepared, d_ends, checkpoints, d_o, d_final))
        grads = [next(present) if exists else None for exists in gradients_of(operands, kind).values()]
        grads.append(None)  # of cu_seqlens
        needed = [g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=False)]
        return *needed, *(None for _ in kind), *(None for _ in links)


def _split(arguments: tuple[Any, ...]) -> tuple[ScanOperands, ScanKind, Links]:
    operands, rest = arguments[:_OPERANDS], arguments[_OPERANDS:]
    return ScanOperands(*operands), ScanKind(*rest[:_KIND]), Links(*rest[_KIND:])
