"""A decode step that computes all linear maps of its input by one product equals one that computes each map.

On the CPU a function takes the place of the kernel, and counts the maps of each product.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from small_configs import OURS, WIDTH, small
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from deltazoo.backends.ops import gemv
from deltazoo.mixers import MomentumDeltaNet, RetNet
from deltazoo.mixers.parts.gates.output_gates import OutputGate
from deltazoo.mixers.parts.projections import QKVProjection


@pytest.fixture
def products(monkeypatch) -> list[int]:
    """Let rows on a CPU be computed together. Return the number of maps of each product."""
    counts: list[int] = []

    def joined(x, weights, norm=None, second=(), convolution=None, biases=()) -> list[Tensor]:
        assert norm is None
        counts.append(len(weights))
        results = F.linear(x, torch.cat(list(weights))).split([len(weight) for weight in weights], -1)
        maps = itertools.zip_longest(results, second, biases)
        results = [(y if weight is None else F.linear(y, weight), bias) for y, weight, bias in maps]
        results = [y if bias is None else y + bias for y, bias in results]
        return results if convolution is None else [convolved(results[0], convolution), *results[1:]]

    def convolved(y, convolution) -> Tensor:
        history, weight, bias, silu = convolution
        window = torch.cat([history, y.reshape(len(history), 1, -1)], 1)
        history.copy_(window[:, 1:])
        window = (window * weight.T).sum(1) + (0 if bias is None else bias)
        return (F.silu(window) if silu else window).reshape(y.shape)

    def each(x, weights) -> list[Tensor]:
        counts.append(len(weights))
        return [F.linear(x_i, weight) for x_i, weight in zip(x.unbind(-2), weights, strict=True)]

    monkeypatch.setattr(gemv, "refusals", lambda x: [])
    monkeypatch.setattr(gemv, "products", joined)
    monkeypatch.setattr(gemv, "products_of_each", each)
    return counts


@torch.no_grad()
@pytest.mark.parametrize("name", OURS)
def test_a_decoded_token_equals_that_of_a_whole_sequence(name, products):
    torch.manual_seed(0)
    mixer = small(name).build(WIDTH, backend="reference").double()
    for parameter in mixer.parameters():  # biases are zero at the start
        parameter.add_(0.01 * torch.randn_like(parameter))
    x = torch.randn(2, 6, WIDTH, dtype=torch.float64)
    expected = mixer(x)[0]
    state = tree_map(lambda leaf: leaf.clone(), mixer.init_state(2, 6))
    state = mixer(x[:, :5], state).state
    assert not products
    torch.testing.assert_close(mixer(x[:, 5:], state)[0], expected[:, 5:])
    if name in ("abc", "mamba3", "mesa", "momentum_deltanet", "retnet", "rodimus", "rwkv4", "rwkv6", "titans"):
        assert products[0] > 1


def check_last_token(mixer):
    """Compare a decode step with the last token of a whole sequence."""
    x = torch.randn(2, 3, 16)
    expected = mixer(x)[0]
    state = mixer(x[:, :2], mixer.init_state(2)).state
    torch.testing.assert_close(mixer(x[:, 2:], state)[0], expected[:, 2:])


@torch.no_grad()
def test_a_part_that_changes_its_input_computes_its_own_map(products):
    class Doubled(QKVProjection):
        def forward(self, x, state, context):
            return super().forward(2 * x, state, context)

    torch.manual_seed(0)
    mixer = RetNet(heads=2).build(16, backend="reference")
    mixer.project.__class__ = Doubled
    mixer.rebind("reference")
    check_last_token(mixer)
    assert products == [1, 1]  # the other map, and the output map


@torch.no_grad()
def test_an_output_part_with_another_transform_computes_its_own_map(products):
    class Doubled(OutputGate):
        def transform(self, o, x):
            return super().transform(o, 2 * x)

    torch.manual_seed(0)
    mixer = RetNet(heads=2).build(16, backend="reference")
    mixer.outputs["gate"].__class__ = Doubled
    mixer.rebind("reference")
    check_last_token(mixer)
    assert products == [1, 1]  # the other map, and the output map


@torch.no_grad()
@pytest.mark.parametrize("config", [RetNet(heads=2), MomentumDeltaNet(heads=2)], ids=["retnet", "momentum_deltanet"])
def test_a_part_with_a_hook_computes_its_own_map(config, products):
    torch.manual_seed(0)
    mixer = config.build(16, backend="reference")
    mixer.project.register_forward_pre_hook(lambda _, arguments: (2 * arguments[0], *arguments[1:]))
    check_last_token(mixer)
    assert len(products) == 2


class DoubledMaps(TorchFunctionMode):
    def __torch_function__(self, function, types, arguments=(), keywords=None):
        y = function(*arguments, **(keywords or {}))
        return 2 * y if function is F.linear else y


@torch.no_grad()
@pytest.mark.parametrize("mode", [DoubledMaps(), torch.device("cpu")], ids=["mode", "default device"])
def test_a_function_mode_changes_the_maps_of_a_decode_step(mode, monkeypatch):
    torch.manual_seed(0)
    mixer, calls = RetNet(heads=2).build(16, backend="reference"), []

    def counted(x, weights, norm=None, second=(), convolution=None, biases=()):
        calls.append(len(weights))
        return [F.linear(x, weight) for weight in weights]

    monkeypatch.setattr(gemv, "kernel_refusals", lambda x: [])
    monkeypatch.setattr(gemv, "products", counted)
    with mode:
        check_last_token(mixer)
    assert calls == ([] if isinstance(mode, DoubledMaps) else [2, 1])  # the maps of the input, and the output map
