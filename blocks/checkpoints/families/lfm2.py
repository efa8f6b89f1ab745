"""LFM2: gated short convolutions with attention in some layers, and SwiGLU."""

from typing import Any, ClassVar

from deltazoo.backends.io.errors import ConfigError
from deltazoo.blocks.checkpoints import decoder, parts
from deltazoo.blocks.checkpoints.family import Family, HubConfig
from deltazoo.blocks.checkpoints.rules import Packed, Rule, renamed, rule, under
from deltazoo.blocks.model.interface import ModelSpec
from deltazoo.blocks.model.layer import LayerSpec
from deltazoo.blocks.model.mlp import Dense
from deltazoo.mixers.attention import Attention
from deltazoo.mixers.lfm2_conv import LFM2Conv

NAMES = decoder.Names(
    norm="model.embedding_norm.weight",
    layer_norm="operator_norm.weight",
    mlp_norm="ffn_norm.weight",
    eps="norm_eps",
)


class Lfm2(Family):
    """LFM2, dense. The attention layers are those of `layer_types`, or of `full_attn_idxs`."""

    architecture: ClassVar[str] = "Lfm2ForCausalLM"
    # The hub's folders repeat these sizes under other names
    ignored: ClassVar[tuple[str, ...]] = (
        "block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu",
        "block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "theta",
        "use_pos_enc",
    )  # fmt: skip

    def stack(self, config: HubConfig) -> dict[str, Any]:
        depth, heads = config["num_hidden_layers"], config["num_attention_heads"]
        attention = Attention(
            heads=heads,
            key_value_heads=config["num_key_value_heads"],
            head_width=config.get("head_dim", config["hidden_size"] // heads),
            qk_norm="head",
            norm_eps=config["norm_eps"],
            **config.rotary(theta=1e6),
        )
        conv = LFM2Conv(conv_width=config.get("conv_L_cache", 3), bias=config.get("conv_bias", False))
        attends = config.get("full_attn_idxs", range(depth))
        types = config.get("layer_types", ["full_attention" if i in attends else "conv" for i in range(depth)])
        if unknown := {*types} - {"conv", "full_attention"}:
            raise ConfigError(f"config.json: layer_types must be 'conv' or 'full_attention', got {sorted(unknown)}")
        layers = {name: mixer for name, mixer in (("conv", conv), ("full_attention", attention)) if name in types}
        sizes = decoder.sizes(config, NAMES) | {
            "tied": config.get("tie_word_embeddings", config.get("tie_embedding", True))
        }
        return {**sizes, "pattern": " + ".join(types), "layers": layers, "mlp": Dense(width=self._hidden(config))}

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        mlp, conv = spec.expand()[0].mlp, decoder.first(spec, LFM2Conv)
        assert isinstance(mlp, Dense)
        attention = decoder.attention_config(decoder.first(spec, Attention), spec.width)
        fields = ("num_attention_heads", "num_key_value_heads", "rope_parameters")
        types = decoder.layer_types_config(spec)
        return {
            **{field: x for field, x in decoder.sizes_config(spec, NAMES).items() if field != "hidden_act"},
            **{field: attention[field] for field in fields},
            "layer_types": ["conv" if kind == "linear_attention" else kind for kind in types],
            "conv_L_cache": conv.conv_width,
            "conv_bias": conv.bias,
            "intermediate_size": mlp.hidden(spec.width),
            "block_auto_adjust_ff_dim": False,
        }

    def rules(self, spec: ModelSpec) -> list[Rule]:
        return decoder.model_rules(spec, lambda layer: self._layer(layer, spec.width), NAMES)

    def _layer(self, layer: LayerSpec, width: int) -> list[Rule]:
        (mixer,), mlp = layer.mixers, layer.mlp
        assert isinstance(mlp, Dense)
        rules = under("mlp.", "feed_forward.", parts.dense_mlp(mlp, width, parts.MlpNames("w1", "w3", "w2")))
        if isinstance(mixer, Attention):
            names = parts.AttentionNames("out_proj", "q_layernorm", "k_layernorm")
            return rules + under("mixers.0.", "self_attn.", parts.attention(mixer, width, names))
        assert isinstance(mixer, LFM2Conv)
        maps = {"to_bcx": "in_proj", "out": "out_proj"}
        kinds = ("weight", "bias") if mixer.bias else ("weight",)
        linear = renamed({f"{x}.{kind}": f"{y}.{kind}" for x, y in maps.items() for kind in kinds})
        conv = [rule("filters.conv.weight", {"conv.weight": Packed("all", axes=(1,))})]
        conv += renamed({"filters.conv.bias": "conv.bias"} if mixer.bias else {})
        return rules + under("mixers.0.", "conv.", linear + conv)

    @staticmethod
    def _hidden(config: HubConfig) -> int:
        """Return the hidden width: two thirds of the field, times a factor, rounded up, if it is adjusted."""
        hidden: int = config.get("block_ff_dim", config["intermediate_size"])
        adjusted = config.get("block_auto_adjust_ff_dim", True)
        factor, multiple = config.get("block_ffn_dim_multiplier", 1.0), config.get("block_multiple_of", 256)
        return multiple * -(-int(factor * int(2 * hidden / 3)) // multiple) if adjusted else hidden
