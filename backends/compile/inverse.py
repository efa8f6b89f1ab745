"""The inverse of a unit lower-triangular matrix, many at once, by merging inverses of blocks."""

import torch
from torch import Tensor
from torch.nn.functional import pad

_BLOCK = 8


def unit_lower_inverse(a: Tensor) -> Tensor:
    """(I + A)^-1 for strictly lower A [..., M, M].

    Diagonal blocks of 8 by forward substitution, then pairs of blocks are merged, [[X, 0], [-Y L X, Y]], until one
    is left. Every intermediate is a block of the inverse, so keys that are nearly parallel do no harm (a Neumann
    series would explode).
    """
    M = a.shape[-1]
    size = max(_BLOCK, 1 << (M - 1).bit_length())
    if size > M:
        return unit_lower_inverse(pad(a, (0, size - M, 0, size - M)))[..., :M, :M].contiguous()
    inverse = _diagonal_inverses(a.reshape(-1, size, size))
    lower = a.reshape(-1, size, size)
    s = _BLOCK
    while s < size:
        for first in range(0, size, 2 * s):
            upper, under = slice(first, first + s), slice(first + s, first + 2 * s)
            product = torch.bmm(torch.bmm(inverse[:, under, under], lower[:, under, upper]), inverse[:, upper, upper])
            torch.neg(product, out=inverse[:, under, upper])
        s *= 2
    return inverse.view(a.shape)


def _diagonal_inverses(a: Tensor) -> Tensor:
    """[L, M, M] -> [L, M, M] with the inverses of the diagonal blocks of 8, zeros elsewhere."""
    L, M, _ = a.shape
    inverse = a.new_zeros(L, M, M)
    blocks, inverses = _diagonal_blocks(a), _diagonal_blocks(inverse)
    # The matrices go last, so that a row is found by vector operations over all of them.
    a_ijl = blocks.permute(2, 3, 0, 1).contiguous()
    x_ijl = torch.zeros_like(a_ijl)
    x_ijl.diagonal(0, 0, 1).fill_(1)
    for row in range(1, _BLOCK):
        x_ijl[row, :row] = (a_ijl[row, :row].unsqueeze(1) * x_ijl[:row, :row]).sum(0).neg_()
    inverses.copy_(x_ijl.permute(2, 3, 0, 1))
    return inverse


def _diagonal_blocks(a: Tensor) -> Tensor:
    """[L, M, M] -> [L, M / 8, 8, 8], a view."""
    count = a.shape[-1] // _BLOCK
    return a.unflatten(1, (count, _BLOCK)).unflatten(3, (count, _BLOCK)).diagonal(0, 1, 3).movedim(-1, 1)
