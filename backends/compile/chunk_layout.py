"""Layout of the operands in chunks: [B, T, ...] to [B, N, C, ...] and back.

B batch, T time, N chunks, C tokens per chunk, HV value heads, K key width, V value width
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from deltazoo.backends.compile.packing import Packing, pack, packing, unpack
from deltazoo.backends.torch_ext.symbolic_sizes import is_known
from deltazoo.backends.update.base import UpdateInputs, state_dtype
from deltazoo.backends.update.lowering import log_decay
from deltazoo.backends.update.spec import UpdateSpec


def split_into_chunks(
    spec: UpdateSpec, inputs: UpdateInputs, C: int, min_chunks: int = 1
) -> tuple[UpdateInputs, Packing | None]:
    """Split the operands into chunks, [B, T, ...] -> [B, N, C, ...], padded with zeros.

    Args:
        C: tokens per chunk, a power of two; C x householders must be a multiple of 16.
        min_chunks: lower bound on N.
    Returns: the operands, and for packed sequences the table that maps tokens to chunk slots.
    """
    T = inputs.q.shape[1]
    constant = {"rate", "state", "cu_seqlens"}
    if spec.decay == "fixed":  # expanded over time, so that the padding of a sequence does not decay its state
        inputs = inputs._replace(log_decay=log_decay(spec, inputs))
    table = None if inputs.cu_seqlens is None else packing(inputs.cu_seqlens, T, C)
    N = (T + C - 1) // C
    N = max(N, min_chunks) if min_chunks > 1 else N
    if not is_known(T <= C) and not is_known(T > C):  # else a graph with a dynamic T would depend on N > 1
        N = torch.sym_max(N, 2)
    chunks = {}
    for name, x in inputs._asdict().items():
        if x is None or name in constant:
            continue
        if table is not None:
            chunks[name] = pack(x, table)
            continue
        # While tracing, the comparison would be a guard on T: one graph for whole chunks and one for all other T.
        if torch.compiler.is_compiling() or N * C > T:
            x = pad(x, (0, 0) * (x.dim() - 2) + (0, N * C - T))
        chunks[name] = x.reshape(x.shape[0], N, C, *x.shape[2:])
    if table is not None and inputs.state is None:  # the number of sequences is known to the table only
        sizes = table.sequences, inputs.v.shape[-2], inputs.q.shape[-1], inputs.v.shape[-1]
        chunks["state"] = inputs.q.new_zeros(sizes, dtype=state_dtype(inputs.q.dtype))
    return inputs._replace(**chunks, cu_seqlens=None), table


def merge_chunks(o: Tensor, T: int, table: Packing | None) -> Tensor:
    """Undo the split for an output: [B, N, C, HV, V] -> [B, T, HV, V]."""
    if table is not None:
        return unpack(o, table)
    padded = o.flatten(1, 2)
    if torch.compiler.is_compiling():  # the contiguity of a slice would be a guard on T; a padded copy is contiguous
        padded = padded.contiguous()  # else the copy would keep the order of strides that one chunk has
        return pad(padded, (0, 0) * (padded.dim() - 2) + (0, T - padded.shape[1]))
    return padded[:, :T]
