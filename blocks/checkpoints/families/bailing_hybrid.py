"""Ling 3.0: KDA with a bounded decay, latent attention with a gate in some layers, and groups of experts."""

from typing import Any, ClassVar

from deltazoo.blocks.checkpoints import decoder, parts, sparse
from deltazoo.blocks.checkpoints.family import Family, HubConfig
from deltazoo.blocks.checkpoints.rules import Rule, under
from deltazoo.blocks.model.interface import ModelSpec
from deltazoo.blocks.model.layer import LayerSpec
from deltazoo.blocks.model.mlp import Dense
from deltazoo.blocks.model.moe import MoE
from deltazoo.mixers.kda import KDA
from deltazoo.mixers.mla import MLA

EXPERTS = parts.ExpertNames(shared="shared_experts", selection_bias="gate.expert_bias")
NAMES = decoder.Names(embedding="model.word_embeddings.weight")


class BailingHybrid(Family):
    """Ling 3.0, in the names of the hub, which transformers writes, too."""

    architecture: ClassVar[str] = "BailingHybridForCausalLM"
    dropped: ClassVar[tuple[str, ...]] = ("model.layers.42.*",)  # multi-token prediction
    aliases: ClassVar[dict[str, str]] = {
        r"\.embed_tokens\.": ".word_embeddings.",
        r"\.self_attn\.(forget_gate\.)?": ".attention.",
        r"\.attention\.o_proj\.": ".attention.dense.",
        r"\.e_score_correction_bias$": ".expert_bias",
    }
    ignored: ClassVar[tuple[str, ...]] = (
        "linear_conv_kernel_dim", "linear_head_dim", "linear_num_heads", "mtp_loss_scaling_factor", "num_mtp_layers",
        "num_nextn_predict_layers", "qk_head_dim", "layer_group_size",
    )  # fmt: skip

    def stack(self, config: HubConfig) -> dict[str, Any]:
        config.require(attention_bias=False, attention_dropout=0.0, q_lora_rank=None)
        rotary = config.rotary(theta=6e6, fraction=1.0)
        del rotary["rotary_fraction"]  # it is that of a head; all of the qk_rope_head_dim channels are rotated
        width = config.get("linear_head_dim", config.get("head_dim", 128))
        mixers = {
            sparse.FULL: sparse.latent_attention(config, gate="head", **rotary),
            sparse.LINEAR: KDA(
                heads=sparse.heads(config),
                key_width=width,
                value_width=width,
                conv_width=config.get("short_conv_kernel_size", 4),
                gate_rank="full",
                decay_bound=config.get("kda_lower_bound", -5.0) if config.get("kda_safe_gate", True) else None,
                norm_eps=config["rms_norm_eps"],
            ),
        }
        group = config.get("layer_group_size", 6)
        attends = [(i + 1) % group == 0 for i in range(config["num_hidden_layers"])]
        mlps = sparse.mlps(config, scale=2.5, groups=8, active_groups=4)
        return {**decoder.sizes(config), **sparse.layers(config, mixers, mlps, attends, dense=2)}

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        kda = decoder.first(spec, KDA, KDA(heads=1, key_width=8, value_width=8, decay_bound=-5.0))
        shape, bound = kda.shape(spec.width), kda.decay_bound
        mla = decoder.first(spec, MLA, MLA(heads=shape.heads, rotary_theta=6e6))
        return {
            **decoder.sizes_config(spec),
            **sparse.config(spec, shape.heads),
            "rope_parameters": decoder.rotary_config(mla),
            "rope_theta": mla.rotary_theta,
            "head_dim": shape.key_width,
            "short_conv_kernel_size": kda.conv_width,
            "kda_safe_gate": bound is not None,
            "kda_lower_bound": -5.0 if bound is None else bound,
        }

    def rules(self, spec: ModelSpec) -> list[Rule]:
        return decoder.model_rules(spec, lambda layer: self._layer(layer, spec.width), NAMES)

    def _layer(self, layer: LayerSpec, width: int) -> list[Rule]:
        (mixer,), mlp = layer.mixers, layer.mlp
        assert isinstance(mixer, KDA | MLA) and isinstance(mlp, Dense | MoE)
        feed = parts.dense_mlp(mlp, width) if isinstance(mlp, Dense) else parts.experts(mlp, width, EXPERTS)
        mixing = parts.kda(mixer, width, "dense") if isinstance(mixer, KDA) else parts.mla(mixer, "dense")
        return under("mlp.", "mlp.", feed) + under("mixers.0.", "attention.", mixing)
