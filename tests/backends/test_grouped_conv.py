"""The convolution with a weight per group of rows: both implementations equal separate short convolutions."""

import itertools

import pytest
import torch

from deltazoo.backends.ops import grouped_conv as module
from deltazoo.backends.ops.grouped_conv import BLOCK, grouped_conv
from deltazoo.backends.ops.short_conv import ConvInputs, ConvPart, short_conv

C, W = 3, 4
# two sequences for each of three groups: some longer than a block, shorter than the window, or empty
BOUNDS = [0, 2 * BLOCK + 5, 2 * BLOCK + 7, 2 * BLOCK + 7, 3 * BLOCK + 8, 3 * BLOCK + 9, 3 * BLOCK + 40]


@pytest.mark.parametrize("by_sequence", [True, False])
@pytest.mark.parametrize("has_history", [True, False])
def test_outputs_and_gradients_equal_separate_convolutions(
    by_sequence: bool, has_history: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_runs_by_sequence", lambda *_: by_sequence)
    torch.manual_seed(0)
    shapes = [(BOUNDS[-1], C), (3, C, W), (6, W - 1, C)]
    x, weight, history = leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    before = history if has_history else None
    ends = torch.tensor(BOUNDS[2::2], dtype=torch.int32)
    actual = grouped_conv(x, weight, before, ends, torch.tensor(BOUNDS, dtype=torch.int32))
    pieces = []
    for n, (start, end) in enumerate(itertools.pairwise(BOUNDS)):
        own = None if before is None else before[n : n + 1]
        pieces.append(short_conv(ConvInputs(x[None, start:end], weight[n // 2], None, own), [ConvPart(C)])[0][0])
    expected = torch.cat(pieces)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    out_weight = torch.randn_like(expected)
    gradients = (
        torch.autograd.grad((y * out_weight).sum(), leaves, allow_unused=True, materialize_grads=True)
        for y in (actual, expected)
    )
    for left, right in zip(*gradients, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("by_sequence", [True, False])
def test_a_nan_stays_in_its_sequence(by_sequence: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_runs_by_sequence", lambda *_: by_sequence)
    x = torch.ones(8, C)
    x[:4] = torch.nan
    x.requires_grad_()
    weight = torch.ones(2, C, W, requires_grad=True)
    ends = torch.tensor([4, 8], dtype=torch.int32)
    y = grouped_conv(x, weight, None, ends, torch.tensor([0, 4, 8], dtype=torch.int32))
    y[4:].sum().backward()
    assert y[4:].isfinite().all()
    assert weight.grad[1].isfinite().all()
    assert x.grad.isfinite().all()
