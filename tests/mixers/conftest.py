"""Fixtures of mixers with small configs."""

import pytest
import torch
from small_configs import OURS, SAME_PARTS, WIDTH, ZOO

from deltazoo.backends.compile import CompileBackend
from deltazoo.backends.update.base import Backend
from deltazoo.mixers.core.mixer import Mixer, MixerConfig
from deltazoo.mixers.families.update import UpdateConfig

BACKENDS: dict[str, str | Backend] = {
    "reference": "reference",
    "chunked": CompileBackend(chunk=16, compiled=False),
}
# All configs run on the reference backend. These also run on the chunked one; they cover all that mixers require of it.
ALSO_CHUNKED = (
    "retnet",
    "mamba2",
    "gated_deltanet",
    "deltanet, negative eigenvalues, 3 householders",
    "EFLA with channel decay",
)
WITH_UPDATE = {name: config for name, config in ZOO.items() if isinstance(config, UpdateConfig)}
_CASES = [
    pytest.param(
        (name, backend), id="-".join([*name.split(), backend]), marks=[pytest.mark.slow] * (name in SAME_PARTS)
    )
    for name, backend in [*((name, "reference") for name in ZOO), *((name, "chunked") for name in ALSO_CHUNKED)]
]


@pytest.fixture
def zoo() -> dict[str, MixerConfig]:
    return ZOO


@pytest.fixture(params=ZOO, ids=[name.replace(" ", "-") for name in ZOO])
def config(request: pytest.FixtureRequest) -> MixerConfig:
    return ZOO[request.param]


@pytest.fixture(params=WITH_UPDATE, ids=[name.replace(" ", "-") for name in WITH_UPDATE])
def update_config(request: pytest.FixtureRequest) -> UpdateConfig:
    """Config that builds a DeltaMixer."""
    return WITH_UPDATE[request.param]


@pytest.fixture(params=OURS)
def one_of_each(request: pytest.FixtureRequest) -> MixerConfig:
    return ZOO[request.param]


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.slow] * (name in SAME_PARTS)) for name in OURS])
def memory(request: pytest.FixtureRequest) -> MixerConfig:
    """One of each mixer, as a memory of a mixture; those with the same parts as others are slow."""
    return ZOO[request.param]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str | Backend:
    return BACKENDS[request.param]


@pytest.fixture(params=_CASES)
def case(request: pytest.FixtureRequest) -> tuple[MixerConfig, str | Backend]:
    """A config and the backend that it runs on; mixers with the same parts as others are slow."""
    name, backend = request.param
    return ZOO[name], BACKENDS[backend]


@pytest.fixture
def mixer(case: tuple[MixerConfig, str | Backend]) -> Mixer:
    """A mixer in float64, so that two ways to compute the same output differ only by rounding."""
    config, backend = case
    torch.manual_seed(0)
    return config.build(WIDTH, backend=backend).double()


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(3, 9, WIDTH, dtype=torch.float64)
