"""Mamba, and Falcon Mamba, which normalises B, C and the step's input."""

from typing import Any, ClassVar

from deltazoo.blocks.checkpoints import decoder, parts
from deltazoo.blocks.checkpoints.family import Family, HubConfig
from deltazoo.blocks.checkpoints.rules import Rule, under
from deltazoo.blocks.model.interface import ModelSpec
from deltazoo.mixers import mamba as mixers

NAMES = decoder.Names(
    embedding="backbone.embeddings.weight",
    layers="backbone.layers",
    norm="backbone.norm_f.weight",
    layer_norm="norm.weight",
    eps="layer_norm_epsilon",
)
# Of the initial values, of kernels, and of the residual stream's dtype
IGNORED = (
    "rescale_prenorm_residual", "residual_in_fp32", "time_step_floor", "time_step_init_scheme", "time_step_max",
    "time_step_min", "time_step_scale", "use_associative_scan", "use_mambapy", "use_falcon_mambapy", "expand",
)  # fmt: skip


class Mamba(Family):
    """Mamba in transformers' folders (-hf).

    With `rescale_prenorm_residual`, transformers 5.23 divides out_proj by the root of the number of layers whenever it
    loads a folder, as if it drew the weights. We read the weights as they are stored: their logits then differ.
    """

    architecture: ClassVar[str] = "MambaForCausalLM"
    ignored: ClassVar[tuple[str, ...]] = IGNORED
    aliases: ClassVar[dict[str, str]] = {r"^backbone\.embedding\.": "backbone.embeddings."}

    def stack(self, config: HubConfig) -> dict[str, Any]:
        return mamba_stack(config)

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        return mamba_config(spec)

    def rules(self, spec: ModelSpec) -> list[Rule]:
        return mamba_rules(spec)


class FalconMamba(Family):
    """Falcon Mamba."""

    architecture: ClassVar[str] = "FalconMambaForCausalLM"
    ignored: ClassVar[tuple[str, ...]] = IGNORED

    def stack(self, config: HubConfig) -> dict[str, Any]:
        return mamba_stack(config, inner_norm="plain", norm_eps=config.get("mixer_rms_eps", 1e-6))

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        return mamba_config(spec) | {"mixer_rms_eps": decoder.first(spec, mixers.Mamba).norm_eps}

    def rules(self, spec: ModelSpec) -> list[Rule]:
        return mamba_rules(spec)


def mamba_stack(config: HubConfig, **fields: Any) -> dict[str, Any]:
    """Return the fields of the stack. Args: fields: of the mixer, beside the sizes."""
    config.require(use_bias=False, use_conv_bias=True)
    width = config["hidden_size"]
    mixer = mixers.Mamba(
        channels=config.get("intermediate_size", config.get("expand", 2) * width),
        state_size=config.get("state_size", 16),
        step_rank=-(-width // 16) if config.get("time_step_rank", "auto") == "auto" else config["time_step_rank"],
        conv_width=config.get("conv_kernel", 4),
        **fields,
    )
    sizes = decoder.sizes(config, NAMES) | {"tied": config.get("tie_word_embeddings", True)}
    return {**sizes, "pattern": "mamba", "layers": {"mamba": mixer}, "mlp": "none"}


def mamba_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields that `mamba_stack` reads."""
    mixer = decoder.first(spec, mixers.Mamba)
    channels = mixer.shape(spec.width).value_heads
    return {
        **decoder.sizes_config(spec, NAMES),
        "intermediate_size": channels,
        "expand": channels // spec.width,  # transformers takes only integers, and reads intermediate_size
        "state_size": mixer.state_size,
        "time_step_rank": mixer.step_rank or -(-spec.width // 16),
        "conv_kernel": mixer.conv_width,
        "use_bias": False,
        "use_conv_bias": True,
    }


def mamba_rules(spec: ModelSpec) -> list[Rule]:
    """Return the rules of all layers."""
    mixer = decoder.first(spec, mixers.Mamba)
    rules = parts.mamba(mixer, mixer.shape(spec.width).value_heads)
    return decoder.model_rules(spec, lambda layer: under("mixers.0.", "mixer.", rules), NAMES)
