"""Run the forward of an update: allocate its results and buffers, and launch the kernels of the plan.

A sequence is a row of chunks. If one program per sequence and head leaves the GPU idle, the chunks of a sequence are
divided into segments, computed in parallel and combined in order.

B batch, T time, N sequences, H key heads, HV value heads, K key width, V value width, C chunk
"""

import torch
from torch import Tensor

from deltazoo.backends.triton.chunk.execute import Tensors, execute
from deltazoo.backends.triton.chunk.plan import Plan
from deltazoo.backends.triton.operands import Prepared, Saved, ScanKind, ScanOperands
from deltazoo.backends.triton.problem import Problem


def empty(like: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Allocate a tensor on the device of another."""
    return torch.empty(shape, device=like.device, dtype=dtype)


def segment_states(like: Tensor, p: Problem, slots: int, chunks: int) -> tuple[Tensor | None, Tensor | None]:
    """Allocate the states at the start of each segment, [segments, HV, V, K], and its contribution and map.

    The second tensor [segments, HV, V + K, K] holds what a segment adds to the state above the map from the state at
    its start to the one at its end. N sequences of `slots` chunks in all have at most slots / chunks + N segments.

    Args: chunks: per segment; 0: no segments, and no tensors.
    """
    if not chunks:
        return None, None
    segments = slots // chunks + p.N
    return empty(like, segments, p.HV, p.V, p.K), empty(like, segments, p.HV, p.V + p.K, p.K)


def forward(operands: ScanOperands, kind: ScanKind, plan: Plan) -> tuple[Tensor, ...]:
    """Launch the forward of a plan.

    Returns: o, the final state, and if the plan stores checkpoints what `Saved` describes, else an empty tensor.
    """
    x, p, C = kind.with_write(operands), plan.problem, plan.config.chunk
    if plan.checkpoint_chunks:
        saved = Saved.empty(x.q, p, C, plan.checkpoint_chunks)
        prepared, checkpoints = Saved.of(saved, p, C, plan.checkpoint_chunks)
    else:
        prepared = Prepared.empty(x.q, p, C, False)
        saved = checkpoints = empty(x.q, 0, dtype=p.saved_dtype)
    o = x.v.new_empty(x.v.shape)
    final = empty(x.q, p.N, p.HV, p.K, p.V)
    starts, ends = segment_states(x.q, p, p.slots(C), plan.forward_segment_chunks)
    tensors = tensors_of(x, prepared)._replace(
        o=o, final=final, checkpoints=checkpoints, starts=starts, ends=ends, initial=x.state
    )
    execute(plan.forward, plan, kind.scale, tensors)
    return o, final, saved


def tensors_of(x: ScanOperands, prepared: Prepared) -> Tensors:
    """Return the operands and the results of prepare, by the names of the kernels' parameters."""
    strengths, slopes = prepared.derivatives()
    return Tensors(
        q=x.q, k=x.k, e=x.e, v_key=x.v_key, v=x.v, log_decay=x.log_decay, b=x.b, w=x.w, state=x.state,
        cu=x.cu_seqlens, gates=prepared.gates, decay_bounds=prepared.decay_bounds, wy_tiles=prepared.wy_tiles,
        scaled=prepared.scaled, strengths=strengths, slopes=slopes,
    )  # fmt: skip
