"""Bamba: Mamba-2 with attention in some layers, and SwiGLU."""

from typing import Any, ClassVar

from deltazoo.blocks.checkpoints import decoder, parts, ssd
from deltazoo.blocks.checkpoints.family import Family, HubConfig
from deltazoo.blocks.checkpoints.rules import Rule, under
from deltazoo.blocks.model.interface import ModelSpec
from deltazoo.blocks.model.layer import LayerSpec
from deltazoo.blocks.model.mlp import Dense
from deltazoo.mixers.attention import Attention

NAMES = decoder.Names(norm="model.final_layernorm.weight", mlp_norm="pre_ff_layernorm.weight")


class Bamba(Family):
    """Bamba."""

    architecture: ClassVar[str] = "BambaForCausalLM"
    ignored: ClassVar[tuple[str, ...]] = (
        "mamba_chunk_size",
        "num_logits_to_keep",
        "z_loss_coefficient",
        "attn_rotary_emb",
    )

    def stack(self, config: HubConfig) -> dict[str, Any]:
        mixers = {
            "mamba2": ssd.mixer(config),
            "attention": decoder.attention(config, **config.rotary(fraction=0.5)),
        }
        attends = config.get("attn_layer_indices", [])
        pattern = ["attention" if i in attends else "mamba2" for i in range(config["num_hidden_layers"])]
        layers = {name: mixer for name, mixer in mixers.items() if name in pattern}
        mlp = Dense(width=config["intermediate_size"])
        return {**decoder.sizes(config), "pattern": " + ".join(pattern), "layers": layers, "mlp": mlp}

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        layers = spec.expand()
        mlp = layers[0].mlp
        assert isinstance(mlp, Dense)
        attention = decoder.attention_config(decoder.first_attention(spec), spec.width)
        attention["rope_parameters"].setdefault("partial_rotary_factor", 1.0)
        return {
            **decoder.sizes_config(spec),
            **{field: value for field, value in attention.items() if field != "head_dim"},
            **ssd.first_mixer_config(spec),
            "attn_layer_indices": [i for i, layer in enumerate(layers) if type(layer.mixers[0]) is Attention],
            "intermediate_size": mlp.hidden(spec.width),
        }

    def rules(self, spec: ModelSpec) -> list[Rule]:
        return decoder.model_rules(spec, lambda layer: self._layer(layer, spec.width), NAMES)

    def _layer(self, layer: LayerSpec, width: int) -> list[Rule]:
        (mixer,), mlp = layer.mixers, layer.mlp
        assert isinstance(mlp, Dense)
        return ssd.mixer_rules(mixer, width) + under("mlp.", "feed_forward.", parts.dense_mlp(mlp, width))
