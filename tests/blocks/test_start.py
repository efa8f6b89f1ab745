"""What a run does beside its start: the collector pauses, a thread prepares the compiler, and one allocates memory."""

import gc
import threading

import pytest
import torch

from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.torch_ext import compiler_start
from deltazoo.blocks.checkpoints.staging import Staging
from deltazoo.blocks.training.collector import paused_collector


def fail(enabled: bool) -> None:
    """Begin a run, take its first step, and fail."""
    with paused_collector() as settle:
        assert not gc.isenabled()
        settle()
        assert gc.isenabled() == enabled
        assert (gc.get_freeze_count() > 0) == enabled
        raise ConfigError("the run fails")


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_pauses_and_is_afterwards_as_before(enabled):
    gc.unfreeze()
    try:
        if not enabled:
            gc.disable()
        with pytest.raises(ConfigError):
            fail(enabled)
        assert (gc.isenabled(), gc.get_freeze_count()) == (enabled, 0)
    finally:
        gc.freeze()
        gc.enable()


def test_the_compiler_is_prepared_in_a_thread_for_a_gpu_only(monkeypatch):
    called = []
    monkeypatch.setattr(torch, "zeros", lambda *_, device: called.append(str(device)))
    for module, name in (
        ("torch._inductor.codecache", "torch_key"),
        ("torch.utils._triton", "triton_hash_with_backend"),
    ):
        monkeypatch.setattr(f"{module}.{name}", lambda name=name: called.append(name))
    compiler_start.start_compiler(torch.device("cpu"))
    assert called == []
    compiler_start.start_compiler(torch.device("cuda:1"))
    for thread in threading.enumerate():
        if thread.name == "deltazoo compiler start":
            thread.join()
    assert called == ["cuda:1", "torch_key", "triton_hash_with_backend"]


def test_memory_is_reserved_once_and_follows_changes_of_shape():
    staging, tensors = Staging(), {"a": torch.randn(3, 4), "b": torch.tensor(2.0)}
    staging.reserve(tensors)
    copies = staging.copy(tensors)
    tensors["a"] += 1
    again = staging.copy(tensors)
    assert all(again[name].data_ptr() == copies[name].data_ptr() != x.data_ptr() for name, x in tensors.items())
    assert all(torch.equal(again[name], x) for name, x in tensors.items())
    tensors["a"] = torch.randn(5, dtype=torch.float64)
    assert torch.equal(staging.copy(tensors)["a"], tensors["a"])
    staging.release()
