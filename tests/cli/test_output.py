"""Tables on narrow terminals wrap words and keep figures whole."""

import sys

import pytest

from deltazoo.cli.output import print_table

FIGURES = ["123456.78", "123456.7-1234567.8", "1.234e-08", "123456"]


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("columns", ["20", "56", "57", "200"])
def test_figures_are_never_wrapped(monkeypatch, capsys, columns, terminal):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    print_table(["shape", ">ms", ">20-80 %", ">error", ">MiB"], [["8 x 4096 of 16 heads", *FIGURES]])
    printed = capsys.readouterr().out.split()
    assert [word for word in printed if word in FIGURES] == FIGURES
    assert {"8", "x", "4096", "of", "16", "heads"} <= {*printed}
