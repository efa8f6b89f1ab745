"""torch.func on the update: what works gives the same numbers, what does not is refused."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from deltazoo import UpdateSpec, bind
from deltazoo.backends.base import Backend, UpdateInputs
from deltazoo.backends.compile import CompileBackend
from deltazoo.backends.conformance import SHAPES, Case, draw
from deltazoo.backends.errors import UnsupportedError
from deltazoo.backends.reference import ReferenceBackend

SPECS = {
    "gated delta": UpdateSpec(decay="head", beta="head"),
    "mamba": UpdateSpec(decay="rate", transition="additive"),
}
BACKENDS = [ReferenceBackend(), CompileBackend(compiled=False)]


def outputs(spec: UpdateSpec, backend: Backend, shape: str = "grouped"):
    x = draw(Case(spec, SHAPES[shape], torch.float64))
    bound = bind(spec, backend)
    return x.q, lambda q: bound(x._replace(q=q)).o


@pytest.mark.parametrize("backend", [*BACKENDS, CompileBackend()], ids=["reference", "eager", "compile"])
@pytest.mark.parametrize("spec", SPECS)
def test_func_grad_and_vmap(spec, backend):
    q, o = outputs(SPECS[spec], backend)

    def loss(q: Tensor) -> Tensor:
        return o(q).square().sum()

    leaf = q.clone().requires_grad_()
    torch.testing.assert_close(torch.func.grad(loss)(q), torch.autograd.grad(loss(leaf), leaf)[0])
    both = torch.stack([q, 2 * q])
    torch.testing.assert_close(torch.func.vmap(o)(both), torch.stack([o(q), o(2 * q)]))


@pytest.mark.parametrize("backend", [*BACKENDS, CompileBackend()], ids=["reference", "eager", "compile"])
def test_decays_have_no_numbers_to_look_at_under_a_transform(backend):
    spec = SPECS["gated delta"]
    x = draw(Case(spec, SHAPES["grouped"], torch.float64))

    def loss(log_decay: Tensor) -> Tensor:
        return bind(spec, backend)(x._replace(log_decay=log_decay)).o.square().sum()

    leaf = x.log_decay.clone().requires_grad_()
    torch.testing.assert_close(torch.func.grad(loss)(x.log_decay), torch.autograd.grad(loss(leaf), leaf)[0])
    if backend.name == "reference":
        both = torch.stack([x.log_decay, 2 * x.log_decay])
        torch.testing.assert_close(torch.func.vmap(loss)(both), torch.stack([loss(both[0]), loss(both[1])]))


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_fake_tensors_have_shapes(backend):
    spec = SPECS["gated delta"]
    x = draw(Case(spec, SHAPES["grouped"]))
    with FakeTensorMode() as mode:
        out = bind(spec, backend)(UpdateInputs(*(None if t is None else mode.from_tensor(t) for t in x)))
    assert out.o.shape == x.v.shape
    assert out.state.shape == x.state.shape


def test_forward_mode_is_the_references_alone():
    spec = SPECS["gated delta"]
    q, o = outputs(spec, ReferenceBackend())
    # o is linear in q
    torch.testing.assert_close(torch.func.jvp(o, (q,), (q,))[1], o(q))


@pytest.mark.parametrize("shape", ["grouped", "column", "one_token"])
@pytest.mark.parametrize("spec", SPECS)
def test_forward_mode_is_refused_where_it_would_be_dropped(spec, shape):
    q, o = outputs(SPECS[spec], CompileBackend(compiled=False), shape)
    with pytest.raises(UnsupportedError, match="'compile' has no forward-mode derivative"):
        torch.func.jvp(o, (q,), (q,))


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("spec", ["gated delta", "mamba", "efla"])
def test_a_second_derivative_is_refused_by_every_path(spec, power):
    """Also of what is linear in the outputs, and of operands that plain torch maps on the way."""
    spec = {**SPECS, "efla": UpdateSpec(beta="head", reparam="efla")}[spec]
    x = draw(Case(spec, SHAPES["grouped"], torch.float64))
    leaves = {name: t.clone().requires_grad_() for name, t in x._asdict().items() if t is not None}
    o = bind(spec, CompileBackend(compiled=False))(UpdateInputs(**leaves)).o
    for leaf in leaves.values():
        (grad,) = torch.autograd.grad(o.pow(power).sum(), leaf, create_graph=True)
        for other in leaves.values():
            with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
                torch.autograd.grad(grad.square().sum(), other, retain_graph=True)


@pytest.mark.parametrize("backend", [CompileBackend(compiled=False), CompileBackend()], ids=["eager", "compile"])
def test_a_second_derivative_is_refused_by_torch_func(backend):
    q, o = outputs(SPECS["gated delta"], backend)
    grad = torch.func.grad(lambda q: o(q).pow(3).sum())
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.func.grad(lambda q: grad(q).square().sum())(q)
