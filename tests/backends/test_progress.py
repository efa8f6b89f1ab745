"""Lines of progress, and the notice of a slow compilation: one line on a terminal, at the first call only."""

import io
import time
from types import SimpleNamespace

import pytest
import torch

import deltazoo
from deltazoo import UpdateInputs, UpdateSpec
from deltazoo.backends import CompileBackend
from deltazoo.backends.compile import backend as compile_backend
from deltazoo.backends.io.progress import ProgressLines, notice_if_slow


class Stream(io.StringIO):
    """A stream that says whether it is a terminal."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.fixture
def stderr(monkeypatch):
    """A terminal as stderr; a notice follows after a tenth of a second."""
    monkeypatch.setattr("deltazoo.backends.io.progress._SLOW", 0.1)
    stream = Stream(is_terminal=True)
    monkeypatch.setattr("deltazoo.backends.io.progress.sys", SimpleNamespace(stderr=stream))
    return stream


def test_a_slow_block_prints_one_line_while_it_runs(stderr):
    with notice_if_slow("compiling"):
        deadline = time.monotonic() + 5
        while not stderr.getvalue() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert stderr.getvalue() == "compiling\n"
    time.sleep(0.3)
    assert stderr.getvalue() == "compiling\n"


def test_a_fast_block_prints_nothing(stderr):
    with notice_if_slow("compiling"):
        pass
    with pytest.raises(ZeroDivisionError), notice_if_slow("compiling"):
        1 / 0  # noqa: B018
    time.sleep(0.3)
    assert stderr.getvalue() == ""


def test_progress_announces_a_long_start_and_then_prints_every_ten_seconds(stderr, monkeypatch):
    now = iter([0.0, 1.0, 2.0, 9.0, 12.0])
    monkeypatch.setattr("deltazoo.backends.io.progress.time", SimpleNamespace(monotonic=lambda: next(now)))
    progress = ProgressLines()
    for done, note in enumerate(["compiling", "a", "b", "c"]):
        progress("training", done, 9, note)
    assert stderr.getvalue() == "training: 0/9 compiling\ntraining: 3/9 c\n"


def test_progress_of_a_short_task_without_a_note_prints_nothing(stderr):
    progress = ProgressLines()
    progress("training", 0, 9)
    progress("training", 9, 9, "a figure")
    assert stderr.getvalue() == ""


@pytest.mark.parametrize("stream", [Stream(is_terminal=False), None])
def test_nothing_is_printed_without_a_terminal(stderr, monkeypatch, stream):
    monkeypatch.setattr("deltazoo.backends.io.progress.sys", SimpleNamespace(stderr=stream))
    with notice_if_slow("compiling"):
        time.sleep(0.3)
    assert stream is None or stream.getvalue() == ""


def test_the_first_eager_update_of_a_spec_says_that_it_compiles(stderr, monkeypatch):
    def compile_slowly(spec):
        first = iter([0.5])

        def call(chunks, sequence):
            time.sleep(next(first, 0.0))
            return compile_backend.chunked_update(spec, chunks, sequence)

        return call

    monkeypatch.setattr(compile_backend, "_compile", compile_slowly)
    backend, spec = CompileBackend(), UpdateSpec(beta="head")
    shape = 2, 40, 1, 16
    inputs = UpdateInputs(*(torch.randn(shape) / 4 for _ in range(3)), beta=torch.rand(shape[:3]))
    for _ in range(2):
        deltazoo.update(spec, inputs, backend)
    (line,) = stderr.getvalue().splitlines()
    assert line.startswith("deltazoo: torch.compile is compiling the forward of an update for cpu")
    assert "deltazoo.backends.CompileBackend(compiled=False)" in line
    deltazoo.update(spec, inputs._replace(q=inputs.q.requires_grad_()), backend)
    assert "the forward and backward of an update" in stderr.getvalue().splitlines()[1]
