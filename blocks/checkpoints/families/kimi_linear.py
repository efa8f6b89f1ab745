"""Kimi Linear: KDA with latent attention without positions in some layers, and a mixture of experts."""

from typing import Any, ClassVar

from deltazoo.blocks.checkpoints import decoder, parts, sparse
from deltazoo.blocks.checkpoints.family import Family, HubConfig
from deltazoo.blocks.checkpoints.rules import Rule, under
from deltazoo.blocks.checkpoints.values import SIZE
from deltazoo.blocks.model.interface import ModelSpec
from deltazoo.blocks.model.layer import LayerSpec
from deltazoo.blocks.model.mlp import Dense
from deltazoo.blocks.model.moe import MoE
from deltazoo.mixers.kda import KDA
from deltazoo.mixers.mla import MLA

REQUIRED: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "mla_use_nope": True, "rope_scaling": None,
    "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid", "num_nextn_predict_layers": 0,
}  # fmt: skip
HUB_FIELDS = ("head_dim", "num_heads", "short_conv_kernel_size", "full_attn_layers", "kda_layers")
EXPERTS = parts.ExpertNames(expert=parts.MlpNames("w1", "w3", "w2"), shared="shared_experts")


class KimiLinear(Family):
    """Kimi Linear, with the field names of the hub and those of transformers."""

    architecture: ClassVar[str] = "KimiLinearForCausalLM"
    aliases: ClassVar[dict[str, str]] = {r"\.block_sparse_moe\.(gate_proj|up_proj|down_proj)\.": r".mlp.\1."}
    ignored: ClassVar[tuple[str, ...]] = ("head_dim", "qk_head_dim", "rope_theta", "use_grouped_topk")

    def stack(self, config: HubConfig) -> dict[str, Any]:
        config.require(**REQUIRED)
        linear = config.nested("linear_attn_config", HUB_FIELDS)
        depth, width = config["num_hidden_layers"], linear.get("head_dim", like=SIZE) or config["linear_head_dim"]
        rank = config.get("q_lora_rank", like=SIZE)
        mixers = {
            sparse.FULL: sparse.latent_attention(config, query_rank=rank, rotary_theta=None),
            sparse.LINEAR: KDA(
                heads=linear.get("num_heads", like=SIZE) or config["linear_num_heads"],
                key_width=width,
                value_width=width,
                conv_width=linear.get("short_conv_kernel_size", like=SIZE) or config.get("linear_conv_kernel_dim", 4),
                norm_eps=config["rms_norm_eps"],
            ),
        }
        default = [i + 1 for i in range(depth) if i and i % 4 == 0]
        places = linear.get("full_attn_layers", default)  # counted from 1
        mlps = sparse.mlps(config, scale=1.0, groups=1, active_groups=1)
        attends = [i + 1 in places for i in range(depth)]
        return {**decoder.sizes(config), **sparse.layers(config, mixers, mlps, attends, dense=1)}

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        kda = decoder.first(spec, KDA, KDA(heads=1, key_width=8, value_width=8))
        shape = kda.shape(spec.width)
        return {
            **decoder.sizes_config(spec),
            **sparse.config(spec),
            "q_lora_rank": decoder.first(spec, MLA, MLA()).query_rank,
            "linear_num_heads": shape.heads,
            "linear_head_dim": shape.key_width,
            "linear_conv_kernel_dim": kda.conv_width,
        }

    def rules(self, spec: ModelSpec) -> list[Rule]:
        return decoder.model_rules(spec, lambda layer: self._layer(layer, spec.width))

    def _layer(self, layer: LayerSpec, width: int) -> list[Rule]:
        (mixer,), mlp = layer.mixers, layer.mlp
        assert isinstance(mixer, KDA | MLA) and isinstance(mlp, Dense | MoE)
        if isinstance(mlp, Dense):
            rules = under("mlp.", "mlp.", parts.dense_mlp(mlp, width))
        else:
            rules = under("mlp.", "block_sparse_moe.", parts.experts(mlp, width, EXPERTS))
        mixing = parts.kda(mixer, width) if isinstance(mixer, KDA) else parts.mla(mixer)
        return rules + under("mixers.0.", "self_attn.", mixing)
