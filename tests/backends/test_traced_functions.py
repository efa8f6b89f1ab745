"""torch 2.11 drops gradients of a traced autograd.Function: of an output that is also an intermediate result, and of an
input that is given twice.

It makes every result in the traced forward an output. A result that an in-place operation or `contiguous` returned
again is then two outputs, and its gradient goes to the one that nothing uses.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from deltazoo.backends.ops import grouped_conv
from deltazoo.backends.update.base import Backend, UpdateInputs, UpdateMeta, UpdateOutput
from deltazoo.backends.update.dispatch import bind
from deltazoo.backends.update.spec import UpdateSpec


class Results(TorchFunctionMode):
    """Records the result of every call of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        self.tensors += [result] if isinstance(result, Tensor) else []
        return result


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def grouped_convolution() -> Any:
    bounds = torch.tensor([0, 3, 5, 12], dtype=torch.int32)
    return grouped_conv._GroupedConv.forward(draw(12, 4), draw(2, 4, 3), None, bounds[[2, 3]], bounds)


def test_outputs_are_no_other_results(monkeypatch):
    monkeypatch.setattr(grouped_conv, "_runs_by_sequence", lambda *_: False)
    with Results() as results:
        outputs = grouped_convolution()
    for output in [outputs] if isinstance(outputs, Tensor) else outputs:
        assert sum(result is output for result in results.tensors) == 1


class Product(torch.autograd.Function):
    """k v per channel, the kernel of a backend."""

    @staticmethod
    def forward(k: Tensor, v: Tensor) -> Tensor:
        return k * v

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        k, v = ctx.saved_tensors
        return grad * v, grad * k


class ProductBackend(Backend):
    name = "product"

    def unsupported(self, spec: UpdateSpec, meta: UpdateMeta) -> list[str]:
        return []

    def forward(self, spec: UpdateSpec, inputs: UpdateInputs) -> UpdateOutput:
        return UpdateOutput(Product.apply(inputs.k, inputs.v), inputs.q)


def test_an_operand_given_twice_gets_both_gradients():
    bound = bind(UpdateSpec(transition="additive"), ProductBackend())
    x = draw(1, 3, 2, 4).requires_grad_()

    def square(x: Tensor) -> Tensor:
        k = 2 * x
        return bound(UpdateInputs(x, k, k)).o.sum()

    compiled = torch.compile(square, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(x), x)[0], 8 * x.detach())
