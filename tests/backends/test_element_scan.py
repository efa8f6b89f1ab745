"""The elementwise scan against the reference: outputs, states, every gradient, and the memory that it allocates."""

import itertools

import pytest
import torch

from deltazoo.backends.compile import CompileBackend
from deltazoo.backends.compile import element_scan as module
from deltazoo.backends.compile.element_scan import ElementOperands, element_scan
from deltazoo.backends.compile.operator_body import body
from deltazoo.backends.update.base import UpdateInputs
from deltazoo.backends.update.reference import ReferenceBackend
from deltazoo.backends.update.spec import UpdateSpec

CASES = list(itertools.product(["none", "fixed", "head", "channel", "rate"], ["after", "before"], [1, 2]))


def draw(spec: UpdateSpec, B: int, T: int, V: int, N: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = spec.operands(B, T, 2, 4, 3, V) | {"state": (N, 4, 3, V)}
    x = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    signs = {"log_decay": -1, "step": 1, "rate": -1}
    return {name: tensor.abs() * signs[name] if name in signs else tensor for name, tensor in x.items()}


@pytest.mark.parametrize(("decay", "read", "V"), CASES)
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "pack"])
def test_element_scan_matches_the_reference(decay: str, read: str, V: int, packed: bool) -> None:
    spec = UpdateSpec(decay=decay, transition="additive", read=read, beta="head")
    B, N = (1, 3) if packed else (2, 2)
    x = draw(spec, B, 37, V, N)
    cu_seqlens = torch.tensor([0, 5, 5, 37], dtype=torch.int32) if packed else None
    weight_o = torch.randn(B, 37, 4, V, dtype=torch.float64)
    results = []
    for backend in (CompileBackend(chunk=16, compiled=False), ReferenceBackend()):
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in x.items()}
        out = backend.forward(spec, UpdateInputs(**leaves, cu_seqlens=cu_seqlens))
        loss = (out.o * weight_o).sum() + (out.state * x["state"].cos()).sum()
        results.append([out.o, out.state, *torch.autograd.grad(loss, list(leaves.values()))])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


def test_operator_passes_opcheck() -> None:
    x = ElementOperands(*(torch.randn(shape) for shape in ((2, 4, 1, 1, 3), (2, 4, 1, 1, 3), (2, 4, 1, 1, 5, 1))),
        state=torch.randn(1, 1, 3, 5, 1), step=torch.rand(2, 4, 1, 1, 5), rate=-torch.rand(1, 3, 5))  # fmt: skip
    torch.library.opcheck(torch.ops.deltazoo.element_scan.default, (*x, False, True))
    o, state = element_scan(x, False)
    assert o.shape == (2, 4, 1, 1, 5, 1)
    assert state.shape == x.state.shape


def test_no_tensor_has_the_size_of_time_times_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """T x HV x K is 16 million elements; the largest tensor of the forward and the backward is smaller."""
    for name in ("_forward", "_backward"):  # the operators' bodies, so that the dispatch mode sees their allocations
        monkeypatch.setattr(module, f"{name}_op", body(getattr(module, name)))
    T, D, K = 2048, 256, 32
    largest = 0

    class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return out

    q, k = torch.randn(2, 1, T, 1, K)
    step = torch.rand(1, T, D, requires_grad=True)
    rate = (-torch.rand(D, K)).requires_grad_()
    inputs = UpdateInputs(q, k, torch.randn(1, T, D, 1), step=step, rate=rate)
    spec = UpdateSpec(decay="rate", transition="additive")
    with LargestTensor():
        CompileBackend(compiled=False).forward(spec, inputs).o.sum().backward()
    assert step.grad is not None
    assert 33 * D * K <= largest <= T * D < T * D * K / 16
