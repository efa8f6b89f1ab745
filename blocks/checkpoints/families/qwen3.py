"""Qwen3, dense: Llama's layers with an RMS norm of each head's q and k."""

from typing import Any, ClassVar

from deltazoo.backends.io.errors import ConfigError
from deltazoo.blocks.checkpoints import decoder
from deltazoo.blocks.checkpoints.families.llama import attention_layer
from deltazoo.blocks.checkpoints.family import Family, HubConfig
from deltazoo.blocks.checkpoints.rules import Rule
from deltazoo.blocks.model.interface import ModelSpec

HEAD_WIDTH = 128  # of a config without head_dim


class Qwen3(Family):
    """Qwen3, dense; sliding windows are refused."""

    architecture: ClassVar[str] = "Qwen3ForCausalLM"
    ignored: ClassVar[tuple[str, ...]] = ("max_window_layers", "sliding_window")  # effective only if use_sliding_window

    def stack(self, config: HubConfig) -> dict[str, Any]:
        config.require(use_sliding_window=False)
        types = config.layer_types(["full_attention"] * config["num_hidden_layers"])
        if other := {*types} - {"full_attention"}:
            raise ConfigError(f"config.json: layer_types must be 'full_attention' for Qwen3, got {sorted(other)}")
        layer = decoder.attention(config, HEAD_WIDTH, qk_norm="head", **config.rotary())
        return decoder.attention_stack(config, layer)

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        return {**decoder.attention_stack_config(spec), "use_sliding_window": False, "sliding_window": None}

    def rules(self, spec: ModelSpec) -> list[Rule]:
        return decoder.model_rules(spec, lambda layer: attention_layer(layer, spec.width))
