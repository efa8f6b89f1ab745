"""torch.library operators around the chunked kernels: torch.compile, export and CUDA graphs see one node each.

Triton is imported when a kernel first runs. B batch, T time, N sequences, H key heads, HV value heads, K key width,
V value width, C chunk
"""

from typing import Any

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.autograd import differentiable_once
from deltazoo.backends.torch_ext.custom_op import differentiate_exported, operator
from deltazoo.backends.torch_ext.modes import functorch_is_active
from deltazoo.backends.triton.chunk.heuristic import checkpoint_distance
from deltazoo.backends.triton.chunk.plan import Plan
from deltazoo.backends.triton.chunk.registry import CHUNK
from deltazoo.backends.triton.config import parse
from deltazoo.backends.triton.operands import (
    BackwardCall,
    Gradients,
    Saved,
    ScanCall,
    ScanKind,
    ScanOperands,
    flatten,
    gradients_of,
    problem_of,
    schema,
    unflatten,
)
from deltazoo.backends.triton.problem import Problem, device_spec_of
from deltazoo.backends.triton.runtime.precompile import begin, compiled_ahead
from deltazoo.backends.triton.runtime.replay import replayed
from deltazoo.backends.triton.runtime.table import look_up


def chunk_scan(operands: ScanOperands, kind: ScanKind) -> tuple[Tensor, Tensor]:
    """Run the chunked kernels; differentiable once. Returns o [B, T, HV, V] and the final state [N, HV, K, V]."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands):
        transformed = torch.compiler.is_compiling() or functorch_is_active()
        out = _ChunkScan.apply(*operands, *kind) if transformed else _EagerScan.apply(*operands, kind)
    else:
        out = _scan_op(*operands, *kind, False)
    return out[0], out[1]


def resolve(x: ScanOperands, kind: ScanKind, grad: bool) -> Plan:
    """Look up the plan. Raises: ConfigError for a kernel that does not take the problem."""
    device = device_spec_of(x.q)
    return look_up(kind.config, problem_of(x, kind, device), device, grad)


def begin_scan(operands: ScanOperands, kind: ScanKind) -> None:
    """Start to compile the kernels of the forward and the backward in threads."""
    forward = flatten(ScanCall(operands, kind, True))
    begin(_scan_impl, forward)
    o, final, saved = _scan_fake(*forward)
    begin(_backward_impl, flatten(BackwardCall(operands, saved, o, final, kind)))


@replayed
def _scan_impl(*arguments: Any) -> tuple[Tensor, ...]:
    from deltazoo.backends.triton.chunk.forward import forward

    operands, kind, save = unflatten(ScanCall, arguments)
    plan = resolve(operands, kind, save)
    with torch.cuda.device_of(operands.q):
        return forward(operands, kind, plan)


@replayed
def _backward_impl(*arguments: Any) -> list[Tensor]:
    from deltazoo.backends.triton.chunk.backward import backward

    operands, saved, d_o, d_final, kind = unflatten(BackwardCall, arguments)
    plan = resolve(operands, kind, True)
    with torch.cuda.device_of(operands.q):
        views = Saved.of(saved, plan.problem, plan.config.chunk, plan.checkpoint_chunks)
        return backward(operands, kind, views, d_o, d_final, plan).present()


def _scan_fake(*arguments: Any) -> tuple[Tensor, ...]:
    operands, kind, save = unflatten(ScanCall, arguments)
    p = problem_of(operands, kind)
    steps = _saved_steps(kind.config, p)
    saved = Saved.empty(operands.q, p, *steps) if save else operands.q.new_empty(0, dtype=p.saved_dtype)
    final = operands.q.new_empty((p.N, p.HV, p.K, p.V), dtype=torch.float32)
    return torch.empty_like(operands.v, memory_format=torch.contiguous_format), final, saved


def _backward_fake(*arguments: Any) -> list[Tensor]:
    call = unflatten(BackwardCall, arguments)
    return Gradients.empty(call.x, call.kind).present()


def _saved_steps(config: str, problem: Problem) -> tuple[int, int]:
    """Tokens per chunk and chunks per checkpoint. No table changes them: saved tensors have these shapes."""
    if config:
        return parse(config).chunk, parse(config).checkpoint_chunks
    return CHUNK, checkpoint_distance(problem)


_scan_op = operator(
    f"triton_scan({schema(ScanCall)}) -> (Tensor, Tensor, Tensor)",
    _scan_impl,
    compiled_ahead(_scan_impl, _scan_fake),
)
_backward_op = operator(
    f"triton_scan_backward({schema(BackwardCall)}) -> Tensor[]",
    _backward_impl,
    compiled_ahead(_backward_impl, _backward_fake),
)


class _ChunkScan(torch.autograd.Function):
    """The scan with its backward; the result after o and the final state is `Saved` as one tensor."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return _scan_op(*arguments, True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        operands, kind, _ = unflatten(ScanCall, (*inputs, True))
        o, _, saved = output
        ctx.kind = kind
        ctx.mark_non_differentiable(saved)
        ctx.set_materialize_grads(False)
        ctx.o_shape = o.shape
        ctx.save_for_backward(*operands, saved)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, d_o: Tensor | None, d_final: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        return (*_gradients(ctx, d_o, d_final), *(None for _ in ctx.kind))


class _EagerScan(torch.autograd.Function):
    """Like `_ChunkScan`, for calls outside of torch.compile and torch.func: its only results are o and the state."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *operands, kind = arguments
        o, final, saved = _scan_op(*operands, *kind, True)
        ctx.kind = kind
        ctx.set_materialize_grads(False)
        ctx.o_shape = o.shape
        ctx.save_for_backward(*operands, saved)
        return o, final

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, d_o: Tensor | None, d_final: Tensor | None) -> tuple[Tensor | None, ...]:
        return (*_gradients(ctx, d_o, d_final), None)


def _gradients(ctx: Any, d_o: Tensor | None, d_final: Tensor | None) -> list[Tensor | None]:
    """Return the gradients of the operands; None for those that need none."""
    flat = ctx.saved_tensors
    operands, kind = ScanOperands(*flat[: len(ScanOperands._fields)]), ctx.kind
    d_o = operands.v.new_zeros(ctx.o_shape) if d_o is None else d_o
    present = iter(_backward_op(*flat, d_o, d_final, *kind))
    grads: list[Tensor | None] = [next(present) if exists else None for exists in gradients_of(operands, kind).values()]
    grads.append(None)  # of cu_seqlens
    return [grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad, strict=False)]


differentiate_exported("triton_scan", lambda *arguments: _ChunkScan.apply(*arguments[:-1]))  # without save
