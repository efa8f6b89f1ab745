"""Fields with defaults in stacks and folders of families, and folders that transformers does not read."""

from pathlib import Path

import pytest

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
