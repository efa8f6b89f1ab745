"""DeltaNet, Gated DeltaNet and KDA in folders of flash-linear-attention.

With `allow_neg_eigval`, our beta is at most 2 - 2^-6: a saturated beta differs.
"""

from typing import Any, ClassVar

from deltazoo.blocks.checkpoints import fla
from deltazoo.blocks.checkpoints.family import HubConfig
from deltazoo.blocks.checkpoints.rules import Rule, renamed
from deltazoo.mixers import deltanet
from deltazoo.mixers import gated_deltanet as gated
from deltazoo.mixers import kda as kda_mixers
from deltazoo.mixers.families.delta_rule import DeltaRuleConfig

BETA_NORM_OUT = {
    "operands.beta.proj.weight": "b_proj.weight",
    "outputs.norm.weight": "o_norm.weight",
    "out.weight": "o_proj.weight",
}
GATE = {"outputs.gate.proj.weight": "g_proj.weight"}
EXACT = {"operands.decay.A_log": "A_log", "operands.decay.dt_bias": "dt_bias"}


class DeltaNet(fla.Fla):
    """DeltaNet."""

    architecture: ClassVar[str] = "DeltaNetForCausalLM"

    def mixer(self, config: HubConfig) -> deltanet.DeltaNet:
        config.require(qk_activation="silu", qk_norm="l2", use_beta=True, use_output_norm=True)
        heads = config["num_heads"]
        return deltanet.DeltaNet(
            heads=heads,
            key_width=fla.expanded(config, "expand_k", 1.0, heads),
            value_width=fla.expanded(config, "expand_v", 1.0, heads),
            gate=config.get("use_gate", False),
            **_common(config),
        )

    def mixer_config(self, mixer: deltanet.DeltaNet, width: int) -> dict[str, Any]:
        shape = mixer.shape(width)
        return {
            **_common_config(mixer),
            "num_heads": shape.heads,
            "expand_k": shape.heads * shape.key_width / width,
            "expand_v": shape.heads * shape.value_width / width,
            "use_gate": mixer.gate,
        }

    def mixer_rules(self, mixer: deltanet.DeltaNet, width: int) -> list[Rule]:
        return _qkv(mixer, width) + renamed(BETA_NORM_OUT | (GATE if mixer.gate else {}))


class GatedDeltaNet(fla.Fla):
    """Gated DeltaNet."""

    architecture: ClassVar[str] = "GatedDeltaNetForCausalLM"

    def mixer(self, config: HubConfig) -> gated.GatedDeltaNet:
        activation = config.get("output_gate_activation", "swish")
        gate = config.get("use_gate", True)
        activations = {"gate_activation": {"swish": "silu"}.get(activation, activation)} if gate else {}
        return gated.GatedDeltaNet(**_heads(config, 2.0), gate=gate, **activations, **_common(config))

    def mixer_config(self, mixer: gated.GatedDeltaNet, width: int) -> dict[str, Any]:
        return {
            **_common_config(mixer),
            **_heads_config(mixer, width),
            "use_gate": mixer.gate,
            "output_gate_activation": "swish" if mixer.gate_activation == "silu" else mixer.gate_activation,
        }

    def mixer_rules(self, mixer: gated.GatedDeltaNet, width: int) -> list[Rule]:
        names = BETA_NORM_OUT | {"operands.decay.proj.weight": "a_proj.weight"} | (GATE if mixer.gate else {})
        return [*_qkv(mixer, width), *renamed(names), *renamed(EXACT, precise=True)]


class KDA(fla.Fla):
    """KDA."""

    architecture: ClassVar[str] = "KDAForCausalLM"

    def mixer(self, config: HubConfig) -> kda_mixers.KDA:
        heads = _heads(config, 1.0)
        bound = config.get("lower_bound")
        return kda_mixers.KDA(
            **heads,
            gate_rank=heads["value_width"],
            gate_bias=True,
            decay_bound=bound if config.get("safe_gate", False) else None,
            **_common(config),
        )

    def mixer_config(self, mixer: kda_mixers.KDA, width: int) -> dict[str, Any]:
        bound = {"safe_gate": mixer.decay_bound is not None, "lower_bound": mixer.decay_bound}
        return {**_common_config(mixer), **_heads_config(mixer, width), **bound}

    def mixer_rules(self, mixer: kda_mixers.KDA, width: int) -> list[Rule]:
        maps = {"operands.decay": "f_proj", "outputs.gate": "g_proj"}
        names = {f"{ours}.proj.{i}.weight": f"{theirs}.{i}.weight" for ours, theirs in maps.items() for i in (0, 1)}
        names |= BETA_NORM_OUT | {"outputs.gate.proj.1.bias": "g_proj.1.bias"}
        return [*_qkv(mixer, width), *renamed(names), *renamed(EXACT, precise=True)]


def _heads(config: HubConfig, expand_v: float) -> dict[str, Any]:
    heads, width = config["num_heads"], config["head_dim"]
    value_width = int(width * config.get("expand_v", expand_v))
    value_heads = config.get("num_v_heads", heads)
    return {"heads": heads, "value_heads": value_heads, "key_width": width, "value_width": value_width}


def _heads_config(mixer: DeltaRuleConfig, width: int) -> dict[str, Any]:
    shape = mixer.shape(width)
    sizes = {"num_heads": shape.heads, "num_v_heads": shape.value_heads, "head_dim": shape.key_width}
    return {**sizes, "expand_v": shape.value_width / shape.key_width}


def _common(config: HubConfig) -> dict[str, Any]:
    """Return the fields that the delta rules share."""
    negative = "both" if config.get("allow_neg_eigval", False) else "off"
    eps = config.get("norm_eps", 1e-6)
    return {"conv_width": fla.conv_width(config), "negative_eigenvalues": negative, "norm_eps": eps}


def _common_config(mixer: DeltaRuleConfig) -> dict[str, Any]:
    return {**fla.conv_config(mixer.conv_width), "allow_neg_eigval": mixer.negative_eigenvalues == "both"}


def _qkv(mixer: DeltaRuleConfig, width: int) -> list[Rule]:
    shape = mixer.shape(width)
    return fla.qkv(shape.heads * shape.key_width, shape.value_heads * shape.value_width, mixer.conv_width)
