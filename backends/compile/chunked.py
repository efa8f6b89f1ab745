"""The chunk-parallel update in plain torch: what is made for each chunk alone, around the scan over chunks.

Per decay, two ways. A scalar decay stays outside the products of keys: one mask of exp(G_i - G_j) for each value
head, keys shared by the heads of a group. A decay per channel goes inside: rows and columns are taken relative to
the boundary between them, level by level (`decayed_products`), so that every factor is at most 1 for any decay.

B batch, T time, H key heads, HV value heads, G value heads a key head, N chunks, Z = B H (or B HV where keys
differ by value head), C tokens a chunk, M micro-steps a chunk, K key width, V value width, Y sequences
"""

from typing import Any, NamedTuple

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn.functional import pad

from deltazoo.backends.base import UpdateInputs, state_dtype
from deltazoo.backends.compile.chunk_scan import ChunkOperands, chunk_scan
from deltazoo.backends.compile.element_scan import element_update, suits
from deltazoo.backends.compile.packing import Packing, pack, packing, unpack
from deltazoo.backends.errors import ShapeError
from deltazoo.backends.lowering import log_decay, strengths
from deltazoo.backends.spec import UpdateSpec
from deltazoo.backends.torch_ext.autograd import differentiable_once

_NOTHING_LEFT = -1000.0  # a log decay whose exp is 0; beside a larger one a cumulative sum would lose all others


def cut(spec: UpdateSpec, inputs: UpdateInputs, tokens: int, least: int = 1) -> tuple[UpdateInputs, Packing | None]:
    """Cut the operands into chunks: [B, T, ...] -> [B, N, C, ...], zeros where no token is.

    Args: tokens: C, a power of two; C x householders a multiple of 16. least: the fewest chunks to make.
    Returns: the operands, and for packed sequences the table that says which token is where.
    """
    T = inputs.q.shape[1]
    constant = {"rate", "state", "cu_seqlens"}
    if spec.decay == "fixed":  # a decay must end with its sequence, so it is laid out in time
        inputs = inputs._replace(log_decay=log_decay(spec, inputs))
    table = None if inputs.cu_seqlens is None else packing(inputs.cu_seqlens, T, tokens)
    N = (T + tokens - 1) // tokens
    N = max(N, least) if least > 1 else N
    chunks = {}
    for name, x in inputs._asdict().items():
        if x is None or name in constant:
            continue
        if table is not None:
            chunks[name] = pack(x, table)
            continue
        # When traced the question would be a guard on T: a graph for whole chunks and one for the rest.
        if torch.compiler.is_compiling() or N * tokens > T:
            x = pad(x, (0, 0) * (x.dim() - 2) + (0, N * tokens - T))
        chunks[name] = x.reshape(x.shape[0], N, tokens, *x.shape[2:])
    if table is not None and inputs.state is None:  # only the table knows how many sequences there are
        sizes = table.sequences, inputs.v.shape[-2], inputs.q.shape[-1], inputs.v.shape[-1]
        chunks["state"] = inputs.q.new_zeros(sizes, dtype=state_dtype(inputs.q.dtype))
    return inputs._replace(**chunks, cu_seqlens=None), table


def join(o: Tensor, T: int, table: Packing | None) -> Tensor:
    """Undo the cut of an output: [B, N, C, HV, V] -> [B, T, HV, V]."""
    if table is not None:
        return unpack(o, table)
    whole = o.flatten(1, 2)
    if torch.compiler.is_compiling():  # a slice's contiguity would be a guard on T, a copy's is known
        return pad(whole, (0, 0) * (whole.dim() - 2) + (0, T - whole.shape[1]))
    return whole[:, :T]


def chunked_update(spec: UpdateSpec, x: UpdateInputs, sequence: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the update of operands cut into chunks.

    Args:
        x: from `cut`; `state` [B, HV, K, V], or [Y, HV, K, V] with `sequence` [N] int64, the sequence of each chunk.
    Returns: o [B, N, C, HV, V] in the dtype of v, and the last states, shaped as `state`.
    """
    dtype = state_dtype(x.q.dtype)
    B, N, _, H, K = x.q.shape
    HV, V = x.v.shape[-2:]
    n, G = spec.householders, HV // H
    for tensor in x:
        if tensor is not None and tensor is not x.state and tensor is not x.rate and tensor.shape[:2] != (B, N):
            raise ShapeError(f"every operand must have {B} x {N} chunks, got {list(tensor.shape)}")
    if suits(spec, x):
        return element_update(spec, x, sequence)
    x = x._replace(q=_in_time(x.q), k=_in_time(x.k), v=_in_time(x.v))
    erase, write = strengths(spec, x)
    decay = x.log_decay if spec.decay == "fixed" else log_decay(spec, x)
    if decay is not None:
        decay = decay.clamp(min=_NOTHING_LEFT)
        if n > 1:  # on a token's first micro-step
            decay = pad(decay.unsqueeze(3), (0, 0) * (decay.dim() - 3) + (0, n - 1)).flatten(2, 3)
    value = x.v.to(dtype)

    def micro(tensor: Tensor | None) -> Tensor | None:
        """[B, N, C, (n,) ...] -> [B, N, M, ...] in `dtype`."""
        return None if tensor is None else (tensor if n == 1 else tensor.flatten(2, 3)).to(dtype)

    chunks = _Chunks(
        q=spec.scale_of(K) * x.q.to(dtype),
        k=_given(micro(x.k)),
        u=_given(micro(value if write is None else _scaled(value, write))),
        e=micro(x.erase_key),
        a=micro(x.a),
        b=micro(x.b),
        erase=micro(erase),
        decay=decay,
    )
    keys_differ = spec.transition == "dplr" or (spec.beta == "channel" and spec.transition == "delta")
    by_channel = decay is not None and decay.dim() == 5
    groups = 1 if keys_differ or by_channel else G
    state = x.state
    if state is None:
        state = x.q.new_zeros(B, HV, K, V, dtype=dtype)
    if sequence is None:
        state = rearrange(state, "b (h g) k v -> 1 (b h) g k v", g=groups)
    else:
        state = rearrange(state, "y (h g) k v -> y h g k v", g=groups)
    make = _channel_operands if keys_differ or by_channel else _scalar_operands
    operands, beside = make(spec, chunks, state, G)
    o, last = chunk_scan(operands._replace(sequence=sequence))
    o = rearrange(o if beside is None else o + beside, "n (b h) g c v -> b n c (h g) v", b=B).to(x.v.dtype)
    if sequence is None:
        return o, rearrange(last, "1 (b h) g k v -> b (h g) k v", b=B)
    return o, last.flatten(1, 2)


class _Chunks(NamedTuple):
    """Lowered operands. q [B, N, C, H, K], k and e [B, N, M, H, K], u [B, N, M, HV, V], a and b [B, N, M, HV, K],
    erase [B, N, M, HV] or [B, N, M, HV, K], decay [B, N, M, HV] or [B, N, M, HV, K]."""

    q: Tensor
    k: Tensor
    u: Tensor
    e: Tensor | None
    a: Tensor | None
    b: Tensor | None
    erase: Tensor | None
    decay: Tensor | None


def _in_time(x: Tensor) -> Tensor:
    """The same [B, N, C, ...]; its gradient is written in that order by the compiler, not copied into it later."""
    return x.flatten(1, 2).unflatten(1, x.shape[1:3])


def _given(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


def _scaled(x: Tensor, strength: Tensor) -> Tensor:
    return x * (strength if strength.dim() == x.dim() else strength.unsqueeze(-1))


def _running(decay: Tensor, dim: int) -> Tensor:
    """The cumulative decay within a chunk, along `dim`.

    In float64, so that differences stay exact after a token that forgets all (none forgets more than
    `_NOTHING_LEFT`); by a triangle of ones, whose gradient is a product too, where a cumulative sum's is two reversals
    and a sum.
    """
    wide = decay.to(decay.dtype if decay.device.type == "mps" else torch.float64)
    M = decay.shape[dim]
    upto = torch.ones(M, M, dtype=wide.dtype, device=decay.device).tril()
    return wide @ upto.T if dim == decay.dim() - 1 else upto @ wide


def _scalar_operands(spec: UpdateSpec, x: _Chunks, state: Tensor, groups: int) -> tuple[ChunkOperands, None]:
    """Decay none or a scalar a head; keys shared by the value heads of a group.

    Decays and strengths scale the keys' rows; the scan does it, segment by segment, so that the backward keeps the
    keys once.
    """
    n = spec.householders
    q = rearrange(x.q, "b n c h k -> n (b h) c k").contiguous()
    k = rearrange(x.k, "b n m h k -> n (b h) m k").contiguous()
    e = k if x.e is None else rearrange(x.e, "b n m h k -> n (b h) m k").contiguous()
    u = rearrange(x.u, "b n m (h g) v -> n (b h) g m v", g=groups)
    C, M = q.shape[2], k.shape[2]
    row, column = torch.arange(C, device=q.device)[:, None], torch.arange(M, device=q.device)
    seen = column < (row if spec.read == "before" else row + 1) * n
    p = _products(q, k).unsqueeze(2).expand(-1, -1, groups, -1, -1)
    scale_q = scale_e = scale_w = gamma = G_e = None
    if x.decay is None:
        p = torch.where(seen, p, 0)
    else:
        decay = rearrange(x.decay, "b n m (h g) -> n (b h) g m", g=groups)
        G_i = _running(decay, 3)
        G_q = _at_reads(spec, G_i, decay, 3)
        G_e = G_i - decay if spec.erase_from == "previous" else G_i
        last = G_i[..., -1:]
        scale_q, scale_w = _exp(G_q, p), _exp(last - G_i, p)
        gamma = _exp(last, p)
        factor = _factor(G_q, G_i, seen, p)
        p = _decayed(p, factor, seen, G_q, G_i)
    operands = ChunkOperands(q, k, u, p, state, gamma=gamma)
    if spec.transition == "delta":
        earlier = column < torch.arange(M, device=q.device)[:, None]
        a = _products(e, k).unsqueeze(2).expand(-1, -1, groups, -1, -1)
        if G_e is None:
            a = torch.where(earlier, a, 0)
        else:
            scale_e = _exp(G_e, a)
            if G_e is not G_q:  # else what is earlier is seen, and one factor serves both
                factor = _factor(G_e, G_i, earlier, a)
            a = _decayed(a, factor, earlier, G_e, G_i)
        if x.erase is not None:
            erase = rearrange(x.erase, "b n m (h g) -> n (b h) g m", g=groups)
            a = a * erase.unsqueeze(-1)
            scale_e = erase if scale_e is None else erase * scale_e
        operands = operands._replace(a=a, e=None if x.e is None else e)
    return operands._replace(scale_q=scale_q, scale_e=scale_e, scale_w=scale_w), None


def _products(rows: Tensor, columns: Tensor) -> Tensor:
    """[N, Z, R, K] and [N, Z, M, K] -> [N, Z, R, M]. By `bmm`, which reads a transposed operand where it lies; `@`
    would copy it."""
    return torch.bmm(rows.flatten(0, 1), columns.flatten(0, 1).mT).unflatten(0, rows.shape[:2])


def _factor(G_row: Tensor, G_column: Tensor, seen: Tensor, like: Tensor) -> Tensor:
    """exp(G_i - G_j) where seen, else 1, without gradients. Not clamped to 1: the rounding of a decay of 0 may be
    positive."""
    difference = G_row.detach().unsqueeze(-1) - G_column.detach().unsqueeze(-2)
    return _exp(torch.where(seen, difference, 0), like)


def _decayed(products: Tensor, factor: Tensor, seen: Tensor, G_row: Tensor, G_column: Tensor) -> Tensor:
    """products * exp(G_i - G_j) where seen, else 0. factor: from `_factor`."""
    # Views, for a tensor may not enter a Function twice.
    return _Decayed.apply(products, factor, seen, G_row.view_as(G_row), G_column)


class _Decayed(torch.autograd.Function):
    """y_ij = x_ij exp(G_i - G_j): as y_ij dy_ij is the gradient of G_i - G_j, the products x need not be kept."""

    generate_vmap_rule = True

    @staticmethod
    def forward(products: Tensor, factor: Tensor, seen: Tensor, G_row: Tensor, G_column: Tensor) -> Tensor:
        return torch.where(seen, products * factor, 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1], inputs[2], output)
        ctx.dtype = inputs[3].dtype

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, Tensor, Tensor]:
        factor, seen, decayed = ctx.saved_tensors
        d_difference = (grad * decayed).to(ctx.dtype)
        return torch.where(seen, grad * factor, 0), None, None, d_difference.sum(-1), -d_difference.sum(-2)


def _channel_operands(spec: UpdateSpec, x: _Chunks, state: Tensor, groups: int) -> tuple[ChunkOperands, Tensor | None]:
    """Decay per channel, or keys that differ by value head: the decays go into the keys.

    Also returns what is written beside the scan and read at once: P_k V of dplr.
    """
    n = spec.householders
    by_value_head = "b n m h k -> n (b h g) m k"
    q = repeat(x.q, by_value_head, g=groups)
    k = repeat(x.k, by_value_head, g=groups)
    u = rearrange(x.u, "b n m h v -> n (b h) 1 m v")
    decay = q.new_zeros(*k.shape[:3], 1)
    if x.decay is not None:
        decay = rearrange(x.decay if x.decay.dim() == 5 else x.decay.unsqueeze(-1), "b n m h k -> n (b h) m k")
    G_i = _running(decay, 2)
    before = spec.read == "before"
    # A token's read stands on the micro-step that it follows: its last, or with read="before" its first.
    q_M = q if n == 1 else pad(q.unsqueeze(3), (0, 0, *((0, n - 1) if before else (n - 1, 0)))).flatten(2, 3)
    G_q = G_i - decay if before else G_i
    G_e = G_i - decay if spec.erase_from == "previous" else G_i
    last = G_i[:, :, -1:]
    gamma = _exp(last, q)
    reads, marks = [q_M], [G_q]
    if spec.transition == "dplr":
        assert x.a is not None
        reads.append(rearrange(x.a, "b n m h k -> n (b h) m k"))
        marks.append(G_e)
    elif spec.transition == "delta":
        e = k if x.e is None else repeat(x.e, by_value_head, g=groups)
        if x.erase is not None:
            erase = x.erase if x.erase.dim() == 5 else x.erase.unsqueeze(-1)
            e = e * rearrange(erase, "b n m h k -> n (b h) m k")
        reads.append(e)
        marks.append(G_e)
    writes = [k]
    if spec.transition == "dplr":
        assert x.b is not None
        writes.append(rearrange(x.b, "b n m h k -> n (b h) m k"))
    products = decayed_products(torch.stack(reads, 2), torch.stack(marks, 2), torch.stack(writes, 2), G_i)
    own = [torch.diag_embed((q_M * write).sum(-1)) if not before else 0 for write in writes]
    p_k = products[:, :, 0, 0] + own[0]
    p_k = (p_k if n == 1 else p_k[:, :, slice(0 if before else n - 1, None, n)]).unsqueeze(2)
    q_in = q * _exp(_at_reads(spec, G_i, decay, 2), q)
    k_out = k * _exp(last - G_i, k)
    if spec.transition == "additive":
        return ChunkOperands(q_in, k_out, u, p_k, state, gamma=gamma), None
    e_in = reads[1] * _exp(G_e, q)
    if spec.transition == "delta":
        a = products[:, :, 1, 0].unsqueeze(2)
        return ChunkOperands(q_in, k_out, u, p_k, state, a, e_in, gamma=gamma), None
    # dplr: y = S_{t-1}^T a is what the b write; as a delta rule it erases with -a, and the k write beside it.
    b_out = writes[1] * _exp(last - G_i, q)
    y_k = products[:, :, 1, 0].unsqueeze(2) @ u
    p_b = (products[:, :, 0, 1] + own[1]).unsqueeze(2)
    inject = (k_out.transpose(2, 3) @ u.squeeze(2)).unsqueeze(2)
    a = -products[:, :, 1, 1].unsqueeze(2)
    operands = ChunkOperands(q_in, b_out, y_k, p_b, state, a, -e_in, gamma=gamma, inject=inject)
    return operands, p_k @ u


def _at_reads(spec: UpdateSpec, G_i: Tensor, decay: Tensor, dim: int) -> Tensor:
    """The cumulative decay at each token's read: [.., M, ..] -> [.., C, ..]."""
    first = G_i - decay if spec.read == "before" else G_i
    n = spec.householders
    return first if n == 1 else first.unflatten(dim, (-1, n)).select(dim + 1, 0)


def _exp(x: Tensor, like: Tensor) -> Tensor:
    return x.to(like.dtype).exp()


def decayed_products(reads: Tensor, marks: Tensor, writes: Tensor, G_i: Tensor) -> Tensor:
    """sum_k reads_ik exp(marks_ik - G_jk) writes_jk for i > j, zeros elsewhere, for any decay.

    At level s the rows of the upper half and the columns of the lower half of each block of 2 s micro-steps are
    taken relative to the boundary between them: both factors are at most 1, whatever the decay.

    Args:
        reads, marks: [N, Z, R, M, K], R kinds of reads and the cumulative decay that each stands at.
        writes: [N, Z, W, M, K], W kinds of writes; G_i: [N, Z, M, K], the cumulative decay at each write.
    Returns: [N, Z, R, W, M, M].
    """
    M, R, W = G_i.shape[2], reads.shape[2], writes.shape[2]
    size = 1 << (M - 1).bit_length()
    if size > M:
        more = (0, 0, 0, size - M)
        reads, writes = pad(reads, more), pad(writes, more)
        marks, G_i = (torch.cat([x, x[..., -1:, :].expand(*x.shape[:-2], size - M, -1)], -2) for x in (marks, G_i))
    products = reads.new_zeros(*reads.shape[:3], W, size, 1, 1)
    s = 1
    while s < size:
        split = (size // (2 * s), 2, s)
        G_upper, G_lower = marks.unflatten(3, split)[:, :, :, :, 1], G_i.unflatten(2, split)[:, :, :, 0]
        boundary = G_lower[:, :, :, -1:]
        upper = reads.unflatten(3, split)[:, :, :, :, 1] * _exp(G_upper - boundary.unsqueeze(2), reads)
        lower = writes.unflatten(3, split)[:, :, :, :, 0] * _exp(boundary - G_lower, writes).unsqueeze(2)
        block = rearrange(upper, "n z r l i k -> n z l (r i) k") @ rearrange(lower, "n z w l j k -> n z l k (w j)")
        block = rearrange(block, "n z l (r i) (w j) -> n z r w l i j", r=R, w=W)
        pairs = products.unflatten(4, (-1, 2))
        top = pad(pairs[..., 0, :, :], (0, s))
        products = torch.cat([top, torch.cat([block, pairs[..., 1, :, :]], -1)], -2)
        s *= 2
    return products[..., 0, :M, :M]
