"""What LFM2's models with and without experts have in common: attention, short convolutions, and names."""

from typing import Any

from deltazoo.backends.io.errors import ConfigError
from deltazoo.blocks.checkpoints import decoder, parts
from deltazoo.blocks.checkpoints.family import HubConfig
from deltazoo.blocks.checkpoints.rules import Packed, Rule, renamed, rule, under
from deltazoo.blocks.model.interface import ModelSpec
from deltazoo.blocks.model.layer import LayerSpec
from deltazoo.mixers.attention import Attention
from deltazoo.mixers.core.mixer import MixerConfig
from deltazoo.mixers.lfm2_conv import LFM2Conv

NAMES = decoder.Names(
    norm="model.embedding_norm.weight",
    layer_norm="operator_norm.weight",
    mlp_norm="ffn_norm.weight",
    eps="norm_eps",
)
MLP = parts.MlpNames("w1", "w3", "w2")


def sizes(config: HubConfig) -> dict[str, Any]:
    """Return the sizes of the stack."""
    tied = config.get("tie_embedding", config.get("tie_word_embeddings", True))
    return decoder.sizes(config, NAMES) | {"tied": tied}


def mixers(config: HubConfig) -> tuple[dict[str, MixerConfig], list[str]]:
    """Return the mixers by their names, and the name of each layer's."""
    depth, heads = config["num_hidden_layers"], config["num_attention_heads"]
    attention = Attention(
        heads=heads,
        key_value_heads=config["num_key_value_heads"],
        head_width=config.get("head_dim", config["hidden_size"] // heads),
        qk_norm="head",
        norm_eps=config["norm_eps"],
        **config.rotary(theta=1e6),
    )
    conv = LFM2Conv(conv_width=config.get("conv_L_cache", 3), bias=config.get("conv_bias", False))
    attends = config.get("full_attn_idxs", range(depth))
    types = config.layer_types(["full_attention" if i in attends else "conv" for i in range(depth)])
    if unknown := {*types} - {"conv", "full_attention"}:
        raise ConfigError(f"config.json: layer_types must be 'conv' or 'full_attention', got {sorted(unknown)}")
    return {"conv": conv, "full_attention": attention}, types


def mixers_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields that `sizes` and `mixers` read."""
    conv = decoder.first(spec, LFM2Conv, LFM2Conv())
    attention = decoder.attention_config(decoder.first_attention(spec), spec.width)
    fields = ("num_attention_heads", "num_key_value_heads", "rope_parameters")
    types = decoder.layer_types_config(spec)
    return {
        **{field: x for field, x in decoder.sizes_config(spec, NAMES).items() if field != "hidden_act"},
        **{field: attention[field] for field in fields},
        "layer_types": ["conv" if kind == "linear_attention" else kind for kind in types],
        "conv_L_cache": conv.conv_width,
        "conv_bias": conv.bias,
    }


def mixer_rules(layer: LayerSpec, width: int) -> list[Rule]:
    """Return the rules of a layer's mixer."""
    (mixer,) = layer.mixers
    if isinstance(mixer, Attention):
        names = parts.AttentionNames("out_proj", "q_layernorm", "k_layernorm")
        return under("mixers.0.", "self_attn.", parts.attention(mixer, width, names))
    assert isinstance(mixer, LFM2Conv)
    maps = {"to_bcx": "in_proj", "out": "out_proj"}
    kinds = ("weight", "bias") if mixer.bias else ("weight",)
    linear = renamed({f"{x}.{kind}": f"{y}.{kind}" for x, y in maps.items() for kind in kinds})
    conv = [rule("filters.conv.weight", {"conv.weight": Packed("all", axes=(1,))})]
    conv += renamed({"filters.conv.bias": "conv.bias"} if mixer.bias else {})
    return under("mixers.0.", "conv.", linear + conv)
