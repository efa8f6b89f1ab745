"""Fixtures of the tests with other libraries."""

import pytest
from small_configs import OURS
from subjects import MLPS


@pytest.fixture(params=OURS)
def mixer(request: pytest.FixtureRequest) -> str:
    """Name of every registered mixer."""
    return str(request.param)


@pytest.fixture(params=list(MLPS))
def mlp(request: pytest.FixtureRequest) -> str:
    """Name of every kind of MLP."""
    return str(request.param)
