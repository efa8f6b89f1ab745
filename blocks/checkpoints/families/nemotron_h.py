"""Nemotron-H and Nemotron 3: layers that are Mamba-2, attention without positions, an MLP, or a mixture of experts."""

from collections.abc import Mapping
from typing import Any, ClassVar

from deltazoo.backends.io.errors import ConfigError
from deltazoo.blocks.checkpoints import parts
from deltazoo.blocks.checkpoints.family import Family, HubConfig
from deltazoo.blocks.checkpoints.rules import Rule, renamed, under
from deltazoo.blocks.checkpoints.values import SIZE
from deltazoo.blocks.model.interface import ModelSpec
from deltazoo.blocks.model.layer import LayerSpec
from deltazoo.blocks.model.mlp import Dense
from deltazoo.blocks.model.moe import MoE
from deltazoo.mixers.attention import Attention
from deltazoo.mixers.mamba2 import Mamba2

KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}  # of hybrid_override_pattern
OLD_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
EXPERTS = parts.ExpertNames(shared="shared_experts")
REQUIRED: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "mamba_hidden_act": "silu", "mamba_proj_bias": False,
    "mlp_bias": False, "mlp_hidden_act": "relu2", "use_bias": False, "use_conv_bias": True,
}  # fmt: skip

# Fields of ours: their field and its default
MAMBA2 = {
    "heads": ("n_groups", 8), "value_heads": ("mamba_num_heads", 128), "key_width": ("ssm_state_size", 128),
    "value_width": ("mamba_head_dim", 64), "conv_width": ("conv_kernel", 4), "norm_eps": ("layer_norm_epsilon", 1e-5),
}  # fmt: skip
ATTENTION = {
    "heads": ("num_attention_heads", 32), "key_value_heads": ("num_key_value_heads", 8), "head_width": ("head_dim", 128)
}  # fmt: skip
MLP = {"width": ("intermediate_size", 21504)}
MOE = {
    "width": ("moe_intermediate_size", 7688), "experts": ("n_routed_experts", 8), "active": ("num_experts_per_tok", 2),
    "shared_width": ("moe_shared_expert_intermediate_size", 7688), "latent_width": ("moe_latent_size", None, SIZE),
    "normalize": ("norm_topk_prob", True), "scale": ("routed_scaling_factor", 1.0), "groups": ("n_group", 1),
    "active_groups": ("topk_group", 1),
}  # fmt: skip
FORMS: dict[Any, Any] = {Mamba2: ("M", MAMBA2), Attention: ("*", ATTENTION), Dense: ("-", MLP), MoE: ("E", MOE)}


class NemotronH(Family):
    """Nemotron-H and Nemotron 3; multi-token prediction is dropped.

    As in transformers, dt is at least time_step_min, and the head has its own weights whatever the config says.
    """

    architecture: ClassVar[str] = "NemotronHForCausalLM"
    dropped: ClassVar[tuple[str, ...]] = ("mtp.*",)
    aliases: ClassVar[dict[str, str]] = {r"^model\.": "backbone.", r"^backbone\.embedding\.": "backbone.embeddings."}
    ignored: ClassVar[tuple[str, ...]] = (
        "chunk_size", "expand", "hidden_dropout", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap",
        "mtp_hybrid_override_pattern", "mtp_layers_block_type", "n_shared_experts", "num_hidden_layers",
        "num_logits_to_keep", "num_nextn_predict_layers", "rescale_prenorm_residual", "residual_in_fp32",
        "rms_norm_eps", "sliding_window", "tie_word_embeddings", "time_step_floor", "time_step_limit",
        "time_step_max", "time_step_rank", "use_mamba_kernels", "norm_eps",
        # of rotary embeddings, which the attention does not have
        "partial_rotary_factor", "rope_parameters", "rope_scaling", "rope_theta",
    )  # fmt: skip

    def stack(self, config: HubConfig) -> dict[str, Any]:
        config.require(**REQUIRED)
        kinds = config.get("layers_block_type", like=[]) or [KINDS.get(x, x) for x in config["hybrid_override_pattern"]]
        kinds = [OLD_KINDS.get(kind, kind) for kind in kinds]
        if unknown := {*kinds} - {*KINDS.values()}:
            names = ", ".join([*KINDS, *KINDS.values()])
            raise ConfigError(f"config.json: a layer must be one of {names}, got {sorted(unknown)}")

        def read(fields: Mapping[str, Any]) -> dict[str, Any]:
            return {ours: config.get(*theirs) for ours, theirs in fields.items()}

        head_width = {"head_width": x} if (x := config.get("attention_head_dim", like=SIZE)) else {}
        attention = Attention(**read(ATTENTION) | head_width, rotary_theta=None)
        experts = MoE(**read(MOE), scores="sigmoid", selection_bias=True, balance=0.0, activation="relu2", gated=False)
        mamba2 = Mamba2(**read(MAMBA2), step_limits=(config.get("time_step_min", 1e-3), None))
        layers = {
            "linear_attention": LayerSpec(mixer=mamba2, mlp="none"),
            "full_attention": LayerSpec(mixer=attention, mlp="none"),
            "mlp": LayerSpec(mixer="none", mlp=Dense(**read(MLP), activation="relu2", gated=False)),
            "moe": LayerSpec(mixer="none", mlp=experts),
        }
        return {
            "width": config["hidden_size"],
            "depth": len(kinds),
            "vocab": config["vocab_size"],
            "tied": False,
            "norm_eps": config.get("layer_norm_epsilon", 1e-5),
            "pattern": " + ".join(kinds),
            "layers": {kind: layer for kind, layer in layers.items() if kind in kinds},
        }

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        fields: dict[str, Any] = {"layers_block_type": []}
        for layer in spec.expand():
            found = layer.mlp if layer.mixer == "none" else layer.mixers[0]
            symbol, names = FORMS[type(found)]
            fields["layers_block_type"].append(KINDS[symbol])
            fields |= {"time_step_min": found.step_limits[0]} if isinstance(found, Mamba2) else {}
            fields |= {theirs[0]: getattr(found, ours) for ours, theirs in names.items()}
        sizes = {"hidden_size": spec.width, "vocab_size": spec.vocab, "tie_word_embeddings": False}
        return {**REQUIRED, **fields, **sizes, "layer_norm_epsilon": spec.norm_eps}

    def rules(self, spec: ModelSpec) -> list[Rule]:
        outer = {"embedding": "backbone.embeddings", "stack.norm": "backbone.norm_f", "head": "lm_head"}
        rules = renamed({f"{ours}.weight": f"{theirs}.weight" for ours, theirs in outer.items()})
        for i, layer in enumerate(spec.expand()):
            rules += under(f"stack.layers.{i}.", f"backbone.layers.{i}.", self._layer(layer, spec.width))
        return rules

    def _layer(self, layer: LayerSpec, width: int) -> list[Rule]:
        if isinstance(layer.mlp, Dense | MoE):
            mlp = layer.mlp
            branch = parts.dense_mlp(mlp, width) if isinstance(mlp, Dense) else parts.experts(mlp, width, EXPERTS)
            return [*renamed({"mlp_norm.weight": "norm.weight"}), *under("mlp.", "mixer.", branch)]
        (mixer,) = layer.mixers
        assert isinstance(mixer, Attention | Mamba2)
        branch = parts.mamba2(mixer, width) if isinstance(mixer, Mamba2) else parts.attention(mixer, width)
        return [*renamed({"norm.weight": "norm.weight"}), *under("mixers.0.", "mixer.", branch)]
