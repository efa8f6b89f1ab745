"""DeltaNet and Gated DeltaNet in folders of flash-linear-attention."""

from typing import Any, ClassVar

from deltazoo.blocks.checkpoints import delta_rule, fla
from deltazoo.blocks.checkpoints.family import HubConfig
from deltazoo.blocks.checkpoints.rules import Rule, renamed
from deltazoo.mixers import deltanet
from deltazoo.mixers import gated_deltanet as gated

GATE = {"outputs.gate.proj.weight": "g_proj.weight"}


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
            **delta_rule.common(config),
        )

    def mixer_config(self, mixer: deltanet.DeltaNet, width: int) -> dict[str, Any]:
        return {
            **delta_rule.common_config(mixer),
            **fla.expansions(mixer.shape(width), width),
            "use_gate": mixer.gate,
        }

    def mixer_rules(self, mixer: deltanet.DeltaNet, width: int) -> list[Rule]:
        return delta_rule.qkv(mixer, width) + renamed(delta_rule.BETA_NORM_OUT | (GATE if mixer.gate else {}))


class GatedDeltaNet(fla.Fla):
    """Gated DeltaNet."""

    architecture: ClassVar[str] = "GatedDeltaNetForCausalLM"

    def mixer(self, config: HubConfig) -> gated.GatedDeltaNet:
        activation = config.get("output_gate_activation", "swish")
        gate = config.get("use_gate", True)
        activations = {"gate_activation": {"swish": "silu"}.get(activation, activation)} if gate else {}
        return gated.GatedDeltaNet(
            **delta_rule.heads(config, 2.0), gate=gate, **activations, **delta_rule.common(config)
        )

    def mixer_config(self, mixer: gated.GatedDeltaNet, width: int) -> dict[str, Any]:
        return {
            **delta_rule.common_config(mixer),
            **delta_rule.heads_config(mixer, width),
            "use_gate": mixer.gate,
            "output_gate_activation": "swish" if mixer.gate_activation == "silu" else mixer.gate_activation,
        }

    def mixer_rules(self, mixer: gated.GatedDeltaNet, width: int) -> list[Rule]:
        names = (
            delta_rule.BETA_NORM_OUT | {"operands.decay.proj.weight": "a_proj.weight"} | (GATE if mixer.gate else {})
        )
        return [*delta_rule.qkv(mixer, width), *renamed(names), *renamed(delta_rule.EXACT, precise=True)]
