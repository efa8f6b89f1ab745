"""GLA and RetNet in folders of flash-linear-attention."""

from typing import Any, ClassVar

from deltazoo.blocks.checkpoints import fla
from deltazoo.blocks.checkpoints.family import HubConfig
from deltazoo.blocks.checkpoints.rules import Rule, renamed
from deltazoo.mixers import gla as gla_mixers
from deltazoo.mixers import retnet as retnet_mixers

NORM = {"outputs.norm.weight": "g_norm_swish_gate.weight", "outputs.gate.proj.weight": "g_proj.weight"}
OUT = {"out.weight": "o_proj.weight"}


class GLA(fla.Fla):
    """GLA. Folders with `fuse_norm` false have another name of the norm; they are written with it true."""

    architecture: ClassVar[str] = "GLAForCausalLM"
    aliases: ClassVar[dict[str, str]] = {r"\.g_norm\.": ".g_norm_swish_gate."}

    def mixer(self, config: HubConfig) -> gla_mixers.GLA:
        config.require(clamp_min=None, feature_map=None, use_gk=True, use_gv=False, use_output_gate=True)
        heads = config["num_heads"]
        shared = config.get("num_kv_heads", heads)
        return gla_mixers.GLA(
            heads=heads,
            key_value_heads=None if shared == heads else shared,
            key_width=fla.expanded(config, "expand_k", 0.5, heads),
            value_width=fla.expanded(config, "expand_v", 1.0, heads),
            conv_width=fla.conv_width(config, default=False),
            gate_bias=False,
            norm_eps=config.get("norm_eps", 1e-6),
        )

    def mixer_config(self, mixer: gla_mixers.GLA, width: int) -> dict[str, Any]:
        return {
            **fla.expansions(mixer.shape(width), width),
            "num_kv_heads": mixer.key_value_heads,
            "fuse_norm": True,
            **fla.conv_config(mixer.conv_width),
        }

    def mixer_rules(self, mixer: gla_mixers.GLA, width: int) -> list[Rule]:
        shape = mixer.shape(width)
        heads = mixer.key_value_heads or shape.heads
        decay = {f"operands.decay.proj.{x}": f"gk_proj.{x}" for x in ("0.weight", "1.weight", "1.bias")}
        sizes = heads * shape.key_width, heads * shape.value_width, mixer.conv_width
        return [*fla.qkv(*sizes, queries=shape.heads * shape.key_width), *renamed(decay | NORM | OUT)]


class RetNet(fla.Fla):
    """RetNet. As for GLA, it is written with `fuse_norm` true."""

    architecture: ClassVar[str] = "RetNetForCausalLM"
    aliases: ClassVar[dict[str, str]] = GLA.aliases
    ignored: ClassVar[tuple[str, ...]] = (*fla.Fla.ignored, "conv_size")

    def mixer(self, config: HubConfig) -> retnet_mixers.RetNet:
        config.require(feature_map=None, use_output_gate=True, use_short_conv=False)
        heads = config["num_heads"]
        config.require(num_kv_heads=heads)
        return retnet_mixers.RetNet(
            heads=heads,
            key_width=fla.expanded(config, "expand_k", 1.0, heads),
            value_width=fla.expanded(config, "expand_v", 2.0, heads),
            norm="rms",
            norm_eps=config.get("norm_eps", 1e-6),
        )

    def mixer_config(self, mixer: retnet_mixers.RetNet, width: int) -> dict[str, Any]:
        return {**fla.expansions(mixer.shape(width), width), "fuse_norm": True}

    def mixer_rules(self, mixer: retnet_mixers.RetNet, width: int) -> list[Rule]:
        shape = mixer.shape(width)
        return [*fla.qkv(shape.heads * shape.key_width, shape.heads * shape.value_width, 0), *renamed(NORM | OUT)]
