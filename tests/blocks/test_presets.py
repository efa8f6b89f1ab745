"""Every preset builds and has the number of parameters of its published sizes."""

import pytest
import torch
import torch.nn.functional as F

from deltazoo.backends.io.errors import UnknownNameError
from deltazoo.blocks import preset
from deltazoo.blocks.model.layer import LayerSpec
from deltazoo.blocks.model.moe import MoE
from deltazoo.blocks.spec import presets
from deltazoo.blocks.spec.stack_spec import StackSpec
from deltazoo.mixers import MLA, Attention, SlidingWindow

SMALL = ["gated-deltanet-h1-small", "gated-deltanet-small", "transformer-pp-small"]


def attention(width: int) -> int:
    return 4 * width**2


def deltanet(width: int, heads: int) -> int:
    """q, k, v and out; beta; three convolutions of four taps; a norm of the heads' outputs."""
    return 4 * width**2 + heads * width + 12 * width + width // heads


def gated_deltanet(width: int) -> int:
    """9 heads, K = 3/4 width / 9, V = 3/2 width / 9: q, k; v, gate, out; beta, decay; convolutions; norm."""
    key, value = 3 * width // 4, 3 * width // 2
    return 2 * width * key + 3 * width * value + 2 * 9 * width + 2 * 9 + 4 * (2 * key + value) + value // 9


def mamba(width: int) -> int:
    """2 width channels with states of 16: input and gate, convolution, B, C and step, A, D; out."""
    channels, rank = 2 * width, width // 16
    return (
        width * 2 * channels
        + 5 * channels
        + channels * (rank + 32)
        + (rank + 1) * channels
        + 17 * channels
        + channels * width
    )


def stack(width: int, mixers: list[int], hidden: int, vocab: int = 32000) -> int:
    """Tied embedding, a SwiGLU and two norms a layer, a last norm."""
    return vocab * width + sum(mixers) + len(mixers) * (3 * width * hidden + 2 * width) + width


COUNTS = {
    "transformer-pp": (stack(1024, 24 * [attention(1024)], 2816), 0.34),
    "transformer-pp-1.3b": (stack(2048, 24 * [attention(2048)], 5632), 1.3),
    "deltanet-swa": (stack(1024, 12 * [deltanet(1024, 8), attention(1024)], 2816), 0.34),
    "deltanet-swa-1.3b": (stack(2048, 12 * [deltanet(2048, 16), attention(2048)], 5632), 1.3),
    "gated-deltanet": (stack(1536, 11 * [gated_deltanet(1536)], 6144), 0.52),
    "gated-deltanet-1.3b": (stack(2400, 16 * [gated_deltanet(2400)], 5888), 1.3),
    "gated-deltanet-h1": (stack(1536, 6 * [gated_deltanet(1536), attention(1536)], 6144), 0.53),
    "gated-deltanet-h1-1.3b": (stack(2304, 9 * [gated_deltanet(2304), attention(2304)], 6144), 1.3),
    "gated-deltanet-h2": (None, 0.54),
    "samba": (stack(1536, 6 * [mamba(1536), attention(1536)], 4096), 0.421),
    "deltanet-global2": (stack(1024, 22 * [deltanet(1024, 8)] + 2 * [attention(1024)], 2816), 0.34),
    "deltanet-global2-1.3b": (stack(2048, 22 * [deltanet(2048, 16)] + 2 * [attention(2048)], 5632), 1.3),
}


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", COUNTS)
def test_a_preset_has_the_published_number_of_parameters(name):
    exact, billions = COUNTS[name]
    with torch.device("meta"):
        parameters = count(StackSpec.load(name).build())
    assert exact in (None, parameters)
    assert abs(parameters / 1e9 - billions) < 0.05 * billions


NEMOTRON_H = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
MAMBA2_HYBRID = "M-M-M--M-M*-M-M-M-M--M*-M-M-M-M-M*--M-M-M-M-M*-M--M-M-M-"

# Preset: class of transformers, and the fields in which the published configuration differs from the class's defaults.
TRANSFORMERS = {
    "falcon-h1": (
        "FalconH1",
        {
            "vocab_size": 32784,
            "hidden_size": 1024,
            "intermediate_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "mamba_d_ssm": 1536,
            "mamba_n_heads": 24,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
        },
    ),
    "griffin": ("RecurrentGemma", {"num_key_value_heads": 1, "intermediate_size": 15360}),
    "jamba": ("Jamba", {}),
    "kimi-linear": (
        "KimiLinear",
        {
            "linear_attn_config": {
                "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],  # from 1
                "kda_layers": [n for n in range(1, 28) if n % 4 and n != 27],
            }
        },
    ),
    "mamba2-hybrid": (  # Megatron's model in the terms of Nemotron-H
        "NemotronH",
        {"hybrid_override_pattern": MAMBA2_HYBRID, "vocab_size": 256000, "intermediate_size": 16384},
    ),
    "minimax-01": (
        "MiniMax",
        {
            "vocab_size": 200064,
            "hidden_size": 6144,
            "intermediate_size": 9216,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "head_dim": 128,
            "num_local_experts": 32,
            "layer_types": 10 * (7 * ["linear_attention"] + ["full_attention"]),
        },
    ),
    "nemotron-h": ("NemotronH", {"hybrid_override_pattern": NEMOTRON_H}),
    "olmo-hybrid": ("OlmoHybrid", {}),
    "qwen3-next": ("Qwen3Next", {}),
    "qwen3.5": ("Qwen3_5", {}),
}


def published_config(name):
    transformers = pytest.importorskip("transformers", minversion="5.17")
    family, fields = TRANSFORMERS[name]
    text = "Text" if family == "Qwen3_5" else ""
    return getattr(transformers, f"{family}{text}Config")(**fields)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_preset_has_as_many_parameters_as_in_transformers(name):
    config, transformers = published_config(name), pytest.importorskip("transformers")
    with torch.device("meta"):
        expected = count(getattr(transformers, f"{TRANSFORMERS[name][0]}ForCausalLM")(config))
        assert count(preset(name).build()) == expected


def kind(layer):
    """The kind of a layer in transformers' words."""
    attention = {Attention: "full_attention", MLA: "full_attention", SlidingWindow: "sliding_attention"}
    return attention.get(type(layer.mixer), "linear_attention") if layer.mixers else "mlp"


@pytest.mark.parametrize("name", [name for name in TRANSFORMERS if name != "falcon-h1"])  # whose layers are all equal
def test_layers_are_in_the_order_of_transformers(name):
    config = published_config(name)
    assert [kind(layer) for layer in preset(name).expand()] == list(config.layer_types)
    sparse = [isinstance(layer.mlp, MoE) for layer in preset(name).expand()]
    if name == "jamba":
        assert sparse == [experts > 1 for experts in config.layers_num_experts]
    elif name == "kimi-linear":
        assert sparse == [mlp == "sparse" for mlp in config.mlp_layer_types]
    else:
        assert sparse == len(sparse) * [name in ("qwen3-next", "minimax-01")]


def test_every_preset_of_a_published_size_has_a_checked_number_of_parameters():
    assert {name for name in presets.names() if name not in SMALL and not name.endswith("-tiny")} == {
        *COUNTS,
        *TRANSFORMERS,
    }


def test_the_small_presets_have_equal_size_and_learn():
    counts = []
    for name in SMALL:
        torch.manual_seed(0)
        model = StackSpec.load(name).build(backend="reference")
        counts.append(count(model))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        tokens = torch.tensor([list(b"the quick brown fox jumps")])
        losses = []
        for _ in range(20):
            loss = model.loss(tokens[:, :-1], tokens[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert abs(losses[0] - F.cross_entropy(torch.zeros(1, 256), torch.tensor([0]))) < 0.3
        assert losses[-1] < 0.5 * losses[0], name
    assert max(counts) / min(counts) < 1.03


@pytest.mark.parametrize("name", presets.names())
def test_a_preset_cites_its_source(name):
    first = presets.text(name).splitlines()[0]
    assert first.startswith("# ")
    assert "arXiv" in presets.text(name) or name.endswith(("-small", "-tiny"))


def test_preset_returns_the_stack_that_load_reads():
    for name in presets.names():
        assert preset(name) == StackSpec.load(name)
    with pytest.raises(UnknownNameError, match="did you mean 'samba'"):
        preset("sambo")


@pytest.mark.parametrize("name", presets.names())
def test_the_layers_of_a_preset_have_the_names_of_their_mixers(name):
    titles: dict[str, list[str]] = {}
    for layer, config in preset(name).layers.items():
        titles.setdefault(config.title if isinstance(config, LayerSpec) else config.name, []).append(layer)
    assert all(title in layers for title, layers in titles.items())


def test_the_embedding_scale_of_griffin_is_the_published_bfloat16_buffer() -> None:
    """`normalizer` in transformers' modeling_recurrent_gemma.py."""
    assert StackSpec.load("griffin").embedding_scale == torch.tensor(2560**0.5, dtype=torch.bfloat16).item() == 50.5


TWICE = {  # pattern with layers of another MLP, and the name of the preset's MLP of the other layers
    "jamba": ("2*(mamba + other) + attention + other + mamba + other", "mamba", "moe", "dense"),
    "jamba-tiny": ("mamba + other + attention + other", "mamba", "moe", "dense"),
    "kimi-linear": ("other@[0] else mla@[3, 7, 11, 15, 19, 23, 26] else kda", "kda", "dense", "moe"),
    "kimi-linear-tiny": ("other@[0] else mla@[3] else kda", "kda", "dense", "moe"),
}


@pytest.mark.parametrize("name", TWICE)
def test_a_preset_with_a_pattern_of_mlps_equals_one_with_a_second_layer(name):
    pattern, mixer, other, rest = TWICE[name]
    data = presets.read(name)
    mlps, layers = data.pop("mlps"), data["layers"]
    layers = {**layers, "other": {"mixer": layers[mixer], "mlp": mlps[other]}}
    assert (
        preset(name).expand() == StackSpec(**data | {"pattern": pattern, "layers": layers, "mlp": mlps[rest]}).expand()
    )
