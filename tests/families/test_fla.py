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
    mixer = {f"attn.{key}": shape for key, shape in MODELS[name][2].items()}
    mlp = {"mlp.gate_proj.weight": (HIDDEN, WIDTH), "mlp.up_proj.weight": (HIDDEN, WIDTH)}
    mlp |= {"mlp.down_proj.weight": (WIDTH, HIDDEN), "attn_norm.weight": (WIDTH,), "mlp_norm.weight": (WIDTH,)}
    expected = {f"model.layers.{i}.{key}": shape for i in range(2) for key, shape in (mixer | mlp).items()}
    expected |= {"model.embeddings.weight": (VOCAB, WIDTH), "lm_head.weight": (VOCAB, WIDTH)}
    expected |= {"model.norm.weight": (WIDTH,)}
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


@pytest.mark.cuda
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_flash_linear_attention(name: str, tmp_path: Path) -> None:
    """At most 64 tokens: it computes them by the kernels that have few configurations to tune."""
    models = pytest.importorskip("fla.models")
    prefix, fields, _ = MODELS[name]
    config = getattr(models, f"{prefix}Config")(**SIZES, **fields, fuse_cross_entropy=False)
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
