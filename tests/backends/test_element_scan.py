"""The elementwise scan against the reference: outputs, states, every gradient, and what it holds in memory."""

import itertools

import pytest
import torch

from deltazoo.backends.base import UpdateInputs
from deltazoo.backends.compile import CompileBackend
from deltazoo.backends.compile import element_scan as module
from deltazoo.backends.compile.element_scan import ElementOperands, element_scan
from deltazoo.backends.compile.operator_body import body
from deltazoo.backends.reference import ReferenceBackend
from deltazoo.backends.spec import UpdateSpec

CASES = list(itertools.product(["none", "fixed", "head", "channel", "rate"], ["after", "before"], [1, 2]))


def draw(spec: UpdateSpec, B: int, T: int, V: int, N: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = spec.operands(B, T, 2, 4, 3, V) | {"state": (N, 4, 3, V)}
    x = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    signs = {"log_decay": -1, "step": 1, "rate": -1}
    return {name: tensor.abs() * signs[name] if name in signs else tensor for name, tensor in x.items()}


@pytest.mark.parametrize(("decay", "read", "V"), CASES)
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "pack"])
def test_it_equals_the_reference(decay: str, read: str, V: int, packed: bool) -> None:
    spec = UpdateSpec(decay=decay, transition="additive", read=read, beta="head")
    B, N = (1, 3) if packed else (2, 2)
    x = draw(spec, B, 37, V, N)
    cu_seqlens = torch.tensor([0, 5, 5, 37], dtype=torch.int32) if packed else None
    weight_o = torch.randn(B, 37, 4, V, dtype=torch.float64)
    found = []
    for backend in (CompileBackend(chunk=16, compiled=False), ReferenceBackend()):
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in x.items()}
        out = backend.forward(spec, UpdateInputs(**leaves, cu_seqlens=cu_seqlens))
        loss = (out.o * weight_o).sum() + (out.state * x["state"].cos()).sum()
        found.append([out.o, out.state, *torch.autograd.grad(loss, list(leaves.values()))])
    for ours, want in zip(*found, strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-9, atol=1e-10)


def test_the_operator_passes_torchs_checks() -> None:
    x = ElementOperands(*(torch.randn(shape) for shape in ((2, 4, 1, 1, 3), (2, 4, 1, 1, 3), (2, 4, 1, 1, 5, 1))),
        state=torch.randn(1, 1, 3, 5, 1), step=torch.rand(2, 4, 1, 1, 5), rate=-torch.rand(1, 3, 5))  # fmt: skip
    torch.library.opcheck(torch.ops.deltazoo.element_scan.default, (*x, False, True))
    o, state = element_scan(x, False)
    assert o.shape == (2, 4, 1, 1, 5, 1)
    assert state.shape == x.state.shape


def test_nothing_has_the_size_of_time_times_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """T x HV x K would be 16 million numbers here; the largest tensor that is made, forward and backward, is less."""
    for name in ("_forward", "_backward"):  # their bodies, so that what they make inside is seen
        monkeypatch.setattr(module, f"{name}_op", body(getattr(module, name)))
    T, D, K = 2048, 256, 32
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
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
    with Watch():
        CompileBackend(compiled=False).forward(spec, inputs).o.sum().backward()
    assert step.grad is not None
    assert 33 * D * K <= largest <= T * D < T * D * K / 16
