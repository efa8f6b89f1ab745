"""Delta rules in folders of flash-linear-attention: sizes, options and rules that they share."""

from typing import Any

from deltazoo.blocks.checkpoints import fla
from deltazoo.blocks.checkpoints.family import HubConfig
from deltazoo.blocks.checkpoints.rules import Rule
from deltazoo.mixers.families.delta_rule import DeltaRuleConfig

BETA_NORM_OUT = {
    "operands.beta.proj.weight": "b_proj.weight",
    "outputs.norm.weight": "o_norm.weight",
    "out.weight": "o_proj.weight",
}
EXACT = {"operands.decay.A_log": "A_log", "operands.decay.dt_bias": "dt_bias"}


def heads(config: HubConfig, expand_v: float) -> dict[str, Any]:
    """Return the sizes of the heads. Args: expand_v: the default of V / K."""
    heads, width = config["num_heads"], config["head_dim"]
    value_width = int(width * config.get("expand_v", expand_v))
    value_heads = config.get("num_v_heads", heads)
    return {"heads": heads, "value_heads": value_heads, "key_width": width, "value_width": value_width}


def heads_config(mixer: DeltaRuleConfig, width: int) -> dict[str, Any]:
    """Return the fields that `heads` reads."""
    shape = mixer.shape(width)
    sizes = {"num_heads": shape.heads, "num_v_heads": shape.value_heads, "head_dim": shape.key_width}
    return {**sizes, "expand_v": shape.value_width / shape.key_width}


def common(config: HubConfig) -> dict[str, Any]:
    """Return the fields that the delta rules share."""
    negative = "both" if config.get("allow_neg_eigval", False) else "off"
    eps = config.get("norm_eps", 1e-6)
    return {"conv_width": fla.conv_width(config), "negative_eigenvalues": negative, "norm_eps": eps}


def common_config(mixer: DeltaRuleConfig) -> dict[str, Any]:
    """Return the fields that `common` reads."""
    return {**fla.conv_config(mixer.conv_width), "allow_neg_eigval": mixer.negative_eigenvalues == "both"}


def qkv(mixer: DeltaRuleConfig, width: int) -> list[Rule]:
    """Return the rules of the maps to q, k and v and of their convolutions."""
    shape = mixer.shape(width)
    return fla.qkv(shape.heads * shape.key_width, shape.value_heads * shape.value_width, mixer.conv_width)
