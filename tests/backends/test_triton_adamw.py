"""The kernel of AdamW against torch.optim.AdamW in float64, and the optimizer of a run with and without it."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton_cases import DEVICE, needs_triton

from deltazoo.backends.triton.adamw.op import BLOCK, CHUNK, AdamWLaunch, AdamWNumbers, AdamWOperands
from deltazoo.blocks.spec.stack_spec import StackSpec
from deltazoo.blocks.training.adamw import KernelAdamW
from deltazoo.blocks.training.config import OptimizerConfig
from deltazoo.blocks.training.optimizer import Optimizer

SPEC = StackSpec(width=16, depth=1, vocab=50, pattern="gated_deltanet(heads=2)", mlp={"width": 24})


def scalar(value: float) -> Tensor:
    return torch.tensor(value, device=DEVICE)


@needs_triton
@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, marks=pytest.mark.kernel_smoke), torch.float32])
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "not aligned"])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.95)])
def test_the_kernel_computes_adamw_and_the_rounded_weights(offset, dtype, betas):
    torch.manual_seed(0)
    sizes = [1, CHUNK, 0, CHUNK + 2 * BLOCK + 37]

    def new(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(size + offset, device=DEVICE, dtype=dtype)[offset:]

    weights = [(new(n).normal_(), new(n), new(n), new(n, dtype), new(n, torch.float16), scalar(0.0)) for n in sizes]
    exact = [weight.double().requires_grad_() for weight, *_ in weights]
    optimizer = torch.optim.AdamW(exact, lr=1e-2, betas=betas, eps=1e-6, weight_decay=0.1)
    launch, numbers = AdamWLaunch(), AdamWNumbers(betas, 1e-6, 0.1)
    for number in (1, 2, 3):
        operands = []
        for x, weight in zip(exact, weights, strict=True):
            gradient = new(len(x), dtype).normal_()  # at another address in each step
            x.grad = 0.5 * gradient.double()
            operands.append(AdamWOperands(*weight)._replace(gradient=gradient, step=scalar(float(number))))
        optimizer.step()
        launch.update(operands, numbers, scalar(1e-2), scalar(0.5), scalar(0.0))
    for x, (weight, first, second, _, rounded, _) in zip(exact, weights, strict=True):
        state = optimizer.state[x]
        for actual, expected in ((weight, x), (first, state["exp_avg"]), (second, state["exp_avg_sq"])):
            torch.testing.assert_close(actual.double(), expected.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(rounded, weight.half())
    before = [x.clone() for weight in weights for x in weight]
    nan = [each._replace(gradient=each.gradient * math.nan) for each in operands]
    launch.update(nan, numbers, scalar(1e-2), scalar(0.5), scalar(1.0))
    assert all(torch.equal(x, y) for x, y in zip((x for weight in weights for x in weight), before, strict=True))
    launch.update(operands[1:2], numbers, scalar(1e-2), scalar(0.5), scalar(0.0))
    assert torch.equal(weights[0][0], before[0]) and not torch.equal(weights[1][0], before[6])


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_with_the_kernel_equals_that_of_torch(dtype, monkeypatch):
    states = []
    for by_kernel in (True, False):
        monkeypatch.setattr(KernelAdamW, "takes", lambda weight, by_kernel=by_kernel: by_kernel)
        torch.manual_seed(0)
        model = SPEC.build("reference").to(DEVICE, dtype)
        optimizer = Optimizer(model, OptimizerConfig(rates={"embedding.*": 0.5}), sharded=False)
        assert {type(part.optimizer) for part in optimizer.parts} == {KernelAdamW if by_kernel else torch.optim.AdamW}
        for step in range(3):  # the second has a gradient that is not finite
            for name, parameter in model.named_parameters():
                parameter.grad = None if name.endswith("A_log") else torch.randn_like(parameter)
            rate = scalar(1e-2) if step else 1e-2
            optimizer.step(rate, scalar(0.5).double(), scalar(float(step == 1)).double())
        states.append(optimizer.state())
        copies = {weight.name: weight.updated.to(dtype) for weight in optimizer.weights}
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter, copies[name], rtol=0.01, atol=0)  # the interpreter truncates
    for name, value in states[1].items():
        torch.testing.assert_close(states[0][name], value, rtol=1e-5, atol=1e-6, msg=name)
    assert states[0].keys() == states[1].keys()
    assert states[0]["optimizer.embedding.weight.step"] == 2


class NoNumbers(TorchDispatchMode):
    """Refuse to read the value of a tensor, for which the host would wait."""

    def __torch_dispatch__(self, call, types, arguments=(), keywords=None):
        assert call is not torch.ops.aten._local_scalar_dense.default
        return call(*arguments, **(keywords or {}))


def test_the_host_reads_no_tensor_for_an_update(monkeypatch):
    monkeypatch.setattr(KernelAdamW, "takes", lambda weight: True)
    monkeypatch.setattr(AdamWLaunch, "update", lambda *arguments: None)
    model = SPEC.build("reference").bfloat16()
    optimizer = Optimizer(model, OptimizerConfig(), sharded=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with NoNumbers():
        optimizer.step(1e-3, torch.ones(()), torch.zeros(()))
    assert optimizer.state()["optimizer.embedding.weight.step"] == 1


@pytest.mark.cuda
def test_a_step_does_not_wait_for_the_gpu():
    model = SPEC.build("reference").to("cuda", torch.bfloat16)
    optimizer = Optimizer(model, OptimizerConfig(), sharded=False)
    scale, skip = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
    mode = torch.cuda.get_sync_debug_mode()
    for step in range(3):  # gradients at the addresses of the step before, and at others
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter) if step < 2 else parameter.grad.clone()
        torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first step compiles
        try:
            optimizer.step(1e-3, scale, skip)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    assert optimizer.state()["optimizer.embedding.weight.step"] == 3
