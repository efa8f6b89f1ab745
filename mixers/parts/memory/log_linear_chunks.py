"""Log-linear attention in plain PyTorch: chunks of tokens, and the step that processes one chunk.

B batch, T time, M chunks, C tokens per chunk, H key heads, HV value heads, K key width, V value width, L levels
"""

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import repeat
from torch import Tensor

from deltazoo.backends.compile.intra_chunk import MIN_LOG_DECAY, cumulative_decay, decays_between, exp_as
from deltazoo.backends.ops.log_linear import CHUNK
from deltazoo.backends.torch_ext.symbolic_sizes import is_known
from deltazoo.backends.update.varlen import sequence_index
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.parts.memory.token_scan import TokenScan

MAX_LEVELS = 23
POSITIONS = 2**MAX_LEVELS  # positions are taken modulo this number, so that float32 holds them exactly
_DELTA_OPERANDS = 6  # with an erase strength


def scan_rows(
    operands: list[Tensor], count_B: Tensor, levels: Tensor, seen_B: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Process rows [B, T, ...]. Tokens after the first `count_B` must neither decay, erase nor write.

    Args:
        operands: those of `chunk_step` from q on, of one dtype.
        levels: states of the last levels before the rows [B, L', HV, K, V].
        seen_B: number of tokens before each row; None: none. Then the levels within a chunk are not needed.
    Returns: o [B, T, HV, V]; the states after the rows.
    """
    o, levels = _scan(_in_rows(operands, count_B, seen_B), levels)
    return o.flatten(1, 2)[:, : operands[0].shape[1]], levels


def scan_packed(operands: list[Tensor], cu_seqlens: Tensor, levels: Tensor) -> Tensor:
    """Process packed sequences [1, T, ...] without tokens before them. Returns: o [1, T, HV, V]."""
    chunks, index_T = _in_one_row(operands, cu_seqlens)
    return _scan(chunks, levels)[0].flatten(1, 2)[:, index_T]


def _scan(chunks: "_Chunks", levels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs [B, M, C, HV, V], and the states of the levels after the last chunk of each row."""
    like = chunks.operands[-1]
    scan = DELTA_SCAN if len(chunks.operands) == _DELTA_OPERANDS else ADDITIVE_SCAN
    numbers = [y.to(like.dtype) for y in (chunks.start, chunks.real, chunks.continues)]
    o, (new_levels,) = scan([levels.to(like.dtype)], [*numbers, *chunks.operands], [], Context())
    return o, new_levels


class _Chunks(NamedTuple):
    """Operands in M chunks of C tokens, which a scan processes in order in each row.

    operands: [B, M, C, ...], with zeros in place of absent tokens.
    start: position of the first token in its sequence, modulo POSITIONS; real: number of tokens; continues: whether the
        chunk continues the sequence, or state, before it. All [B, M].
    """

    operands: list[Tensor]
    start: Tensor
    real: Tensor
    continues: Tensor


def _in_rows(operands: list[Tensor], count_B: Tensor, seen_B: Tensor | None) -> _Chunks:
    """Divide rows [B, T, ...] into chunks. Tokens after the first `count_B` must neither decay, erase nor write."""
    B, T = operands[0].shape[:2]
    size = max(T, 1) if is_known(T <= CHUNK) else CHUNK
    chunks = (T + size - 1) // size
    if not is_known(T <= CHUNK) and not is_known(T > CHUNK):  # else a graph with a dynamic T would depend on chunks > 1
        chunks = torch.sym_max(chunks, 2)
    before = torch.minimum(torch.arange(chunks, device=count_B.device) * size, count_B[:, None])
    start = before if seen_B is None else (before + seen_B[:, None]) % POSITIONS
    padding = chunks * size - T
    in_chunks = [
        F.pad(x, [0, 0] * (x.dim() - 2) + [0, padding]).reshape(B, chunks, size, *x.shape[2:]) for x in operands
    ]
    return _Chunks(in_chunks, start, (count_B[:, None] - before).clamp(max=size), torch.ones_like(start))


def _in_one_row(operands: list[Tensor], cu_seqlens: Tensor) -> tuple[_Chunks, Tensor]:
    """Divide packed sequences [1, T, ...] into chunks of one row, each sequence from the start of a chunk.

    Returns: the chunks; the index [T] of each token among all tokens of the chunks.
    """
    T, N = operands[0].shape[1], cu_seqlens.shape[0] - 1
    chunks = T // CHUNK + N + 1  # an upper bound; rows after the last sequence count as a further one
    bounds = cu_seqlens.long()
    ends_N = ((bounds.diff() + CHUNK - 1) // CHUNK).cumsum(0)
    first = F.pad(ends_N, (1, 0))  # first chunk of each sequence
    chunk_M = torch.arange(chunks, device=bounds.device)
    owner_M = torch.searchsorted(ends_N, chunk_M, right=True)
    start_M = (chunk_M - first[owner_M]) * CHUNK
    sequence_T = sequence_index(cu_seqlens, T)
    index_T = first[sequence_T] * CHUNK + torch.arange(T, device=bounds.device) - bounds[sequence_T]
    in_chunks = [
        x.new_zeros(chunks * CHUNK, *x.shape[2:]).index_copy(0, index_T, x[0]).reshape(1, chunks, CHUNK, *x.shape[2:])
        for x in operands
    ]
    # The number of tokens in the last chunk of a sequence matters only to a chunk that continues it.
    real_M = torch.full_like(start_M, CHUNK)
    return _Chunks(in_chunks, start_M[None] % POSITIONS, real_M[None], (start_M > 0)[None]), index_T


def chunk_step(
    erases: bool, state: list[Tensor], operands: list[Tensor], parameters: list[Tensor]
) -> tuple[list[Tensor], Tensor]:
    """Process one chunk.

    With G the decay from one token of the chunk to a later one, and N_ts = erase_t G_ts k_t^T k_s below the diagonal,
    the delta rule reads the value of s at t with M = (G * Q K^T) (I + N)^-1, and the states of before the chunk with
    E = G_0 Q - M Diag(erase) G_0 K. Without an erase N = 0.

    state: states of the last levels [B, L', HV, K, V], of the tree at the chunk's first token.
    operands: `start`, `real` and `continues` of `_Chunks` [B]; q, k [B, C, H, K]; log_decay and (if the recurrence
        erases) the erase strength [B, C, HV]; lambda [B, C, HV, L]; v, times the write strength, [B, C, HV, V].
    """
    start, real, continues, q, k, decay = operands[:6]
    S = torch.where(continues[:, None, None, None, None] > 0, state[0], 0.0)
    weights, v = operands[-2:]
    groups = v.shape[2] // q.shape[2]
    q, k = (repeat(y, "b c h k -> b (h g) c k", g=groups) for y in (q, k))
    total = cumulative_decay(decay.clamp(min=MIN_LOG_DECAY).mT, 2)  # [B, HV, C]
    G = decays_between(total, q)
    from_start, to_end = exp_as(total, q)[..., None], exp_as(total[..., -1:] - total, q)[..., None]
    # The rows of `reads` map the values of the chunk to its outputs, and to its K contributions to a state.
    reads = torch.cat([G * (q @ k.mT), (to_end * k).mT], 2)
    E, chunk_decay = from_start * q, from_start[..., -1:, :]
    carried = chunk_decay[:, None] * S
    if erases:
        erase = operands[6].mT[..., None]  # [B, HV, C, 1]
        N = (erase * G * (k @ k.mT)).tril(-1)
        reads = torch.linalg.solve_triangular(N, reads, upper=False, left=False, unitriangular=True)
        erased_k = erase * from_start * k
        E = E - reads[:, :, : q.shape[2]] @ erased_k
        carried = carried - reads[:, None, :, q.shape[2] :] @ (erased_k[:, None] @ S)
    M, R = reads.split([q.shape[2], q.shape[3]], 2)

    tree = _Tree(start.long(), real.long(), v.shape[1], weights.shape[-1], S.shape[1])
    token_weights = _gather_levels(weights, tree.token_levels)
    bucket_weights = _gather_levels(weights, tree.bucket_levels)
    o = (M * token_weights) @ v.transpose(1, 2)
    o = o + torch.einsum("bhcl,bhck,blhkv->bhcv", bucket_weights, E, S)
    new_S = torch.einsum("bml,blhkv->bmhkv", tree.moved.to(v.dtype), carried)
    new_S = new_S + torch.einsum("bmc,bhkc,bchv->bmhkv", tree.written.to(v.dtype), R, v)
    return [new_S], o.transpose(1, 2)


class _Tree:
    """Levels of the tokens of a chunk, and of the carried buckets, which are those of the chunk's first token.

    token_levels: level of s at t, [B, C, C]; bucket_levels: level at t of each carried bucket, [B, C, L'].
    moved, written: whether a bucket, or a token, is in each carried level at the first token of the next chunk,
        [B, L', L'] and [B, L', C].
    """

    def __init__(self, start_B: Tensor, real_B: Tensor, size: int, levels: int, carried: int) -> None:
        last = levels - 1
        carried_L = torch.arange(levels - carried, levels, device=start_B.device)
        bucket_BL = start_B[:, None] >> carried_L << carried_L  # position of the first token of the bucket

        def level(t: Tensor, s: Tensor) -> Tensor:
            return torch.frexp((t ^ s).float()).exponent.long().clamp(max=last)

        def bucket_level(t: Tensor, bucket: Tensor) -> Tensor:
            return torch.where(carried_L == last, last, level(t, bucket))  # the last level keeps its tokens

        token_BC = start_B[:, None] + torch.arange(size, device=start_B.device)
        end_B1 = (start_B + real_B)[:, None]
        self.token_levels = level(token_BC[:, :, None], token_BC[:, None, :])
        self.bucket_levels = bucket_level(token_BC[:, :, None], bucket_BL[:, None, :])
        self.moved = bucket_level(end_B1, bucket_BL)[:, None, :] == carried_L[:, None]
        self.written = level(end_B1, token_BC)[:, None, :] == carried_L[:, None]


def _gather_levels(weights: Tensor, levels: Tensor) -> Tensor:
    """weights [B, C, HV, L] at levels [B, C, X] -> [B, HV, C, X]."""
    index = levels[:, :, None].expand(-1, -1, weights.shape[2], -1)
    return weights.gather(-1, index).transpose(1, 2)


ADDITIVE_SCAN = TokenScan("log_linear_additive", partial(chunk_step, False))
DELTA_SCAN = TokenScan("log_linear_delta", partial(chunk_step, True))
