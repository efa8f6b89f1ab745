"""Folders of transformers: one case of each kind. `make test-families` runs every family."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

import deltazoo
from deltazoo import StackSpec
from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.update import registry
from deltazoo.blocks.checkpoints.rules import Packed, rule
from deltazoo.blocks.checkpoints.tensor_files import TensorFiles
from deltazoo.cli import app
from deltazoo.mixers import KDA, Attention

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def config(**changes: Any) -> dict[str, Any]:
    fields = {
        "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 19, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 24, "rms_norm_eps": 1e-5, "rope_theta": 50.0, "eos_token_id": 7,
    }  # fmt: skip
    return fields | changes


def weights() -> dict[str, Tensor]:
    """Return random tensors by the names of a Llama with the config above."""
    shapes = {"self_attn.q_proj": (16, 16), "self_attn.k_proj": (8, 16), "self_attn.v_proj": (8, 16)}
    shapes |= {
        "self_attn.o_proj": (16, 16),
        "mlp.gate_proj": (24, 16),
        "mlp.up_proj": (24, 16),
        "mlp.down_proj": (16, 24),
    }
    shapes |= {"input_layernorm": (16,), "post_attention_layernorm": (16,)}
    names = {f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in shapes.items()}
    names |= {"model.embed_tokens.weight": (19, 16), "model.norm.weight": (16,), "lm_head.weight": (19, 16)}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in names.items()}


def write(folder: Path, tensors: dict[str, Tensor], **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(**changes)))
    save_file(tensors, folder / FILE)
    return folder


def problem(folder: Path, **arguments: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        deltazoo.from_pretrained(folder, **arguments)
    return str(caught.value)


def test_interleaved_stacked_and_one_channel_tensors_are_taken_apart_and_put_together() -> None:
    """Rows of two heads: q0 g0 q1 g1, with 2 rows of q and 1 of the gate per head."""
    x = torch.arange(6.0)[:, None] * torch.ones(3)
    q_and_gate = rule({"q": "q", "gate": "gate"}, {"both": Packed("q gate", groups=2)}, {"q": 4, "gate": 2})
    ours = Packed("q gate", groups=2).split(x, q_and_gate.sizes)
    assert ours["q"][:, 0].tolist() == [0, 1, 3, 4] and ours["gate"][:, 0].tolist() == [2, 5]
    assert torch.equal(q_and_gate.write(ours)["both"], x)
    experts = rule({"all": Packed("a b", stack=2)}, {"first": "a", "second": "b"}, {"a": 3, "b": 3})
    assert torch.equal(experts.write({"all": x.view(2, 3, 3)})["second"], x[3:])
    conv = rule("conv", {"conv1d": Packed("all", axes=(1,))})
    assert conv.write({"conv": x})["conv1d"].shape == (6, 1, 3)
    assert all(view._is_view() for view in experts.targets({"all": x.view(2, 3, 3)}).values())
    sizes = {"whole": 2, "even": 2, "odd": 2}
    rotary = rule({"all": "whole even odd"}, {"pairs": "whole even~odd"}, sizes)
    assert rotary.write({"all": x})["pairs"][:, 0].tolist() == [0, 1, 2, 4, 3, 5]
    pieces = Packed("whole even~odd").split(x, sizes)
    assert pieces["even"][:, 0].tolist() == [2, 4] and pieces["odd"][:, 0].tolist() == [3, 5]
    transposed = rule("map", {"map.T": Packed("all", transposed=True)})
    assert torch.equal(transposed.write({"map": x})["map.T"], x.T)
    with pytest.raises(ConfigError, match="a tensor of the model must hold its pieces in order"):
        rule({"pairs": "even~odd"}, "x", sizes).targets({"pairs": x})


def test_qwen3_next_has_the_logits_of_transformers_and_equal_bytes(tmp_path: Path) -> None:
    """Interleaved projections, gated attention, experts, norms with an offset; bfloat16 with A_log in float32."""
    pytest.importorskip("transformers", minversion="5.23", reason="the config's fields are those of 5.23")
    import folders

    from deltazoo.blocks.checkpoints.comparison import compare

    folders.write(tmp_path / "a", "qwen3_next", torch.bfloat16)
    result = compare(tmp_path / "a", tokens=8)
    assert result.equal and max(result.layers) < 1e-4
    deltazoo.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    expected, actual = (load_file(tmp_path / x / FILE) for x in "ab")
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype and torch.equal(actual[name], tensor)


def test_shards_are_written_and_read(tmp_path: Path) -> None:
    model = deltazoo.from_pretrained(write(tmp_path / "a", weights()))
    model.save_pretrained(tmp_path / "b", max_shard_bytes=3000)
    index = json.loads((tmp_path / "b" / INDEX).read_text())
    files = {*index["weight_map"].values()}
    assert len(files) > 2 and not (tmp_path / "b" / FILE).exists()
    written = {name: x for file in files for name, x in load_file(tmp_path / "b" / file).items()}
    assert {name: x.tolist() for name, x in written.items()} == {name: x.tolist() for name, x in weights().items()}
    again = deltazoo.from_pretrained(tmp_path / "b")
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in model.state_dict().items())
    assert json.loads((tmp_path / "b" / "config.json").read_text())["eos_token_id"] == 7


def test_pickled_tensors_are_read_and_other_objects_are_not(tmp_path: Path) -> None:
    folder = write(tmp_path, weights())
    expected = deltazoo.from_pretrained(folder).state_dict()
    (folder / FILE).unlink()
    torch.save(weights(), folder / "pytorch_model.bin")
    assert all(torch.equal(x, expected[name]) for name, x in deltazoo.from_pretrained(folder).state_dict().items())
    torch.save(weights() | {"code": Path("x")}, folder / "pytorch_model.bin")
    assert "pytorch_model.bin is damaged" in problem(folder)


def test_tensors_are_read_in_place_or_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path, weights())
    storages: dict[int, int] = {}
    get = TensorFiles.get

    def recorded(files: TensorFiles, name: str) -> Tensor:
        tensor = get(files, name)
        storages[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    monkeypatch.setattr(TensorFiles, "get", recorded)
    expected = deltazoo.from_pretrained(folder).state_dict()
    assert not storages
    actual = deltazoo.from_pretrained(folder, dtype=torch.float64).state_dict()
    assert max(storages.values()) == max(x.numel() * 4 for x in weights().values())
    assert all(torch.equal(x, expected[name].double()) for name, x in actual.items())


def test_dtype_casts_the_weights(tmp_path: Path) -> None:
    model = deltazoo.from_pretrained(write(tmp_path, weights()), dtype=torch.bfloat16)
    assert {x.dtype for x in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.embedding.weight, weights()["model.embed_tokens.weight"].bfloat16())


def test_one_error_lists_every_wrong_tensor(tmp_path: Path) -> None:
    tensors = weights()
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.ones(24, 15)
    tensors["model.layers.7.mlp.up_proj.weight"] = torch.ones(1)
    tensors["lm_head.weight"] = torch.ones(19, 16, dtype=torch.int64)
    sentence = problem(write(tmp_path, tensors))
    assert "nothing was loaded" in sentence
    assert sentence.splitlines()[1:] == [
        "  model.norm.weight is missing",
        "  lm_head.weight must be float64, float32, float16 or bfloat16, got torch.int64",
        "  model.layers.0.mlp.up_proj.weight must have shape [24, 16], got [24, 15]",
        "  model.layers.7.mlp.up_proj.weight is unknown",
    ]


def test_the_head_of_a_tied_model_must_equal_the_embedding(tmp_path: Path) -> None:
    embedding = weights()["model.embed_tokens.weight"]
    expected = write(tmp_path / "a", weights() | {"lm_head.weight": embedding.clone()}, tie_word_embeddings=True)
    assert torch.equal(deltazoo.from_pretrained(expected).embedding.weight, embedding)
    for head in (weights()["lm_head.weight"], torch.ones(20, 16), embedding.bfloat16()):
        folder = write(tmp_path / "b", weights() | {"lm_head.weight": head}, tie_word_embeddings=True)
        assert "lm_head.weight must equal model.embed_tokens.weight" in problem(folder)
    rounded = {"lm_head.weight": embedding.bfloat16(), "model.embed_tokens.weight": embedding.bfloat16().float()}
    assert deltazoo.from_pretrained(write(tmp_path / "b", weights() | rounded, tie_word_embeddings=True)).spec.tied


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    tensors = weights()
    tensors["model.norm.weight"][3] = float("nan")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("inf")
    sentence = problem(write(tmp_path, tensors))
    assert "model.norm.weight has values that are NaN" in sentence and "layers.1.mlp.up_proj" in sentence
    assert sentence == problem(tmp_path, dtype=torch.bfloat16)  # which is not read in place
    tensors = weights()
    tensors["model.norm.weight"][3] = 1e5
    assert "model.norm.weight has values that torch.float16 cannot hold" in problem(
        write(tmp_path, tensors), dtype=torch.float16
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_threads_read_all_pieces_and_find_each_kind_of_number_that_is_not_finite(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three pieces of 4 MB and one of 8 bytes, with the largest finite numbers of both signs."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    x = torch.arange((3 << 22) // dtype.itemsize + 8 // dtype.itemsize).remainder(1000).to(dtype)
    x[:2] = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min], dtype=dtype)
    for number in (None, torch.inf, -torch.inf, torch.nan):
        stored = x.clone()
        if number is not None:
            stored[-1] = number
        save_file({"x": stored}, tmp_path / FILE)
        target = torch.empty_like(x)
        with TensorFiles(tmp_path) as files:
            assert all(files.get_into("x", [target[:5], target[5:]])) == (number is None)
        assert torch.equal(target.view(torch.uint8), stored.view(torch.uint8))


def test_damaged_missing_and_contradicting_files_are_refused(tmp_path: Path) -> None:
    names = [*weights()]
    folder = write(tmp_path, weights())
    content = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(content[:-9])
    assert "model.safetensors is damaged" in problem(folder)
    (folder / FILE).unlink()
    assert "has no weights" in problem(folder)
    save_file(weights(), folder / "1.safetensors")
    save_file({names[0]: weights()[names[0]]}, folder / "2.safetensors")
    weight_map = dict.fromkeys(names, "1.safetensors") | {names[1]: "2.safetensors", names[2]: "3.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    sentence = problem(folder)
    assert f"{names[0]} is in two files" in sentence and "3.safetensors is missing" in sentence
    assert f"{names[1]} is in 1.safetensors, and the index says 2.safetensors" in sentence
    (folder / INDEX).write_text(json.dumps({"weight_map": {names[0]: "../1.safetensors"}}))
    assert "must be in the same folder" in problem(folder)


def fp8_weights() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return tensors with matrices in FP8 in blocks of 8 x 6, and the dequantised ones."""
    quantised, expected = weights(), weights()
    for name, x in weights().items():
        if "proj" not in name:
            continue
        rows, columns = -(-x.shape[0] // 8), -(-x.shape[1] // 6)
        scale = 0.01 + torch.rand(rows, columns, generator=torch.Generator().manual_seed(len(name)))
        quantised[name], quantised[f"{name}_scale_inv"] = (x / 3).to(torch.float8_e4m3fn), scale
        whole = scale.repeat_interleave(8, 0)[: x.shape[0]].repeat_interleave(6, 1)[:, : x.shape[1]]
        expected[name] = (quantised[name].float() * whole).bfloat16()
    return quantised, expected


FP8 = {"quant_method": "fp8", "weight_block_size": [8, 6], "fmt": "e4m3", "activation_scheme": "dynamic"}


def test_weights_in_fp8_are_dequantised_and_written_without_scales(tmp_path: Path) -> None:
    quantised, expected = fp8_weights()
    model = deltazoo.from_pretrained(write(tmp_path / "a", quantised, quantization_config=FP8))
    model.save_pretrained(tmp_path / "b")
    written = load_file(tmp_path / "b" / FILE)
    assert written.keys() == expected.keys()
    assert all(written[name].dtype == x.dtype and torch.equal(written[name], x) for name, x in expected.items())
    assert "quantization_config" not in json.loads((tmp_path / "b" / "config.json").read_text())


def test_wrong_scales_of_fp8_weights_are_listed(tmp_path: Path) -> None:
    quantised, _ = fp8_weights()
    name = "model.layers.0.mlp.up_proj.weight"
    quantised[f"{name}_scale_inv"] = torch.ones(3, 2)
    other = "model.layers.1.self_attn.q_proj.weight"
    del quantised[f"{other}_scale_inv"]
    quantised["lm_head.weight_scale_inv"] = torch.ones(1, 1)
    sentence = problem(write(tmp_path, quantised, quantization_config=FP8))
    assert f"{name}_scale_inv must have shape [3, 3], got [3, 2]" in sentence
    assert f"{other}_scale_inv, the scales of {other}, is missing" in sentence
    assert "lm_head.weight_scale_inv is unknown" in sentence
    assert len(sentence.splitlines()) == 4
    assert "must be float64, float32, float16 or bfloat16, got torch.float8" in problem(write(tmp_path, quantised))


def test_a_tensor_that_is_twice_in_a_file_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, weights())
    content = (folder / FILE).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].decode().rstrip()
    entry = json.dumps({"model.norm.weight": json.loads(header)["model.norm.weight"]})[1:-1]
    header = f"{header[:-1]},{entry}}}".encode()
    header += b" " * (-len(header) % 8)
    (folder / FILE).write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    sentence = problem(folder)
    assert "model.norm.weight is twice in model.safetensors" in sentence or "model.safetensors is damaged" in sentence


@pytest.mark.parametrize(
    "damage", [lambda x: x[:4], lambda x: b"", lambda x: b"\xff" * 64, lambda x: x[:8] + b"x" + x[9:]]
)
def test_a_damaged_header_is_refused(damage: Any, tmp_path: Path) -> None:
    folder = write(tmp_path, weights())
    (folder / FILE).write_bytes(damage((folder / FILE).read_bytes()))
    assert "the file model.safetensors is damaged" in problem(folder)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
            "rope_parameters of the type 'longrope': rope_type",
        ),
        ({"rope_scaling": {"type": "yarn"}}, "rope_parameters of the type 'yarn': factor"),
        ({"attention_bias": True}, "attention_bias must be False for a model of type 'llama', got True"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
        ({"sinks": 4}, "with sinks is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "no other quantisation is supported"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8], "x": 1}}, "with x is not"),
        ({"hidden_size": None}, "needs the field hidden_size"),
        ({"hidden_size": "16"}, "hidden_size must be an integer of at least 1, got '16'"),
        ({"num_attention_heads": 0}, "config.json: num_attention_heads must be an integer of at least 1, got 0"),
        ({"rope_parameters": [1]}, "rope_parameters must be a mapping, got [1]"),
        ({"rope_scaling": "x"}, "rope_scaling must be a mapping, got 'x'"),
        ({"model_type": "os:system"}, "model_type must be the name of a family"),
    ],
)
def test_a_config_that_no_stack_expresses_is_refused(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    assert sentence in problem(write(tmp_path, weights(), **changes))


def test_an_unknown_model_type_names_the_nearest_family(tmp_path: Path) -> None:
    with pytest.raises(deltazoo.DeltazooError, match="qwen3_next"):
        deltazoo.from_pretrained(write(tmp_path, weights(), model_type="qwen3_nex"))


def test_a_stack_outside_all_families_is_not_written(tmp_path: Path) -> None:
    model = StackSpec(width=16, depth=1, vocab=9, pattern=KDA(heads=1)).build("reference")
    with pytest.raises(ConfigError, match=r"not any family of transformers:\n(.*\n)*  other .*, llama, "):
        model.save_pretrained(tmp_path / "a")
    layer = Attention(heads=2, key_value_heads=2, head_width=8, norm_eps=1e-6, gate=True)
    model = StackSpec(width=16, depth=1, vocab=9, pattern=layer, mlp={"width": 8}).build()
    with pytest.raises(
        ConfigError, match=r"'llama' of transformers:\n  llama: layer 0: mixer\.gate must be False, got"
    ):
        model.save_pretrained(tmp_path / "a", model_type="llama")
    assert not (tmp_path / "a").exists()
    (tmp_path / "b").write_text("")
    with pytest.raises(ConfigError, match="exists and is not an empty folder"):
        model.save_pretrained(tmp_path / "b")


def test_a_package_adds_a_family_by_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "family_of_a_test.py").write_text(
        "from deltazoo.blocks.checkpoints.families.llama import Llama\n"
        "class Mine(Llama):\n    architecture = 'MineForCausalLM'\n"
    )
    info = tmp_path / "mine-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[deltazoo.families]\nmine = family_of_a_test:Mine\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry.refresh()
    try:
        model = deltazoo.from_pretrained(write(tmp_path / "a", weights(), model_type="mine"))
        model.save_pretrained(tmp_path / "b")
    finally:
        monkeypatch.undo()
        registry.refresh()
    written = json.loads((tmp_path / "b" / "config.json").read_text())
    assert (written["model_type"], written["architectures"]) == ("mine", ["MineForCausalLM"])


def test_commands_convert_and_compare(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5.23")
    write(tmp_path / "a", weights())
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--dtype", "bfloat16"])
    assert (
        result.exit_code == 0 and f"llama, {sum(x.numel() for x in weights().values()):,} parameters" in result.stdout
    )
    assert load_file(tmp_path / "b" / FILE)["model.norm.weight"].dtype == torch.bfloat16
    result = CliRunner().invoke(app, ["compare", str(tmp_path / "b"), "--tokens", "4"])
    assert result.exit_code == 0 and "greedy tokens: 4 of 4 equal" in result.stdout


def test_a_family_has_at_most_120_lines() -> None:
    folder = Path(deltazoo.__file__).parent / "blocks" / "checkpoints" / "families"
    lengths = {path.name: len(path.read_text().splitlines()) for path in folder.glob("*.py")}
    assert len(lengths) > 9
    assert {name: length for name, length in lengths.items() if length > 120} == {}


def test_a_trained_model_is_converted(tmp_path: Path) -> None:
    from deltazoo.blocks.checkpoints.conversion import convert

    layer = Attention(heads=2, key_value_heads=1, head_width=8)
    spec = StackSpec(width=16, depth=1, vocab=256, pattern=layer, mlp={"width": 8})
    (tmp_path / "text").write_text("to be or not to be, that is the question. " * 40)
    run = deltazoo.TrainConfig(steps=1, batch={"length": 8, "rows": 2}, compile=False)
    deltazoo.train(spec, tmp_path / "run", tmp_path / "text", run)
    assert convert(tmp_path / "run", tmp_path / "out") == ("llama", 256 * 16 + 16 * 16 * 3 + 16 * 8 * 3 + 3 * 16)
    read, trained = deltazoo.from_pretrained(tmp_path / "out"), deltazoo.load(tmp_path / "run")
    assert read.spec == trained.spec
    assert all(torch.equal(x, trained.state_dict()[name]) for name, x in read.state_dict().items())
