"""RWKV: the `.pth` files of RWKV-7's authors against their equations in float64, and folders of both libraries.

B batch, T time, D width, H heads, K key and value width
"""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

import deltazoo
from deltazoo.backends.io.errors import ConfigError
from deltazoo.blocks.checkpoints.conversion import convert
from deltazoo.blocks.generation.sampling import Sampling
from deltazoo.mixers.core.conformance import relative_error

D, H, K, BLOCKS, VOCAB, HIDDEN = 24, 3, 8, 3, 17, 20
RANKS = {"w": 5, "a": 4, "v": 3, "g": 6}


def weights() -> dict[str, Tensor]:
    """Random weights with the names and shapes of the published files."""
    torch.manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"emb.weight": (VOCAB, D), "head.weight": (VOCAB, D)}
    for i in range(BLOCKS):
        block = f"blocks.{i}."
        norms = ["ln1", "ln2", "att.ln_x"] + (["ln0"] if i == 0 else [])
        shapes |= {f"{block}{norm}.{x}": (D,) for norm in norms for x in ("weight", "bias")}
        shapes |= {f"{block}att.x_{x}": (1, 1, D) for x in "rwkvag"} | {f"{block}att.r_k": (H, K)}
        shapes |= {f"{block}att.{x}": (1, 1, D) for x in ("w0", "a0", "v0", "k_k", "k_a")}
        shapes |= {f"{block}att.{x}1": (D, rank) for x, rank in RANKS.items()}
        shapes |= {f"{block}att.{x}2": (rank, D) for x, rank in RANKS.items()}
        shapes |= {f"{block}att.{x}.weight": (D, D) for x in ("receptance", "key", "value", "output")}
        shapes |= {f"{block}ffn.x_k": (1, 1, D), f"{block}ffn.key.weight": (HIDDEN, D)}
        shapes |= {f"{block}ffn.value.weight": (D, HIDDEN)}
    shapes |= {f"ln_out.{x}": (D,) for x in ("weight", "bias")}
    return {name: 0.6 * torch.randn(shape) for name, shape in shapes.items()}


def rwkv7(w: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """The logits by the equations of RWKV-7 (2503.14456), token by token."""
    w = {name: x.double() for name, x in w.items()}

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (D,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

    x, first = norm(w["emb.weight"][tokens], "blocks.0.ln0"), None
    for i in range(BLOCKS):
        att = {name.removeprefix(f"blocks.{i}.att."): y for name, y in w.items()}
        y = norm(x, f"blocks.{i}.ln1")
        delta = F.pad(y, (0, 0, 1, -1)) - y
        r, d, k, v, a, g = (y + delta * att[f"x_{n}"] for n in "rwkvag")
        r, key, value = r @ att["receptance.weight"].T, k @ att["key.weight"].T, v @ att["value.weight"].T
        decay = torch.exp(-0.606531 * torch.sigmoid(att["w0"] + torch.tanh(d @ att["w1"]) @ att["w2"]))
        a = torch.sigmoid(att["a0"] + a @ att["a1"] @ att["a2"])
        g = torch.sigmoid(g @ att["g1"]) @ att["g2"]
        if first is None:
            first = value
        else:
            value = value + (first - value) * torch.sigmoid(att["v0"] + v @ att["v1"] @ att["v2"])
        heads = lambda z: z.unflatten(-1, (H, K))  # noqa: E731
        kappa = F.normalize(heads(key * att["k_k"]), dim=-1)
        key = key * (1 + (a - 1) * att["k_a"])
        S = x.new_zeros(len(x), H, K, K)  # [value, key]
        outputs = []
        for t in range(x.shape[1]):
            rt, wt, kt, vt, at = (heads(z)[:, t] for z in (r, decay, key, value, a))
            removal = kappa[:, t]
            S = S * wt[:, :, None] - (S @ removal[..., None]) * (removal * at)[:, :, None]
            S = S + vt[..., None] * kt[:, :, None]
            outputs.append((S @ rt[..., None])[..., 0].flatten(1))
        o = torch.stack(outputs, 1)
        o = F.group_norm(o.flatten(0, 1), H, att["ln_x.weight"], att["ln_x.bias"], 64e-5 * K / 64).view_as(o)
        o = o + ((heads(r) * heads(key) * att["r_k"]).sum(-1, keepdim=True) * heads(value)).flatten(2)
        x = x + (o * g) @ att["output.weight"].T
        y = norm(x, f"blocks.{i}.ln2")
        mixed = y + (F.pad(y, (0, 0, 1, -1)) - y) * w[f"blocks.{i}.ffn.x_k"]
        x = x + (mixed @ w[f"blocks.{i}.ffn.key.weight"].T).relu() ** 2 @ w[f"blocks.{i}.ffn.value.weight"].T
    return norm(x, "ln_out") @ w["head.weight"].T


def test_a_file_of_rwkv7_has_the_logits_of_its_equations(tmp_path: Path) -> None:
    w, tokens = weights(), torch.randint(VOCAB, (2, 29))
    torch.save(w, tmp_path / "RWKV-x070.pth")
    wanted = rwkv7(w, tokens)
    for path in (tmp_path, tmp_path / "RWKV-x070.pth"):
        model = deltazoo.from_pretrained(path, dtype=torch.float64, backend="reference")
        assert relative_error(model(tokens)[0], wanted) < 1e-6  # the published constant has six digits
    greedy, text = model.generate(tokens, Sampling(max_tokens=64, temperature=0)), tokens
    for _ in range(64):
        text = torch.cat([text, rwkv7(w, text)[:, -1:].argmax(-1)], 1)
    assert torch.equal(greedy, text[:, 29:])


def test_a_file_of_rwkv7_is_written_as_a_folder_of_flash_linear_attention(tmp_path: Path) -> None:
    """Names and shapes of flash-linear-attention 0.6.0, with transposed low-rank maps; both have equal logits."""
    w = weights()
    torch.save(w, tmp_path / "model.pth")
    convert(tmp_path / "model.pth", tmp_path / "folder")
    written = load_file(tmp_path / "folder" / "model.safetensors")
    blocks = {name.split(".", 3)[-1]: tuple(x.shape) for name, x in written.items() if ".layers.1." in name}
    lora = {f"attn.{x}_lora.lora.{i}.weight": (D, n)[:: 1 - 2 * (i == 0)] for x, n in RANKS.items() for i in (0, 2)}
    assert blocks == {
        **{f"{norm}.{x}": (D,) for norm in ("attn_norm", "ffn_norm", "attn.g_norm") for x in ("weight", "bias")},
        **{f"attn.x_{x}": (1, 1, D) for x in "rwkvag"},
        **{f"attn.{x}_proj.weight": (D, D) for x in "rkvo"},
        **lora,
        **{f"attn.{x}_lora.lora.2.bias": (D,) for x in "wav"},
        "attn.k_k": (D,),
        "attn.k_a": (D,),
        "attn.r_k": (H, K),
        "ffn.x_k": (D,),
        "ffn.key.weight": (HIDDEN, D),
        "ffn.value.weight": (D, HIDDEN),
    }
    assert "model.layers.0.pre_norm.bias" in written and not any("layers.0.attn.v_lora" in name for name in written)
    assert torch.equal(written["model.layers.2.attn.w_lora.lora.2.weight"], w["blocks.2.att.w2"].T)
    tokens = torch.randint(VOCAB, (1, 9))
    logits = [deltazoo.from_pretrained(tmp_path / x, backend="reference")(tokens)[0] for x in ("model.pth", "folder")]
    assert torch.equal(*logits)
    prefix = "model.layers.0.attn."
    joined = {name: x for name, x in written.items() if not name.startswith(f"{prefix}x_")}
    joined[f"{prefix}x_x"] = torch.cat([written[f"{prefix}x_{x}"].view(1, D) for x in "rwkvag"])
    from safetensors.torch import save_file

    save_file(joined, tmp_path / "folder" / "model.safetensors")
    assert torch.equal(deltazoo.from_pretrained(tmp_path / "folder", backend="reference")(tokens)[0], logits[0])


def test_other_files_are_refused_in_one_sentence(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "model.pth")
    with pytest.raises(ConfigError, match=r"must have the tensors of RWKV-7"):
        deltazoo.from_pretrained(tmp_path / "model.pth")
    w = weights()
    del w["blocks.1.ln2.bias"]
    torch.save(w, tmp_path / "model.pth")
    with pytest.raises(ConfigError, match=r"blocks\.1\.ln2\.bias is missing"):
        deltazoo.from_pretrained(tmp_path)
    torch.save({"run": print}, tmp_path / "model.pth")
    with pytest.raises(ConfigError, match="damaged"):
        deltazoo.from_pretrained(tmp_path)
