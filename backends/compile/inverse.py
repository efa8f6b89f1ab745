"""Batched inverse of unit lower-triangular matrices: T = (I + A)^-1 of the WY representation."""

import torch
from torch import Tensor
from torch.nn.functional import pad

_BLOCK = 8


def unit_lower_inverse(a: Tensor) -> Tensor:
    """Invert I + A for strictly lower triangular A [..., M, M].

    Inverts the diagonal 8 x 8 blocks by forward substitution, then merges pairs of neighbouring blocks,
    [[X, 0], [-Y L X, Y]], until one block remains. All intermediates are blocks of the inverse, so that nearly
    parallel keys cause no growth (the terms of a Neumann series would grow exponentially).
    """
    M = a.shape[-1]
    size = max(_BLOCK, 1 << (M - 1).bit_length())
    if size > M:
        return unit_lower_inverse(pad(a, (0, size - M, 0, size - M)))[..., :M, :M].contiguous()
    inverse = _invert_diagonal_blocks(a.reshape(-1, size, size))
    lower = a.reshape(-1, size, size)
    s = _BLOCK
    while s < size:
        for start in range(0, size, 2 * s):
            first, second = slice(start, start + s), slice(start + s, start + 2 * s)
            product = torch.bmm(
                torch.bmm(inverse[:, second, second], lower[:, second, first]), inverse[:, first, first]
            )
            torch.neg(product, out=inverse[:, second, first])
        s *= 2
    return inverse.view(a.shape)


def _invert_diagonal_blocks(a: Tensor) -> Tensor:
    """[L, M, M] -> [L, M, M] with the inverses of the diagonal 8 x 8 blocks, zeros elsewhere."""
    L, M, _ = a.shape
    inverse = a.new_zeros(L, M, M)
    # The batch is the innermost axis, so that forward substitution computes a row of all blocks by vector operations.
    a_ijl = _diagonal_blocks(a).permute(2, 3, 0, 1).contiguous()
    x_ijl = torch.zeros_like(a_ijl)
    x_ijl.diagonal(0, 0, 1).fill_(1)
    for row in range(1, _BLOCK):
        x_ijl[row, :row] = (a_ijl[row, :row].unsqueeze(1) * x_ijl[:row, :row]).sum(0).neg_()
    _diagonal_blocks(inverse).copy_(x_ijl.permute(2, 3, 0, 1))
    return inverse


def _diagonal_blocks(a: Tensor) -> Tensor:
    """[L, M, M] -> [L, M / 8, 8, 8], a view."""
    count = a.shape[-1] // _BLOCK
    return a.view(-1, count, _BLOCK, count, _BLOCK).diagonal(0, 1, 3).movedim(-1, 1)
