"""Bamba: Mamba-2 with attention in some layers, and SwiGLU."""

from typing import Any, ClassVar

from deltazoo.blocks.checkpoints import decoder, parts
from deltazoo.blocks.checkpoints.family import Family, HubConfig
from deltazoo.blocks.checkpoints.rules import Rule, under
from deltazoo.blocks.model.interface import ModelSpec
from deltazoo.blocks.model.layer import LayerSpec
from deltazoo.blocks.model.mlp import Dense
from deltazoo.mixers.attention import Attention
from deltazoo.mixers.mamba2 import Mamba2

NAMES = decoder.Names(norm="model.final_layernorm.weight", mlp_norm="pre_ff_layernorm.weight")


class Bamba(Family):
    """Bamba; limits of the time step are refused."""

    architecture: ClassVar[str] = "BambaForCausalLM"
    ignored: ClassVar[tuple[str, ...]] = (
        "mamba_chunk_size",
        "num_logits_to_keep",
        "z_loss_coefficient",
        "attn_rotary_emb",
    )

    def stack(self, config: HubConfig) -> dict[str, Any]:
        config.require(mamba_conv_bias=True, mamba_proj_bias=False, mlp_bias=False)
        config.without_limits()
        heads = config["mamba_n_heads"]
        width = config.get("mamba_d_head", "auto")
        inner = config.get("mamba_expand", 2) * config["hidden_size"]
        mamba = Mamba2(
            heads=config.get("mamba_n_groups", 1),
            value_heads=heads,
            key_width=config["mamba_d_state"],
            value_width=inner // heads if width == "auto" else width,
            conv_width=config.get("mamba_d_conv", 4),
            norm_eps=config["rms_norm_eps"],
        )
        attention = decoder.attention(config, **config.rotary(fraction=0.5))
        attends = config.get("attn_layer_indices", [])
        pattern = ["attention" if i in attends else "mamba2" for i in range(config["num_hidden_layers"])]
        layers = {name: mixer for name, mixer in (("mamba2", mamba), ("attention", attention)) if name in pattern}
        mlp = Dense(width=config["intermediate_size"])
        return {**decoder.sizes(config), "pattern": " + ".join(pattern), "layers": layers, "mlp": mlp}

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        layers = spec.expand()
        mixer, mlp = decoder.first(spec, Mamba2), layers[0].mlp
        assert isinstance(mlp, Dense)
        shape = mixer.shape(spec.width)
        attention = decoder.attention_config(decoder.first(spec, Attention), spec.width)
        return {
            **decoder.sizes_config(spec),
            **{field: value for field, value in attention.items() if field != "head_dim"},
            "attn_layer_indices": [i for i, layer in enumerate(layers) if type(layer.mixers[0]) is Attention],
            "mamba_n_groups": shape.heads,
            "mamba_n_heads": shape.value_heads,
            "mamba_d_head": shape.value_width,
            "mamba_d_state": shape.key_width,
            "mamba_expand": shape.value_heads * shape.value_width // spec.width,
            "mamba_d_conv": mixer.conv_width,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
            "mlp_bias": False,
            "intermediate_size": mlp.hidden(spec.width),
        }

    def rules(self, spec: ModelSpec) -> list[Rule]:
        return decoder.model_rules(spec, lambda layer: self._layer(layer, spec.width), NAMES)

    def _layer(self, layer: LayerSpec, width: int) -> list[Rule]:
        (mixer,), mlp = layer.mixers, layer.mlp
        assert isinstance(mlp, Dense)
        rules = under("mlp.", "feed_forward.", parts.gated_mlp(mlp, width))
        if isinstance(mixer, Attention):
            return rules + under("mixers.0.", "self_attn.", parts.attention(mixer, width))
        assert isinstance(mixer, Mamba2)
        return rules + under("mixers.0.", "mamba.", parts.mamba2(mixer, width))
