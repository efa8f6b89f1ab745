"""A refused capture is a warning and a lack of memory an error; a graph of a benchmark keeps its tensors."""

import weakref

import pytest
import torch

from deltazoo.backends.torch_ext import cuda_graph
from deltazoo.backends.torch_ext.cuda_graph import capture, capture_and_keep, eager_if_refused


def test_a_refused_capture_is_a_warning_that_names_the_part(caplog):
    with eager_if_refused("the decoding step"):
        raise RuntimeError("operation not permitted when stream is capturing")
    assert [record.getMessage() for record in caplog.records] == [
        "the decoding step of this model cannot be captured and stays eager: "
        "operation not permitted when stream is capturing"
    ]


def test_a_lack_of_memory_is_raised():
    with pytest.raises(torch.OutOfMemoryError), eager_if_refused("the decoding step"):
        raise torch.OutOfMemoryError("out of memory")


def test_a_kept_call_lives_as_long_as_its_replays(monkeypatch):
    replays = []
    monkeypatch.setattr(cuda_graph, "capture", lambda *_: lambda: replays.append(1))
    x = torch.zeros(3)
    memory, call = weakref.ref(x), capture_and_keep(lambda x=x: x.add_(1), torch.device("cuda"))
    del x
    call()
    assert replays and memory() is not None
    del call
    assert memory() is None


@pytest.mark.cuda
def test_kept_graphs_of_freed_operands_replay_after_another_capture():
    device, totals = torch.device("cuda"), []
    for value in (1.0, 2.0):
        x, total = torch.full((2**24,), value, device=device), torch.zeros((), device=device)
        totals.append((total, capture_and_keep(lambda x=x, total=total: total.copy_(x.mean()), device)))
        del x
    capture(lambda: torch.zeros(1, device=device).add_(1), device)  # empties the allocator's cache
    for value, (total, replay) in zip((1.0, 2.0), totals, strict=True):
        total.zero_()
        replay()
        assert total.item() == value
