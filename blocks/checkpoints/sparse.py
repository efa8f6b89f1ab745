"""What Kimi Linear and Ling 3.0 share: KDA or latent attention in a layer, and a dense MLP or groups of experts."""

from typing import Any

from deltazoo.backends.io.errors import ConfigError
from deltazoo.blocks.checkpoints import decoder
from deltazoo.blocks.checkpoints.family import HubConfig
from deltazoo.blocks.checkpoints.values import SIZE
from deltazoo.blocks.model.interface import ModelSpec
from deltazoo.blocks.model.layer import LayerSpec
from deltazoo.blocks.model.mlp import Dense
from deltazoo.blocks.model.moe import MoE
from deltazoo.mixers.core.mixer import MixerConfig
from deltazoo.mixers.mla import MLA

FULL, LINEAR = "full_attention", "linear_attention"
LATENT_NORM_EPS = 1e-6  # a constant of the models, whatever rms_norm_eps is


def heads(config: HubConfig) -> int:
    """Return the number of heads. Raises: ConfigError: those of keys and values differ."""
    count: int = config["num_attention_heads"]
    if (keys := config.get("num_key_value_heads", count)) != count:
        raise ConfigError(f"config.json: num_key_value_heads must be num_attention_heads = {count}, got {keys}")
    return count


def latent_attention(config: HubConfig, **fields: Any) -> MLA:
    """Return the latent attention. Args: fields: of `MLA`, beside the sizes."""
    return MLA(
        heads=heads(config),
        key_width=config["qk_nope_head_dim"],
        value_width=config["v_head_dim"],
        latent_width=config["kv_lora_rank"],
        rotary_width=config["qk_rope_head_dim"],
        norm_eps=LATENT_NORM_EPS,
        **fields,
    )


def mlps(config: HubConfig, scale: float, groups: int, active_groups: int) -> dict[str, Dense | MoE]:
    """Return both MLPs, with the field names of the hub and those of transformers. Args: defaults of the family."""
    expert = config["moe_intermediate_size"]
    sparse = MoE(
        experts=config.get("num_experts", like=SIZE) or config["num_local_experts"],
        active=config.get("num_experts_per_token", like=SIZE) or config["num_experts_per_tok"],
        width=expert,
        scores="sigmoid",
        selection_bias=True,
        normalize=config.get("moe_renormalize", config.get("norm_topk_prob", True)),
        scale=config.get("routed_scaling_factor", scale),
        shared_width=expert * config.get("num_shared_experts", config.get("n_shared_experts", 1)),
        groups=config.get("n_group", config.get("num_expert_group", groups)),
        active_groups=config.get("topk_group", active_groups),
        balance=0.0,
    )
    return {"dense": Dense(width=config["intermediate_size"]), "sparse": sparse}


def layers(
    config: HubConfig, mixers: dict[str, MixerConfig], mlps: dict[str, Dense | MoE], attends: list[bool], dense: int
) -> dict[str, Any]:
    """Return the pattern and the layers of a stack. Args: attends, dense: the defaults of the lists of layer types."""
    kinds = config.layer_types([FULL if full else LINEAR for full in attends])
    first = config.get("first_k_dense_replace", dense)
    default = ["dense" if i < first else "sparse" for i in range(len(kinds))]
    mlp_kinds = config.get("mlp_layer_types", like=[]) or default
    places = [*zip(kinds, mlp_kinds, strict=True)]
    named = {f"{kind}_{mlp}": LayerSpec(mixer=mixers[kind], mlp=mlps[mlp]) for kind, mlp in places}
    return {"pattern": " + ".join("_".join(place) for place in places), "layers": named}


def config(spec: ModelSpec, heads: int = 1) -> dict[str, Any]:
    """Return the fields that these functions read; of a small part, if the stack has none. Args: heads: of that MLA."""
    expanded = spec.expand()
    small = MLA(heads=heads, key_width=8, value_width=8, latent_width=8, rotary_width=8)
    mla = decoder.first(spec, MLA, small)
    experts = MoE(width=1, experts=1, active=1, shared_width=1)
    sparse = next((layer.mlp for layer in expanded if isinstance(layer.mlp, MoE)), experts)
    dense = next((layer.mlp for layer in expanded if isinstance(layer.mlp, Dense)), Dense(width=sparse.width))
    return {
        "num_attention_heads": mla.heads,
        "num_key_value_heads": mla.heads,
        "qk_nope_head_dim": mla.key_width,
        "v_head_dim": mla.value_width,
        "kv_lora_rank": mla.latent_width,
        "qk_rope_head_dim": mla.rotary_width,
        "layer_types": [FULL if type(x.mixers[0]) is MLA else LINEAR for x in expanded],
        "mlp_layer_types": ["sparse" if isinstance(x.mlp, MoE) else "dense" for x in expanded],
        "intermediate_size": dense.hidden(spec.width),
        "moe_intermediate_size": sparse.width,
        "num_experts": sparse.experts,
        "num_experts_per_token": sparse.active,
        "num_shared_experts": (sparse.shared_width or 0) // (sparse.width or 1),
        "moe_renormalize": sparse.normalize,
        "routed_scaling_factor": sparse.scale,
        "n_group": sparse.groups,
        "topk_group": sparse.active_groups,
    }
