"""The addresses that the elementwise kernels prefetch; runs on a GPU, or with TRITON_INTERPRET=1 on the CPU."""

import pytest
import torch
import triton
import triton.language as tl
from triton_cases import DEVICE, needs_triton

from deltazoo.backends.triton.element.kernels.prefetch import sector_offsets

pytestmark = needs_triton


@triton.jit
def offsets_kernel(
    out, row, last, column, ROWS: tl.constexpr, STRIDE: tl.constexpr, COLUMNS: tl.constexpr, SECTOR: tl.constexpr
):
    """Store the offsets of a tile."""
    offsets = sector_offsets(row, last, column, ROWS, STRIDE, COLUMNS, SECTOR)
    tl.store(out + tl.arange(0, ROWS * max(COLUMNS // SECTOR, 1)), offsets)


@pytest.mark.parametrize(
    ("row", "last", "column", "rows", "stride", "columns", "sector"),
    [
        (3, 19, 64, 16, 256, 64, 8),  # every sector of a tile within the rows
        (3, 5, 64, 16, 256, 64, 16),  # two rows remain
        (0, 4, 24, 4, 29, 8, 8),  # the tile is wider than the rest of the row
        (2, 3, 5, 2, 6, 1, 16),  # less than a sector, in the last row
    ],
)
def test_every_sector_of_a_tile_is_addressed_once_and_nothing_outside(row, last, column, rows, stride, columns, sector):
    out = torch.full((rows * max(columns // sector, 1),), -1, dtype=torch.int64, device=DEVICE)
    offsets_kernel[(1,)](out, row, last, column, rows, stride, columns, sector)
    wanted = {
        min(r, last - 1) * stride + min(c, stride - 1)
        for r in range(row, row + rows)
        for c in range(column, column + columns, sector)
    }
    assert set(out.tolist()) == wanted
    assert max(wanted) < last * stride
