"""Llama: softmax attention with rotary embeddings, and SwiGLU."""

from typing import Any, ClassVar

from deltazoo.blocks.checkpoints import decoder, parts
from deltazoo.blocks.checkpoints.family import Family, HubConfig
from deltazoo.blocks.checkpoints.rules import Rule, under
from deltazoo.blocks.model.interface import ModelSpec
from deltazoo.blocks.model.layer import LayerSpec
from deltazoo.blocks.model.mlp import Dense
from deltazoo.mixers.attention import Attention


class Llama(Family):
    """Llama 1 to 3, and the models with its layers; biases are refused."""

    architecture: ClassVar[str] = "LlamaForCausalLM"

    def stack(self, config: HubConfig) -> dict[str, Any]:
        config.require(mlp_bias=False)
        return decoder.attention_stack(config, decoder.attention(config, **config.rotary()))

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        return {**decoder.attention_stack_config(spec), "mlp_bias": False}

    def rules(self, spec: ModelSpec) -> list[Rule]:
        return decoder.model_rules(spec, lambda layer: attention_layer(layer, spec.width))


def attention_layer(layer: LayerSpec, width: int) -> list[Rule]:
    """Return rules of self_attn and of a dense MLP."""
    (mixer,), mlp = layer.mixers, layer.mlp
    assert isinstance(mixer, Attention) and isinstance(mlp, Dense)
    return [
        *under("mixers.0.", "self_attn.", parts.attention(mixer, width)),
        *under("mlp.", "mlp.", parts.dense_mlp(mlp, width)),
    ]
