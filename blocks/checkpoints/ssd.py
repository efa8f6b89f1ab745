"""Mamba-2 in the configs of hybrids, whose fields begin with mamba_: Bamba, Granite 4 and Falcon-H1."""

from typing import Any

from deltazoo.blocks.checkpoints import parts
from deltazoo.blocks.checkpoints.family import HubConfig, limits_config
from deltazoo.blocks.checkpoints.rules import Rule, under
from deltazoo.mixers.attention import Attention
from deltazoo.mixers.core.mixer import MixerConfig
from deltazoo.mixers.mamba2 import Mamba2


def mixer(config: HubConfig, channels: int | None = None, **fields: Any) -> Mamba2:
    """Return the mixer. Args: channels: None: mamba_expand times the width; fields: of `Mamba2`, beside the sizes."""
    config.require(mamba_conv_bias=True, mamba_proj_bias=False, mlp_bias=False)
    heads, width = config["mamba_n_heads"], config.get("mamba_d_head", "auto")
    expanded = config.get("mamba_expand", 2) * config["hidden_size"]
    return Mamba2(
        heads=config.get("mamba_n_groups", 1),
        value_heads=heads,
        key_width=config["mamba_d_state"],
        value_width=(channels or expanded) // heads if width == "auto" else width,
        conv_width=config.get("mamba_d_conv", 4),
        norm_eps=config["rms_norm_eps"],
        step_limits=config.step_limits(),
        **fields,
    )


def no_mixer(width: int) -> Mamba2:
    """Return the mixer that is written for a stack without Mamba-2: transformers checks its sizes."""
    return Mamba2(heads=1, value_heads=1, value_width=2 * width)


def mixer_config(found: Mamba2, width: int) -> dict[str, Any]:
    """Return the fields that `mixer` reads."""
    shape = found.shape(width)
    return {
        **limits_config(found.step_limits),
        "mamba_n_groups": shape.heads,
        "mamba_n_heads": shape.value_heads,
        "mamba_d_head": shape.value_width,
        "mamba_d_state": shape.key_width,
        "mamba_expand": shape.value_heads * shape.value_width // width,
        "mamba_d_conv": found.conv_width,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "mlp_bias": False,
    }


def mixer_rules(found: MixerConfig, width: int, index: int = 0) -> list[Rule]:
    """Return the rules of a layer's mixer, Mamba-2 or attention. Args: index: of the mixer in the layer."""
    if isinstance(found, Attention):
        return under(f"mixers.{index}.", "self_attn.", parts.attention(found, width))
    assert isinstance(found, Mamba2)
    return under(f"mixers.{index}.", "mamba.", parts.mamba2(found, width))
