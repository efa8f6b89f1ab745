"""LFM2: gated short convolutions with attention in some layers, and SwiGLU."""

from typing import Any, ClassVar

from deltazoo.blocks.checkpoints import decoder, lfm2, parts
from deltazoo.blocks.checkpoints.family import Family, HubConfig
from deltazoo.blocks.checkpoints.rules import Rule, under
from deltazoo.blocks.checkpoints.values import SIZE
from deltazoo.blocks.model.interface import ModelSpec
from deltazoo.blocks.model.layer import LayerSpec
from deltazoo.blocks.model.mlp import Dense


class Lfm2(Family):
    """LFM2, dense. The attention layers are those of `layer_types`, or of `full_attn_idxs`."""

    architecture: ClassVar[str] = "Lfm2ForCausalLM"
    # initial values, switches without effect, and sizes that other fields repeat
    ignored: ClassVar[tuple[str, ...]] = (
        "block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu",
        "block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "theta",
        "use_pos_enc",
    )  # fmt: skip

    def stack(self, config: HubConfig) -> dict[str, Any]:
        found, types = lfm2.mixers(config)
        layers = {name: mixer for name, mixer in found.items() if name in types}
        return {
            **lfm2.sizes(config),
            "pattern": " + ".join(types),
            "layers": layers,
            "mlp": Dense(width=self._hidden(config)),
        }

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        mlp = spec.expand()[0].mlp
        assert isinstance(mlp, Dense)
        return {
            **lfm2.mixers_config(spec),
            "intermediate_size": mlp.hidden(spec.width),
            "block_auto_adjust_ff_dim": False,
        }

    def rules(self, spec: ModelSpec) -> list[Rule]:
        return decoder.model_rules(spec, lambda layer: self._layer(layer, spec.width), lfm2.NAMES)

    def _layer(self, layer: LayerSpec, width: int) -> list[Rule]:
        assert isinstance(layer.mlp, Dense)
        return lfm2.mixer_rules(layer, width) + under(
            "mlp.", "feed_forward.", parts.dense_mlp(layer.mlp, width, lfm2.MLP)
        )

    @staticmethod
    def _hidden(config: HubConfig) -> int:
        """Return the hidden width: two thirds of the field, times a factor, rounded up, if it is adjusted."""
        hidden: int = config.get("block_ff_dim", like=SIZE) or config["intermediate_size"]
        adjusted = config.get("block_auto_adjust_ff_dim", True)
        factor, multiple = config.get("block_ffn_dim_multiplier", 1.0), config.get("block_multiple_of", 256)
        return multiple * -(-int(factor * int(2 * hidden / 3)) // multiple) if adjusted else hidden
