"""The plan of tokens that a router sends to several memories, each of which processes its own as one sequence.

D documents, G pieces of all ranks, P pieces of this rank, S segments per piece, N = P S, M memories, A rows of the pack
"""

import torch
from torch import Tensor

from deltazoo.backends.context_parallel.exchange import sum_over_ranks
from deltazoo.backends.context_parallel.plan import ContextPlan
from deltazoo.backends.update.varlen import valid_sequence_index


def plan_of_memories(plan: ContextPlan, cu_seqlens: Tensor, memories: int, rows: int) -> ContextPlan:
    """Return the plan of a pack that holds the segments of memory 0, then those of memory 1, and so on.

    It has M P local pieces, M G pieces of all ranks, and M D documents, ordered by memory. A piece of a memory holds
    the tokens of a piece of `plan` that the memory receives. Their number depends on the router, so that `sizes` and
    `key_bounds` are empty. The ranks exchange it once, without a host synchronisation.

    Args:
        cu_seqlens: [M N + 1] int32, bounds of the segments in the pack, of which some may be empty.
        memories: M. rows: A.
    """
    M, P, G, D = memories, len(plan.local), len(plan.order), plan.documents
    memory_M = torch.arange(M, device=cu_seqlens.device)
    count_MN = cu_seqlens.diff().long().view(M, -1)
    N = count_MN.shape[1]

    def repeated(x: Tensor) -> Tensor:
        return x.repeat(M, *[1] * (x.dim() - 1))

    def shifted(x: Tensor, step: int) -> Tensor:
        """Repeat x for each memory, and add `step` times the index of the memory."""
        return (x + (step * memory_M).view(-1, *[1] * x.dim())).flatten(0, 1)

    def linked(chain: Tensor) -> Tensor:
        """Return `before` or `after` of all memories: the gathered pieces are ordered by rank, then by memory."""
        pieces = shifted(chain[:, 1:] // P * (M * P) + chain[:, 1:] % P, P)
        return torch.cat([repeated(chain[:, :1]), pieces.to(chain.dtype)], 1)

    tail_MP = count_MN[:, plan.tails]
    none_M = tail_MP.new_zeros(M)
    tail_MG = torch.stack([tail_MP[:, plan.local.index(g)] if g in plan.local else none_M for g in range(G)], 1)
    document_MD = count_MN.new_zeros(M, D).index_add(1, plan.document, count_MN)
    length_MG, document_MD = sum_over_ranks(torch.cat([tail_MG, document_MD], 1), plan).split([G, D], 1)

    is_before_PG = plan.distance >= 0  # g holds tokens of the document that p continues
    ends_MG = length_MG.cumsum(1)
    start_MP = torch.stack([ends_MG[:, g] - length_MG[:, g] for g in plan.local], 1)
    distance_MPG = torch.where(is_before_PG, start_MP[:, :, None] - ends_MG[:, None], -1)
    is_same_MM = memory_M[:, None] == memory_M
    distance = torch.where(is_same_MM[:, None, :, None], distance_MPG[:, :, None], -1).view(M * P, M * G)

    seen_MP = torch.where(is_before_PG, length_MG[:, None], 0).sum(2)
    first_N = torch.cat([seen_MP.view(-1, 1), seen_MP.new_zeros(M * P, plan.segments - 1)], 1).flatten()
    # The states of a document enter and leave at its first and last token: kernels pass none through empty segments.
    total_MN, first_MN, has_tokens_MN = document_MD[:, plan.document], first_N.view(M, N), count_MN > 0
    begins_MN = torch.where(total_MN > 0, has_tokens_MN & (first_MN == 0), plan.ends)
    ends_MN = torch.where(total_MN > 0, has_tokens_MN & (first_MN + count_MN == total_MN), plan.ends)
    receives_MP = plan.receives & ~begins_MN[:, :: plan.segments]
    segment_A = valid_sequence_index(cu_seqlens, rows)
    position_A = torch.arange(rows, device=cu_seqlens.device) - (cu_seqlens[:-1].long() - first_N)[segment_A]

    return plan._replace(
        order=tuple(i // P * M * P + m * P + i % P for m in range(M) for i in plan.order),
        local=tuple(m * G + g for m in range(M) for g in plan.local),
        sizes=(), key_bounds=plan.key_bounds[:0], documents=M * D, cu_seqlens=cu_seqlens,
        document=shifted(plan.document, D), tails=shifted(plan.tails, N),
        begins=begins_MN.flatten(), ends=ends_MN.flatten(), receives=receives_MP.flatten(),
        before=linked(plan.before), after=linked(plan.after), joins=repeated(plan.joins),
        lengths=length_MG.flatten(), distance=distance, positions=position_A[None],
        document_lengths=document_MD.flatten(),
        is_head=repeated(plan.is_head), is_outer=repeated(plan.is_outer),
    )  # fmt: skip
