"""The embedding, the head and the MLPs are called, so that LoRA, packed and offloaded weights take effect."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import wrapping
from torch import Tensor, nn

from deltazoo.backends.io.errors import DeviceError, ValueRangeError
from deltazoo.backends.ops import glu_linear
from deltazoo.blocks.generation.decoder import Decoder
from deltazoo.blocks.inspect.describe import describe
from deltazoo.blocks.model import mlp as mlp_module
from deltazoo.blocks.model.mlp import Dense
from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.blocks.spec.stack_spec import StackSpec
from deltazoo.mixers import Context
from deltazoo.mixers.core.conformance import relative_error

VOCAB = 29
MOE = {"type": "moe", "experts": 3, "width": 8, "shared_width": 8, "shared_gate": True}


def build(tied: bool, dtype: torch.dtype = torch.float64, mlp: Any = MOE) -> LanguageModel:
    torch.manual_seed(0)
    pattern = "gated_deltanet(heads=1) + attention(heads=2)"
    spec = StackSpec(width=16, depth=2, vocab=VOCAB, pattern=pattern, mlp=mlp, tied=tied, logit_cap=0.5)
    model = spec.build("reference").to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def decode(model: LanguageModel, tokens_BT: Tensor) -> Tensor:
    decoder, columns = Decoder(model, tokens_BT.shape[0], tokens_BT.shape[1]), []
    for token_B1 in tokens_BT.split(1, 1):
        decoder.tokens.copy_(token_B1)
        decoder.step()
        columns.append(decoder.logits.clone())
    return torch.stack(columns, 1)


def assert_computes(model: LanguageModel, expected: LanguageModel, tokens: Callable[..., Tensor], limit: float) -> None:
    """Logits, decoded logits and every loss equal those of `expected`."""
    tokens_BT = tokens(2, 7)
    targets_BT = tokens_BT.roll(-1, 1)
    targets_BT[0, 2:4] = -100
    logits_BTL = expected(tokens_BT)[0]
    assert relative_error(model(tokens_BT)[0], logits_BTL) < limit
    assert relative_error(decode(model, tokens_BT), logits_BTL) < max(limit, 1e-6)  # decoded logits are in float32
    losses, expected_losses = model.losses(tokens_BT, targets_BT), expected.losses(tokens_BT, targets_BT)
    for name in ("total", "cross_entropy"):
        assert relative_error(getattr(losses, name), getattr(expected_losses, name)) < limit
    entropy = F.cross_entropy(logits_BTL.flatten(0, 1), targets_BT.flatten())
    assert relative_error(losses.cross_entropy, entropy) < limit
    assert model.losses(tokens_BT, torch.full_like(targets_BT, -100)).cross_entropy == 0


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_lora_on_head_embedding_and_mlps_equals_merged_weights(tied: bool, tokens: Callable[..., Tensor]) -> None:
    model, merged = build(tied), build(tied)
    adapted = wrapping.replace(model, wrapping.Adapted)
    adapted |= wrapping.replace(model, wrapping.AdaptedEmbedding, nn.Embedding)
    assert {"embedding", *([] if tied else ["head"]), "stack.layers.0.mlp.shared.out"} <= set(adapted)
    wrapping.merge(merged, adapted)
    assert_computes(model, merged, tokens, 1e-10)
    parameters = {f"{name}.{part}": getattr(layer, part) for name, layer in adapted.items() for part in "AB"}
    loss = model.loss(tokens(2, 7), tokens(2, 7).roll(-1, 1))
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    assert not [name for name, d in zip(parameters, gradients, strict=True) if d is None or not d.abs().sum() > 0]


def test_packed_weights_of_head_and_mlps_equal_their_unpacked_values(tokens: Callable[..., Tensor]) -> None:
    for mlp in ({"width": 24}, MOE):
        model, unpacked = (build(False, torch.float32, mlp) for _ in range(2))
        wrapping.merge(unpacked, wrapping.replace(model, wrapping.Packed))
        assert_computes(model, unpacked, tokens, 1e-5)
        assert describe(model).flops == describe(unpacked).flops


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_offloaded_model_takes_tokens_and_decodes(tied: bool, tokens: Callable[..., Tensor]) -> None:
    model = build(tied)
    wrapping.offload(model)
    assert model.device == torch.device("cpu")
    assert_computes(model, build(tied), tokens, 1e-10)
    with pytest.raises(ValueRangeError, match=r"tokens must be in \[0, 29\), got 29"):
        model(torch.full((1, 2), VOCAB))


def test_model_on_meta_refuses_tokens_on_the_cpu(tokens: Callable[..., Tensor]) -> None:
    with torch.device("meta"):
        model = build(True)
    with pytest.raises(DeviceError, match="tokens must be on meta, where the model is, got cpu"):
        model(tokens(1, 3))


def test_hook_of_the_embedding_does_not_change_a_tied_head(tokens: Callable[..., Tensor]) -> None:
    """A hook changes the vectors of tokens, for example by noise, and not the weights."""
    model, scaled = build(True), build(True)
    model.embedding.register_forward_hook(lambda module, arguments, y: 2 * y)
    scaled.embedding_scale = 2.0
    assert_computes(model, scaled, tokens, 1e-10)


def test_kernel_of_a_gated_mlp_is_used_only_for_a_plain_output_map(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp_module, "kernel_refusals", lambda hidden: [])
    monkeypatch.setattr(glu_linear, "glu_linear", lambda *arguments: "the kernel")
    x = torch.randn(1, 2, 8)

    def call(change: Callable[[nn.Linear], nn.Module | None]) -> object:
        mlp = Dense(width=12).build(8)
        mlp.out = change(mlp.out) or mlp.out
        return mlp.forward(x, Context()).y

    assert call(lambda out: None) == "the kernel"
    for wrap in (wrapping.Adapted, wrapping.Packed, wrapping.with_product_weight, wrapping.offload):
        assert isinstance(call(wrap), Tensor)
    assert isinstance(call(lambda out: nn.Linear(12, 8, bias=True)), Tensor)
