"""The intra-chunk operands of the compile backend: values, gradients, and what a compiled update saves."""

from functools import partial

import pytest
import torch
from torch import Tensor

from deltazoo import UpdateInputs, UpdateSpec, bind
from deltazoo.backends import CompileBackend
from deltazoo.backends.compile.decayed_keys import KeyOperands, decayed_keys

N, Z, K = 2, 1, 3


def equations(early: tuple[bool, ...], g: Tensor, decay: Tensor, *keys: Tensor | None) -> list[Tensor]:
    """What `decayed_keys` returns, by its equations."""
    q, e, k, b = keys
    g_rows = [g - decay if is_early else g for is_early in early]
    rows = [(x, g_row) for x, g_row in zip((q, e), g_rows, strict=False) if x is not None]
    columns = [x for x in (k, b) if x is not None]
    earlier = torch.ones(g.shape[2], g.shape[2], dtype=torch.bool).tril(-1)
    products = [
        torch.where(
            earlier.unsqueeze(-1), (g_row.unsqueeze(3) - g.unsqueeze(2)).exp() * x.unsqueeze(3) * column.unsqueeze(2), 0
        ).sum(-1)
        for x, g_row in rows
        for column in columns
    ]
    stacked = torch.stack(products, 2).unflatten(2, (len(rows), len(columns)))
    return [stacked, *(x * g_row.exp() for x, g_row in rows), *(x * (g[:, :, -1:] - g).exp() for x in columns)]


@pytest.mark.parametrize("M", [4, 6])
@pytest.mark.parametrize("width", [1, K])
@pytest.mark.parametrize(("early", "kinds"), [((True,), "qk"), ((False, True), "qek"), ((True, True), "qekb")])
def test_decayed_keys_equal_their_equations_with_their_gradients(early, kinds, width, M):
    generator = torch.Generator().manual_seed(M)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes, dtype=torch.float64, generator=generator).requires_grad_()

    decay = -draw(N, Z, M, width).abs().detach().requires_grad_()
    g = decay.detach().cumsum(2).requires_grad_()
    keys = [draw(N, Z, M, K) if kind in kinds else None for kind in "qekb"]
    inputs = [x for x in (g, decay, *keys) if x is not None]
    products, decayed = decayed_keys(KeyOperands(g, decay, *keys), early)
    actual = [products, *decayed.of_keys()]
    expected = equations(early, g, decay, *keys)
    cotangents = [draw(*x.shape).detach() for x in expected]
    gradients = [
        torch.autograd.grad(results, inputs, cotangents, materialize_grads=True) for results in (actual, expected)
    ]
    for x, y in zip((*actual, *gradients[0]), (*expected, *gradients[1]), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.graphs
def test_a_compiled_update_saves_no_factors_of_the_levels(monkeypatch):
    """Each level would add half an operand for each kind of keys.

    "aot_eager" divides forward and backward as Inductor does, without compiling C++.
    """
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    B, T, H, width = 1, 64, 2, 16
    generator = torch.Generator().manual_seed(0)
    x = {name: torch.randn(B, T, H, width, generator=generator).requires_grad_() for name in ("q", "k", "v")}
    x["log_decay"] = -torch.rand(B, T, H, width, generator=generator).requires_grad_()
    x["beta"] = torch.rand(B, T, H, generator=generator).requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        bind(UpdateSpec(decay="channel", beta="head"), CompileBackend(chunk=16))(UpdateInputs(**x))
    # q, k, v, g (float64), the decayed q, k and e, V_new; smaller ones: P, T, states of segments
    assert sum(y.numel() * y.element_size() for y in saved) < 16 * B * T * H * width * 4
