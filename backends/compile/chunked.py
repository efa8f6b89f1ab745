"""Chunk-parallel form of the update in plain PyTorch.

Each chunk of C tokens is computed in parallel from the state before it (the WY representation of DeltaNet, see
`chunk_scan`): the intra-chunk operands P and A here, the inter-chunk recurrence of the state in `chunk_scan`. The decay
enters the intra-chunk operands in one of two ways:

- a scalar decay per head multiplies the scores Q K^T by exp(g_i - g_j), so that the heads of a group share their keys
  (`intra_chunk_scalar`);
- a decay per channel is multiplied into the keys (`intra_chunk_channel`).

B batch, N chunks, C tokens per chunk, M = C x householders micro-steps per chunk, H key heads, HV value heads,
G value heads per key head, K key width, V value width, Y sequences
"""

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad

from deltazoo.backends.compile.chunk_scan import chunk_scan
from deltazoo.backends.compile.element_scan import element_update, uses_element_scan
from deltazoo.backends.compile.intra_chunk import MIN_LOG_DECAY, LoweredChunks
from deltazoo.backends.compile.intra_chunk_channel import channel_operands
from deltazoo.backends.compile.intra_chunk_scalar import scalar_operands
from deltazoo.backends.io.errors import ShapeError
from deltazoo.backends.update.base import UpdateInputs, state_dtype
from deltazoo.backends.update.lowering import accumulates_rounding_errors, log_decay, strengths
from deltazoo.backends.update.spec import UpdateSpec

# In place of MIN_LOG_DECAY for operands of 16 bits, whose cumulative sums are in float32: its exp is 0 in float32, and
# a sum of 64 of them has an error of 3e-4, which such operands allow.
_MIN_LOG_DECAY_16_BITS = -104.0


def chunked_update(spec: UpdateSpec, x: UpdateInputs, sequence: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the update of operands in chunks.

    Args:
        x: from `split_into_chunks`; `state` is [B, HV, K, V], or [Y, HV, K, V] with `sequence`.
        sequence: [N] int64, the sequence of each chunk; None: row b of the batch is sequence b.
    Returns: o [B, N, C, HV, V] in the dtype of v, and the final states, shaped as `state`.
    """
    B, N, _, H, K = x.q.shape
    HV, V = x.v.shape[-2:]
    for tensor in x:
        if tensor is not None and tensor is not x.state and tensor is not x.rate and tensor.shape[:2] != (B, N):
            raise ShapeError(f"every operand must have {B} x {N} chunks, got {list(tensor.shape)}")
    if uses_element_scan(spec, x):
        return element_update(spec, x, sequence)
    chunks = _lower(spec, x)
    has_channel_decay = chunks.decay is not None and chunks.decay.dim() == 5
    keys_per_value_head = spec.transition == "dplr" or (spec.beta == "channel" and spec.transition == "delta")
    by_channel = has_channel_decay or keys_per_value_head
    state = x.state
    if state is None:
        state = x.q.new_zeros(B, HV, K, V, dtype=state_dtype(x.q.dtype))
    groups = 1 if by_channel else HV // H
    rows = "b (h g) k v -> 1 (b h) g k v" if sequence is None else "y (h g) k v -> y h g k v"
    state = rearrange(state, rows, g=groups)
    operands, o_direct = (channel_operands if by_channel else scalar_operands)(spec, chunks, state, HV // H)
    tf32 = chunks.has_16_bits and not accumulates_rounding_errors(spec)
    o, final_state = chunk_scan(operands._replace(sequence=sequence), tf32)
    o = rearrange(o if o_direct is None else o + o_direct, "n (b h) g c v -> b n c (h g) v", b=B).to(x.v.dtype)
    if sequence is None:
        return o, rearrange(final_state, "1 (b h) g k v -> b (h g) k v", b=B)
    return o, final_state.flatten(1, 2)


def _lower(spec: UpdateSpec, x: UpdateInputs) -> LoweredChunks:
    """Apply scale and strengths, and merge the micro-steps of a chunk into one axis."""
    dtype, n = state_dtype(x.q.dtype), spec.householders
    has_16_bits = x.q.dtype.itemsize == 2
    x = x._replace(q=_time_major(x.q), k=_time_major(x.k), v=_time_major(x.v))
    erase, write = strengths(spec, x)
    decay = x.log_decay if spec.decay == "fixed" else log_decay(spec, x)
    if decay is not None:
        decay = decay.clamp(min=_MIN_LOG_DECAY_16_BITS if has_16_bits else MIN_LOG_DECAY)
        if n > 1:  # a token decays the state on its first micro-step
            decay = pad(decay.unsqueeze(3), (0, 0) * (decay.dim() - 3) + (0, n - 1)).flatten(2, 3)
    v = x.v.to(dtype)
    if write is not None:
        v = v * (write if write.dim() == v.dim() else write.unsqueeze(-1))

    def micro_steps(tensor: Tensor) -> Tensor:
        """[B, N, C, (n,) ...] -> [B, N, M, ...] in `dtype`."""
        return (tensor if n == 1 else tensor.flatten(2, 3)).to(dtype)

    return LoweredChunks(
        q=spec.scale_of(x.q.shape[-1]) * x.q.to(dtype),
        k=micro_steps(x.k),
        v=micro_steps(v),
        e=None if x.erase_key is None else micro_steps(x.erase_key),
        a=None if x.a is None else micro_steps(x.a),
        b=None if x.b is None else micro_steps(x.b),
        erase=None if erase is None else micro_steps(erase),
        decay=decay,
        has_16_bits=has_16_bits,
    )


def _time_major(x: Tensor) -> Tensor:
    """Return x [B, N, C, ...] unchanged; the compiler then writes its gradient in this order instead of copying it."""
    return torch.unflatten(x.flatten(1, 2), 1, x.shape[1:3])
