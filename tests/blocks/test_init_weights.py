"""init_weights: a model built on the meta device gets the weights of a model built on the CPU."""

import pytest
import torch
from torch import nn

from deltazoo.backends.update import registry
from deltazoo.blocks.spec.stack_spec import StackSpec

ALL_MIXERS = registry.names(registry.MIXERS)
SMALL = ["gated-deltanet-h1-small", "gated-deltanet-small", "transformer-pp-small"]


def all_mixers() -> StackSpec:
    """One layer of each mixer, RWKV-7 first because later layers of it read its values."""
    return StackSpec(width=64, depth=len(ALL_MIXERS), vocab=50, pattern=" + ".join(ALL_MIXERS), mlp={"width": 64})


SPECS = {
    **{name: lambda name=name: StackSpec.load(name) for name in SMALL},
    "untied": lambda: StackSpec.load("gated-deltanet-h1-small").model_copy(update={"tied": False}),
    "biases": lambda: StackSpec.load("griffin-tiny"),
    "shared": lambda: StackSpec(
        width=16, depth=3, vocab=9, pattern="a", layers={"a": {"mixer": {"mixer": "attention"}, "share": "a"}}
    ),
    "experts": lambda: StackSpec(
        width=16, depth=2, vocab=9, pattern="rg_lru", mlp={"type": "moe", "experts": 3, "active": 2, "width": 8}
    ),
    "all mixers": all_mixers,
}


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@pytest.mark.parametrize("make", SPECS.values(), ids=SPECS)
def test_a_model_from_the_meta_device_gets_bitwise_the_same_weights(make):
    spec = make()
    torch.manual_seed(3)
    expected = tensors(spec.build("reference"))
    with torch.device("meta"):
        model = spec.build("reference")
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in tensors(model).values():
            tensor.fill_(77)  # a value that no initialisation draws
    torch.manual_seed(3)
    initialised = tensors(model.init_weights())
    assert initialised.keys() == expected.keys()
    for name, tensor in initialised.items():
        assert torch.equal(tensor, expected[name]), name
        assert tensor.requires_grad == expected[name].requires_grad, name


@pytest.mark.parametrize("name", ["biases", "shared", "experts"])
def test_a_model_of_16_bits_gets_the_rounded_weights_of_float32(name):
    spec = SPECS[name]()
    torch.manual_seed(3)
    expected = tensors(spec.build("reference").bfloat16())
    torch.set_default_dtype(torch.bfloat16)
    try:
        torch.manual_seed(3)
        built = spec.build("reference")
    finally:
        torch.set_default_dtype(torch.float32)
    for initialise in (lambda: built, built.init_weights):
        torch.manual_seed(3)
        actual = tensors(initialise())
        assert actual.keys() == expected.keys()
        for key, tensor in actual.items():
            assert torch.equal(tensor, expected[key]), key
            assert tensor.dtype == torch.bfloat16, key
            assert tensor.requires_grad == expected[key].requires_grad, key


def test_init_weights_restarts_a_trained_model():
    spec = StackSpec.load("gated-deltanet-h1-small")
    torch.manual_seed(3)
    model = spec.build("reference")
    expected = {name: tensor.clone() for name, tensor in tensors(model).items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    torch.manual_seed(3)
    model.init_weights()
    for name, tensor in tensors(model).items():
        assert torch.equal(tensor, expected[name]), name


def test_a_module_without_reset_parameters_is_refused():
    model = StackSpec.load("transformer-pp-small").build("reference")
    model.stack.layers[1].mixers[0].extra = nn.ParameterList([torch.zeros(3)])
    with pytest.raises(TypeError, match=r"ParameterList has parameters or buffers, so it needs a method"):
        model.init_weights()


def test_the_output_map_of_rg_lru_keeps_its_published_scale_in_a_stack():
    """2 / (depth channels), `final_w_init_variance_scale` / `lru_width` of transformers' RecurrentGemma."""
    mixers = {"a": {"mixer": "rg_lru", "channels": 256}, "b": {"mixer": "gated_deltanet", "heads": 2}}
    model = StackSpec(width=64, depth=4, vocab=9, pattern="a + b", layers=mixers).build("reference")
    for layer, std in zip(model.stack.layers, 2 * [(2 / (4 * 256)) ** 0.5, 0.02 / 8**0.5], strict=True):
        assert abs(float(layer.mixers[0].out.weight.std()) / std - 1) < 0.05
