"""Layers of flash-linear-attention with the sizes and options of a mixer, for benchmarks.

A report prints the messages of errors after the name of the package, which they call "it".
"""

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import nn

from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.peers.common import missing_packages
from deltazoo.mixers.core.mixer import MixerConfig

_SIZES = frozenset({"heads", "value_heads", "key_width", "value_width", "norm_eps"})


class FlaLayer(NamedTuple):
    """A layer of flash-linear-attention.

    Args:
        name: the class in `fla.layers`; with a module if the package does not export it.
        arguments: keyword arguments for a config and a width, besides `hidden_size`.
        fields: fields of the config, besides the sizes of heads, that the arguments take over. Others must have their
            default.
    """

    name: str
    arguments: Callable[[Any, int], dict[str, Any]]
    fields: frozenset[str] = frozenset()


def fla_layer(config: MixerConfig, width: int) -> nn.Module:
    """Build the layer of flash-linear-attention that corresponds to a mixer.

    Raises: ConfigError: the package is not installed, has no such layer, or lacks an option that the config changes.
    """
    entry = FLA_LAYERS.get(config.name)
    if entry is None:
        raise ConfigError("it has no such layer.")
    defaults = dict(type(config)())
    known = _SIZES | entry.fields
    if changed := [name for name, value in config if name not in known and value != defaults[name]]:
        raise ConfigError(f"its layer has no {', '.join(changed)}.")
    arguments = entry.arguments(config, width)
    if missing := missing_packages({"fla": "flash-linear-attention"}):
        raise ConfigError(" ".join(missing))
    module, _, name = entry.name.rpartition(":")
    layers = import_module(f"fla.layers.{module}" if module else "fla.layers")
    layer_class = getattr(layers, name)
    if "layer_idx" in inspect.signature(layer_class).parameters:  # of layers with a cache
        arguments["layer_idx"] = 0
    layer: nn.Module = layer_class(hidden_size=width, **arguments)
    return layer


def _expansions(config: Any, width: int) -> dict[str, Any]:
    shape = config.shape(width).validated()
    return {
        "num_heads": shape.heads, "expand_k": shape.heads * shape.key_width / width,
        "expand_v": shape.value_heads * shape.value_width / width,
    }  # fmt: skip


def _head_sizes(config: Any, width: int) -> dict[str, Any]:
    shape = config.shape(width).validated()
    return {
        "num_heads": shape.heads, "num_v_heads": shape.value_heads, "head_dim": shape.key_width,
        "expand_v": shape.value_width / shape.key_width,
    }  # fmt: skip


def _features(config: Any, width: int) -> dict[str, Any]:
    shape = config.shape(width)
    return {"num_heads": shape.heads, "num_key_value_heads": shape.value_heads, "feature_dim": shape.key_width}


def _delta(config: Any, width: int) -> dict[str, Any]:
    if config.negative_eigenvalues == "erase":
        raise ConfigError("it has no negative_eigenvalues='erase'.")
    negative = config.negative_eigenvalues == "both"
    return _head_sizes(config, width) | {"allow_neg_eigval": negative, "conv_size": config.conv_width}


def _deltanet(config: Any, width: int) -> dict[str, Any]:
    negative = config.negative_eigenvalues == "both"
    return _expansions(config, width) | {
        "allow_neg_eigval": negative, "conv_size": config.conv_width, "use_gate": config.gate,
    }  # fmt: skip


def _mamba2(config: Any, width: int) -> dict[str, Any]:
    shape = config.shape(width).validated()
    return {
        "num_heads": shape.value_heads, "head_dim": shape.value_width, "state_size": shape.key_width,
        "n_groups": shape.heads, "expand": shape.value_heads * shape.value_width // width,
    }  # fmt: skip


def _attention(config: Any, width: int) -> dict[str, Any]:
    heads, kv_heads, head_width = config.resolve_heads(width)
    if heads * head_width != width:
        raise ConfigError("its attention needs head_width = width / heads.")
    return {"num_heads": heads, "num_kv_heads": kv_heads}


def _latent(config: Any, width: int) -> dict[str, Any]:
    with torch.device("meta"):
        mixer = config.build(width)
    return {
        "num_heads": mixer.heads, "q_lora_rank": config.query_rank, "qk_rope_head_dim": mixer.R,
        "kv_lora_rank": mixer.C, "v_head_dim": mixer.V, "qk_nope_head_dim": mixer.K, "qk_head_dim": mixer.K + mixer.R,
        "window_size": config.window, "rope_theta": config.rotary_theta,
    }  # fmt: skip


def _shared_keys(config: Any, width: int) -> dict[str, Any]:
    shared = {"num_kv_heads": config.key_value_heads} if config.key_value_heads else {}
    convolution = {"use_short_conv": True, "conv_size": config.conv_width} if config.conv_width else {}
    return _expansions(config, width) | shared | convolution


_DELTA_FIELDS = frozenset({"conv_width", "negative_eigenvalues"})
_SHARED_KEYS_FIELDS = frozenset({"key_value_heads", "conv_width"})

# Options of these layers that differ from the mixer's defaults and from FLA's own are set to the mixer's.
FLA_LAYERS: dict[str, FlaLayer] = {
    "abc": FlaLayer("ABCAttention", lambda c, w: _expansions(c, w) | {"num_slots": c.slots}, frozenset({"slots"})),
    "attention": FlaLayer("Attention", _attention),
    "based": FlaLayer("BasedLinearAttention", _features),
    "comba": FlaLayer("Comba", _head_sizes),
    "deltanet": FlaLayer("DeltaNet", _deltanet, _DELTA_FIELDS | {"gate"}),
    "fox": FlaLayer(
        "ForgettingAttention",
        lambda c, w: _attention(c, w) | {"use_output_gate": c.gate, "qk_norm": c.qk_norm},
        frozenset({"gate", "qk_norm"}),
    ),
    "gated_deltanet": FlaLayer(
        "GatedDeltaNet",
        lambda c, w: _delta(c, w) | {"use_gate": c.gate, "conv_bias": c.conv_bias},
        _DELTA_FIELDS | {"gate", "conv_bias"},
    ),
    "gated_deltanet2": FlaLayer("GatedDeltaNet2", _delta, _DELTA_FIELDS),
    "gated_deltaproduct": FlaLayer(
        "GatedDeltaProduct",
        lambda c, w: _delta(c, w) | {"num_householder": c.householders},
        _DELTA_FIELDS | {"householders"},
    ),
    "gated_retnet": FlaLayer(
        "YOCOGatedRetention", lambda c, w: {"num_heads": c.shape(w).heads, "norm_eps": c.norm_eps}
    ),
    "gla": FlaLayer(
        "GatedLinearAttention",
        lambda c, w: _shared_keys(c, w) | {"gate_low_rank_dim": c.gate_rank},
        _SHARED_KEYS_FIELDS | {"gate_rank"},
    ),
    "gsa": FlaLayer(
        "GatedSlotAttention",
        lambda c, w: _shared_keys(c, w) | {"num_slots": c.slots},
        _SHARED_KEYS_FIELDS | {"slots"},
    ),
    "hgrn2": FlaLayer("HGRN2Attention", lambda c, w: {"num_heads": c.shape(w).heads, "expand_ratio": None}),
    "kda": FlaLayer(
        "KimiDeltaAttention",
        lambda c, w: _delta(c, w) | {"conv_bias": c.conv_bias},
        _DELTA_FIELDS | {"conv_bias", "gate_bias"},
    ),
    "linear_attention": FlaLayer(
        "LinearAttention", lambda c, w: _expansions(c, w) | {"feature_map": "elu", "output_norm": "identity"}
    ),
    "lightnet": FlaLayer(
        "LightNetAttention",
        lambda c, w: {"num_heads": c.shape(w).heads, "expand_ratio": None, "gate_low_rank_dim": c.gate_rank},
        frozenset({"gate_rank"}),
    ),
    "log_linear_mamba2": FlaLayer("LogLinearMamba2", lambda c, w: _mamba2(c, w) | {"use_bias": False}),
    "mamba": FlaLayer(
        "Mamba",
        lambda c, w: {
            "state_size": c.state_size,
            "conv_kernel": c.conv_width,
            "intermediate_size": c.channels or 2 * w,
        },
        frozenset({"state_size", "conv_width", "channels"}),
    ),
    "mamba2": FlaLayer("Mamba2", _mamba2),
    "mamba3": FlaLayer("Mamba3", lambda c, w: {k: v for k, v in _mamba2(c, w).items() if k != "num_heads"}),
    "mesa": FlaLayer(
        "MesaNet",
        lambda c, w: {
            "num_heads": c.shape(w).heads,
            "head_dim": c.shape(w).key_width,
            "max_cg_step_training": c.steps,
            "max_cg_step_decoding": c.steps,
            "lambda_lower_bound": c.bound,
        },
        frozenset({"steps", "bound"}),
    ),
    "mla": FlaLayer(
        "MultiheadLatentAttention",
        _latent,
        frozenset({"query_rank", "latent_width", "rotary_width", "window", "rotary_theta"}),
    ),
    "mom": FlaLayer(
        "MomAttention",
        lambda c, w: {
            "num_heads": c.memory.shape(w).heads,
            "head_dim": c.memory.shape(w).key_width,
            "expand_v": c.memory.shape(w).value_width / c.memory.shape(w).key_width,
            "num_memories": c.memories,
            "topk": c.active,
            "shared_mem": c.shared,
            "single_kv_proj": c.sharing == "all",
        },
        frozenset({"memory", "memories", "active", "shared", "sharing"}),
    ),
    "path_attention": FlaLayer(
        "PaTHAttention",
        lambda c, w: _attention(c, w) | {"use_forget_gate": c.forget_gate, "use_qk_norm": c.qk_norm},
        frozenset({"forget_gate", "qk_norm"}),
    ),
    "momentum_deltanet": FlaLayer(
        "MomentumDeltaNet",
        lambda c, w: _head_sizes(c, w) | {"use_gate": c.gate, "use_output_correction": c.correction},
        frozenset({"gate", "correction"}),
    ),
    "preconditioned_deltanet": FlaLayer("PrecondGatedDeltaNet", _head_sizes),
    "preconditioned_kda": FlaLayer("PrecondKDA", _head_sizes),
    "raven": FlaLayer(
        "Raven",
        lambda c, w: _expansions(c, w) | {"num_slots": c.slots, "topk": c.active, "add_gumbel_noise": False},
        frozenset({"slots", "active"}),
    ),
    "rebased": FlaLayer("ReBasedLinearAttention", _features),
    "retnet": FlaLayer("MultiScaleRetention", _expansions),
    "rodimus": FlaLayer(
        "RodimusAttention",
        lambda c, w: {
            "expand_ratio": c.key_width,
            "input_gate_low_rank": c.gate_rank or "auto",
            "conv_size": c.conv_width,
            "norm_eps": c.norm_eps,
        },
        frozenset({"gate_rank", "conv_width"}),
    ),
    "rwkv6": FlaLayer("RWKV6Attention", _expansions),
    "rwkv7": FlaLayer("RWKV7Attention", lambda c, w: {"head_dim": c.shape(w).key_width, "num_hidden_layers": 24}),
    "simple_gla": FlaLayer(
        "simple_gla:SimpleGatedLinearAttention",
        lambda c, w: _expansions(c, w) | {"use_short_conv": c.conv_width > 0},
        frozenset({"conv_width"}),
    ),
}
