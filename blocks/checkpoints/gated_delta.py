"""Configs of gated delta rules with transformers' fields `linear_*`, and of the layers around them."""

from typing import Any

from deltazoo.blocks.checkpoints import decoder
from deltazoo.blocks.checkpoints.family import HubConfig
from deltazoo.blocks.model.interface import ModelSpec
from deltazoo.mixers.gated_deltanet import GatedDeltaNet

HEAD_WIDTH = 256  # of the attention of a Qwen3-Next or Qwen3.5 without head_dim


def mixer(config: HubConfig, norm_eps: float, **fields: Any) -> GatedDeltaNet:
    """Return the mixer. Args: norm_eps: of the output norm; fields: of `GatedDeltaNet`, beside the sizes."""
    return GatedDeltaNet(
        heads=config["linear_num_key_heads"],
        value_heads=config["linear_num_value_heads"],
        key_width=config["linear_key_head_dim"],
        value_width=config["linear_value_head_dim"],
        conv_width=config.get("linear_conv_kernel_dim", 4),
        norm_eps=norm_eps,
        **fields,
    )


def mixer_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields that `mixer` reads; those of a small mixer, if the stack has none."""
    found = decoder.first(spec, GatedDeltaNet, GatedDeltaNet(heads=1, key_width=8, value_width=8))
    shape = found.shape(spec.width)
    return {
        "linear_num_key_heads": shape.heads,
        "linear_num_value_heads": shape.value_heads,
        "linear_key_head_dim": shape.key_width,
        "linear_value_head_dim": shape.value_width,
        "linear_conv_kernel_dim": found.conv_width,
    }


def rows(config: GatedDeltaNet, width: int) -> dict[str, int]:
    """Return the rows of q, k, v, gate, beta and decay."""
    shape = config.shape(width)
    keys, values, heads = shape.heads * shape.key_width, shape.value_heads * shape.value_width, shape.value_heads
    return {"q": keys, "k": keys, "v": values, "gate": values, "beta": heads, "decay": heads}


def qwen_stack(config: HubConfig) -> dict[str, Any]:
    """Return the fields of a stack of Qwen3-Next or Qwen3.5, without the MLP."""
    interval = config.get("full_attention_interval", 4)
    kinds = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(config["num_hidden_layers"])]
    rotary = config.rotary(fraction=0.25)
    layers = {
        "linear_attention": mixer(config, config["rms_norm_eps"]),
        "full_attention": decoder.attention(config, HEAD_WIDTH, qk_norm="head", gate=True, norm_offset=1.0, **rotary),
    }
    pattern = decoder.layer_types(config, kinds)
    used = {name: layer for name, layer in layers.items() if name in pattern}
    return {**decoder.sizes(config), "norm_offset": 1.0, "pattern": pattern, "layers": used}


def qwen_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields that `qwen_stack` reads."""
    attention = decoder.attention_config(decoder.first_attention(spec), spec.width)
    attention["rope_parameters"].setdefault("partial_rotary_factor", 1.0)
    return {
        **decoder.sizes_config(spec),
        **attention,
        **mixer_config(spec),
        "layer_types": decoder.layer_types_config(spec),
    }
