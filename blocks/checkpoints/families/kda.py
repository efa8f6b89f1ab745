"""KDA in folders of flash-linear-attention. A saturated beta differs as for DeltaNet."""

from typing import Any, ClassVar

from deltazoo.blocks.checkpoints import delta_rule, fla
from deltazoo.blocks.checkpoints.family import HubConfig
from deltazoo.blocks.checkpoints.rules import Rule, renamed
from deltazoo.mixers import kda as kda_mixers


class KDA(fla.Fla):
    """KDA."""

    architecture: ClassVar[str] = "KDAForCausalLM"

    def mixer(self, config: HubConfig) -> kda_mixers.KDA:
        heads = delta_rule.heads(config, 1.0)
        bound = config.get("lower_bound", like=-5.0)
        return kda_mixers.KDA(
            **heads,
            gate_rank=heads["value_width"],
            gate_bias=True,
            decay_bound=bound if config.get("safe_gate", False) else None,
            **delta_rule.common(config),
        )

    def mixer_config(self, mixer: kda_mixers.KDA, width: int) -> dict[str, Any]:
        bound = {"safe_gate": mixer.decay_bound is not None, "lower_bound": mixer.decay_bound}
        return {**delta_rule.common_config(mixer), **delta_rule.heads_config(mixer, width), **bound}

    def mixer_rules(self, mixer: kda_mixers.KDA, width: int) -> list[Rule]:
        maps = {"operands.decay": "f_proj", "outputs.gate": "g_proj"}
        names = {f"{ours}.proj.{i}.weight": f"{theirs}.{i}.weight" for ours, theirs in maps.items() for i in (0, 1)}
        names |= delta_rule.BETA_NORM_OUT | {"outputs.gate.proj.1.bias": "g_proj.1.bias"}
        return [*delta_rule.qkv(mixer, width), *renamed(names), *renamed(delta_rule.EXACT, precise=True)]
