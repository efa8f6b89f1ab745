"""The zoo at a size for tests: one small config a mixer, and some that combine axes."""

import pytest
import torch

from deltazoo.backends.base import Backend
from deltazoo.backends.compile import CompileBackend
from deltazoo.mixers import (
    EFLA,
    GLA,
    GSA,
    H3,
    HGRN,
    HGRN2,
    KDA,
    LRU,
    MLSTM,
    RGLRU,
    RWKV4,
    RWKV6,
    RWKV7,
    S4D,
    S5,
    Attention,
    Comba,
    DeltaNet,
    DeltaProduct,
    GatedDeltaNet,
    GatedDeltaNet2,
    GatedDeltaProduct,
    GatedEFLA,
    GatedLonghorn,
    GatedRetNet,
    GatedRFA,
    Hyena,
    LightningAttention,
    LinearAttention,
    Longhorn,
    LonghornDiagonal,
    Mamba,
    Mamba2,
    Mesa,
    MixerConfig,
    MoM,
    RetNet,
    SlidingWindow,
    Titans,
    TTTLinear,
)
from deltazoo.mixers.core.mixer import Mixer

WIDTH = 24

_HEADS = {"heads": 2, "value_heads": 4, "key_width": 4, "value_width": 6}

ZOO: dict[str, MixerConfig] = {
    "attention": Attention(heads=4, key_value_heads=2, head_width=6),
    "sliding_window": SlidingWindow(heads=4, key_value_heads=2, head_width=6, window=4),
    "linear_attention": LinearAttention(**_HEADS),
    "retnet": RetNet(**_HEADS),
    "mamba2": Mamba2(**_HEADS),
    "gla": GLA(**_HEADS, gate_rank=3),
    "deltanet": DeltaNet(**_HEADS),
    "gated_deltanet": GatedDeltaNet(**_HEADS),
    "kda": KDA(**_HEADS),
    "efla": EFLA(**_HEADS),
    "longhorn": Longhorn(**_HEADS),
    "lightning_attention": LightningAttention(**_HEADS),
    "gated_retnet": GatedRetNet(**_HEADS),
    "gated_rfa": GatedRFA(**_HEADS, features=8),
    "mlstm": MLSTM(**_HEADS),
    "mamba": Mamba(channels=6, state_size=3),
    "longhorn_diagonal": LonghornDiagonal(channels=6, state_size=3),
    "hgrn": HGRN(channels=8),
    "hgrn2": HGRN2(**_HEADS),
    "rg_lru": RGLRU(channels=8, blocks=2),
    "lru": LRU(channels=6),
    "s5": S5(channels=6, blocks=2),
    "rwkv4": RWKV4(channels=8),
    "rwkv6": RWKV6(**_HEADS, mix_rank=2, decay_rank=3),
    "rwkv7": RWKV7(**_HEADS, ranks=(3, 0, 3, 2, 4)),
    "gsa": GSA(**_HEADS, slots=5),
    "gated_deltanet2": GatedDeltaNet2(**_HEADS),
    "comba": Comba(**_HEADS),
    "deltaproduct": DeltaProduct(**_HEADS),
    "gated_deltaproduct": GatedDeltaProduct(**_HEADS),
    "gated_efla": GatedEFLA(**_HEADS),
    "gated_longhorn": GatedLonghorn(**_HEADS),
    "mom": MoM(memory=DeltaNet(**_HEADS), memories=3, balance=0, z=0),
    "s4d": S4D(states=3, convolution=False),
    "h3": H3(states=3, shift=4, convolution=False),
    "hyena": Hyena(filter_width=8, max_length=32),
    "ttt_linear": TTTLinear(heads=2, batch=3),
    "titans": Titans(heads=2, chunk=3),
    "mesa": Mesa(**_HEADS, steps=4),
    # axes combined: fields, not new mixers
    "attention, qk-norm, gate, partial rotary": Attention(heads=2, qk_norm=True, gate=True, rotary_fraction=0.5),
    "linear_attention, dpfp": LinearAttention(**_HEADS, feature="dpfp"),
    "linear_attention, no normaliser": LinearAttention(**_HEADS, feature="identity", normaliser=False),
    "deltanet, negative eigenvalues, 3 householders": DeltaNet(
        **_HEADS, negative_eigenvalues="both", householders=3, feature="elu+1", qk_norm="l1"
    ),
    "gated EFLA": GatedDeltaNet(**_HEADS, reparam="efla"),
    "EFLA with channel decay": KDA(**_HEADS, reparam="efla", conv_width=0),
    "gated Longhorn, 2 householders": GatedDeltaNet(**_HEADS, reparam="longhorn", householders=2, conv_width=2),
    "mom of rwkv4, one active": MoM(memory=RWKV4(channels=8), memories=2, active=1, shared=False, balance=0, z=0),
    "s4d, real, bilinear": S4D(states=3, start="real", discretisation="bilinear", convolution=False),
    "titans, a matrix": Titans(heads=4, depth=1, chunk=4),
    "kda, negative eigenvalues in the erase": KDA(**_HEADS, negative_eigenvalues="erase"),
}


# The whole zoo runs on the reference; what it asks of a backend, on the chunked code as well (uncompiled, for speed).
BACKENDS: dict[str, str | Backend] = {
    "reference": "reference",
    "chunked": CompileBackend(chunk=16, compiled=False),
}
ALSO_CHUNKED = (
    "retnet",
    "mamba2",
    "gated_deltanet",
    "deltanet, negative eigenvalues, 3 householders",
    "EFLA with channel decay",
)
_CASES = [*((name, "reference") for name in ZOO), *((name, "chunked") for name in ALSO_CHUNKED)]


@pytest.fixture
def zoo() -> dict[str, MixerConfig]:
    return ZOO


@pytest.fixture(params=ZOO, ids=[name.replace(" ", "-") for name in ZOO])
def config(request: pytest.FixtureRequest) -> MixerConfig:
    return ZOO[request.param]


# One config of each mixer, without the combinations of axes.
_EACH = [name for name, config in ZOO.items() if ZOO[config.name] is config]


@pytest.fixture(params=_EACH)
def one_of_each(request: pytest.FixtureRequest) -> MixerConfig:
    return ZOO[request.param]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str | Backend:
    return BACKENDS[request.param]


@pytest.fixture(params=_CASES, ids=["-".join([*name.split(), backend]) for name, backend in _CASES])
def mixer(request: pytest.FixtureRequest) -> Mixer:
    """In float64, so that two ways to the same number differ by rounding alone."""
    name, backend = request.param
    torch.manual_seed(0)
    return ZOO[name].build(WIDTH, backend=BACKENDS[backend]).double()


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(3, 9, WIDTH, dtype=torch.float64)
