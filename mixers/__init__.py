"""Token mixers: modules that mix information along time, and the configs that build them.

`dir(deltazoo.mixers)` lists the public names: the mixer classes that the distribution `deltazoo` registers as entry
points; the base classes of mixers and of their configs; and functions for states and sequences. Parts are in
`deltazoo.mixers.parts`.
"""

import functools
from importlib.metadata import entry_points

from deltazoo import by_name, lazy_exports

_OTHERS = {
    "deltazoo.mixers.core": ["conformance"],
    "deltazoo.mixers.core.config": ["dump", "parse"],
    "deltazoo.mixers.core.delta_mixer": ["DeltaMixer"],
    "deltazoo.mixers.core.initialization": ["init_weights"],
    "deltazoo.mixers.core.losses": ["AuxiliaryLoss"],
    "deltazoo.mixers.core.mixer": ["Context", "Cost", "Mixer", "MixerConfig", "MixerOutput", "PageTable", "Place"],
    "deltazoo.mixers.core.named_tensors": ["NamedTensors"],
    "deltazoo.mixers.core.sequences": [
        "check_state",
        "last_of_each_sequence",
        "left_align",
        "positions",
        "segment_cumsum",
        "token_counts",
        "undo_left_align",
        "unpack",
    ],
    "deltazoo.mixers.core.side": ["LostGradientError", "Side", "side_outputs"],
    "deltazoo.mixers.core.state": ["nbytes", "reorder", "rollback_", "select", "snapshot", "write_back"],
    "deltazoo.mixers.families.attention_heads": ["AttentionHeadsConfig"],
    "deltazoo.mixers.families.delta_rule": ["DeltaRuleConfig"],
    "deltazoo.mixers.families.fast_weights": ["FastWeightMixer"],
    "deltazoo.mixers.families.filter": ["FilterConfig", "FilterMixer"],
    "deltazoo.mixers.families.log_linear": ["LogLinearConfig"],
    "deltazoo.mixers.families.shared_keys": ["SharedKeysConfig"],
    "deltazoo.mixers.families.token_cache": ["QKV", "TokenCacheMixer"],
    "deltazoo.mixers.families.update": ["ChannelConfig", "HeadConfig", "UpdateConfig"],
}


@functools.cache
def _modules() -> dict[str, str]:
    """Return the module of each public name."""
    points = [point for point in entry_points(group="deltazoo.mixers") if point.dist and point.dist.name == "deltazoo"]
    return {point.value.rpartition(":")[2]: point.value.partition(":")[0] for point in points} | by_name(_OTHERS)


__getattr__, __dir__ = lazy_exports(__name__, _modules)
