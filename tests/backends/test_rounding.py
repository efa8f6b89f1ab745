"""The rounding of operands to tf32; runs on a GPU, or with TRITON_INTERPRET=1 on the CPU."""

import pytest
import torch
import triton
import triton.language as tl
from triton_cases import DEVICE, needs_triton

from deltazoo.backends.triton.chunk.kernels.portable.channel.dplr_prepare import round_operand

pytestmark = needs_triton


@triton.jit
def rounding_kernel(x, y, SIZE: tl.constexpr, EXACT: tl.constexpr):
    """Store the rounded numbers."""
    i = tl.arange(0, SIZE)
    tl.store(y + i, round_operand(tl.load(x + i), EXACT))


def rounded(x: torch.Tensor, exact: bool = False) -> torch.Tensor:
    y = torch.full_like(x, 3.0)
    rounding_kernel[(1,)](x, y, x.numel(), exact)
    return y


def test_numbers_are_rounded_to_the_nearest_of_eleven_bits():
    x = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    y = rounded(x)
    assert not (y.view(torch.int32) & 0x1FFF).any()
    assert ((y - x).abs() <= 2.0**-11 * x.abs()).all() and (y != x).any()
    assert torch.equal(rounded(x, exact=True), x)


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7FC00000, -0x400000, 0x7F800001])
def test_every_nan_stays_one(bits):
    assert rounded(torch.tensor([bits, bits], dtype=torch.int32, device=DEVICE).view(torch.float32)).isnan().all()


def test_infinities_stay():
    x = torch.tensor([torch.inf, -torch.inf], device=DEVICE)
    assert torch.equal(rounded(x), x)
