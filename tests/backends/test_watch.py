"""`watch` records which backend ran and does not change compiled graphs. test_triton.py covers kernel launches."""

import threading

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from deltazoo import UpdateInputs, UpdateSpec, bind, update, watch
from deltazoo.backends.compile import CompileBackend
from deltazoo.backends.ops.short_conv import ConvInputs, ConvPart
from deltazoo.backends.update import watch as watching
from deltazoo.backends.update.dispatch import bind_conv

GATED = UpdateSpec(decay="head", beta="head")
EAGER = CompileBackend(compiled=False)


def make_inputs(T=5):
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes):
        return torch.randn(*sizes, generator=generator)

    return UpdateInputs(
        q=normal(2, T, 1, 16), k=normal(2, T, 1, 16), v=normal(2, T, 2, 16),
        log_decay=-torch.rand(2, T, 2, generator=generator), beta=torch.rand(2, T, 2, generator=generator),
    )  # fmt: skip


def test_calls_inside_the_block_are_recorded_in_order():
    update(GATED, make_inputs(), backend="reference")
    with watch() as log:
        update(GATED, make_inputs(), backend=EAGER)
        update(GATED, make_inputs(), backend="reference")
        bind(GATED, "reference").step_(make_inputs(1), torch.zeros(2, 2, 16, 16))
        bind_conv([ConvPart(channels=8)])(ConvInputs(torch.randn(1, 5, 8), torch.randn(8, 4)))
    update(GATED, make_inputs(), backend="reference")
    assert [(run.backend, run.name) for run in log.runs] == [
        ("compile", "update"), ("reference", "update"), ("reference", "step"), ("torch", "short conv"),
    ]  # fmt: skip
    assert log.kernels == {}


def test_equal_records_print_as_one_line_with_a_count(monkeypatch):
    monkeypatch.setattr(watching, "_traced_before", {})
    with watch() as log:
        assert str(log) == "nothing"
        for _ in range(3):
            update(GATED, make_inputs(), backend="reference")
        update(GATED, make_inputs(), backend=EAGER)
    assert str(log) == "3 x reference: update\n1 x compile: update"


def test_nested_blocks_all_record_and_end_on_an_exception():
    inner_logs = []

    def fails():
        with watch() as inner:
            inner_logs.append(inner)
            update(GATED, make_inputs(), backend=EAGER)
            raise ZeroDivisionError

    with watch() as outer:
        update(GATED, make_inputs(), backend="reference")
        with pytest.raises(ZeroDivisionError):
            fails()
        update(GATED, make_inputs(), backend="reference")
    assert [run.backend for run in inner_logs[0].runs] == ["compile"]
    assert [run.backend for run in outer.runs] == ["reference", "compile", "reference"]


def test_calls_in_other_threads_are_recorded():
    with watch() as log:
        thread = threading.Thread(target=update, args=(GATED, make_inputs()), kwargs={"backend": "reference"})
        thread.start()
        thread.join()
    assert [run.backend for run in log.runs] == ["reference"]


def test_compiled_graph_records_nothing_and_is_not_recompiled():
    bound, counter = bind(GATED, EAGER), CompileCounter()
    step = torch.compile(lambda x: bound(x).o, fullgraph=True, backend=counter)
    with watch() as log:
        first = step(make_inputs())
    torch.testing.assert_close(step(make_inputs()), first)
    with watch() as second_log:
        step(make_inputs())
    assert counter.frame_count == 1
    assert log.runs == second_log.runs == []
    assert str(log).startswith(
        "traced into a compiled graph: compile: update. The runs of a compiled graph are not rec"
    )
    assert str(second_log).startswith(
        "nothing in eager code. The runs of a compiled graph are not recorded: deltazoo.ex"
    )
    assert "compile: update" in str(second_log)
