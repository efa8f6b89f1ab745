"""Folders of flash-linear-attention: names and shapes of its tensors, and its logits where it can run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import deltazoo
from deltazoo.blocks.checkpoints.pretrained import read_spec
from deltazoo.mixers.core.conformance import relative_error

WIDTH, VOCAB, HIDDEN = 32, 19, 48
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH, "num_hidden_layers": 2, "vocab_size": VOCAB, "intermediate_size": HIDDEN, "norm_eps": 1e-3,
    "hidden_act": "swish", "tie_word_embeddings": False,
}  # fmt: skip
# Fields of each model, and the shapes of its mixer's tensors in flash-linear-attention 0.6.0
DELTA = {f"{x}_conv1d.weight": (32, 1, 4) for x in "qkv"} | {f"{x}_proj.weight": (32, 32) for x in "qkvo"}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "gla": ("GLA", {"num_heads": 2, "fuse_norm": True}, {
        "q_proj.weight": (16, 32), "k_proj.weight": (16, 32), "v_proj.weight": (32, 32), "g_proj.weight": (32, 32),
        "gk_proj.0.weight": (16, 32), "gk_proj.1.weight": (16, 16), "gk_proj.1.bias": (16,), "o_proj.weight": (32, 32),
        "g_norm_swish_gate.weight": (16,),
    }),
    "retnet": ("RetNet", {"num_heads": 2, "fuse_norm": True}, {
        "q_proj.weight": (32, 32), "k_proj.weight": (32, 32), "v_proj.weight": (64, 32), "g_proj.weight": (64, 32),
        "o_proj.weight": (32, 64), "g_norm_swish_gate.weight": (32,),
    }),
    "delta_net": ("DeltaNet", {"num_heads": 2}, DELTA | {"b_proj.weight": (2, 32), "o_norm.weight": (16,)}),
    "gated_deltanet": ("GatedDeltaNet", {"num_heads": 2, "head_dim": 8}, {
        "A_log": (2,), "dt_bias": (2,), "q_proj.weight": (16, 32), "k_proj.weight": (16, 32),
        "v_proj.weight": (32, 32),
        "a_proj.weight": (2, 32), "b_proj.weight": (2, 32), "q_conv1d.weight": (16, 1, 4),
        "k_conv1d.weight": (16, 1, 4),
        "v_conv1d.weight": (32, 1, 4), "g_proj.weight": (32, 32), "o_norm.weight": (16,), "o_proj.weight": (32, 32),
    }),
    "rwkv6": ("RWKV6", {"num_heads": 2, "hidden_act": "sqrelu", "proj_low_rank_dim": 3, "gate_low_rank_dim": 5}, {
        "attn.x_proj.0.mu": (32,), "attn.x_proj.0.linear.weight": (15, 32), "attn.x_proj.2.weight": (32, 15),
        "attn.x_bias": (5, 32), "attn.bonus": (2, 8), "attn.g_norm.weight": (32,), "attn.g_norm.bias": (32,),
        "attn.w_proj.linear.lora.0.weight": (5, 32), "attn.w_proj.linear.lora.2.weight": (16, 5),
        "attn.w_proj.linear.lora.2.bias": (16,), "attn.r_proj.linear.weight": (16, 32),
        "attn.k_proj.linear.weight": (16, 32), "attn.v_proj.linear.weight": (32, 32),
        "attn.g_proj.linear.weight": (32, 32), "attn.o_proj.weight": (32, 32),
        "ffn.key.mu": (32,), "ffn.key.linear.weight": (48, 32), "ffn.receptance.mu": (32,),
        "ffn.receptance.linear.weight": (32, 32), "ffn.value.weight": (32, 48),
    }),
    "rwkv7": ("RWKV7", {"head_dim": 8, "hidden_act": "sqrelu", "v_low_rank_dim": 3, "value_dim": 32}, {
        **{f"attn.x_{x}": (1, 1, 32) for x in "rwkvag"}, "attn.k_k": (32,), "attn.k_a": (32,), "attn.r_k": (4, 8),
        **{f"attn.{x}_proj.weight": (32, 32) for x in "rkvo"}, "attn.g_norm.weight": (32,), "attn.g_norm.bias": (32,),
        **{f"attn.{x}_lora.lora.0.weight": (rank, 32) for x, rank in {"w": 64, "a": 64, "g": 128}.items()},
        **{f"attn.{x}_lora.lora.2.weight": (32, rank) for x, rank in {"w": 64, "a": 64, "g": 128}.items()},
        "attn.w_lora.lora.2.bias": (32,), "attn.a_lora.lora.2.bias": (32,),
        "ffn.x_k": (32,), "ffn.key.weight": (48, 32), "ffn.value.weight": (32, 48),
    }),
    "kda": ("KDA", {"num_heads": 2, "head_dim": 8}, {
        "A_log": (2,), "dt_bias": (16,), "q_proj.weight": (16, 32), "k_proj.weight": (16, 32),
        "v_proj.weight": (16, 32),
        "q_conv1d.weight": (16, 1, 4), "k_conv1d.weight": (16, 1, 4), "v_conv1d.weight": (16, 1, 4),
        "f_proj.0.weight": (8, 32), "f_proj.1.weight": (16, 8), "b_proj.weight": (2, 32), "g_proj.0.weight": (8, 32),
        "g_proj.1.weight": (16, 8), "g_proj.1.bias": (16,), "o_norm.weight": (8,), "o_proj.weight": (32, 16),
    }),
}  # fmt: skip


def write(folder: Path, name: str, **changes: Any) -> Path:
    """Write a folder with a config and random weights, by our exporter."""
    _, fields, _ = MODELS[name]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": name} | SIZES | fields | changes))
    spec = read_spec(folder).spec
    torch.manual_seed(0)
    spec.build(backend="reference").save_pretrained(folder / "written", model_type=name)
    return folder / "written"


@pytest.mark.parametrize("name", MODELS)
def test_the_folder_has_the_tensors_of_flash_linear_attention(name: str, tmp_path: Path) -> None:
    if name.startswith("rwkv"):
        layer, vectors = MODELS[name][2], ["model.norm.bias", "model.layers.0.pre_norm.weight"]
        layer = layer | {f"{norm}_norm.{x}": (WIDTH,) for norm in ("attn", "ffn") for x in ("weight", "bias")}
        vectors.append("model.layers.0.pre_norm.bias")
    else:
        layer, vectors = {f"attn.{key}": shape for key, shape in MODELS[name][2].items()}, []
        layer |= {"mlp.gate_proj.weight": (HIDDEN, WIDTH), "mlp.up_proj.weight": (HIDDEN, WIDTH)}
        layer |= {"mlp.down_proj.weight": (WIDTH, HIDDEN), "attn_norm.weight": (WIDTH,), "mlp_norm.weight": (WIDTH,)}
    expected = {f"model.layers.{i}.{key}": shape for i in range(2) for key, shape in layer.items()}
    expected |= {"model.embeddings.weight": (VOCAB, WIDTH), "lm_head.weight": (VOCAB, WIDTH)}
    expected |= dict.fromkeys(["model.norm.weight", *vectors], (WIDTH,))
    if name == "rwkv7":  # whose first layer has no values to be mixed with
        lora = "model.layers.1.attn.v_lora.lora."
        expected |= {f"{lora}0.weight": (3, 32), f"{lora}2.weight": (32, 3), f"{lora}2.bias": (32,)}
    folder = write(tmp_path / "a", name)
    tensors = load_file(folder / "model.safetensors")
    assert {key: tuple(x.shape) for key, x in tensors.items()} == expected
    deltazoo.from_pretrained(folder).save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == tensors.keys() and all(torch.equal(again[key], x) for key, x in tensors.items())


def test_attention_in_some_layers_is_read(tmp_path: Path) -> None:
    attn = {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "window_size": 6, "qkv_bias": False, "rope_theta": 50.0}
    model = deltazoo.from_pretrained(write(tmp_path / "a", "gated_deltanet", attn=attn))
    assert model.spec.layer_names() == ["linear", "attention"]
    (window,) = model.spec.expand()[1].mixers
    assert (window.name, window.window, window.key_value_heads) == ("sliding_window", 6, 2)


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("rwkv")])
def test_a_model_of_attention_alone_is_written(name: str, tmp_path: Path) -> None:
    attn = {"layers": [0, 1], "num_heads": 4, "num_kv_heads": 2, "window_size": None, "rope_theta": 50.0}
    folder = write(tmp_path / "a", name, attn=attn)
    fields = json.loads((folder / "config.json").read_text())
    assert (fields["model_type"], fields["attn"]["layers"]) == (name, [0, 1])
    names = {key.split(".", 3)[-1] for key in load_file(folder / "model.safetensors") if ".attn." in key}
    assert names == {f"attn.{x}_proj.weight" for x in "qkvo"}
    assert read_spec(folder).spec == read_spec(tmp_path / "a").spec


@pytest.mark.cuda
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_flash_linear_attention(name: str, tmp_path: Path) -> None:
    """At most 64 tokens: it computes them by the kernels that have few configurations to tune."""
    models = pytest.importorskip("fla.models")
    prefix, fields, _ = MODELS[name]
    config = getattr(models, f"{prefix}Config")(**SIZES | fields, fuse_cross_entropy=False)
    torch.manual_seed(0)
    theirs = getattr(models, f"{prefix}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path)
    tokens = torch.randint(VOCAB, (2, 40))
    with torch.no_grad():
        expected = theirs.cuda()(tokens.cuda()).logits.cpu()
        actual = deltazoo.from_pretrained(tmp_path, backend="reference")(tokens)[0]
    assert relative_error(actual, expected) < 2e-3  # their kernels multiply in tf32
