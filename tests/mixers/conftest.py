"""The zoo at a size for tests: one small config a mixer, and some that combine axes."""

import pytest
import torch

from deltazoo.backends.base import Backend
from deltazoo.backends.compile import CompileBackend
from deltazoo.mixers import (
    EFLA,
    GLA,
    KDA,
    Attention,
    DeltaNet,
    GatedDeltaNet,
    LinearAttention,
    Longhorn,
    Mamba2,
    MixerConfig,
    RetNet,
    SlidingWindow,
)
from deltazoo.mixers.base import Mixer

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
