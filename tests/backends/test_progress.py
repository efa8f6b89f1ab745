"""The notice of a slow compilation: one line on a terminal, at the first call only."""

import io
import time
from types import SimpleNamespace

import pytest
import torch

import deltazoo
from deltazoo import UpdateInputs, UpdateSpec
from deltazoo.backends import CompileBackend
from deltazoo.backends.compile import backend as compile_backend
from deltazoo.backends.progress import notice_if_slow


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
    monkeypatch.setattr("deltazoo.backends.progress._SLOW", 0.1)
    stream = Stream(is_terminal=True)
    monkeypatch.setattr("deltazoo.backends.progress.sys", SimpleNamespace(stderr=stream))
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


@pytest.mark.parametrize("stream", [Stream(is_terminal=False), None])
def test_nothing_is_printed_without_a_terminal(stderr, monkeypatch, stream):
    monkeypatch.setattr("deltazoo.backends.progress.sys", SimpleNamespace(stderr=stream))
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
