"""Softmax attention with forget gates by torch's FlexAttention, which generates a fused kernel for CUDA.

The score of query t and key s gets -G_s with G_t = log f_1 + ... + log f_t, as in `mixers.parts.gates.forget_gates`.
The kernel adds it in float32 to the scores and accumulates the gradient of G in float32, so that q, k and v need
neither extra channels nor float32.

B batch, T time, H heads, G key-value heads, E head width, N packed sequences, M blocks of BLOCK tokens
"""

import functools
import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from deltazoo.backends.io.errors import DeviceError
from deltazoo.backends.torch_ext.compiled_call import compiled_call
from deltazoo.backends.torch_ext.materialize import materialize
from deltazoo.backends.torch_ext.modes import functorch_is_active
from deltazoo.backends.update.varlen import sequence_index

BLOCK = 128  # FlexAttention's default block of queries and of keys
MIN_WIDTH = 16  # its least head width on CUDA
HAS_TRITON = importlib.util.find_spec("triton") is not None


def flex_problems(q: Tensor) -> list[str]:
    """Return the reasons why `flex_attend` cannot compute queries q [B, T, H, E]; none: it can."""
    problems = []
    if not q.is_cuda:
        problems.append(f"FlexAttention has gradients on CUDA alone, got {q.device.type}")
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        problems.append(f"its kernel takes float16, bfloat16 and float32, got {q.dtype}")
    if q.shape[-1] < MIN_WIDTH:
        problems.append(f"its kernel needs a head width of at least {MIN_WIDTH}, got {q.shape[-1]}")
    if q.shape[0] == 0 or q.shape[1] == 0:
        problems.append("its kernel needs at least one token")
    if not HAS_TRITON:
        problems.append("Triton is not installed")
    if torch.are_deterministic_algorithms_enabled():
        problems.append("its gradient of the gates is a sum in no fixed order")
    if not torch.compiler.is_compiling() and functorch_is_active():
        problems.append("it cannot be compiled within a torch.func transform")
    return problems


def flex_attend(
    q: Tensor, k: Tensor, v: Tensor, sums_BTH: Tensor, scale: float, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Attend causally among the tokens of the call with the score scale q_t^T k_s - G_s.

    Eager calls are compiled, once for each combination of head sizes, dtypes and gradients. Within torch.compile the
    attention is a part of the caller's graph.

    Args: q: [B, T, H, E]; k, v: [B, T, G, E]; sums_BTH: G, float32; cu_seqlens: bounds of packed sequences; then B = 1.
    Returns: [B, T, H, E].
    Raises: DeviceError, with the reasons of `flex_problems`.
    """
    problems = flex_problems(q)
    if problems:
        raise DeviceError(f"FlexAttention cannot run here: {'; '.join(problems)}")
    if torch.compiler.is_compiling():
        return forgetting_attention(q, k, v, sums_BTH, scale, cu_seqlens)
    grads = tuple(torch.is_grad_enabled() and x.requires_grad for x in (q, k, v, sums_BTH))
    compiled = _compiled(
        (*q.shape[2:], k.shape[2], q.dtype, q.device, scale, cu_seqlens is None, q.shape[0] == 1, *grads)
    )
    return compiled(q, k, v, sums_BTH, scale, cu_seqlens)


def forgetting_attention(
    q: Tensor, k: Tensor, v: Tensor, sums_BTH: Tensor, scale: float, cu_seqlens: Tensor | None
) -> Tensor:
    """Compute `flex_attend` by torch's operator; to be compiled."""
    T = q.shape[1]
    sums_BHT = materialize(sums_BTH.transpose(1, 2))

    def add_gate(score: Tensor, b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return score - sums_BHT[b, h, s]

    mask = causal_blocks(T, q.device, None if cu_seqlens is None else materialize(sequence_index(cu_seqlens, T)))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    o = flex_attention(q, k, v, score_mod=add_gate, block_mask=mask, scale=scale, enable_gqa=grouped)
    assert isinstance(o, Tensor)  # without the logsumexp
    return o.transpose(1, 2)


def causal_blocks(T: int, device: torch.device, sequence_T: Tensor | None) -> BlockMask:
    """Return the mask of s <= t within each sequence, from the M x M blocks alone.

    Args: sequence_T: the sequence of each token, which does not decrease; None: one sequence.
    """
    block_M = torch.arange((T + BLOCK - 1) // BLOCK, device=device)
    visible = block_M <= block_M[:, None]
    full = (block_M < block_M[:, None]) & ((block_M + 1) * BLOCK <= T)[:, None]
    if sequence_T is not None:
        first_M, last_M = sequence_T[block_M * BLOCK], sequence_T[((block_M + 1) * BLOCK - 1).clamp(max=T - 1)]
        visible = visible & (last_M >= first_M[:, None])
        full = full & (first_M == last_M[:, None])

    def is_visible(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return s <= t if sequence_T is None else (s <= t) & (sequence_T[s] == sequence_T[t])

    partial, whole = _ordered(visible & ~full), _ordered(full)
    return BlockMask.from_kv_blocks(*partial, *whole, BLOCK_SIZE=BLOCK, mask_mod=is_visible, seq_lengths=(T, T))


def _ordered(blocks_MM: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of blocks per row [1, 1, M] and the indices of all blocks, these first, [1, 1, M, M]."""
    count_M = blocks_MM.sum(-1, dtype=torch.int32)
    index_MM = blocks_MM.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return count_M[None, None], index_MM[None, None]


@functools.cache
def _compiled(key: tuple[object, ...]) -> Callable[..., Tensor]:
    """Compile for one combination of all but B and T: torch.compile counts recompilations per code object."""
    return compiled_call(forgetting_attention)
