"""Models whose weights accelerate offloads to the CPU's memory compute as before, take tokens and decode."""

import pytest
from accelerate import cpu_offload
from subjects import MLPS, assert_computes, build

LIMIT = 1e-6


def test_offloaded_mixer_equals_a_loaded_one(mixer: str) -> None:
    model = cpu_offload(build(mixer), execution_device="cpu")
    assert all(parameter.is_meta for parameter in model.parameters())
    assert_computes(model, build(mixer), LIMIT)


def test_offloaded_mlp_equals_a_loaded_one(mlp: str) -> None:
    model = cpu_offload(build("gated_deltanet", MLPS[mlp]), execution_device="cpu")
    assert_computes(model, build("gated_deltanet", MLPS[mlp]), LIMIT)


@pytest.mark.parametrize("offload_buffers", [True, False])
def test_offloaded_tied_model_equals_a_loaded_one(offload_buffers: bool) -> None:
    model = cpu_offload(build("gated_rfa", tied=True), execution_device="cpu", offload_buffers=offload_buffers)
    assert_computes(model, build("gated_rfa", tied=True), LIMIT)
