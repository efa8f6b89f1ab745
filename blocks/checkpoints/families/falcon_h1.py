"""Falcon-H1: Mamba-2 and attention in parallel in every layer, with constant factors on the outputs of maps."""

from typing import Any, ClassVar

from deltazoo.blocks.checkpoints import decoder, parts, ssd
from deltazoo.blocks.checkpoints.families.bamba import NAMES
from deltazoo.blocks.checkpoints.family import Family, HubConfig
from deltazoo.blocks.checkpoints.rules import Rule, under
from deltazoo.blocks.checkpoints.values import SIZE
from deltazoo.blocks.model.interface import ModelSpec
from deltazoo.blocks.model.layer import LayerSpec
from deltazoo.blocks.model.mlp import Dense
from deltazoo.mixers.attention import Attention
from deltazoo.mixers.mamba2 import Mamba2
from deltazoo.mixers.parts.ssm.stream_factors import StreamFactors


class FalconH1(Family):
    """Falcon-H1. The factors of the inputs of the mixers are merged into others, and written as 1."""

    architecture: ClassVar[str] = "FalconH1ForCausalLM"
    ignored: ClassVar[tuple[str, ...]] = (
        "attn_layer_indices", "mamba_chunk_size", "mamba_use_mlp", "mlp_expansion_factor", "num_logits_to_keep",
        "residual_in_fp32", "rescale_prenorm_residual", "time_step_floor", "time_step_max", "time_step_min",
        "time_step_rank",
    )  # fmt: skip

    def stack(self, config: HubConfig) -> dict[str, Any]:
        config.require(projectors_bias=False)
        of_inputs = config.get("ssm_in_multiplier", 1.0)
        factors = StreamFactors._make(of_inputs * x for x in config.get("ssm_multipliers", [1.0] * 5))
        first = config.get("mamba_norm_before_gate", True)
        norm = config.get("mamba_rms_norm", False) and ("first" if first else True)
        mamba2 = ssd.mixer(config, config.get("mamba_d_ssm", like=SIZE), norm=norm, factors=factors)
        of_input = config.get("attention_in_multiplier", 1.0)  # q, k and v have it: the scores its square
        key_scale = config.get("key_multiplier", 1.0) * of_input**2
        attention = decoder.attention(config, key_scale=key_scale, **config.rotary())
        scales = config.get("ssm_out_multiplier", 1.0), config.get("attention_out_multiplier", 1.0) * of_input
        layer = LayerSpec(mixer=(mamba2, attention), mixer_scales=None if scales == (1, 1) else scales)
        gate_scale, out_scale = config.get("mlp_multipliers", [1.0, 1.0])
        return {
            **decoder.sizes(config),
            "pattern": "hybrid",
            "layers": {"hybrid": layer},
            "mlp": Dense(width=config["intermediate_size"], gate_scale=gate_scale, out_scale=out_scale),
            "embedding_scale": config.get("embedding_multiplier", 1.0),
            "logit_scale": config.get("lm_head_multiplier", 1.0),
        }

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        layer = spec.expand()[0]
        (mamba2, attention), mlp = layer.mixers, layer.mlp
        assert isinstance(mamba2, Mamba2) and isinstance(attention, Attention) and isinstance(mlp, Dense)
        of_mamba2, of_attention = layer.mixer_scales or (1.0, 1.0)
        shape = mamba2.shape(spec.width)
        return {
            **decoder.sizes_config(spec),
            **decoder.attention_config(attention, spec.width),
            **ssd.mixer_config(mamba2, spec.width),
            "mamba_d_ssm": shape.value_heads * shape.value_width,
            "mamba_rms_norm": bool(mamba2.norm),
            "mamba_norm_before_gate": mamba2.norm == "first",
            "projectors_bias": False,
            "intermediate_size": mlp.hidden(spec.width),
            "ssm_in_multiplier": 1.0,
            "ssm_multipliers": [*mamba2.factors],
            "ssm_out_multiplier": of_mamba2,
            "attention_in_multiplier": 1.0,
            "key_multiplier": attention.key_scale,
            "attention_out_multiplier": of_attention,
            "mlp_multipliers": [mlp.gate_scale, mlp.out_scale],
            "embedding_multiplier": spec.embedding_scale,
            "lm_head_multiplier": spec.logit_scale,
        }

    def rules(self, spec: ModelSpec) -> list[Rule]:
        return decoder.model_rules(spec, lambda layer: self._layer(layer, spec.width), NAMES)

    def _layer(self, layer: LayerSpec, width: int) -> list[Rule]:
        mlp = layer.mlp
        assert isinstance(mlp, Dense)
        rules = under("mlp.", "feed_forward.", parts.dense_mlp(mlp, width))
        for i, mixer in enumerate(layer.mixers):
            rules += ssd.mixer_rules(mixer, width, i)
        return rules
