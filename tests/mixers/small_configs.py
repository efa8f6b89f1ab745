"""Small configs of every registered mixer, and of some combinations of options."""

from typing import Any

from deltazoo.backends.update import registry
from deltazoo.mixers.core.config import parse
from deltazoo.mixers.core.mixer import MixerConfig

WIDTH = 24

# Small values of config fields; each mixer uses those that its config has.
SMALL = {
    "batch": 3, "blocks": 2, "channels": 8, "chunk": 3, "convolution": False, "decay_rank": 3, "features": 8,
    "filter_width": 8, "gate_rank": 3, "head_width": 6, "heads": 2, "key_value_heads": 1, "key_width": 4,
    "levels": 4, "max_length": 32, "mix_rank": 2, "shift": 4, "slots": 5, "state_size": 3, "states": 3, "steps": 4,
    "value_heads": 4, "value_width": 6, "window": 4,
}  # fmt: skip
# Fields of mixers that need other values.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    **{
        name: {"key_value_heads": None} for name in ("based", "gla", "gsa", "linear_attention", "rebased", "simple_gla")
    },
    # With four value heads the gradients of the decay rates nearly cancel for the seed of test_precision.py.
    "preconditioned_kda": {"value_heads": 6},
    "raven": {"active": 2, "key_value_heads": None},
    "rwkv7": {"ranks": (3, 0, 3, 2, 4)},
    "mom": {"memory": {"mixer": "deltanet", "heads": 2, "key_width": 4}, "memories": 3, "balance": 0, "z": 0},
}


def small(name: str, **fields: Any) -> MixerConfig:
    known = registry.load(registry.MIXERS, name).model_fields
    defaults = {field: value for field, value in SMALL.items() if field in known}
    return parse({"mixer": name, **defaults, **EXCEPTIONS.get(name, {}), **fields})


OURS = [
    name for name in registry.names(registry.MIXERS) if registry.owner(registry.MIXERS, name).startswith("deltazoo ")
]

# Built from parts that other mixers cover too; `make conformance` tests their states, precision and memories in full.
SAME_PARTS = (
    "based", "deltaproduct", "efla", "gated_deltaproduct", "gated_efla", "gated_longhorn", "gated_retnet", "gla",
    "gsa", "hgrn", "hgrn2", "lightning_attention", "log_linear_mamba2", "longhorn", "longhorn_diagonal",
    "preconditioned_kda", "simple_gla",
)  # fmt: skip

COMBINATIONS: dict[str, MixerConfig] = {
    "attention, qk-norm, gate, partial rotary": small("attention", qk_norm="head", gate=True, rotary_fraction=0.5),
    "attention, norm of all heads": small("attention", qk_norm="all"),
    "mla, low-rank query, no positions": small("mla", query_rank=3, rotary_theta=None),
    "fox, pro": small(
        "fox", heads=4, key_value_heads=2, kv_shift=True, qk_norm=True, output_norm=True, gate=True, rotary_theta=50.0
    ),
    "path_attention, forget gate, grouped heads": small(
        "path_attention", heads=4, key_value_heads=2, forget_gate=True, qk_norm=True, rank=None
    ),
    "linear_attention, dpfp": small("linear_attention", feature="dpfp"),
    "linear_attention, no normaliser": small("linear_attention", feature="identity", normaliser=False),
    "deltanet, negative eigenvalues, 3 householders": small(
        "deltanet", negative_eigenvalues="both", householders=3, feature="elu+1", qk_norm="l1"
    ),
    "EFLA with channel decay": small("kda", reparam="efla", conv_width=0),
    "comba, norm after the feedback, 2 householders": small("comba", norm_after=True, householders=2),
    "gated Longhorn, 2 householders": small("gated_longhorn", householders=2, conv_width=2),
    "retnet, RMS norm without a weight": small("retnet", norm="rms", norm_weight=False),
    "mom of rwkv4, one active": small(
        "mom", memory={"mixer": "rwkv4", "channels": 8}, memories=2, active=1, shared=False
    ),
    "s4d, real, bilinear": small("s4d", start="real", discretisation="bilinear"),
    "titans, a matrix": small("titans", heads=4, depth=1, chunk=4),
    "lfm2_conv, biases": small("lfm2_conv", bias=True),
    "kda, negative eigenvalues in the erase": small("kda", negative_eigenvalues="erase"),
}
ZOO: dict[str, MixerConfig] = {**{name: small(name) for name in OURS}, **COMBINATIONS}
