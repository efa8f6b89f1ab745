"""TTT-Linear and the neural memory in chunks of plain torch against their definitions token by token, in float64."""

import pytest
import torch
from fast_weight_cases import (
    DENSE,
    PACKED,
    convert,
    detached,
    draw_memory,
    draw_ttt,
    memory_reference,
    tensors,
    ttt_reference,
)

from deltazoo.backends.ops.fast_weights import neural_memory as neural_memory_module
from deltazoo.backends.ops.fast_weights.neural_memory import neural_memory
from deltazoo.backends.ops.fast_weights.ttt_linear import ttt_linear


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    monkeypatch.setattr(neural_memory_module, "SEGMENT", 2)


def run_ttt(x, size):
    o, state = ttt_linear(x)
    return [o, *state]


def run_memory(x, size):
    o, state = neural_memory(x, size)
    return [o, *state]


CASES = {
    "ttt_linear": lambda case, size: (draw_ttt(case, 5, size), run_ttt, lambda x, size: ttt_reference(x)),
    "two layers": lambda case, size: (draw_memory(case, (4, 6), 2), run_memory, memory_reference),
    "one layer": lambda case, size: (draw_memory(case, (4, 4), 1), run_memory, memory_reference),
    "two layers, strong gates": lambda case, size: (
        draw_memory(case, (4, 6), 2, strong=True), run_memory, memory_reference,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("case", "size"), [(DENSE, 3), (DENSE, 1), (DENSE, 16), (PACKED, 3)])
def test_chunks_equal_the_definition_with_all_gradients(name, case, size):
    x, run, reference = CASES[name](case, size)
    x = convert(x, torch.float64)
    expected, actual = reference(x, size), run(x, size)
    weights = [torch.randn_like(y) for y in expected]
    expected += torch.autograd.grad(expected, tensors(x), weights, allow_unused=True, materialize_grads=True)
    actual += torch.autograd.grad(actual, tensors(x), weights)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_without_gradients_a_state_is_updated_in_place(name):
    x, run, reference = CASES[name](PACKED, 3)
    expected = reference(x, 3)
    with torch.no_grad():
        given = detached(x)
        o, *state = run(given, 3)
    torch.testing.assert_close(o, expected[0])
    stored = given.state if hasattr(given, "state") else [given.W, given.G, given.b, given.g]
    for new, old, correct in zip(state, stored, expected[1:], strict=True):
        assert new is old
        torch.testing.assert_close(new, correct)


@pytest.mark.parametrize("name", CASES)
def test_values_that_are_not_finite_stay_within_their_sequence_and_head(name):
    x, run, _ = CASES[name](PACKED, 3)
    x = detached(x)
    with torch.no_grad():
        expected = run(detached(x), 3)
        x.k[0, 7, 1] = torch.nan
        actual = run(x, 3)
    outputs = [(a.clone(), b.clone()) for a, b in zip(actual, expected, strict=True)]
    for rows in outputs[:1]:
        for y in rows:
            y[0, 5:14, 1] = 0
    for rows in outputs[1:]:
        for y in rows:
            y[3, 1] = 0
    for a, b in outputs:
        torch.testing.assert_close(a, b)
