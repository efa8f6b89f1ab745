"""Mamba-2 in transformers' folders."""

from typing import Any, ClassVar

from deltazoo.backends.io.errors import ConfigError
from deltazoo.blocks.checkpoints import decoder, parts, ssd
from deltazoo.blocks.checkpoints.families.mamba import IGNORED, NAMES
from deltazoo.blocks.checkpoints.family import Family, HubConfig, limits_config
from deltazoo.blocks.checkpoints.rules import Rule, under
from deltazoo.blocks.model.interface import ModelSpec
from deltazoo.mixers import mamba2 as mixers


class Mamba2(Family):
    """Mamba-2."""

    architecture: ClassVar[str] = "Mamba2ForCausalLM"
    ignored: ClassVar[tuple[str, ...]] = (*IGNORED, "chunk_size", "time_step_rank")

    def stack(self, config: HubConfig) -> dict[str, Any]:
        config.require(use_bias=False, use_conv_bias=True, rms_norm=True)
        mixer = mixers.Mamba2(
            heads=config["n_groups"],
            value_heads=config["num_heads"],
            key_width=config["state_size"],
            value_width=config["head_dim"],
            conv_width=config.get("conv_kernel", 4),
            norm_eps=config["layer_norm_epsilon"],
            step_limits=config.step_limits(),
        )
        inner, expanded = config["num_heads"] * config["head_dim"], int(config.get("expand", 2) * config["hidden_size"])
        if inner != expanded:
            raise ConfigError(
                f"config.json: num_heads times head_dim must be expand times hidden_size = {expanded}, got {inner}"
            )
        sizes = decoder.sizes(config, NAMES)
        return {**sizes, "pattern": "mamba2", "layers": {"mamba2": mixer}, "mlp": "none"}

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        mixer = decoder.first(spec, mixers.Mamba2)
        shape = mixer.shape(spec.width)
        return {
            **decoder.sizes_config(spec, NAMES),
            **limits_config(mixer.step_limits),
            "n_groups": shape.heads,
            "num_heads": shape.value_heads,
            "head_dim": shape.value_width,
            "state_size": shape.key_width,
            "expand": ssd.expansion(mixer, spec.width),
            "conv_kernel": mixer.conv_width,
            "use_bias": False,
            "use_conv_bias": True,
        }

    def rules(self, spec: ModelSpec) -> list[Rule]:
        rules = parts.mamba2(decoder.first(spec, mixers.Mamba2), spec.width)
        return decoder.model_rules(spec, lambda layer: under("mixers.0.", "mixer.", rules), NAMES)
