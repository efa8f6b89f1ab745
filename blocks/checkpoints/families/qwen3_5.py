"""Qwen3.5, dense: the layers of Qwen3-Next with projections that are not interleaved, and SwiGLU."""

from typing import Any, ClassVar

from deltazoo.blocks.checkpoints import decoder, gated_delta, parts
from deltazoo.blocks.checkpoints.family import Family, HubConfig
from deltazoo.blocks.checkpoints.rules import Packed, Rule, under
from deltazoo.blocks.model.interface import ModelSpec
from deltazoo.blocks.model.layer import LayerSpec
from deltazoo.blocks.model.mlp import Dense
from deltazoo.blocks.model.moe import MoE
from deltazoo.mixers.attention import Attention
from deltazoo.mixers.gated_deltanet import GatedDeltaNet

EXPERTS = parts.ExpertNames(joined=("experts.gate_up_proj", "experts.down_proj"))


class Qwen35Text(Family):
    """The text model of Qwen3.5; multi-token prediction is dropped."""

    architecture: ClassVar[str] = "Qwen3_5ForCausalLM"
    dropped: ClassVar[tuple[str, ...]] = ("mtp.*", "model.mtp.*")
    ignored: ClassVar[tuple[str, ...]] = ("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")

    def stack(self, config: HubConfig) -> dict[str, Any]:
        config.require(attn_output_gate=True, mlp_only_layers=[])
        return {**gated_delta.qwen_stack(config), "mlp": Dense(width=config["intermediate_size"])}

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        mlp = spec.expand()[0].mlp
        assert isinstance(mlp, Dense)
        return {**gated_delta.qwen_config(spec), "intermediate_size": mlp.hidden(spec.width)}

    def rules(self, spec: ModelSpec) -> list[Rule]:
        return decoder.model_rules(spec, lambda layer: qwen35_layer(layer, spec.width))


class Qwen35(Qwen35Text):
    """Qwen3.5 with a vision tower, which is dropped: only text is read, and folders are written as qwen3_5_text."""

    architecture: ClassVar[str] = "Qwen3_5ForConditionalGeneration"
    nested: ClassVar[str | None] = "text_config"
    written_as: ClassVar[str | None] = "qwen3_5_text"
    dropped: ClassVar[tuple[str, ...]] = ("mtp.*", "model.mtp.*", "model.visual.*")
    aliases: ClassVar[dict[str, str]] = {r"^model\.language_model\.": "model."}


def qwen35_layer(layer: LayerSpec, width: int) -> list[Rule]:
    """Return rules of a layer, with a dense MLP or experts."""
    (mixer,), mlp = layer.mixers, layer.mlp
    assert isinstance(mlp, Dense | MoE)
    branch = parts.dense_mlp(mlp, width) if isinstance(mlp, Dense) else parts.experts(mlp, width, EXPERTS)
    rules = under("mlp.", "mlp.", branch)
    if isinstance(mixer, Attention):
        return rules + under("mixers.0.", "self_attn.", parts.attention(mixer, width))
    assert isinstance(mixer, GatedDeltaNet)
    inputs = {
        "in_proj_qkv.weight": "q k v",
        "in_proj_z.weight": "gate",
        "in_proj_b.weight": "beta",
        "in_proj_a.weight": "decay",
    }
    names = parts.DeltaNames(inputs, {"conv1d.weight": Packed("q k v", axes=(1,))})
    return rules + under("mixers.0.", "linear_attn.", parts.gated_delta(names, gated_delta.rows(mixer, width)))
