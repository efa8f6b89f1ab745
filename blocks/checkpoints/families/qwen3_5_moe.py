"""Qwen3.5 with a mixture of experts: the mixers of Qwen3.5, and the experts of Qwen3-Next."""

from typing import Any, ClassVar

from deltazoo.blocks.checkpoints import decoder, gated_delta
from deltazoo.blocks.checkpoints.families.qwen3_5 import Qwen35, qwen35_layer
from deltazoo.blocks.checkpoints.families.qwen3_next import experts, experts_config
from deltazoo.blocks.checkpoints.family import Family, HubConfig
from deltazoo.blocks.checkpoints.rules import Rule
from deltazoo.blocks.model.interface import ModelSpec
from deltazoo.blocks.model.moe import MoE


class Qwen35MoeText(Family):
    """The text model of Qwen3.5 with experts; multi-token prediction is dropped.

    Folders have a tensor for each expert, or one with all of them; they are written with a tensor for each.
    """

    architecture: ClassVar[str] = "Qwen3_5MoeForCausalLM"
    dropped: ClassVar[tuple[str, ...]] = Qwen35.dropped
    aliases: ClassVar[dict[str, str]] = Qwen35.aliases
    ignored: ClassVar[tuple[str, ...]] = (*Qwen35.ignored, "intermediate_size")

    def stack(self, config: HubConfig) -> dict[str, Any]:
        config.require(attn_output_gate=True, norm_topk_prob=True)
        return {**gated_delta.qwen_stack(config), "mlp": experts(config)}

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        mlp = spec.expand()[0].mlp
        assert isinstance(mlp, MoE)
        fields = {**gated_delta.qwen_config(spec), **experts_config(mlp, spec.width)}
        del fields["norm_topk_prob"]  # transformers has no such field for this family
        return fields

    def rules(self, spec: ModelSpec) -> list[Rule]:
        return decoder.model_rules(spec, lambda layer: qwen35_layer(layer, spec.width))


class Qwen35Moe(Qwen35MoeText):
    """Qwen3.5 with experts and a vision tower, which is dropped: folders are written as qwen3_5_moe_text."""

    architecture: ClassVar[str] = "Qwen3_5MoeForConditionalGeneration"
    nested: ClassVar[str | None] = Qwen35.nested
    written_as: ClassVar[str | None] = "qwen3_5_moe_text"
