"""LoRA of peft on every linear map, on the experts, the head and the embedding: as the merged weights, with gradients.

docs/integrations.md names the maps.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from subjects import MLPS, MOE, assert_computes, build, tokens
from torch import nn

from deltazoo.blocks import Sampling, generate_tokens
from deltazoo.blocks.model.stack import LanguageModel

LIMIT = 1e-5  # rounding in float32: the unmerged product has another order of summation


def adapt(model: LanguageModel, **fields: Any) -> PeftModel:
    """Add LoRA whose B is not zero."""
    torch.manual_seed(2)
    return get_peft_model(model, LoraConfig(r=2, lora_alpha=4, init_lora_weights=False, **fields))


def assert_equals_merged(adapted: PeftModel, count: int) -> None:
    """`count` modules have LoRA; outputs are those of the merged weights; every LoRA parameter has a gradient."""
    assert sum(isinstance(module, LoraLayer) for module in adapted.modules()) == count
    merged = copy.deepcopy(adapted).merge_and_unload()
    assert_computes(adapted, merged, LIMIT)
    adapted.loss(tokens()[:, :-1], tokens()[:, 1:]).backward()
    trained = {name: p.grad for name, p in adapted.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    assert not [name for name, grad in trained.items() if grad is None or not grad.abs().sum() > 0]


def linear_maps(model: nn.Module) -> int:
    return sum(isinstance(module, nn.Linear) for module in model.modules())


def test_lora_on_all_linear_maps_of_a_mixer(mixer: str) -> None:
    count = linear_maps(build(mixer))
    assert_equals_merged(adapt(build(mixer), target_modules="all-linear"), count)


def test_lora_on_the_maps_that_interpolate_values_of_later_rwkv7_layers() -> None:
    assert_equals_merged(adapt(build("rwkv7", depth=2), target_modules=["value.down", "value.up"]), 2)


def test_all_linear_maps_without_the_head() -> None:
    adapted = adapt(build("kda"), target_modules="all-linear", exclude_modules=["head"])
    assert type(adapted.get_base_model().head) is nn.Linear
    assert_equals_merged(adapted, linear_maps(build("kda")) - 1)


def test_saved_adapters_generate_as_before(tmp_path: Path) -> None:
    adapted = adapt(build("gated_deltanet"), target_modules="all-linear")
    adapted.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(build("gated_deltanet"), tmp_path)
    expected, actual = (generate_tokens(model, tokens(), Sampling(max_tokens=5)) for model in (adapted, loaded))
    assert torch.equal(actual, expected)
    assert_computes(loaded, adapted.merge_and_unload(), LIMIT)


def test_lora_on_all_linear_maps_of_an_mlp(mlp: str) -> None:
    count = linear_maps(build("gated_deltanet", MLPS[mlp]))
    assert_equals_merged(adapt(build("gated_deltanet", MLPS[mlp]), target_modules="all-linear"), count)


def test_lora_on_the_maps_and_the_router_of_experts() -> None:
    parameters = [f"mlp.{name}.weight" for name in ("router", "to_hidden", "out")]
    assert_equals_merged(adapt(build("gated_deltanet", MOE), target_modules=[], target_parameters=parameters), 3)


def test_lora_on_the_router_of_memories() -> None:
    model = build("mom", mlp={"width": 8})
    assert_equals_merged(adapt(model, target_modules=[], target_parameters=["router.weight"]), 1)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_lora_on_the_embedding(tied: bool) -> None:
    """The head of a tied model uses the adapted embedding, as it does after a merge."""
    assert_equals_merged(adapt(build("kda", tied=tied), target_modules=["embedding"]), 1)


def test_lora_on_the_head_alone() -> None:
    model = build("kda")
    before = model(tokens())[0].detach()
    adapted = adapt(model, target_modules=["head"])
    assert not torch.allclose(adapted(tokens())[0], before, rtol=1e-2)
    assert_equals_merged(adapted, 1)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_embedding_and_head_trained_in_full_beside_lora(tied: bool) -> None:
    modules = ["embedding"] if tied else ["embedding", "head"]
    adapted = adapt(build("kda", tied=tied), target_modules=["out"], modules_to_save=modules)
    assert_computes(adapted, copy.deepcopy(adapted).merge_and_unload(), LIMIT)
    adapted.loss(tokens()[:, :-1], tokens()[:, 1:]).backward()
    trained = {name: p.grad for name, p in adapted.named_parameters() if "modules_to_save" in name}
    assert len(trained) == len(modules)
    assert all(grad is not None and grad.abs().sum() > 0 for grad in trained.values())


def test_lora_on_a_low_rank_map_by_its_parts() -> None:
    assert_equals_merged(adapt(build("kda"), target_modules=["decay.proj.0", "decay.proj.1"]), 2)
