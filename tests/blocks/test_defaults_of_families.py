"""Fields with defaults in stacks and folders of families, and folders that transformers does not read."""

from pathlib import Path
from typing import Any

import pytest
import torch

import deltazoo
from deltazoo import StackSpec
from deltazoo.backends.io.errors import ConfigError
from deltazoo.blocks.checkpoints.export import choose_family
from deltazoo.blocks.checkpoints.families.lfm2 import Lfm2
from deltazoo.blocks.checkpoints.family import HubConfig, family


def test_a_stack_with_the_default_width_of_the_channel_mix_is_written() -> None:
    found = family("rwkv").stack(HubConfig({"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 9}, "rwkv"))
    texts = StackSpec(**found).model_dump_json()
    assert '"hidden":64' in texts
    spec = StackSpec.model_validate_json(texts.replace('"hidden":64', '"hidden":null'))
    assert choose_family(spec, "rwkv")[1]["hidden_size"] == 16


def test_the_older_field_of_lfm2_is_enough() -> None:
    config = {"block_ff_dim": 96, "block_auto_adjust_ff_dim": False}
    assert Lfm2._hidden(HubConfig(config, "lfm2")) == 96
    assert Lfm2._hidden(HubConfig(config | {"block_ff_dim": None, "intermediate_size": 64}, "lfm2")) == 64


def test_a_folder_that_transformers_does_not_read_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from deltazoo.blocks.checkpoints.comparison import compare

    config = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 9, "num_heads": 1, "intermediate_size": 8}
    model = StackSpec(**family("gla").stack(HubConfig(config, "gla"))).build()
    model.save_pretrained(tmp_path / "gla", model_type="gla")
    with pytest.raises(ConfigError, match="transformers cannot read"):
        compare(tmp_path / "gla")
    assert deltazoo.from_pretrained(tmp_path / "gla").spec == model.spec


def stack(model_type: str, **fields: Any) -> dict[str, Any]:
    """Return the stack of a config with these fields and small sizes."""
    sizes = {
        "hidden_size": 16, "num_hidden_layers": 6, "vocab_size": 9, "num_attention_heads": 2, "num_key_value_heads": 1,
        "intermediate_size": 8, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    return family(model_type).stack(HubConfig(sizes | fields, model_type))


def test_an_offset_that_transformers_refuses_is_refused() -> None:
    with pytest.raises(ConfigError, match="attn_layer_offset must be less than attn_layer_period = 2, got 3"):
        stack("jamba", attn_layer_offset=3, attn_layer_period=2)
    spec = StackSpec(**stack("jamba", attn_layer_offset=1, attn_layer_period=2, num_experts=1))
    assert choose_family(spec, "jamba")[1]["attn_layer_period"] == 2


def test_a_full_rotation_of_bamba_is_written() -> None:
    sizes = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "attn_layer_indices": [1]}
    rotary = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    spec = StackSpec(**stack("bamba", **sizes, rope_parameters=rotary))
    assert choose_family(spec, "bamba")[1]["rope_parameters"]["partial_rotary_factor"] == 1.0


@pytest.mark.parametrize("tied", [True, False])
def test_the_older_name_of_tied_embeddings_of_lfm2_wins(tied: bool) -> None:
    fields = {"norm_eps": 1e-5, "tie_embedding": tied, "tie_word_embeddings": not tied}
    assert stack("lfm2", **fields)["tied"] == tied


def test_the_head_width_of_qwen3_is_not_that_of_its_width() -> None:
    spec = StackSpec(**stack("qwen3", hidden_size=42))
    assert spec.expand()[0].mixers[0].head_width == 128


def test_values_that_float16_cannot_hold_are_refused_in_bfloat16_too(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = StackSpec(**stack("qwen3", head_dim=8)).build().bfloat16()
    with torch.no_grad():
        model.stack.layers[0].mixers[0].to_qkv.weight[0, 0] = 1e5
    model.save_pretrained(tmp_path / "a")
    with pytest.raises(ConfigError, match=r"has values that torch.float16 cannot hold"):
        deltazoo.from_pretrained(tmp_path / "a", dtype=torch.float16)
