"""OLMo Hybrid: Gated DeltaNet with norms before the branches, attention with norms after them."""

from typing import Any, ClassVar

from deltazoo.blocks.checkpoints import decoder, gated_delta, parts
from deltazoo.blocks.checkpoints.family import Family, HubConfig
from deltazoo.blocks.checkpoints.rules import Packed, Rule, renamed, under
from deltazoo.blocks.model.interface import ModelSpec
from deltazoo.blocks.model.layer import LayerSpec
from deltazoo.blocks.model.mlp import Dense
from deltazoo.mixers.attention import Attention
from deltazoo.mixers.gated_deltanet import GatedDeltaNet

OUTPUT_NORM_EPS = 1e-5  # a constant of the model, whatever rms_norm_eps is


class OlmoHybrid(Family):
    """OLMo Hybrid."""

    architecture: ClassVar[str] = "OlmoHybridForCausalLM"
    aliases: ClassVar[dict[str, str]] = {
        "attention_layer_norm": "input_layernorm",
        "feedforward_layer_norm": "post_attention_layernorm",
    }
    ignored: ClassVar[tuple[str, ...]] = (
        "linear_a_log_max", "linear_a_log_min", "linear_dt_init_floor", "linear_dt_max", "linear_dt_min",
    )  # fmt: skip

    def stack(self, config: HubConfig) -> dict[str, Any]:
        negative = "both" if config.get("linear_allow_neg_eigval", True) else "off"
        attention = decoder.attention(config, qk_norm="all", **config.rotary(optional=True))
        layers = {
            "linear_attention": gated_delta.mixer(config, OUTPUT_NORM_EPS, negative_eigenvalues=negative),
            "full_attention": LayerSpec(mixer=attention, norm_position="output"),
        }
        depth = config["num_hidden_layers"]
        pattern = decoder.layer_types(
            config, ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(depth)]
        )
        mlp = Dense(width=config["intermediate_size"])
        return {**decoder.sizes(config), "pattern": pattern, "layers": layers, "mlp": mlp}

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        mlp = spec.expand()[0].mlp
        assert isinstance(mlp, Dense)
        attention = decoder.attention_config(decoder.first(spec, Attention), spec.width)
        return {
            **decoder.sizes_config(spec),
            **{field: value for field, value in attention.items() if field != "head_dim"},
            **gated_delta.mixer_config(spec),
            "layer_types": decoder.layer_types_config(spec),
            "linear_allow_neg_eigval": decoder.first(spec, GatedDeltaNet).negative_eigenvalues == "both",
            "intermediate_size": mlp.hidden(spec.width),
        }

    def rules(self, spec: ModelSpec) -> list[Rule]:
        outer = {"embedding.weight": "model.embed_tokens.weight", "stack.norm.weight": "model.norm.weight"}
        rules = renamed(outer if spec.tied else outer | {"head.weight": "lm_head.weight"})
        for i, layer in enumerate(spec.expand()):
            rules += under(f"stack.layers.{i}.", f"model.layers.{i}.", self._layer(layer, spec.width))
        return rules

    def _layer(self, layer: LayerSpec, width: int) -> list[Rule]:
        (mixer,), mlp = layer.mixers, layer.mlp
        assert isinstance(mlp, Dense)
        rules = under("mlp.", "mlp.", parts.dense_mlp(mlp, width))
        if isinstance(mixer, Attention):
            norms = ("post_attention_layernorm", "post_feedforward_layernorm")
            rules += under("mixers.0.", "self_attn.", parts.attention(mixer, width))
        else:
            assert isinstance(mixer, GatedDeltaNet)
            norms = ("input_layernorm", "post_attention_layernorm")
            inputs = parts.QKV | {"g_proj.weight": "gate", "b_proj.weight": "beta", "a_proj.weight": "decay"}
            conv = {f"{x}_conv1d.weight": Packed(x, axes=(1,)) for x in "qkv"}
            rows = gated_delta.rows(mixer, width)
            channels = rows["q"] + rows["k"] + rows["v"]
            third = -(-channels // 3)  # transformers 5.23 and 5.24 cut the convolution into thirds when they save it
            cut = {"q": third, "k": third, "v": channels - 2 * third}
            names = parts.DeltaNames(inputs, conv, norm="o_norm.weight", out="o_proj.weight", other_conv=cut)
            rules += under("mixers.0.", "linear_attn.", parts.gated_delta(names, rows))
        ours = ("norm.weight", "mlp_norm.weight")
        return rules + renamed({name: f"{norm}.weight" for name, norm in zip(ours, norms, strict=True)})
