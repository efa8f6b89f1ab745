"""The kernels behind torch.library operators, so that torch.compile, export and CUDA graphs see one node each.

Triton is imported when a kernel first runs. B batch, T time, N sequences, H key heads, HV value heads, K key width,
V value width, C chunk
"""

from typing import Any

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.autograd import differentiable_once
from deltazoo.backends.torch_ext.custom_op import cache_forward_signature, operator, written
from deltazoo.backends.triton.config import LaunchConfig, checkpoint_distance, parse
from deltazoo.backends.triton.operands import Gradients, Prepared, ScanKind, ScanOperands, Sizes, ready
from deltazoo.backends.triton.precompile import compiled_ahead


def chunk_scan(x: ScanOperands, kind: ScanKind) -> tuple[Tensor, Tensor]:
    """Run the chunked kernels; differentiable once. Returns o [B, T, HV, V] and the final state [N, HV, K, V]."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in x):
        out = _ChunkScan.apply(*x, *kind)
    else:
        out = _scan_op(*x, *kind, False)
    return out[0], out[1]


def step_(x: ScanOperands, states: Tensor, slots: Tensor | None, kind: ScanKind) -> Tensor:
    """Decode one token a row in place. Returns o [B, 1, HV, V].

    Args:
        x: as for `chunk_scan`, with T the micro-steps of the token, but q [B, 1, H, K], log_decay [B, 1, HV] or [HV].
        states: [S, HV, K, V] float32.
        slots: [B] int64.
    """
    return _step_op(x.q, x.k, x.v, x.log_decay, x.b, x.w, x.e, states, slots, *kind)


_KIND = "bool delta, bool erase_early, bool read_early, bool precise, bool tied, float scale, str config"
_STEP = "Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? b, Tensor? w, Tensor? e"
_SCAN = f"{_STEP}, Tensor? state, Tensor? cu_seqlens"


def _scan_impl(*arguments: Any) -> tuple[Tensor, ...]:
    from deltazoo.backends.triton import forward as launch

    *ready, keep = _ready(arguments)
    kind = ScanKind(*ready[9:])
    x = kind.writes(ScanOperands(*ready[:9]))
    with torch.cuda.device_of(x.q):
        return launch.forward(x, kind, keep, launch.resolve(x, kind))


def _backward_impl(*arguments: Any) -> list[Tensor]:
    from deltazoo.backends.triton import backward
    from deltazoo.backends.triton import forward as launch

    ready = _ready(arguments)
    kind = ScanKind(*ready[15:])
    x = kind.writes(ScanOperands(*ready[:9]))
    prepared, checkpoints, d_o, d_final = Prepared(*ready[9:12]), *ready[12:15]
    with torch.cuda.device_of(x.q):
        return _listed(backward.backward(x, kind, prepared, checkpoints, d_o, d_final, launch.resolve(x, kind)))


def _listed(d: Gradients) -> list[Tensor]:
    """An operator returns no None: those that there are, as Gradients.which says."""
    return [x for x in d if x is not None]


def _step_impl(*arguments: Any) -> Tensor:
    from deltazoo.backends.triton import forward as launch

    states, kind = arguments[7], ScanKind(*arguments[9:])
    *operands, slots = _ready((*arguments[:7], arguments[8]))
    x = kind.writes(ScanOperands(*operands))
    decay = x.log_decay
    token = x._replace(
        q=x.q[:, 0].contiguous(),
        log_decay=decay[:, 0].contiguous() if decay is not None and decay.dim() == 3 else decay,
    )
    stepped = states if states.is_contiguous() else states.contiguous()
    with torch.cuda.device_of(x.q):
        o = launch.step_(token, stepped, slots, kind, launch.resolve_decode(x, kind))
    written(states, stepped)
    return o.unsqueeze(1)


def _ready(arguments: tuple[Any, ...]) -> list[Any]:
    return [ready(x) if isinstance(x, Tensor) else x for x in arguments]


def _scan_fake(*arguments: Any) -> tuple[Tensor, ...]:
    *known, keep = arguments
    x, kind = ScanOperands(*known[:9]), ScanKind(*known[9:])
    C, every = _steps(kind.config, x.cu_seqlens is not None)
    s = Sizes.of(x, C)
    prepared = Prepared.empty(x, kind, s, keep) if keep else Prepared.nothing(x.q)
    checkpoints = x.q.new_empty((s.places(every), s.HV, s.V, s.K) if keep else (0,), dtype=kind.kept(x.q.dtype))
    final = x.q.new_empty((s.N, s.HV, s.K, s.V), dtype=torch.float32)
    return torch.empty_like(x.v, memory_format=torch.contiguous_format), final, *prepared, checkpoints


def _backward_fake(*arguments: Any) -> list[Tensor]:
    return _listed(Gradients.empty(ScanOperands(*arguments[:9]), ScanKind(*arguments[15:])))


def _step_fake(*arguments: Any) -> Tensor:
    q, _, v = arguments[:3]
    return v.new_empty(q.shape[0], 1, *v.shape[2:])


def _steps(config: str, packed: bool) -> tuple[int, int]:
    """C and the chunks a checkpoint: no table changes them, for they shape what is saved."""
    if config:
        return parse(config).chunk, parse(config).every
    return LaunchConfig().chunk, checkpoint_distance(packed)


_scan_op = operator(
    f"triton_scan({_SCAN}, {_KIND}, bool keep) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _scan_impl,
    compiled_ahead(_scan_impl, _scan_fake),
)
_backward_op = operator(
    f"triton_scan_backward({_SCAN}, Tensor gates, Tensor decay_bounds, Tensor wy_tiles, Tensor checkpoints, "
    f"Tensor d_o, Tensor? d_final, {_KIND}) -> Tensor[]",
    _backward_impl,
    compiled_ahead(_backward_impl, _backward_fake),
)
_step_op = operator(
    f"triton_step_({_STEP}, Tensor(a!) states, Tensor? slots, {_KIND}) -> Tensor",
    _step_impl,
    compiled_ahead(_step_impl, _step_fake),
)


@cache_forward_signature
class _ChunkScan(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return _scan_op(*arguments, True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        operands, ctx.kind = inputs[:9], inputs[9:]
        o, _, *kept = output
        ctx.mark_non_differentiable(*kept)
        ctx.set_materialize_grads(False)
        ctx.o_shape = o.shape
        ctx.save_for_backward(*operands, *kept)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, d_o: Tensor | None, d_final: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        operands = saved[:9]
        d_o = operands[2].new_zeros(ctx.o_shape) if d_o is None else d_o
        grads = iter(_backward_op(*saved, d_o, d_final, *ctx.kind))
        out = []
        counts = Gradients.which(ScanOperands(*operands), ScanKind(*ctx.kind))
        for operand, exists, wanted in zip(operands, counts, ctx.needs_input_grad, strict=False):
            grad = next(grads) if exists else None
            out.append(grad.to(operand.dtype) if grad is not None and wanted else None)
        return (*out, None, *(None for _ in ctx.kind))
