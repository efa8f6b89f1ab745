"""Log-linear attention: a state for each level of a Fenwick tree over the past, weighted by the query.

B batch, T time, D width, H key heads, HV value heads, K key width, V value width, C tokens per chunk, L levels
"""

import math
from typing import ClassVar

import torch
from einops import rearrange
from torch import Tensor, nn

from deltazoo.backends.context_parallel.heads import HeadShare
from deltazoo.backends.ops.log_linear import CHUNK, LevelOperands, level_scan, level_step_, refusals
from deltazoo.backends.torch_ext.symbolic_sizes import is_known
from deltazoo.backends.update.base import UpdateInputs, state_dtype
from deltazoo.backends.update.lowering import log_decay, strengths
from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.backends.update.watch import runs_by_kernel
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import HeadShape
from deltazoo.mixers.core.sequences import mask_padding, token_counts, unpack
from deltazoo.mixers.core.state import write_back
from deltazoo.mixers.parts.gates.decays import softplus
from deltazoo.mixers.parts.memory.log_linear_chunks import scan_packed, scan_rows


class LogLinearUpdate(nn.Module):
    """o_t = sum_l lambda_t^(l) (S_t^(l))^T q_t, where S^(l) contains the writes of the tokens of level l.

    At time t, the level of token s is 0 if s = t, and else the number of binary digits of t xor s, at most L - 1. So
    level l holds 2^(l - 1) tokens or none, and the last level all older tokens. Each S^(l) follows the recurrence
    `spec`. lambda_t^(l) = softplus(gain_l (W x_t)_l) for each value head.

    Inside a chunk the weights of all pairs of tokens are computed from a C x C matrix; between chunks the states of the
    levels are carried: O(T L) work, O(L) states. On a GPU kernels compute whole chunks and decoded tokens
    (backends/ops/log_linear.py). All else is computed in float32 (float64) in plain PyTorch, in chunks that may start
    at any position.

    Args: spec: additive or delta, with a decay per head and scale 1; levels: L.
    State: "levels", S^(1) to S^(L - 1), [B, L - 1, HV, K, V]; "seen", the number of tokens so far, [B] int64.
    Initialisation: gain = 1.
    Source: Log-Linear Attention 2506.04761; lambda and its initial values as in the authors' code.
    """

    no_weight_decay: ClassVar[tuple[str, ...]] = ("gain",)

    def __init__(self, shape: HeadShape, spec: UpdateSpec, levels: int) -> None:
        super().__init__()
        self.shape, self.spec, self.levels = shape, spec, levels
        self.proj = nn.Linear(shape.width, shape.value_heads * levels, bias=False)
        self.gain = nn.Parameter(torch.empty(shape.value_heads, levels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)

    def init_state(self, batch: int, like: Tensor) -> dict[str, Tensor]:
        """Return the state before the first token, on the device of `like`."""
        return {"levels": self._no_writes(batch, 1, like), "seen": like.new_zeros(batch, dtype=torch.int64)}

    def _no_writes(self, batch: int, first: int, like: Tensor) -> Tensor:
        """Return the states of the levels from `first`, before any write."""
        _, _, HV, K, V, _ = self.shape
        return like.new_zeros(batch, self.levels - first, HV, K, V, dtype=state_dtype(like.dtype))

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: dict[str, Tensor] | None, context: Context
    ) -> tuple[Tensor, dict[str, Tensor] | None]:
        """Return o [B, T, HV, V] and the new state.

        With a state, packed sequences are unpacked to N rows of T tokens. Without one, one row holds the chunks of all.
        """
        raw = self.proj(x)
        dtype = state_dtype(inputs.v.dtype)
        weights = softplus(self.gain.to(dtype) * rearrange(raw, "b t (h l) -> b t h l", l=self.levels).to(dtype))
        if context.mask is not None:
            inputs = mask_padding(inputs, context.mask)
        erase, write = strengths(self.spec, inputs)
        decay = log_decay(self.spec, inputs)
        assert decay is not None
        v = inputs.v if write is None else inputs.v * write[..., None]
        operands = LevelOperands(inputs.q, inputs.k, v, decay, erase, weights)
        if context.parallel is not None:
            operands = _repeated_keys(operands, context.parallel.ranks)
        count_B = token_counts(x, context)
        share, context = HeadShare(operands.q.shape[2], context.parallel), context.of_line()
        operands = LevelOperands(*share.scatter(operands))
        if state is None:
            o = self._without_state(operands, count_B, context.cu_seqlens)
            return share.gather(o.to(inputs.v.dtype)), None
        own = {"levels": share.own(state["levels"], 2), "seen": state["seen"]}
        if context.cu_seqlens is None:
            o, levels = self._with_state(operands, count_B, own)
        else:
            rows, index_T = _unpack(operands, context.cu_seqlens)
            o, levels = self._with_state(rows, count_B, own)
            o = o.flatten(0, 1)[index_T][None]
        new = {"levels": share.all(levels, 2), "seen": state["seen"] + count_B}
        kept = {name: write_back(state[name], tensor) for name, tensor in new.items()}
        return share.gather(o.to(inputs.v.dtype)), kept

    def _without_state(self, x: LevelOperands, count_B: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """Return o. A sequence begins at token 0 of the tree."""
        on_gpu = _for_kernels(x)
        if runs_by_kernel("log-linear attention", refusals(on_gpu)):
            return level_scan(on_gpu._replace(cu=cu_seqlens))[0]
        # Chunks start at multiples of CHUNK, where the levels inside a chunk hold no tokens.
        levels = self._no_writes(x.q.shape[0], min(CHUNK.bit_length(), self.levels - 1), x.q)[:, :, : x.v.shape[2]]
        if cu_seqlens is None:
            return scan_rows(_for_scan(x), count_B, levels)[0]
        return scan_packed(_for_scan(x), cu_seqlens, levels)

    def _with_state(self, x: LevelOperands, count_B: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return o of rows, and the new states of the levels."""
        T = x.q.shape[1]
        on_gpu = _for_kernels(x)
        if runs_by_kernel("log-linear attention", refusals(on_gpu)):
            if T == 1 and not torch.is_grad_enabled():
                return level_step_(on_gpu, state["levels"], state["seen"], count_B), state["levels"]
            if not is_known(T <= CHUNK):
                return self._in_pieces(on_gpu, count_B, state)
        return scan_rows(_for_scan(x), count_B, state["levels"], state["seen"])

    def _in_pieces(self, x: LevelOperands, count_B: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Run the kernels on the whole chunks of each row, and plain PyTorch on the tokens before and after them.

        The chunks of the kernels begin at multiples of CHUNK, where the levels inside a chunk hold no tokens.
        """
        seen_B, levels = state["seen"], state["levels"]
        begin_B = torch.minimum(-seen_B % CHUNK, count_B)
        chunks_B = (count_B - begin_B) // CHUNK
        end_B = begin_B + CHUNK * chunks_B
        o_head, levels = self._piece(x, torch.zeros_like(begin_B), begin_B, levels, seen_B)
        low, high = levels.split([CHUNK.bit_length() - 1, self.levels - CHUNK.bit_length()], 1)
        middle = _rows_from(x, begin_B, x.q.shape[1])._replace(
            state=high, first=((seen_B + begin_B) // CHUNK).int(), counts=(CHUNK * chunks_B).int()
        )
        o, high = level_scan(middle)
        o_tail, levels = self._piece(x, end_B, count_B - end_B, torch.cat([low, high], 1), seen_B + end_B)
        time_T = torch.arange(x.q.shape[1], device=seen_B.device)
        o = _shifted(o, begin_B, time_T)
        o = torch.where((time_T < begin_B[:, None])[..., None, None], _shifted(o_head, 0 * begin_B, time_T), o)
        return torch.where((time_T < end_B[:, None])[..., None, None], o, _shifted(o_tail, end_B, time_T)), levels

    def _piece(
        self, x: LevelOperands, begin_B: Tensor, count_B: Tensor, levels: Tensor, seen_B: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Process at most CHUNK tokens of each row. Returns: o [B, CHUNK, HV, V]; the new states of the levels."""
        is_real = torch.arange(CHUNK, device=seen_B.device) < count_B[:, None]
        operands = [
            torch.where(is_real.view(*is_real.shape, *[1] * (y.dim() - 2)), y, 0.0)
            for y in _for_scan(_rows_from(x, begin_B, CHUNK))
        ]
        o, levels = scan_rows(operands, count_B, levels, seen_B)
        return o.to(x.v.dtype), levels

    def extra_repr(self) -> str:
        return f"{self.spec!r}, levels={self.levels}"


def _repeated_keys(x: LevelOperands, ranks: int) -> LevelOperands:
    """Repeat q and k, so that the ranks get equally many value heads if the number of value heads allows it."""
    H, HV = x.q.shape[2], x.v.shape[2]
    heads = math.lcm(H, ranks)
    copies = (heads if HV % heads == 0 else HV) // H
    return x._replace(q=x.q.repeat_interleave(copies, 2), k=x.k.repeat_interleave(copies, 2))


def _for_kernels(x: LevelOperands) -> LevelOperands:
    """Return the operands in the dtypes of the kernels."""
    wide = state_dtype(x.q.dtype)
    erase = None if x.erase is None else x.erase.to(wide)
    return x._replace(v=x.v.to(x.q.dtype), log_decay=x.log_decay.to(wide), erase=erase)


def _for_scan(x: LevelOperands) -> list[Tensor]:
    """Return the operands of `scan_rows`, in the dtype of the states."""
    operands = (x.q, x.k, x.log_decay, x.erase, x.weights, x.v)
    return [y.to(state_dtype(x.q.dtype)) for y in operands if y is not None]


def _unpack(x: LevelOperands, cu_seqlens: Tensor) -> tuple[LevelOperands, Tensor]:
    """Move each packed sequence to a row. Returns: the rows; the index of each packed token in the flattened rows."""
    names = [name for name, y in zip(x._fields, x, strict=True) if y is not None]
    rows, _, index_T = unpack([getattr(x, name) for name in names], cu_seqlens)
    return x._replace(**dict(zip(names, rows, strict=True))), index_T


def _rows_from(x: LevelOperands, begin_B: Tensor, size: int) -> LevelOperands:
    """Return `size` tokens of each row from `begin_B` on; after the last token it is repeated."""
    time = begin_B[:, None] + torch.arange(size, device=begin_B.device)
    rows = torch.arange(begin_B.shape[0], device=begin_B.device)[:, None]
    index = time.clamp(max=x.q.shape[1] - 1)
    return LevelOperands._make(None if y is None else y[rows, index] for y in x)


def _shifted(o: Tensor, begin_B: Tensor, time_T: Tensor) -> Tensor:
    """Return for each token of a row its output; o [B, .., HV, V] begins at `begin_B`. Elsewhere it is any number."""
    index = (time_T - begin_B[:, None]).clamp(0, o.shape[1] - 1)
    return o.gather(1, index[..., None, None].expand(-1, -1, *o.shape[2:]))
