"""Every family of checkpoints: folders of transformers read and written; run by `make test-families`."""

import json
import logging
from pathlib import Path

import folders
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import deltazoo
from deltazoo.blocks.checkpoints.comparison import compare
from deltazoo.blocks.checkpoints.conversion import convert
from deltazoo.blocks.model.moe import MoE
from deltazoo.mixers.core.conformance import relative_error

pytest.importorskip("transformers", minversion="5.23", reason="older versions have no OLMo Hybrid")


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: x for path in sorted(folder.glob("*.safetensors")) for name, x in load_file(path).items()}


def assert_same_bytes(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(actual[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), name


@pytest.mark.parametrize("name", folders.MODELS)
def test_logits_layers_and_greedy_tokens_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    folders.write(tmp_path, name)
    result = compare(tmp_path, tokens=64)
    assert result.equal, result
    assert max(result.layers) < 1e-4


@pytest.mark.parametrize("name", folders.MODELS)
def test_the_error_of_bfloat16_is_at_most_1_2_times_that_of_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folders.write(tmp_path, name, torch.bfloat16)
    # their grouped products need rows of a multiple of 16 bytes
    model = deltazoo.from_pretrained(tmp_path)
    routed = any(isinstance(layer.mlp, MoE) for layer in model.spec.expand())
    rows = 40 if routed else 8  # the error is that of the few tokens which rounding sends to another expert
    tokens = torch.randint(folders.VOCAB, (rows, 64), generator=torch.Generator().manual_seed(3))
    options = {"experts_implementation": "eager"} if routed else {}
    with torch.no_grad():
        exact = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(tokens).logits
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, **options)(tokens).logits
        ours = model(tokens)[0]
    assert relative_error(ours, exact) < 1.2 * relative_error(theirs, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", folders.MODELS)
def test_round_trip_gives_equal_bytes(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Two are written by our exporter first: that of transformers cuts the convolutions of OLMo Hybrid at wrong rows,
    and gives the dense MLPs of Kimi Linear the name of the experts.
    """
    source = tmp_path / "source"
    folders.write(source, name, dtype)
    if name.startswith(("olmo", "kimi")):
        convert(source, tmp_path / "exact")
        source = tmp_path / "exact"
    deltazoo.from_pretrained(source).save_pretrained(tmp_path / "ours", max_shard_bytes=20_000)
    assert len([*(tmp_path / "ours").glob("*.safetensors")]) > 1
    assert_same_bytes(tensors(tmp_path / "ours"), tensors(source))


@pytest.mark.parametrize("name", folders.MODELS)
def test_transformers_loads_our_folder_without_a_warning(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import AutoModelForCausalLM

    folders.write(tmp_path / "source", name)
    deltazoo.from_pretrained(tmp_path / "source").save_pretrained(tmp_path / "ours", max_shard_bytes=20_000)
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "source").state_dict()
    logger = logging.getLogger("transformers")
    logger.propagate = True
    with caplog.at_level(logging.WARNING):
        model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert [record.message for record in caplog.records] == []
    assert not any(info.values())
    assert_same_bytes(model.state_dict(), before)


@pytest.mark.parametrize("name", folders.MODELS)
def test_a_stack_without_an_origin_has_one_config(name: str, tmp_path: Path) -> None:
    """A model that was trained here is written as the simplest family that expresses it, and read as the same stack."""
    folders.write(tmp_path / "source", name)
    model = deltazoo.from_pretrained(tmp_path / "source")
    model.origin = None
    model.save_pretrained(tmp_path / "ours")
    again = deltazoo.from_pretrained(tmp_path / "ours")
    assert again.spec == model.spec
    assert_same_bytes(again.state_dict(), model.state_dict())


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_qwen3_5_with_a_vision_tower_drops_it_and_is_written_without(name: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    text, whole = tmp_path / "text", tmp_path / "whole"
    folders.write(text, f"{name}_text")
    whole.mkdir()
    config = json.loads((text / "config.json").read_text())
    nested = {"model_type": name, "text_config": config, "vision_config": {"depth": 1}}
    (whole / "config.json").write_text(json.dumps(nested))
    renamed = {name.replace("model.", "model.language_model."): x for name, x in tensors(text).items()}
    extra = {"model.visual.blocks.0.weight": torch.ones(3), "mtp.norm.weight": torch.ones(3)}
    save_file(renamed | extra, whole / "model.safetensors")
    expected, actual = deltazoo.from_pretrained(text), deltazoo.from_pretrained(whole)
    assert_same_bytes(actual.state_dict(), expected.state_dict())
    actual.save_pretrained(tmp_path / "written")
    assert_same_bytes(tensors(tmp_path / "written"), tensors(text))
    written = json.loads((tmp_path / "written" / "config.json").read_text())
    assert (written["model_type"], written["architectures"]) == (config["model_type"], config["architectures"])


@pytest.mark.parametrize("name", ["mamba-tied", "mamba2-tied"])
def test_folders_of_state_spaces_are_read_and_written_as_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Their names, their config, and a pickled file with the tied head beside the embedding."""
    source, theirs = tmp_path / "source", tmp_path / "theirs"
    folders.write(source, name)
    theirs.mkdir()
    config = json.loads((source / "config.json").read_text())
    weights = {key.replace(".embeddings.", ".embedding."): x for key, x in tensors(source).items()}
    weights["lm_head.weight"] = weights["backbone.embedding.weight"]
    torch.save(weights, theirs / "pytorch_model.bin")
    layer = {"d_state": config["state_size"], "expand": config["expand"]}
    if name == "mamba-tied":
        layer["dt_rank"] = config["time_step_rank"]
    else:
        layer |= {"layer": "Mamba2", "headdim": config["head_dim"], "ngroups": config["n_groups"]}
    fields = {"d_model": config["hidden_size"], "n_layer": config["num_hidden_layers"], "vocab_size": folders.VOCAB}
    fields |= {"ssm_cfg": layer, "rms_norm": True, "residual_in_fp32": True, "fused_add_norm": True}
    (theirs / "config.json").write_text(json.dumps(fields | {"pad_vocab_size_multiple": 1}))
    model = deltazoo.from_pretrained(theirs)
    expected = deltazoo.from_pretrained(source)
    assert_same_bytes(model.state_dict(), expected.state_dict())
    mixer, other = model.spec.expand()[0].mixers[0], expected.spec.expand()[0].mixers[0]
    assert mixer.model_copy(update={"norm_eps": other.norm_eps}) == other
    assert model.spec.norm_eps == 1e-5 and (name == "mamba-tied" or mixer.norm_eps == 1e-5)
    model.save_pretrained(tmp_path / "written")
    assert_same_bytes(tensors(tmp_path / "written"), tensors(source))


def test_all_experts_in_one_tensor_are_read_and_written_as_one_each(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    source = tmp_path / "source"
    folders.write(source, "qwen3_5_moe_text")
    weights = tensors(source)
    joined = {}
    for i in range(3):
        prefix = f"model.layers.{i}.mlp.experts."
        gates = [torch.cat([weights.pop(f"{prefix}{n}.{x}_proj.weight") for x in ("gate", "up")]) for n in range(3)]
        joined[f"{prefix}gate_up_proj"] = torch.stack(gates)
        joined[f"{prefix}down_proj"] = torch.stack([weights.pop(f"{prefix}{n}.down_proj.weight") for n in range(3)])
    (tmp_path / "joined").mkdir()
    (tmp_path / "joined" / "config.json").write_text((source / "config.json").read_text())
    save_file(weights | joined, tmp_path / "joined" / "model.safetensors")
    model = deltazoo.from_pretrained(tmp_path / "joined")
    assert_same_bytes(model.state_dict(), deltazoo.from_pretrained(source).state_dict())
    model.save_pretrained(tmp_path / "written")
    assert_same_bytes(tensors(tmp_path / "written"), tensors(source))


def test_the_hub_fields_of_kimi_linear_give_the_stack_of_those_of_transformers(tmp_path: Path) -> None:
    folders.write(tmp_path, "kimi_linear")
    expected = deltazoo.from_pretrained(tmp_path).spec
    config = json.loads((tmp_path / "config.json").read_text())
    types = config.pop("layer_types")
    places = {kind: [i + 1 for i, other in enumerate(types) if other == kind] for kind in types}
    hub = {"num_heads": config.pop("linear_num_heads"), "head_dim": config.pop("linear_head_dim")}
    hub |= {"full_attn_layers": places["full_attention"], "kda_layers": places["linear_attention"]}
    hub["short_conv_kernel_size"] = config.pop("linear_conv_kernel_dim")
    del config["mlp_layer_types"]
    config |= {"linear_attn_config": hub, "first_k_dense_replace": 1, "moe_layer_freq": 1, "use_grouped_topk": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert deltazoo.from_pretrained(tmp_path).spec == expected
