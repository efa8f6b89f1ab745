"""Floor 1: modules that mix along time."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltazoo.mixers.attention import Attention, SlidingWindow
    from deltazoo.mixers.comba import Comba
    from deltazoo.mixers.core.config import dump, parse
    from deltazoo.mixers.core.mixer import Context, Cost, Mixer, MixerConfig, Place
    from deltazoo.mixers.deltanet import DeltaNet
    from deltazoo.mixers.deltaproduct import DeltaProduct
    from deltazoo.mixers.efla import EFLA
    from deltazoo.mixers.gated_deltanet import GatedDeltaNet
    from deltazoo.mixers.gated_deltanet2 import GatedDeltaNet2
    from deltazoo.mixers.gated_deltaproduct import GatedDeltaProduct
    from deltazoo.mixers.gated_efla import GatedEFLA
    from deltazoo.mixers.gated_longhorn import GatedLonghorn
    from deltazoo.mixers.gated_retnet import GatedRetNet
    from deltazoo.mixers.gated_rfa import GatedRFA
    from deltazoo.mixers.gla import GLA
    from deltazoo.mixers.gsa import GSA
    from deltazoo.mixers.h3 import H3
    from deltazoo.mixers.hgrn import HGRN
    from deltazoo.mixers.hgrn2 import HGRN2
    from deltazoo.mixers.hyena import Hyena
    from deltazoo.mixers.kda import KDA
    from deltazoo.mixers.lightning_attention import LightningAttention
    from deltazoo.mixers.linear_attention import LinearAttention
    from deltazoo.mixers.longhorn import Longhorn
    from deltazoo.mixers.longhorn_diagonal import LonghornDiagonal
    from deltazoo.mixers.lru import LRU
    from deltazoo.mixers.mamba import Mamba
    from deltazoo.mixers.mamba2 import Mamba2
    from deltazoo.mixers.mesa import Mesa
    from deltazoo.mixers.mlstm import MLSTM
    from deltazoo.mixers.mom import MoM
    from deltazoo.mixers.retnet import RetNet
    from deltazoo.mixers.rg_lru import RGLRU
    from deltazoo.mixers.rwkv4 import RWKV4
    from deltazoo.mixers.rwkv6 import RWKV6
    from deltazoo.mixers.rwkv7 import RWKV7
    from deltazoo.mixers.s4d import S4D
    from deltazoo.mixers.s5 import S5
    from deltazoo.mixers.titans import Titans
    from deltazoo.mixers.ttt_linear import TTTLinear

_HOME = {
    "Attention": "attention",
    "Comba": "comba",
    "Context": "core.mixer",
    "Cost": "core.mixer",
    "DeltaNet": "deltanet",
    "DeltaProduct": "deltaproduct",
    "EFLA": "efla",
    "GLA": "gla",
    "GSA": "gsa",
    "GatedDeltaNet": "gated_deltanet",
    "GatedDeltaNet2": "gated_deltanet2",
    "GatedDeltaProduct": "gated_deltaproduct",
    "GatedEFLA": "gated_efla",
    "GatedLonghorn": "gated_longhorn",
    "GatedRFA": "gated_rfa",
    "GatedRetNet": "gated_retnet",
    "H3": "h3",
    "HGRN": "hgrn",
    "HGRN2": "hgrn2",
    "Hyena": "hyena",
    "KDA": "kda",
    "LRU": "lru",
    "LightningAttention": "lightning_attention",
    "LinearAttention": "linear_attention",
    "Longhorn": "longhorn",
    "LonghornDiagonal": "longhorn_diagonal",
    "MLSTM": "mlstm",
    "Mamba": "mamba",
    "Mamba2": "mamba2",
    "Mesa": "mesa",
    "Mixer": "core.mixer",
    "MixerConfig": "core.mixer",
    "MoM": "mom",
    "Place": "core.mixer",
    "RGLRU": "rg_lru",
    "RWKV4": "rwkv4",
    "RWKV6": "rwkv6",
    "RWKV7": "rwkv7",
    "RetNet": "retnet",
    "S4D": "s4d",
    "S5": "s5",
    "SlidingWindow": "attention",
    "TTTLinear": "ttt_linear",
    "Titans": "titans",
    "dump": "core.config",
    "parse": "core.config",
}

__all__ = [
    "EFLA",
    "GLA",
    "GSA",
    "H3",
    "HGRN",
    "HGRN2",
    "KDA",
    "LRU",
    "MLSTM",
    "RGLRU",
    "RWKV4",
    "RWKV6",
    "RWKV7",
    "S4D",
    "S5",
    "Attention",
    "Comba",
    "Context",
    "Cost",
    "DeltaNet",
    "DeltaProduct",
    "GatedDeltaNet",
    "GatedDeltaNet2",
    "GatedDeltaProduct",
    "GatedEFLA",
    "GatedLonghorn",
    "GatedRFA",
    "GatedRetNet",
    "Hyena",
    "LightningAttention",
    "LinearAttention",
    "Longhorn",
    "LonghornDiagonal",
    "Mamba",
    "Mamba2",
    "Mesa",
    "Mixer",
    "MixerConfig",
    "MoM",
    "Place",
    "RetNet",
    "SlidingWindow",
    "TTTLinear",
    "Titans",
    "dump",
    "parse",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'deltazoo.mixers' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"deltazoo.mixers.{_HOME[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return list(__all__)
