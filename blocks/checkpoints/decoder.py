"""What most decoders of transformers have in common: names of the sizes, of the embedding, the norms and the head."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.io.frozen_config import changed_fields
from deltazoo.blocks.checkpoints.family import HubConfig
from deltazoo.blocks.checkpoints.rules import Rule, renamed, under
from deltazoo.blocks.model.interface import ModelSpec
from deltazoo.blocks.model.layer import LayerSpec
from deltazoo.blocks.model.mlp import Dense
from deltazoo.mixers.attention import Attention
from deltazoo.mixers.mla import MLA


class Names(NamedTuple):
    """Their names of the tensors around the mixers and MLPs."""

    embedding: str = "model.embed_tokens.weight"
    layers: str = "model.layers"
    norm: str = "model.norm.weight"
    layer_norm: str = "input_layernorm.weight"
    mlp_norm: str = "post_attention_layernorm.weight"
    eps: str = "rms_norm_eps"


def sizes(config: HubConfig, names: Names | None = None) -> dict[str, Any]:
    """Return width, depth, vocab, tied and norm_eps of a stack; the activation must be SiLU."""
    config.require(hidden_act="silu")
    return {
        "width": config["hidden_size"],
        "depth": config["num_hidden_layers"],
        "vocab": config["vocab_size"],
        "tied": config.get("tie_word_embeddings", False),
        "norm_eps": config[(names or Names()).eps],
    }


def sizes_config(spec: ModelSpec, names: Names | None = None) -> dict[str, Any]:
    """Return the fields that `sizes` reads."""
    return {
        "hidden_size": spec.width,
        "num_hidden_layers": len(spec.expand()),
        "vocab_size": spec.vocab,
        "tie_word_embeddings": spec.tied,
        (names or Names()).eps: spec.norm_eps,
        "hidden_act": "silu",
    }


def attention(config: HubConfig, head_width: int | None = None, **fields: Any) -> Attention:
    """Return the attention of a config. Biases are refused.

    Args: head_width: the default; None: the width divided by the heads; fields: of `Attention`, beside the sizes.
    Raises: ConfigError: the number of channels that rotate is odd; transformers then rotates another number.
    """
    config.require(attention_bias=False, attention_dropout=0.0)
    heads = config["num_attention_heads"]
    head_width = config.get("head_dim", head_width or config["hidden_size"] // heads)
    channels = int(head_width * fields.get("rotary_fraction", 1.0))
    if fields.get("rotary_theta") is not None and channels % 2:
        raise ConfigError(
            "config.json: partial_rotary_factor must rotate an even number of the channels of a head, got "
            f"{fields['rotary_fraction']:g} of head_dim = {head_width}, which is {channels}"
        )
    return Attention(
        heads=heads,
        key_value_heads=config.get("num_key_value_heads", heads),
        head_width=head_width,
        norm_eps=config["rms_norm_eps"],
        **fields,
    )


def attention_config(mixer: Attention, width: int) -> dict[str, Any]:
    """Return the fields that `attention` and `HubConfig.rotary` read."""
    heads, key_value_heads, head_width = mixer.resolve_heads(width)
    rotary = rotary_config(mixer)
    if mixer.rotary_fraction != 1:
        rotary["partial_rotary_factor"] = mixer.rotary_fraction
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "head_dim": head_width,
        "attention_bias": False,
        "rope_parameters": rotary,
    }


def rotary_config(mixer: Attention | MLA) -> dict[str, Any]:
    """Return the field rope_parameters, without the fraction."""
    scaling = mixer.rope_scaling
    rotary: dict[str, Any] = {"rope_type": "default", "rope_theta": mixer.rotary_theta}
    if scaling is not None:
        needed = ("low_freq_factor", "high_freq_factor") if scaling.rope_type == "llama3" else ()
        rotary |= scaling.model_dump(include={"rope_type", "factor", *needed, *changed_fields(scaling)})
    return rotary


def inverse(x: float) -> float:
    """Return 1 / x, with fewer digits if they give x back: fields of a config that divide are factors of a stack."""
    rounded = round(1 / x, 9)
    return rounded if rounded and 1 / rounded == x else 1 / x


def attention_stack(config: HubConfig, layer: Attention) -> dict[str, Any]:
    """Return the fields of a stack whose layers are all this attention with a dense SwiGLU."""
    mlp = Dense(width=config["intermediate_size"])
    return {**sizes(config), "pattern": "attention", "layers": {"attention": layer}, "mlp": mlp}


def attention_stack_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields that `attention_stack` and `attention` read."""
    return {
        **sizes_config(spec),
        **attention_config(first(spec, Attention), spec.width),
        "intermediate_size": spec.expand()[0].mlp.hidden(spec.width),  # type: ignore[union-attr]
    }


def first(spec: ModelSpec, kind: type[Any], default: Any = None) -> Any:
    """Return the first mixer of a class, or the default. Raises: ValueError: the stack has none, nor is a default."""
    for layer in spec.expand():
        for mixer in layer.mixers:
            if type(mixer) is kind:
                return mixer
    if default is not None:
        return default
    raise ValueError(f"the stack has no {kind.__name__}")


def first_attention(spec: ModelSpec) -> Attention:
    """Return the first attention, or for a stack without one head, because transformers needs heads that divide."""
    found: Attention = first(spec, Attention, Attention(heads=1, key_value_heads=1))
    return found


def layer_types(config: HubConfig, default: Sequence[str]) -> str:
    """Return the pattern of `layer_types`, with the names linear_attention and full_attention as layers."""
    return " + ".join(config.layer_types(default))


def layer_types_config(spec: ModelSpec) -> list[str]:
    """Return `layer_types` of a stack whose other layers are linear attention."""
    kinds = [type(mixer) is Attention for layer in spec.expand() for mixer in layer.mixers]
    return ["full_attention" if attends else "linear_attention" for attends in kinds]


def model_rules(spec: ModelSpec, branches: Callable[[LayerSpec], list[Rule]], names: Names | None = None) -> list[Rule]:
    """Return the rules of the embedding, head and norms, and those of each layer.

    Args: branches: returns the rules of a layer's mixer and MLP, with names below the layer: "mixers.0.", "mlp.".
    """
    names = names or Names()
    outer = {"embedding.weight": names.embedding, "stack.norm.weight": names.norm}
    rules = renamed(outer if spec.tied else outer | {"head.weight": "lm_head.weight"})
    for i, layer in enumerate(spec.expand()):
        norms = {"norm.weight": names.layer_norm}
        if layer.mlp != "none":
            norms["mlp_norm.weight"] = names.mlp_norm
        rules += under(f"stack.layers.{i}.", f"{names.layers}.{i}.", [*renamed(norms), *branches(layer)])
    return rules
