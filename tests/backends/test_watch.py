"""`watch` shows which backend ran, and leaves compiled graphs as they were; of kernels test_triton.py tells."""

import threading

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from deltazoo import UpdateInputs, UpdateSpec, bind, update, watch
from deltazoo.backends.dispatch import bind_conv
from deltazoo.backends.short_conv import ConvInputs, ConvPart

GATED = UpdateSpec(decay="head", beta="head")


def inputs(T=5):
    draw = torch.Generator().manual_seed(0)

    def normal(*sizes):
        return torch.randn(*sizes, generator=draw)

    return UpdateInputs(
        q=normal(2, T, 1, 16), k=normal(2, T, 1, 16), v=normal(2, T, 2, 16),
        log_decay=-torch.rand(2, T, 2, generator=draw), beta=torch.rand(2, T, 2, generator=draw),
    )  # fmt: skip


def test_each_call_of_a_backend_is_seen_in_order_and_nothing_before_or_after():
    update(GATED, inputs(), backend="reference")
    with watch() as seen:
        update(GATED, inputs(), backend="compile")
        update(GATED, inputs(), backend="reference")
        bind(GATED, "reference").step_(inputs(1), torch.zeros(2, 2, 16, 16))
        bind_conv([ConvPart(channels=8)])(ConvInputs(torch.randn(1, 5, 8), torch.randn(8, 4)))
    update(GATED, inputs(), backend="reference")
    assert [(ran.backend, ran.what) for ran in seen.runs] == [
        ("compile", "update"), ("reference", "update"), ("reference", "step"), ("torch", "short conv"),
    ]  # fmt: skip
    assert seen.kernels == {}


def test_what_was_alike_is_one_line():
    with watch() as seen:
        assert str(seen) == "nothing"
        for _ in range(3):
            update(GATED, inputs(), backend="reference")
        update(GATED, inputs(), backend="compile")
    assert str(seen) == "3 x reference: update\n1 x compile: update"


def test_watches_stand_in_each_other_and_end_with_an_error():
    inner = []

    def fails():
        with watch() as seen:
            inner.append(seen)
            update(GATED, inputs(), backend="compile")
            raise ZeroDivisionError

    with watch() as outer:
        update(GATED, inputs(), backend="reference")
        with pytest.raises(ZeroDivisionError):
            fails()
        update(GATED, inputs(), backend="reference")
    assert [ran.backend for ran in inner[0].runs] == ["compile"]
    assert [ran.backend for ran in outer.runs] == ["reference", "compile", "reference"]


def test_other_threads_are_seen():
    with watch() as seen:
        thread = threading.Thread(target=update, args=(GATED, inputs()), kwargs={"backend": "reference"})
        thread.start()
        thread.join()
    assert [ran.backend for ran in seen.runs] == ["reference"]


def test_a_compiled_graph_is_one_and_the_same_watched_or_not():
    bound, graphs = bind(GATED, "compile"), CompileCounter()
    step = torch.compile(lambda x: bound(x).o, fullgraph=True, backend=graphs)
    with watch() as seen:
        watched = step(inputs())
    torch.testing.assert_close(step(inputs()), watched)
    with watch():
        step(inputs())
    assert graphs.frame_count == 1
    assert seen.runs == []
