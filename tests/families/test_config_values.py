"""Values of config.json that are missing, null or of an older form: logits of transformers, and folders written."""

import json
import re
from pathlib import Path
from typing import Any

import folders
import pytest
import torch

import deltazoo
from deltazoo.backends.io.errors import ConfigError
from deltazoo.blocks.checkpoints.export import choose_family
from deltazoo.blocks.checkpoints.pretrained import read_spec
from deltazoo.mixers.attention import Attention
from deltazoo.mixers.core.conformance import relative_error
from deltazoo.mixers.mamba2 import Mamba2

pytest.importorskip("transformers", minversion="5.23", reason="older versions have no OLMo Hybrid")

TOKENS = torch.randint(folders.VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))


def change(folder: Path, changes: dict[str, Any], missing: tuple[str, ...] = ()) -> None:
    """Replace and remove fields of a folder's config.json."""
    path = folder / "config.json"
    fields = {name: x for name, x in json.loads(path.read_text()).items() if name not in missing}
    path.write_text(json.dumps(fields | changes))


@torch.no_grad()
def assert_logits_of_transformers(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = theirs(TOKENS, use_cache=False).logits
    actual = deltazoo.from_pretrained(folder, dtype=torch.float32)(TOKENS)[0]
    assert relative_error(actual, expected) < 1e-5


LINEAR = {"type": "linear", "factor": 3.0}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rope_parameters": None},
        {"rope_parameters": {"rope_type": "default"}},
        {"rope_theta": 50.0},
        {"rope_theta": None},
        {"rope_theta": 50.0, "rope_parameters": {"rope_type": "default", "rope_theta": None}},
        {"rope_theta": 50.0, "rope_scaling": LINEAR},
        {"rope_theta": None, "rope_scaling": LINEAR},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}, "rope_scaling": LINEAR},
        {"rope_theta": 50.0, "rope_parameters": {"rope_type": "linear", "factor": 3.0}},
    ],
    ids=json.dumps,
)
def test_only_a_theta_that_is_null_leaves_out_the_positions_of_olmo_hybrid(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    folders.write(tmp_path, "olmo_hybrid")
    change(tmp_path, fields, missing=("rope_theta", "rope_scaling", "rope_parameters"))
    assert_logits_of_transformers(tmp_path)


def test_a_theta_that_is_null_is_refused_where_transformers_fails(tmp_path: Path) -> None:
    folders.write(tmp_path / "llama", "llama")
    for changes in ({"rope_theta": None}, {"rope_parameters": {"rope_type": "default", "rope_theta": None}}):
        change(tmp_path / "llama", changes, missing=("rope_theta", "rope_parameters"))
        with pytest.raises(ConfigError, match=r"config\.json: rope_theta must be a number, got null"):
            read_spec(tmp_path / "llama")
    folders.write(tmp_path / "granite", "granitemoehybrid")
    change(tmp_path / "granite", {"position_embedding_type": "nope", "rope_theta": None}, missing=("rope_parameters",))
    assert_logits_of_transformers(tmp_path / "granite")


def partial(fraction: float) -> dict[str, Any]:
    return folders.rope(rope_theta=99.0, partial_rotary_factor=fraction)


@pytest.mark.parametrize(("name", "fraction"), [("qwen3_next", 0.9), ("qwen3_5_text", 0.65), ("bamba", 0.8)])
def test_a_part_of_the_channels_rotates_as_in_transformers(name: str, fraction: float, tmp_path: Path) -> None:
    folders.write(tmp_path, name, fields=partial(fraction))
    assert_logits_of_transformers(tmp_path)


def test_a_part_of_the_channels_that_transformers_rotates_otherwise_is_refused(tmp_path: Path) -> None:
    folders.write(tmp_path / "next", "qwen3_next", fields=partial(0.85))  # it rotates 14 channels by angles of 13
    with pytest.raises(ConfigError, match=r"even number .* got 0\.85 of head_dim = 16, which is 13"):
        read_spec(tmp_path / "next")
    for name in ("llama", "qwen3", "falcon_h1", "olmo_hybrid", "lfm2", "minimax"):  # it rotates all channels
        folders.write(tmp_path / name, name, fields=partial(0.5))
        with pytest.raises(ConfigError, match=r"partial_rotary_factor must be 1 for .*, got 0\.5"):
            read_spec(tmp_path / name)
    layer = Attention(heads=2, rotary_fraction=0.5)
    spec = deltazoo.StackSpec(width=32, depth=1, vocab=9, pattern=layer, norm="rms", mlp={"width": 40})
    with pytest.raises(ConfigError, match="partial_rotary_factor must be 1"):
        choose_family(spec, "llama")


def test_attention_without_positions_is_not_written_as_llama(tmp_path: Path) -> None:
    spec = deltazoo.StackSpec(
        width=32, depth=2, vocab=folders.VOCAB, pattern="attention(heads=2, rotary_theta=null)", norm="rms",
        mlp={"width": 40},
    )  # fmt: skip
    spec.build().save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "jamba"
    assert_logits_of_transformers(tmp_path)


def test_a_null_attention_multiplier_of_granite_is_the_scale_of_softmax_attention(tmp_path: Path) -> None:
    source, written = tmp_path / "source", tmp_path / "written"
    folders.write(source, "granitemoehybrid")
    change(source, {"attention_multiplier": None})
    assert_logits_of_transformers(source)
    deltazoo.from_pretrained(source).save_pretrained(written)
    assert_logits_of_transformers(written)
    assert json.loads((written / "config.json").read_text())["attention_multiplier"] == 8**-0.5
    change(source, {}, missing=("attention_multiplier",))
    assert_logits_of_transformers(source)


def test_mamba_with_channels_that_are_no_multiple_of_the_width_is_written(tmp_path: Path) -> None:
    folders.write(tmp_path / "source", "mamba", fields={"intermediate_size": 65})
    deltazoo.from_pretrained(tmp_path / "source").save_pretrained(tmp_path / "written")
    assert_logits_of_transformers(tmp_path / "written")


def test_mamba2_with_channels_that_are_no_multiple_of_the_width_is_not_written(tmp_path: Path) -> None:
    layer = Mamba2(value_heads=3, key_width=8, value_width=16, norm_eps=1e-5)
    model = deltazoo.StackSpec(width=32, depth=1, vocab=9, pattern=layer, mlp="none").build("reference")
    with pytest.raises(ConfigError, match="mamba2: value_heads times value_width must be a multiple of the width 32"):
        model.save_pretrained(tmp_path / "a", model_type="mamba2")


@pytest.mark.parametrize("family", ["bamba", "granitemoehybrid"])
def test_hybrids_with_channels_that_are_no_multiple_of_the_width_are_not_written(family: str, tmp_path: Path) -> None:
    folders.write(tmp_path, family)
    spec = read_spec(tmp_path).spec
    layers = {
        name: layer.model_copy(update={"value_width": 17}) if isinstance(layer, Mamba2) else layer
        for name, layer in spec.layers.items()
    }
    with pytest.raises(ConfigError, match="value_heads times value_width must be a multiple of the width 32"):
        choose_family(spec.model_copy(update={"layers": layers}), family)


LINEAR_LAYERS, FULL_LAYERS = ({"layer_types": [f"{kind}_attention"] * 3} for kind in ("linear", "full"))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        *[(name, fields) for name in ("qwen3_next", "qwen3_5_text") for fields in (LINEAR_LAYERS, FULL_LAYERS)],
        *[("granitemoehybrid", fields) for fields in (LINEAR_LAYERS, FULL_LAYERS, {"layer_types": None})],
        *[("minimax", fields) for fields in (LINEAR_LAYERS, FULL_LAYERS)],
        *[("bamba", {"attn_layer_indices": places}) for places in (None, [], [0, 1, 2])],
        *[("lfm2", {"layer_types": kinds}) for kinds in (None, ["conv"] * 3, ["full_attention"] * 3)],
        *[("lfm2_moe", {"layer_types": kinds}) for kinds in (["conv"] * 3, ["full_attention"] * 3)],
        *[("lfm2_moe", {"num_dense_layers": number}) for number in (0, 3)],
        *[(name, fields) for name in ("kimi_linear", "bailing_hybrid") for fields in (LINEAR_LAYERS, FULL_LAYERS)],
        *[(name, {"mlp_layer_types": ["dense"] * 3}) for name in ("kimi_linear", "bailing_hybrid")],
        *[("jamba", {"attn_layer_period": n, "attn_layer_offset": n - 1}) for n in (1, 9)],
    ],
)
def test_a_model_with_layers_of_one_kind_is_written(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    source, written = tmp_path / "source", tmp_path / "written"
    folders.write(source, name, fields=fields)
    if None in fields.values():
        change(source, {}, missing=(*fields,))
    model = deltazoo.from_pretrained(source)
    model.save_pretrained(written)
    assert_logits_of_transformers(written)
    assert deltazoo.from_pretrained(written).spec == model.spec


DEPTH = "layer_types must be a list of num_hidden_layers = 3"


@pytest.mark.parametrize(
    ("name", "fields", "sentence"),
    [
        (
            "qwen3_next",
            {"full_attention_interval": 0, "layer_types": None},
            "full_attention_interval must be an integer of at least 1, got 0",
        ),
        (
            "qwen3_next",
            {"layer_types": ["linear_attention"] * 2},
            DEPTH,
        ),
        ("qwen3", {"layer_types": ["full_attention"] * 2}, DEPTH),
        ("kimi_linear", {"layer_types": ["full_attention"]}, DEPTH),
        ("lfm2", {"layer_types": "conv"}, "layer_types must be a list, got 'conv'"),
        ("granitemoehybrid", {"layer_types": ["mamba"]}, DEPTH),
        ("granitemoehybrid", {"logits_scaling": 0}, "logits_scaling = 0"),
        ("jamba", {"attn_layer_period": 0}, "attn_layer_period must be an integer of at least 1, got 0"),
        ("falcon_h1", {"mlp_multipliers": 3}, "mlp_multipliers must be a list of 2 finite numbers, got 3"),
        ("falcon_h1", {"ssm_multipliers": [1]}, "ssm_multipliers must be a list of 5 finite numbers, got [1]"),
        ("mamba2", {"time_step_limit": 5}, "time_step_limit must be a list, got 5"),
        ("xlstm", {"num_heads": 0}, "num_heads must be an integer of at least 1, got 0"),
    ],
)
def test_a_field_with_a_wrong_value_is_named(name: str, fields: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    folders.write(tmp_path, name)
    change(tmp_path, fields)
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        read_spec(tmp_path)
