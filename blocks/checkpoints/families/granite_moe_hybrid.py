"""Granite 4: Mamba-2 with attention in some layers, a mixture of experts with a shared expert, and constant factors."""

from typing import Any, ClassVar

from deltazoo.backends.io.errors import ConfigError
from deltazoo.blocks.checkpoints import decoder, ssd
from deltazoo.blocks.checkpoints.family import Family, HubConfig
from deltazoo.blocks.checkpoints.rules import Rule, renamed
from deltazoo.blocks.checkpoints.values import SIZE
from deltazoo.blocks.model.interface import ModelSpec
from deltazoo.blocks.model.layer import LayerSpec
from deltazoo.blocks.model.mlp import Dense
from deltazoo.blocks.model.moe import MoE

KINDS = {"mamba": "linear_attention", "attention": "full_attention"}  # names of older configs
SHARED = {"to_hidden.weight": "shared_mlp.input_linear.weight", "out.weight": "shared_mlp.output_linear.weight"}
EXPERTS = {
    "router.weight": "block_sparse_moe.router.layer.weight",
    "to_hidden.weight": "block_sparse_moe.input_linear.weight",
    "out.weight": "block_sparse_moe.output_linear.weight",
}


class GraniteMoeHybrid(Family):
    """Granite 4 with and without experts."""

    architecture: ClassVar[str] = "GraniteMoeHybridForCausalLM"
    ignored: ClassVar[tuple[str, ...]] = ("init_method", "mamba_chunk_size")

    def stack(self, config: HubConfig) -> dict[str, Any]:
        config.require(normalization_function="rmsnorm")
        positions = config.get("position_embedding_type", "nope")
        rotary = config.rotary(optional=positions == "nope")
        if positions not in ("rope", "nope"):
            raise ConfigError(f"config.json: position_embedding_type must be 'rope', 'nope' or null, got {positions!r}")
        if positions == "nope":
            rotary = {"rotary_theta": None}
        scale = config.get_or_null("attention_multiplier", 1.0)  # null: that of softmax attention
        mixers = {
            "linear_attention": ssd.mixer(config),
            "full_attention": decoder.attention(config, scale=scale, **rotary),
        }
        kinds = config.layer_types(["linear_attention"] * config["num_hidden_layers"])
        pattern = [KINDS.get(kind, kind) for kind in kinds]
        shared, experts = config.get("shared_intermediate_size", 1024), config.get("num_local_experts", 8)
        mlp: Dense | MoE = Dense(width=shared)
        hidden, active = config.get("intermediate_size", like=SIZE), config.get("num_experts_per_tok", 2)
        if experts:
            mlp = MoE(width=hidden, experts=experts, active=active, shared_width=shared)
        return {
            **decoder.sizes(config),
            "pattern": " + ".join(pattern),
            "layers": {name: mixer for name, mixer in mixers.items() if name in pattern},
            "mlp": mlp,
            "branch_scale": config.get("residual_multiplier", 1.0),
            "embedding_scale": config.get("embedding_multiplier", 1.0),
            "logit_scale": 1 / config.get("logits_scaling", 1.0),
        }

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        layers = spec.expand()
        attention, mlp = decoder.first_attention(spec), layers[0].mlp
        fields = decoder.attention_config(attention, spec.width)
        if isinstance(mlp, MoE):
            sizes = {"intermediate_size": mlp.hidden(spec.width), "shared_intermediate_size": mlp.shared_width}
            sizes |= {"num_local_experts": mlp.experts, "num_experts_per_tok": mlp.active}
        else:
            assert isinstance(mlp, Dense)
            sizes = {"shared_intermediate_size": mlp.hidden(spec.width), "num_local_experts": 0}
        return {
            **decoder.sizes_config(spec),
            **{field: value for field, value in fields.items() if field != "head_dim"},
            **ssd.first_mixer_config(spec),
            **sizes,
            "layer_types": decoder.layer_types_config(spec),
            "position_embedding_type": None if attention.rotary_theta is None else "rope",
            "attention_multiplier": fields["head_dim"] ** -0.5 if attention.scale is None else attention.scale,
            "residual_multiplier": layers[0].branch_scale,
            "embedding_multiplier": spec.embedding_scale,
            "logits_scaling": decoder.inverse(spec.logit_scale),
        }

    def rules(self, spec: ModelSpec) -> list[Rule]:
        return decoder.model_rules(spec, lambda layer: self._layer(layer, spec.width))

    def _layer(self, layer: LayerSpec, width: int) -> list[Rule]:
        names = SHARED
        if isinstance(layer.mlp, MoE):
            names = EXPERTS | {f"shared.{ours}": theirs for ours, theirs in SHARED.items()}
        rules = renamed({f"mlp.{ours}": theirs for ours, theirs in names.items()})
        return rules + ssd.mixer_rules(layer.mixers[0], width)
