"""Chunked cross entropy equals torch's in value and gradient, with less memory."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from deltazoo.blocks.head import cross_entropy


def inputs(n: int = 23, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 7, generator=generator, dtype=torch.float64) for rows in (n, 11))
    targets = torch.randint(0, 11, (n,), generator=generator)
    targets[::5] = -100
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def with_gradients(loss: Tensor, *tensors: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(3 * loss, tensors)]


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("chunk", [1, 4, 23, 100])
def test_cross_entropy_equals_torch_in_value_and_gradient(chunk, cap):
    x, weight, targets = inputs()
    ours = with_gradients(cross_entropy(x, weight, targets, chunk, cap), x, weight)
    logits = x @ weight.T
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    theirs = with_gradients(F.cross_entropy(logits, targets), x, weight)
    for actual, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_low_precision_is_close_to_float64(dtype, tolerance):
    x, weight, targets = inputs(200, dtype)
    x64, weight64 = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    ours = with_gradients(cross_entropy(x, weight, targets, 64), x, weight)
    theirs = with_gradients(F.cross_entropy(x64 @ weight64.T, targets), x64, weight64)
    for actual, expected in zip(ours, theirs, strict=True):
        assert (actual.double() - expected).norm() <= tolerance * expected.norm()
    assert ours[0].dtype == torch.float32
    assert ours[1].dtype == ours[2].dtype == dtype


def test_autocast_applies_as_for_a_linear_layer():
    x, weight, targets = inputs(200, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours = with_gradients(cross_entropy(x, weight, targets, 64), x, weight)
        theirs = with_gradients(F.cross_entropy(F.linear(x, weight).float(), targets), x, weight)
    for actual, expected in zip(ours, theirs, strict=True):
        assert (actual - expected).norm() <= 1e-2 * expected.norm()
        assert actual.dtype == torch.float32


def test_without_targets_the_loss_and_its_gradients_are_zero():
    x, weight, targets = inputs()
    loss, *gradients = with_gradients(cross_entropy(x, weight, torch.full_like(targets, -100)), x, weight)
    assert loss == 0
    assert all(gradient.abs().max() == 0 for gradient in gradients)
    assert cross_entropy(x[:0], weight, targets[:0]) == 0


def test_one_dynamic_graph_serves_every_length():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *args: cross_entropy(*args, 8), fullgraph=True, dynamic=True, backend=counter)
    for n in (23, 50, 7):
        x, weight, targets = inputs(n)
        ours = with_gradients(compiled(x, weight, targets), x, weight)
        theirs = with_gradients(F.cross_entropy(x @ weight.T, targets), x, weight)
        for actual, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)
    assert counter.frame_count == 1


def test_the_operators_pass_opcheck():
    x, weight, targets = (tensor.detach() for tensor in inputs())
    grad = torch.ones((), dtype=torch.float64)
    for cap in (None, 1.5):
        torch.library.opcheck(torch.ops.deltazoo.cross_entropy.default, (x, weight, targets, 8, cap))
        torch.library.opcheck(torch.ops.deltazoo.cross_entropy_backward.default, (grad, x, weight, targets, 8, cap))


MEASURE = """
import resource, sys, torch
from deltazoo.blocks.head import cross_entropy
N, D, L = 8192, 16, 8192
x, weight = torch.randn(N, D, requires_grad=True), torch.randn(L, D, requires_grad=True)
targets = torch.randint(0, L, (N,))
cross_entropy(x[:1024], weight, targets[:1024]).backward()
unit = 1 if sys.platform == "darwin" else 1024
one = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
cross_entropy(x, weight, targets).backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - one) / (N * L * 4))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="the peak of resident memory is read from `resource`")
def test_eight_chunks_take_the_memory_of_one_chunk():
    run = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
    assert float(run.stdout) < 0.1  # fraction of the float32 logits of all tokens
