"""Models with all linear maps quantised by bitsandbytes or torchao equal models with the dequantised weights.

On a CPU both libraries multiply by the dequantised weights, so that the errors are those of rounding.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import bitsandbytes
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from subjects import MLPS, VOCAB, WIDTH, assert_computes, build, copy_weights, decode, tokens
from torch import Tensor, nn
from torch.ao.quantization import quantize_dynamic
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from wrapping import replace

from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.mixers.core.conformance import relative_error

LIMIT = 1e-5


class Library(NamedTuple):
    """quantise: replaces or quantises all linear maps, and returns them by name; weight: dequantises that of one."""

    quantise: Callable[[nn.Module], dict[str, Any]]
    weight: Callable[[Any], Tensor]


def to_8bit(linear: nn.Linear) -> nn.Module:
    options = {"bias": linear.bias is not None, "has_fp16_weights": False, "threshold": 0.0}
    quantised = bitsandbytes.nn.Linear8bitLt(linear.in_features, linear.out_features, **options)
    quantised.load_state_dict(linear.state_dict())
    return quantised.to("cpu")


def to_4bit(linear: nn.Linear) -> nn.Module:
    bias = linear.bias is not None
    quantised = bitsandbytes.nn.Linear4bit(linear.in_features, linear.out_features, bias=bias, quant_type="nf4")
    quantised.load_state_dict(linear.state_dict())
    return quantised.to("cpu")


def with_torchao(model: nn.Module) -> dict[str, Any]:
    quantize_(model, Int8WeightOnlyConfig())
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def with_8_bits(model: nn.Module) -> dict[str, Any]:
    return replace(model, to_8bit)


def with_4_bits(model: nn.Module) -> dict[str, Any]:
    return replace(model, to_4bit)


LIBRARIES = {
    "8 bit": Library(with_8_bits, lambda layer: layer.weight * layer.weight.SCB[:, None] / 127),
    "4 bit": Library(with_4_bits, lambda layer: dequantize_4bit(layer.weight.data, layer.weight.quant_state)),
    "torchao int8": Library(with_torchao, lambda layer: layer.weight.dequantize()),
}


def assert_equals_dequantised(model: LanguageModel, expected: LanguageModel, library: Library) -> None:
    layers = library.quantise(model)
    assert len(layers) == sum(isinstance(module, nn.Linear) for module in expected.modules()) > 0
    assert all(type(layer.weight) is not nn.Parameter for layer in layers.values())
    copy_weights(expected, layers, library.weight)
    assert_computes(model, expected, LIMIT)


@pytest.mark.parametrize("library", LIBRARIES)
def test_mixer_equals_one_with_dequantised_weights(mixer: str, library: str) -> None:
    assert_equals_dequantised(build(mixer), build(mixer), LIBRARIES[library])


@pytest.mark.parametrize("library", LIBRARIES)
def test_mlp_equals_one_with_dequantised_weights(mlp: str, library: str) -> None:
    models = (build("gated_deltanet", MLPS[mlp]) for _ in range(2))
    assert_equals_dequantised(*models, LIBRARIES[library])


def test_mixer_in_4_bit_with_bfloat16_activations_and_lora_decodes(mixer: str) -> None:
    """The usual QLoRA: float32 norms, adapters and embedding around packed weights, under bfloat16 autocast."""
    model = build(mixer, dtype=torch.bfloat16)
    replace(model, to_4bit)
    adapted = get_peft_model(
        prepare_model_for_kbit_training(model, use_gradient_checkpointing=False),
        LoraConfig(target_modules="all-linear"),
    )
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = adapted(tokens())[0]
        assert logits.isfinite().all()
        assert relative_error(decode(adapted, tokens()), logits) < 0.02


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_mixer_with_dynamic_quantisation_of_torch_is_close_to_the_original(mixer: str) -> None:
    """Its linear maps have a method `weight`, and they round their inputs to 8 bits, with one scale for all tokens."""
    torch.backends.quantized.engine = torch.backends.quantized.supported_engines[-1]
    model = quantize_dynamic(build(mixer), {nn.Linear})
    with torch.no_grad():
        logits = build(mixer)(tokens())[0]
        assert relative_error(model(tokens())[0], logits) < 0.2
        assert relative_error(decode(model, tokens()), logits) < 0.2


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", [bitsandbytes.nn.Embedding8bit, bitsandbytes.nn.Embedding4bit])
def test_quantised_embedding_equals_its_dequantised_vectors(kind: type[nn.Module], tied: bool) -> None:
    model, expected = build("kda", tied=tied), build("kda", tied=tied)
    embedding = kind(VOCAB, WIDTH)
    embedding.load_state_dict(model.embedding.state_dict())
    model.embedding = embedding.to("cpu")
    with torch.no_grad():
        expected.embedding.weight.copy_(model.embedding(torch.arange(VOCAB)))
    assert_computes(model, expected, LIMIT)
