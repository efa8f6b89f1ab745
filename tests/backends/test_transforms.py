"""torch.func on the update: what works gives the same numbers, what does not is refused."""

import pytest
import torch
from torch import Tensor

from deltazoo import UpdateSpec, bind
from deltazoo.backends.base import Backend
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


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("spec", SPECS)
def test_func_grad_and_vmap(spec, backend):
    q, o = outputs(SPECS[spec], backend)

    def loss(q: Tensor) -> Tensor:
        return o(q).square().sum()

    leaf = q.clone().requires_grad_()
    torch.testing.assert_close(torch.func.grad(loss)(q), torch.autograd.grad(loss(leaf), leaf)[0])
    both = torch.stack([q, 2 * q])
    torch.testing.assert_close(torch.func.vmap(o)(both), torch.stack([o(q), o(2 * q)]))


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


def test_a_second_derivative_is_refused():
    q, o = outputs(SPECS["gated delta"], CompileBackend(compiled=False))
    leaf = q.clone().requires_grad_()
    (grad,) = torch.autograd.grad(o(leaf).square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        grad.sum().backward()
