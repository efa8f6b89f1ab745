"""Qwen3-Next: Gated DeltaNet with projections interleaved by key head, gated attention, and a mixture of experts."""

from typing import Any, ClassVar

from deltazoo.blocks.checkpoints import decoder, gated_delta, parts
from deltazoo.blocks.checkpoints.family import Family, HubConfig
from deltazoo.blocks.checkpoints.rules import Packed, Rule, under
from deltazoo.blocks.model.interface import ModelSpec
from deltazoo.blocks.model.layer import LayerSpec
from deltazoo.blocks.model.moe import MoE
from deltazoo.mixers.attention import Attention
from deltazoo.mixers.gated_deltanet import GatedDeltaNet


class Qwen3Next(Family):
    """Qwen3-Next; layers with a dense MLP are refused, multi-token prediction is dropped."""

    architecture: ClassVar[str] = "Qwen3NextForCausalLM"
    dropped: ClassVar[tuple[str, ...]] = ("mtp.*",)
    ignored: ClassVar[tuple[str, ...]] = ("intermediate_size",)  # of dense layers

    def stack(self, config: HubConfig) -> dict[str, Any]:
        config.require(decoder_sparse_step=1, mlp_only_layers=[])
        return {**gated_delta.qwen_stack(config), "mlp": experts(config)}

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        mlp = spec.expand()[0].mlp
        assert isinstance(mlp, MoE)
        return {
            **gated_delta.qwen_config(spec),
            **experts_config(mlp, spec.width),
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }

    def rules(self, spec: ModelSpec) -> list[Rule]:
        return decoder.model_rules(spec, lambda layer: self._layer(layer, spec.width))

    def _layer(self, layer: LayerSpec, width: int) -> list[Rule]:
        (mixer,), mlp = layer.mixers, layer.mlp
        assert isinstance(mlp, MoE)
        rules = under("mlp.", "mlp.", parts.experts(mlp, width))
        if isinstance(mixer, Attention):
            return rules + under("mixers.0.", "self_attn.", parts.attention(mixer, width))
        assert isinstance(mixer, GatedDeltaNet)
        heads = mixer.shape(width).heads
        inputs = {
            "in_proj_qkvz.weight": Packed("q k v gate", groups=heads),
            "in_proj_ba.weight": Packed("beta decay", groups=heads),
        }
        names = parts.DeltaNames(inputs, {"conv1d.weight": Packed("q k v", axes=(1,))})
        return rules + under("mixers.0.", "linear_attn.", parts.gated_delta(names, gated_delta.rows(mixer, width)))


def experts(config: HubConfig) -> MoE:
    """Return the mixture of experts of a config."""
    return MoE(
        experts=config["num_experts"],
        active=config["num_experts_per_tok"],
        width=config["moe_intermediate_size"],
        normalize=config.get("norm_topk_prob", True),
        shared_width=config["shared_expert_intermediate_size"],
        shared_gate=True,
    )


def experts_config(mlp: MoE, width: int) -> dict[str, Any]:
    """Return the fields that `experts` reads."""
    return {
        "num_experts": mlp.experts,
        "num_experts_per_tok": mlp.active,
        "moe_intermediate_size": mlp.hidden(width),
        "norm_topk_prob": mlp.normalize,
        "shared_expert_intermediate_size": mlp.shared_width,
    }
