"""What the RWKV models have in common: two layers for each block, layer norms, and a norm after the embedding."""

from collections.abc import Callable
from typing import Any, NamedTuple

from deltazoo.blocks.checkpoints.family import HubConfig
from deltazoo.blocks.checkpoints.rules import Packed, Rule, renamed, rule, under
from deltazoo.blocks.model.interface import ModelSpec
from deltazoo.mixers.core.mixer import MixerConfig
from deltazoo.mixers.rwkv_channel_mix import RWKVChannelMix

LOW_RANK = {"down.weight": "0.weight", "up.weight": "2.weight", "bias": "2.bias"}


class Names(NamedTuple):
    """Their names around the mixers, below the blocks for those of a block. The first norm is in block 0."""

    embedding: str = "model.embeddings.weight"
    blocks: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head.weight"
    first_norm: str = "pre_norm"
    time: tuple[str, str] = ("attn_norm", "attn")
    channel: tuple[str, str] = ("ffn_norm", "ffn")


def stack(config: HubConfig, norm_eps: float, time_mix: MixerConfig, channel_mix: RWKVChannelMix) -> dict[str, Any]:
    """Return the fields of a stack."""
    return {
        "width": config["hidden_size"],
        "vocab": config["vocab_size"],
        "tied": config.get("tie_word_embeddings", False),
        "norm_eps": norm_eps,
        "depth": 2 * config["num_hidden_layers"],
        "pattern": "time + channel",
        "layers": {"time": time_mix, "channel": channel_mix},
        "mlp": "none",
        "norm": "layer",
        "embedding_norm": True,
    }


def config(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields of config.json that all have."""
    return {
        "hidden_size": spec.width,
        "num_hidden_layers": len(spec.expand()) // 2,
        "vocab_size": spec.vocab,
        "tie_word_embeddings": spec.tied,
        "intermediate_size": mixers(spec)[1].hidden or 4 * spec.width,
    }


def mixers(spec: ModelSpec) -> tuple[Any, RWKVChannelMix]:
    """Return the mixers of the first block, which are those of all."""
    (time,), (channel,) = (layer.mixers for layer in spec.expand()[:2])
    assert isinstance(channel, RWKVChannelMix)
    return time, channel


def rules(spec: ModelSpec, names: Names, time_mix: Callable[[int], list[Rule]], channel_mix: list[Rule]) -> list[Rule]:
    """Return the rules of a model. Args: time_mix: returns those of the mixer of a block."""
    outer = {"embedding.weight": names.embedding} | ({} if spec.tied else {"head.weight": names.head})
    found = renamed(outer) + _norm("embedding_norm", f"{names.blocks}.0.{names.first_norm}")
    found += _norm("stack.norm", names.norm)
    for block in range(len(spec.expand()) // 2):
        parts = (names.time, time_mix(block)), (names.channel, channel_mix)
        for layer, ((norm, module), mixer_rules) in enumerate(parts, start=2 * block):
            ours, theirs = f"stack.layers.{layer}.", f"{names.blocks}.{block}."
            found += _norm(f"{ours}norm", f"{theirs}{norm}")
            found += under(f"{ours}mixers.0.", f"{theirs}{module}.", mixer_rules)
    return found


def mix(ours: str, theirs: dict[str, Packed], width: int) -> Rule:
    """Return the rule of the weights of the token shift [n, D]. Args: theirs: one vector each, in the order of ours."""
    pieces = [packed.pieces for packed in theirs.values()]
    return rule({ours: Packed(" ".join(pieces), stack=len(pieces))}, theirs, dict.fromkeys(pieces, width))


def low_rank(ours: str, theirs: str, bias: bool = True) -> list[Rule]:
    """Return the rules of a low-rank map of flash-linear-attention."""
    names = LOW_RANK if bias else {name: x for name, x in LOW_RANK.items() if name != "bias"}
    return renamed({f"{ours}.{x}": f"{theirs}.lora.{y}" for x, y in names.items()})


def _norm(ours: str, theirs: str) -> list[Rule]:
    return renamed({f"{ours}.{x}": f"{theirs}.{x}" for x in ("weight", "bias")})
