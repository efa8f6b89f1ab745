"""Run the backward of an update: allocate its gradients and scratch, and launch the kernels of the plan.

Long inputs are processed window by window of chunks, the last first, so that the scratch for recomputed states stays
small.

B batch, T time, N sequences, H key heads, HV value heads, K key width, V value width, C chunk
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.triton.chunk.execute import execute
from deltazoo.backends.triton.chunk.forward import empty, segment_states, tensors_of
from deltazoo.backends.triton.chunk.plan import Plan
from deltazoo.backends.triton.operands import Gradients, Saved, ScanKind, ScanOperands


class Scratch(NamedTuple):
    """The scratch buffers of a window, in `saved_dtype`; None: no such buffer.

    With `Windows.states_in_gradients` a chunk's states are stored in the rows of its gradients, which the gradients
    kernel writes last (channel_gradients.py): states is d_log_decay as 16-bit elements, dstates is d_q, continued in
    dstates_high, which is d_k.

    Args:
        states: [slots, HV, V, K], the state before each chunk. v_new: [slots, C, HV, V], the values that the delta rule
            writes.
        dstates: [slots, HV, V, K], the gradient of the state after each chunk; None in the sweep.
        du: [slots, C, HV, V], or dv where du is recovered from dv.
        partial: [2 or 3, slots, C, programs, K], the key gradients of each program, if several share a key head.
        spare: [N, 128, H, K], of a backward without windows: the state before the last chunk of each sequence. That
            before another chunk is stored where the chunk's gradients will be written.
    """

    states: Tensor | None = None
    v_new: Tensor | None = None
    dstates: Tensor | None = None
    dstates_high: Tensor | None = None
    du: Tensor | None = None
    partial: Tensor | None = None
    spare: Tensor | None = None

    @classmethod
    def empty(cls, x: ScanOperands, plan: Plan, d: Gradients, given: Collection[str] = ()) -> "Scratch":
        """Allocate the buffers that a plan uses. Args: given: names of those that exist."""
        p, C, windows, dtype = plan.problem, plan.config.chunk, plan.windows, plan.problem.saved_dtype
        if windows is None:
            return cls(spare=empty(x.q, p.N, 128, p.H, p.K, dtype=dtype))
        slots, sweep = windows.slots, "gradients" not in plan.kernels
        states, values = (slots, p.HV, p.V, p.K), (slots, C, p.HV, p.V)
        in_gradients = d.log_decay if windows.states_in_gradients else None
        partial = (3 if p.erase_key else 2, slots, C, windows.programs, p.K)
        return cls(
            states=None
            if "states" in given
            else empty(x.q, *states, dtype=dtype)
            if in_gradients is None
            else in_gradients.view(dtype),
            v_new=empty(x.q, *values, dtype=dtype) if p.delta and "v_new" not in given else None,
            dstates=None if sweep else empty(x.q, *states, dtype=dtype) if in_gradients is None else d.q,
            dstates_high=None if in_gradients is None else d.k,
            du=empty(x.q, *values, dtype=dtype) if p.stores_du and not sweep else d.v,
            partial=empty(x.q, *partial, dtype=dtype) if windows.programs > p.H else None,
        )


def backward(
    operands: ScanOperands,
    kind: ScanKind,
    saved: Saved,
    d_o: Tensor,
    d_final: Tensor | None,
    plan: Plan,
    given: Mapping[str, Tensor] = MappingProxyType({}),
) -> Gradients:
    """Launch the backward of a plan. Returns: the gradients of the operands.

    Args: d_final: None is zero. given: tensors that the plan does not compute, by their names in `Tensors`.
    """
    x, p, sums = kind.with_write(operands), plan.problem, plan.sums
    assert sums is not None
    d = Gradients.empty(operands, kind)
    if p.reparam != "none":
        x = x._replace(b=saved.prepared.strengths, w=saved.prepared.strengths)
    d_state = empty(x.q, p.N, p.HV, p.K, p.V) if d.state is None else d.state
    # With segments only `combine` reads the gradient of the state after the window; it takes None for zero.
    windows = max(launch.span.windows for launch in plan.backward) if plan.backward else 1
    is_zero = d_final is None and d.state is None and plan.segment_chunks > 0 and windows == 1
    if not is_zero:
        _ = d_state.zero_() if d_final is None else d_state.copy_(d_final)
    slots = p.slots(plan.config.chunk)
    sum_slots = 0 if p.dplr else slots  # DPLR has no gradients of gates
    starts, ends = segment_states(x.q, p, plan.windows.slots if plan.windows else slots, plan.segment_chunks)
    # that of a fixed decay is the sum over all tokens of one per token
    d_log_decay = empty(x.q, *x.v.shape[:3]) if p.decay == "fixed" else d.log_decay
    tensors = tensors_of(x, saved.prepared)._replace(
        **Scratch.empty(x, plan, d, given)._asdict(), checkpoints=saved.checkpoints, starts=starts, ends=ends,
        initial=None if is_zero else d_state, do=d_o, dstate=d_state,
        dgates=empty(x.q, sums.tiles, sum_slots, p.HV, 4 if p.gates_before else 3, plan.config.chunk),
        state_products=empty(x.q, sums.tiles, slots, p.HV),
        dq=d.q, dk=d.k, de=d.e, dv_key=d.v_key, dv=d.v, dlog_decay=d_log_decay, db=d.b, dw=d.w,
    )  # fmt: skip
    execute(plan.backward, plan, kind.scale, tensors._replace(**given))
    if d_log_decay is not None and p.decay == "fixed":
        torch.sum(d_log_decay, (0, 1), out=d.log_decay)
    return d
