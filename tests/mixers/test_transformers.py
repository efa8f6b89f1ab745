"""Mixers against transformers' modules with the same random weights: outputs, all gradients, cached decoding."""

import pytest
import torch
from oracles import ORACLES, WIDTH, Lfm2, Oracle

from deltazoo.backends.update.base import Backend
from deltazoo.mixers.core.conformance import relative_error

pytest.importorskip("transformers", minversion="5.17", reason="deltazoo[hf] needs transformers 5.17 or newer")

# Relative RMS error between two float32 modules
OUTPUT_TOLERANCE, GRADIENT_TOLERANCE = 2e-5, 1e-4


def build(oracle: type[Oracle]) -> Oracle:
    module = oracle()
    torch.manual_seed(3)
    module.randomise()
    return module


@pytest.mark.parametrize("oracle", ORACLES, ids=lambda oracle: oracle.__name__)
def test_outputs_and_gradients_equal_those_of_transformers(oracle: type[Oracle], backend: str | Backend) -> None:
    case = build(oracle)
    ours = case.mixer(backend)
    torch.manual_seed(4)
    weight = torch.randn(2, 37, WIDTH)
    x_ours = torch.randn(2, 37, WIDTH, requires_grad=True)
    x_theirs = x_ours.detach().clone().requires_grad_(case.differentiable)
    actual, expected = ours(x_ours)[0], case.call(x_theirs, None)
    assert relative_error(actual, expected) < OUTPUT_TOLERANCE
    if not case.differentiable:
        return
    (actual * weight).sum().backward()
    (expected * weight).sum().backward()
    assert relative_error(x_ours.grad, x_theirs.grad) < GRADIENT_TOLERANCE
    gradients = case.gradients()
    parameters = dict(ours.named_parameters())
    assert parameters.keys() == gradients.keys()
    for name, parameter in parameters.items():
        shared = case.shared(name, parameter.grad)
        if shared is not None:
            assert relative_error(shared, case.shared(name, gradients[name])) < GRADIENT_TOLERANCE, name


@pytest.mark.parametrize("oracle", [oracle for oracle in ORACLES if oracle.cached], ids=lambda oracle: oracle.__name__)
def test_cached_decoding_equals_that_of_transformers(oracle: type[Oracle], backend: str | Backend) -> None:
    case = build(oracle)
    ours, cache = case.mixer(backend), case.cache()
    torch.manual_seed(5)
    x = torch.randn(2, 9, WIDTH)
    with torch.no_grad():
        state = ours.init_state(2, capacity=9)
        for piece in x.split([5, 1, 1, 1, 1], dim=1):
            actual, state, _ = ours(piece, state)
            assert relative_error(actual, case.call(piece, cache)) < OUTPUT_TOLERANCE


def test_lfm2_conv_has_the_outputs_and_the_state_of_transformers_in_float64() -> None:
    case = build(Lfm2)
    case.theirs.double()
    ours, cache = case.mixer("reference").double(), case.cache()
    torch.manual_seed(5)
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        state = ours.init_state(2)
        for piece in x.split([5, 1, 1, 2], dim=1):
            actual, state, _ = ours(piece, state)
            torch.testing.assert_close(actual, case.call(piece, cache), rtol=1e-12, atol=1e-14)
    # Their state holds the last three inputs, ours the two that later tokens need.
    theirs = cache.get_conv_state(0, state_idx=0).mT
    torch.testing.assert_close(state["conv."], theirs[:, 1:], rtol=1e-12, atol=1e-14)
