"""Intra-chunk operands for no decay or a scalar decay per head.

    P_ij = q_i . k_j exp(g_i - g_j)           for the writes j that query i reads
    A_ij = b_i e_i . k_j exp(g_i - g_j)       for j < i

g is the cumulative log decay at the query, erase or write. Decays and erase strengths are row scales of the keys. The
scan applies them segment by segment, so that the backward saves each key once and value heads of a group share it.

B batch, N chunks, Z = B x H, C tokens per chunk, M micro-steps per chunk, G value heads per key head, K key width
"""

from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from deltazoo.backends.compile.chunk_operands import ChunkOperands
from deltazoo.backends.compile.intra_chunk import LoweredChunks, cumulative_decay, decay_at_reads, exp_as
from deltazoo.backends.torch_ext.autograd import differentiable_once
from deltazoo.backends.torch_ext.modes import is_exporting
from deltazoo.backends.update.spec import UpdateSpec


def scalar_operands(spec: UpdateSpec, x: LoweredChunks, state: Tensor, G: int) -> tuple[ChunkOperands, None]:
    """Compute the operands of the scan."""
    n = spec.householders
    q = rearrange(x.q, "b n c h k -> n (b h) c k").contiguous()
    k = rearrange(x.k, "b n m h k -> n (b h) m k").contiguous()
    e = k if x.e is None else rearrange(x.e, "b n m h k -> n (b h) m k").contiguous()
    v = rearrange(x.v, "b n m (h g) v -> n (b h) g m v", g=G)
    C, M = q.shape[2], k.shape[2]
    row, column = torch.arange(C, device=q.device)[:, None], torch.arange(M, device=q.device)
    is_read = column < (row if spec.read == "before" else row + 1) * n
    attn = _scores(q, k).unsqueeze(2).expand(-1, -1, G, -1, -1)
    scale_q = scale_e = scale_k = gamma = g_e = None
    if x.decay is None:
        attn = torch.where(is_read, attn, 0)
    else:
        decay = rearrange(x.decay, "b n m (h g) -> n (b h) g m", g=G)
        g_k = cumulative_decay(decay, 3)
        g_q = decay_at_reads(spec, g_k, decay, 3)
        g_e = g_k - decay if spec.erase_from == "previous" else g_k
        g_last = g_k[..., -1:]
        scale_q, scale_k = exp_as(g_q, attn), exp_as(g_last - g_k, attn)
        gamma = exp_as(g_last, attn)
        decay_mask = _decay_mask(g_q, g_k, is_read, attn)
        attn = _apply_decay(attn, decay_mask, is_read, g_q, g_k)
    operands = ChunkOperands(q, k, v, attn, state, gamma=gamma)
    if spec.transition == "delta":
        is_earlier = column < torch.arange(M, device=q.device)[:, None]
        a = _scores(e, k).unsqueeze(2).expand(-1, -1, G, -1, -1)
        if g_e is None:
            a = torch.where(is_earlier, a, 0)
        else:
            scale_e = exp_as(g_e, a)
            if g_e is not g_q:  # else every earlier write is read, and one decay mask serves P and A
                decay_mask = _decay_mask(g_e, g_k, is_earlier, a)
            a = _apply_decay(a, decay_mask, is_earlier, g_e, g_k)
        if x.erase is not None:
            erase = rearrange(x.erase, "b n m (h g) -> n (b h) g m", g=G)
            a = a * erase.unsqueeze(-1)
            scale_e = erase if scale_e is None else erase * scale_e
        operands = operands._replace(a=a, e=None if x.e is None else e)
    return operands._replace(scale_q=scale_q, scale_e=scale_e, scale_k=scale_k), None


def _scores(rows: Tensor, columns: Tensor) -> Tensor:
    """[N, Z, R, K] and [N, Z, M, K] -> [N, Z, R, M]. `bmm` reads a transposed operand in place; `@` would copy it."""
    return torch.unflatten(torch.bmm(rows.flatten(0, 1), columns.flatten(0, 1).mT), 0, rows.shape[:2])


def _decay_mask(g_row: Tensor, g_column: Tensor, mask: Tensor, like: Tensor) -> Tensor:
    """exp(g_i - g_j) where the mask holds, else 1; no gradients, except in programs of torch.export.

    Not clamped to 1: with a decay of 0 the rounding error of the difference may be positive.
    """
    if not is_exporting():
        g_row, g_column = g_row.detach(), g_column.detach()
    difference = g_row.unsqueeze(-1) - g_column.unsqueeze(-2)
    return exp_as(torch.where(mask, difference, 0), like)


def _apply_decay(scores: Tensor, decay_mask: Tensor, mask: Tensor, g_row: Tensor, g_column: Tensor) -> Tensor:
    """scores * exp(g_i - g_j) where the mask holds, else 0; differentiable in the scores and in g."""
    if is_exporting():  # the program has the forward of an autograd.Function, but not its backward
        return torch.where(mask, scores * decay_mask, 0)
    # A view of g_row, because a tensor may not be passed to an autograd.Function twice.
    return _ApplyDecay.apply(scores, decay_mask, mask, g_row.view_as(g_row), g_column)


class _ApplyDecay(torch.autograd.Function):
    """y_ij = x_ij exp(g_i - g_j). The gradient of g_i - g_j is y_ij dy_ij, so that x need not be saved."""

    generate_vmap_rule = True

    @staticmethod
    def forward(scores: Tensor, decay_mask: Tensor, mask: Tensor, g_row: Tensor, g_column: Tensor) -> Tensor:
        return torch.where(mask, scores * decay_mask, 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1], inputs[2], output)
        ctx.dtype = inputs[3].dtype

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, Tensor, Tensor]:
        decay_mask, mask, output = ctx.saved_tensors
        d_difference = (grad * output).to(ctx.dtype)
        return torch.where(mask, grad * decay_mask, 0), None, None, d_difference.sum(-1), -d_difference.sum(-2)
