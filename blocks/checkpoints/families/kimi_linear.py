"""Kimi Linear: KDA with latent attention without positions in some layers, and a mixture of experts."""

from typing import Any, ClassVar

from deltazoo.backends.io.errors import ConfigError
from deltazoo.blocks.checkpoints import decoder, parts
from deltazoo.blocks.checkpoints.family import Family, HubConfig
from deltazoo.blocks.checkpoints.rules import Rule, under
from deltazoo.blocks.model.interface import ModelSpec
from deltazoo.blocks.model.layer import LayerSpec
from deltazoo.blocks.model.mlp import Dense
from deltazoo.blocks.model.moe import MoE
from deltazoo.mixers.kda import KDA
from deltazoo.mixers.mla import MLA

LATENT_NORM_EPS = 1e-6  # a constant of the model, whatever rms_norm_eps is
REQUIRED: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "mla_use_nope": True, "rope_scaling": None,
    "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid", "num_nextn_predict_layers": 0,
}  # fmt: skip
FULL, LINEAR = "full_attention", "linear_attention"
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
        heads, depth = config["num_attention_heads"], config["num_hidden_layers"]
        if (keys := config.get("num_key_value_heads", heads)) != heads:
            raise ConfigError(f"config.json: num_key_value_heads must be num_attention_heads = {heads}, got {keys}")
        width, expert = linear.get("head_dim") or config["linear_head_dim"], config["moe_intermediate_size"]
        mixers = {
            FULL: MLA(
                heads=heads,
                key_width=config["qk_nope_head_dim"],
                value_width=config["v_head_dim"],
                latent_width=config["kv_lora_rank"],
                rotary_width=config["qk_rope_head_dim"],
                query_rank=config.get("q_lora_rank"),
                rotary_theta=None,
                norm_eps=LATENT_NORM_EPS,
            ),
            LINEAR: KDA(
                heads=linear.get("num_heads") or config["linear_num_heads"],
                key_width=width,
                value_width=width,
                conv_width=linear.get("short_conv_kernel_size") or config.get("linear_conv_kernel_dim", 4),
                norm_eps=config["rms_norm_eps"],
            ),
        }
        sparse = MoE(
            experts=config.get("num_experts") or config["num_local_experts"],
            active=config.get("num_experts_per_token") or config["num_experts_per_tok"],
            width=expert,
            scores="sigmoid",
            selection_bias=True,
            normalize=config.get("moe_renormalize", True),
            scale=config.get("routed_scaling_factor", 1.0),
            shared_width=expert * config.get("num_shared_experts", 1),
            groups=config.get("n_group", config.get("num_expert_group", 1)),
            active_groups=config.get("topk_group", 1),
            balance=0.0,
        )
        mlps = {"dense": Dense(width=config["intermediate_size"]), "sparse": sparse}
        attends = linear.get("full_attn_layers") or [i + 1 for i in range(depth) if i and i % 4 == 0]  # counted from 1
        kinds = config.get("layer_types") or [FULL if i + 1 in attends else LINEAR for i in range(depth)]
        first = config.get("first_k_dense_replace", 1)
        mlp_kinds = config.get("mlp_layer_types") or ["dense" if i < first else "sparse" for i in range(depth)]
        places = [*zip(kinds, mlp_kinds, strict=True)]
        layers = {f"{kind}_{mlp}": LayerSpec(mixer=mixers[kind], mlp=mlps[mlp]) for kind, mlp in places}
        return {**decoder.sizes(config), "pattern": " + ".join("_".join(place) for place in places), "layers": layers}

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        layers, mla, kda = spec.expand(), decoder.first(spec, MLA), decoder.first(spec, KDA)
        sparse = next(layer.mlp for layer in layers if isinstance(layer.mlp, MoE))
        dense = next((layer.mlp for layer in layers if isinstance(layer.mlp, Dense)), Dense(width=sparse.width))
        shape = kda.shape(spec.width)
        return {
            **decoder.sizes_config(spec),
            "num_attention_heads": mla.heads,
            "num_key_value_heads": mla.heads,
            "qk_nope_head_dim": mla.key_width,
            "v_head_dim": mla.value_width,
            "kv_lora_rank": mla.latent_width,
            "qk_rope_head_dim": mla.rotary_width,
            "q_lora_rank": mla.query_rank,
            "linear_num_heads": shape.heads,
            "linear_head_dim": shape.key_width,
            "linear_conv_kernel_dim": kda.conv_width,
            "layer_types": [FULL if type(x.mixers[0]) is MLA else LINEAR for x in layers],
            "mlp_layer_types": ["sparse" if isinstance(x.mlp, MoE) else "dense" for x in layers],
            "intermediate_size": dense.hidden(spec.width),
            "moe_intermediate_size": sparse.width,
            "num_experts": sparse.experts,
            "num_experts_per_token": sparse.active,
            "num_shared_experts": (sparse.shared_width or 0) // (sparse.width or 1),
            "moe_renormalize": sparse.normalize,
            "routed_scaling_factor": sparse.scale,
        } | {"n_group": sparse.groups, "topk_group": sparse.active_groups}

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
