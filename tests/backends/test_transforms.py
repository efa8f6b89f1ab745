"""torch.func transforms and fake tensors on an update: correct results where supported, an error elsewhere."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from deltazoo import UpdateSpec, bind
from deltazoo.backends.compile import CompileBackend
from deltazoo.backends.conformance import SHAPES, Case, draw
from deltazoo.backends.io.errors import UnsupportedError
from deltazoo.backends.update.base import Backend, UpdateInputs
from deltazoo.backends.update.reference import ReferenceBackend

SPECS = {
    "gated delta": UpdateSpec(decay="head", beta="head"),
    "mamba": UpdateSpec(decay="rate", transition="additive"),
}
BACKENDS = {"reference": ReferenceBackend(), "eager": CompileBackend(compiled=False), "compile": CompileBackend()}
EAGER = CompileBackend(compiled=False)


def output_of_q(spec: UpdateSpec, backend: Backend, shape: str = "grouped") -> tuple[Tensor, Callable[..., Tensor]]:
    """q, and o as a function of q."""
    x = draw(Case(spec, SHAPES[shape], torch.float64))
    bound = bind(spec, backend)
    return x.q, lambda q: bound(x._replace(q=q)).o


# Under a transform the compile backend runs eagerly. The expected values come from the reference, so that no test here
# compiles anything.
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_func_grad_and_vmap_equal_autograd_and_stacking(spec, backend):
    q, o = output_of_q(spec, backend)
    _, expected_o = output_of_q(spec, ReferenceBackend())
    leaf = q.clone().requires_grad_()
    (expected_grad,) = torch.autograd.grad(expected_o(leaf).square().sum(), leaf)
    torch.testing.assert_close(torch.func.grad(lambda q: o(q).square().sum())(q), expected_grad)
    batch = torch.stack([q, 2 * q])
    torch.testing.assert_close(torch.func.vmap(o)(batch), torch.stack([expected_o(q), expected_o(2 * q)]))


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_value_checks_of_decays_are_skipped_under_a_transform(backend):
    spec = SPECS["gated delta"]
    x = draw(Case(spec, SHAPES["grouped"], torch.float64))

    def loss(log_decay: Tensor, backend: Backend = backend) -> Tensor:
        return bind(spec, backend)(x._replace(log_decay=log_decay)).o.square().sum()

    leaf = x.log_decay.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf, ReferenceBackend()), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(x.log_decay), expected)
    if backend.name == "reference":
        batch = torch.stack([x.log_decay, 2 * x.log_decay])
        torch.testing.assert_close(torch.func.vmap(loss)(batch), torch.stack([loss(batch[0]), loss(batch[1])]))


@pytest.mark.parametrize("backend", [ReferenceBackend(), EAGER], ids=lambda backend: backend.name)
def test_fake_tensors_get_the_right_shapes(backend):
    spec = SPECS["gated delta"]
    x = draw(Case(spec, SHAPES["grouped"]))
    with FakeTensorMode() as mode:
        out = bind(spec, backend)(UpdateInputs(*(None if t is None else mode.from_tensor(t) for t in x)))
    assert out.o.shape == x.v.shape
    assert out.state.shape == x.state.shape


def test_reference_supports_forward_mode():
    q, o = output_of_q(SPECS["gated delta"], ReferenceBackend())
    torch.testing.assert_close(torch.func.jvp(o, (q,), (q,))[1], o(q))  # o is linear in q


@pytest.mark.parametrize("shape", ["grouped", "column", "one_token"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_compile_backend_refuses_forward_mode(spec, shape):
    q, o = output_of_q(spec, EAGER, shape)
    with pytest.raises(UnsupportedError, match="'compile' has no forward-mode derivative"):
        torch.func.jvp(o, (q,), (q,))


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("spec", [*SPECS.values(), UpdateSpec(beta="head", reparam="efla")], ids=[*SPECS, "efla"])
def test_second_derivative_with_respect_to_any_pair_of_operands_is_refused(spec, power):
    """power 1: the loss is linear in o. efla: plain torch maps beta before the custom operator."""
    x = draw(Case(spec, SHAPES["grouped"], torch.float64))
    leaves = {name: t.clone().requires_grad_() for name, t in x._asdict().items() if t is not None}
    o = bind(spec, EAGER)(UpdateInputs(**leaves)).o
    for leaf in leaves.values():
        (grad,) = torch.autograd.grad(o.pow(power).sum(), leaf, create_graph=True)
        for other in leaves.values():
            with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
                torch.autograd.grad(grad.square().sum(), other, retain_graph=True)


@pytest.mark.parametrize("backend", [EAGER, CompileBackend()], ids=["eager", "compile"])
def test_second_derivative_by_torch_func_is_refused(backend):
    q, o = output_of_q(SPECS["gated delta"], backend)
    grad = torch.func.grad(lambda q: o(q).pow(3).sum())
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.func.grad(lambda q: grad(q).square().sum())(q)
