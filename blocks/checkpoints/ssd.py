"""Mamba-2 in the configs of hybrids, whose fields begin with mamba_: Bamba, Granite 4 and Falcon-H1."""

from typing import Any

from deltazoo.backends.io.errors import ConfigError
from deltazoo.blocks.checkpoints import decoder, parts
from deltazoo.blocks.checkpoints.family import HubConfig, limits_config
from deltazoo.blocks.checkpoints.rules import Rule, under
from deltazoo.blocks.model.interface import ModelSpec
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


def expansion(found: Mamba2, width: int) -> int:
    """Return the channels divided by the width. Raises: ConfigError: it is no integer, which transformers refuses."""
    shape = found.shape(width)
    expand, rest = divmod(shape.value_heads * shape.value_width, width)
    if rest:
        raise ConfigError(f"value_heads times value_width must be a multiple of the width {width}")
    return expand


def first_mixer_config(spec: ModelSpec) -> dict[str, Any]:
    """Return `mixer_config` of the first Mamba-2, or of a small one for a stack without: transformers needs its fields.

    Raises: ConfigError: of `expansion`.
    """
    found = decoder.first(spec, Mamba2, Mamba2(heads=1, value_heads=1, value_width=2 * spec.width))
    return mixer_config(found, spec.width) | {"mamba_expand": expansion(found, spec.width)}


def mixer_rules(found: MixerConfig, width: int, index: int = 0) -> list[Rule]:
    """Return the rules of a layer's mixer, Mamba-2 or attention. Args: index: of the mixer in the layer."""
    if isinstance(found, Attention):
        return under(f"mixers.{index}.", "self_attn.", parts.attention(found, width))
    assert isinstance(found, Mamba2)
    return under(f"mixers.{index}.", "mamba.", parts.mamba2(found, width))
