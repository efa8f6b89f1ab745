"""Products of rows and columns with decays per channel, of any strength, as a custom operator with its own backward.

    products_ij = sum_k row_ik column_jk exp(g_ik - g_jk) for i > j, else 0     [N, Z, R, W, M, M]
    row_i exp(g_i),   column_j exp(g_last - g_j)                                [N, Z, M, K]

exp(-g_j) alone overflows for strong decays. The dyadic decomposition of the chunk splits it recursively in halves, and
takes both decays relative to the boundary between the two halves, where both factors are at most 1. Level s computes
the products of the rows in the second half of each block of 2 s micro-steps with the columns in the first half.

It is one operator: with traced levels the compilation of KDA takes three times as long.

N chunks, Z = B x HV, X rows of N Z, M micro-steps per chunk, K key width, R kinds of rows (queries, erase keys),
W kinds of columns (write keys), L blocks of a level
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad

from deltazoo.backends.compile.intra_chunk import exp_as
from deltazoo.backends.compile.operator_body import body
from deltazoo.backends.torch_ext.autograd import differentiable_once
from deltazoo.backends.torch_ext.custom_op import cache_forward_signature, differentiate_exported, operator

_SEGMENT = 2**19  # elements of an operand that a CPU processes at a time, so that intermediate results stay in a cache


class KeyOperands(NamedTuple):
    """The rows and columns of a chunk, and their decays.

    Args:
        g, decay: log decays [N, Z, M, K or 1], cumulative and of each micro-step.
        q, e: rows [N, Z, M, K], queries and erase keys; e may be None.
        k, b: columns [N, Z, M, K], write keys; b may be None.
    """

    g: Tensor
    decay: Tensor
    q: Tensor
    e: Tensor | None
    k: Tensor
    b: Tensor | None

    def of_keys(self) -> list[Tensor]:
        """Return the rows, then the columns."""
        return [x for x in self[2:] if x is not None]


def decayed_keys(operands: KeyOperands, early: Sequence[bool]) -> tuple[Tensor, KeyOperands]:
    """Multiply rows and columns with their decays; differentiable once.

    Args: early: for each kind of rows, whether its g_i excludes the decay of micro-step i.
    Returns: the products, and the operands with the decayed rows and columns.
    """
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands):
        products, *decayed = _DecayedKeys.apply(list(early), *operands)
    else:
        products, *decayed = _forward_op(*operands, list(early))
    keys: list[Any] = [None if x is None else y for x, y in zip(operands[2:], decayed, strict=True)]
    return products, KeyOperands(operands.g, operands.decay, *keys)


class _Part(NamedTuple):
    """Some rows of N Z: the cumulative decays of each kind of rows, of the columns, and the operands, [X, M, K]."""

    g_rows: list[Tensor]
    g: Tensor
    keys: list[Tensor]

    def padded(self, size: int) -> "_Part":
        """Extend the cumulative decays by their last value, and the operands by zeros, to `size` micro-steps."""
        missing = size - self.g.shape[1]
        if not missing:
            return self
        *g_rows, g = _once(lambda x: torch.cat([x, x[:, -1:].expand(-1, missing, -1)], 1), [*self.g_rows, self.g])
        return _Part(g_rows, g, [pad(x, (0, 0, 0, missing)) for x in self.keys])

    def scan_decays(self) -> list[Tensor]:
        """Return exp(g) of each kind of rows and exp(g_last - g) for each kind of columns."""
        to_end = _exp_of_difference(self.g[:, -1:], self.g, self.keys[0])
        of_rows = _once(lambda g: exp_as(g, self.keys[0]), self.g_rows)
        return [*of_rows, *[to_end] * (len(self.keys) - len(self.g_rows))]

    def factors(self, s: int) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
        """Return the decayed rows [X L, R s, K] and columns [X L, W s, K] of level s, and their decays."""
        R = len(self.g_rows)
        boundary = _half(self.g, 0, s)[:, :, -1:]
        row_decays = _once(lambda g: _exp_of_difference(_half(g, 1, s), boundary, self.keys[0]), self.g_rows)
        column_decay = _exp_of_difference(boundary, _half(self.g, 0, s), self.keys[0])
        rows = _multiplied(self.keys[:R], 1, s, row_decays)
        columns = _multiplied(self.keys[R:], 0, s, [column_decay] * (len(self.keys) - R))
        return rows, columns, row_decays, column_decay


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    x, early = KeyOperands(*arguments[:-1]), arguments[-1]
    keys = [y.flatten(0, 1) for y in x.of_keys()]
    X, M, _ = keys[0].shape
    R, size = len(early), 1 << (M - 1).bit_length()
    products = keys[0].new_zeros(X, R, len(keys) - R, size, size)
    decayed = [torch.empty_like(y) for y in keys]
    for places, part in _parts(x, early):
        padded = part.padded(size)
        for s in _levels(size):
            rows, columns, *_ = padded.factors(s)
            block = torch.bmm(rows, columns.mT)
            block = rearrange(block, "(x l) (r i) (w j) -> x r w i j l", l=size // 2 // s, i=s, j=s)
            _of_level(products[places], s).copy_(block)
        for y, decay, out in zip(part.keys, part.scan_decays(), decayed, strict=True):
            torch.mul(y, decay, out=out[places])
    results = (torch.unflatten(y, 0, x.q.shape[:2]) for y in (products[..., :M, :M].contiguous(), *decayed))
    return next(results), *(x.q.new_empty(0) if y is None else next(results) for y in x[2:])


def _forward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    x, early = KeyOperands(*arguments[:-1]), arguments[-1]
    N, Z, M, _ = x.q.shape
    products = x.q.new_empty(N, Z, len(early), len(x.of_keys()) - len(early), M, M)
    return products, *(x.q.new_empty(0 if y is None else y.shape) for y in x[2:])


def _backward(*arguments: Any) -> list[Tensor]:
    """The factors are computed again.

    The gradient of g_i is row_i d_row_i - column_i d_column_i, and that of g_last also has the sum of the decayed
    columns times their gradients. decay_i has the gradient -row_i d_row_i of each kind of rows that is early.
    """
    *operands, early, d_products, d_decayed = arguments
    x = KeyOperands(*operands)
    R, M, size = len(early), x.q.shape[2], 1 << (x.q.shape[2] - 1).bit_length()
    d_products, *d_decayed = (y.flatten(0, 1) for y in (d_products, *d_decayed))
    d_g, d_decay, *d_keys = (torch.empty_like(y).flatten(0, 1) for y in (x.g, x.decay, *x.of_keys()))
    for places, part in _parts(x, early):
        padded = part.padded(size)
        d_blocks = pad(d_products[places], (0, size - M, 0, size - M))
        d_scan = [d[places] * decay for d, decay in zip(d_decayed, part.scan_decays(), strict=True)]
        d_padded = [pad(d, (0, 0, 0, size - M)) if size > M else d.clone() for d in d_scan]
        for s in _levels(size):
            rows, columns, row_decays, column_decay = padded.factors(s)
            d_block = rearrange(_of_level(d_blocks, s), "x r w i j l -> (x l) (r i) (w j)")
            d_rows = rearrange(torch.bmm(d_block, columns), "(x l) (r i) k -> r x l i k", l=size // 2 // s, i=s)
            d_columns = rearrange(torch.bmm(d_block.mT, rows), "(x l) (w j) k -> w x l j k", l=size // 2 // s, j=s)
            for d, d_row, row_decay in zip(d_padded[:R], d_rows, row_decays, strict=True):
                _half(d, 1, s).addcmul_(d_row, row_decay)
            for d, d_column in zip(d_padded[R:], d_columns, strict=True):
                _half(d, 0, s).addcmul_(d_column, column_decay)
        for d, out in zip(d_padded, d_keys, strict=True):
            out[places] = d[:, :M]
        x_dx = [y * d[:, :M] for y, d in zip(part.keys, d_padded, strict=True)]
        d_last = functools.reduce(torch.add, [y * d for y, d in zip(part.keys[R:], d_scan[R:], strict=True)])
        of_g = functools.reduce(torch.add, x_dx[:R]) - functools.reduce(torch.add, x_dx[R:])
        of_g[:, -1] += d_last.sum(1)
        d_g[places] = _summed_as(of_g, x.g)
        if any(early):
            of_early = [d for d, is_early in zip(x_dx[:R], early, strict=True) if is_early]
            d_decay[places] = -_summed_as(functools.reduce(torch.add, of_early), x.decay)
    if not any(early):
        d_decay.zero_()
    return [torch.unflatten(y, 0, x.q.shape[:2]) for y in (d_g, d_decay, *d_keys)]


def _backward_fake(*arguments: Any) -> list[Tensor]:
    x = KeyOperands(*arguments[:-3])
    return [y.new_empty(y.shape) for y in (x.g, x.decay, *x.of_keys())]


def _parts(x: KeyOperands, early: Sequence[bool]) -> Iterator[tuple[slice, _Part]]:
    """Yield parts of the N Z rows, and their places."""
    g, decay, *keys = (y.flatten(0, 1) for y in (x.g, x.decay, *x.of_keys()))
    X, M, K = keys[0].shape
    count = max(1, _SEGMENT // (M * K) if x.q.is_cpu else X)
    for first in range(0, X, count):
        places = slice(first, first + count)
        late_g = g[places]
        early_g = late_g - decay[places] if any(early) else late_g
        g_rows = [early_g if is_early else late_g for is_early in early]
        yield places, _Part(g_rows, late_g, [y[places] for y in keys])


def _levels(size: int) -> list[int]:
    """Return the sizes of the halves of each level: 1, 2, 4, ..., size / 2."""
    return [1 << level for level in range(size.bit_length() - 1)]


def _half(x: Tensor, index: int, s: int) -> Tensor:
    """Return the first or the second halves of the blocks of level s, [X, M, K] -> [X, L, s, K], a view."""
    return torch.unflatten(x, 1, (-1, 2, s))[:, :, index]


def _of_level(products: Tensor, s: int) -> Tensor:
    """Return the products of level s, [X, R, W, M, M] -> [X, R, W, s, s, L], a view."""
    blocks = rearrange(products, "x r w (l i) (m j) -> x r w l i m j", i=2 * s, j=2 * s)
    return blocks[..., s:, :, :s].diagonal(0, 3, 5)


def _multiplied(keys: list[Tensor], index: int, s: int, decays: list[Tensor]) -> Tensor:
    """Multiply halves of the operands, of F kinds, by their decays, [X L, F s, K]."""
    halves = [_half(x, index, s) for x in keys]
    X, L, _, K = halves[0].shape
    result = halves[0].new_empty(X, L, len(keys), s, K)
    for place, (half, decay) in enumerate(zip(halves, decays, strict=True)):
        torch.mul(half, decay, out=result[:, :, place])
    return result.flatten(0, 1).flatten(1, 2)


def _exp_of_difference(a: Tensor, b: Tensor, like: Tensor) -> Tensor:
    """Return exp(a - b) in the dtype of `like`."""
    return (a - b).to(like.dtype).exp_()


def _once(function: Callable[[Tensor], Tensor], values: list[Tensor]) -> list[Tensor]:
    """Apply a function to each value, once to those that are the same tensor."""
    results = {key: function(value) for key, value in {id(value): value for value in values}.items()}
    return [results[id(value)] for value in values]


def _summed_as(gradient: Tensor, x: Tensor) -> Tensor:
    """Sum a gradient over the channels if x has one for all."""
    return (gradient.sum(-1, keepdim=True) if x.shape[-1] == 1 else gradient).to(x.dtype)


_OPERANDS = "Tensor g, Tensor decay, Tensor q, Tensor? e, Tensor k, Tensor? b, bool[] early"
_forward_op = operator(
    f"decayed_keys({_OPERANDS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", body(_forward), _forward_fake
)
_backward_op = operator(
    f"decayed_keys_backward({_OPERANDS}, Tensor d_products, Tensor[] d_decayed) -> Tensor[]",
    body(_backward),
    _backward_fake,
)


@cache_forward_signature
class _DecayedKeys(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(early: list[bool], *operands: Any) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = _forward_op(*operands, early)
        return results

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.early = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, d_products: Tensor, *d_keys: Tensor) -> tuple[Tensor | None, ...]:
        operands = ctx.saved_tensors
        d_decayed = [d for x, d in zip(operands[2:], d_keys, strict=True) if x is not None]
        gradients = iter(_backward_op(*operands, ctx.early, d_products, d_decayed))
        return None, *(None if x is None else next(gradients) for x in operands)


differentiate_exported("decayed_keys", lambda *arguments: _DecayedKeys.apply(arguments[-1], *arguments[:-1]))
