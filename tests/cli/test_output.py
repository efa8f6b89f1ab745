"""Tables fit the width of the output: texts wrap at spaces, figures stay whole, and empty columns are omitted."""

import io
import sys

import pytest

from deltazoo.cli.terminal.output import print_line, print_notes, print_piece, print_table, progress


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


FIGURES = ["123456.78", "123456.7-1234567.8", "1.234e-08", "123456"]
COLUMNS = ["case", "backend", ">error"]
ROWS = [
    ["decay=head beta=head of the shape 4x1000 with a sentence of many words", "preconditioned_deltanet", "1.0e-03"],
    ["decay=head", "fla", "1.0e-08"],
]


@pytest.fixture
def terminal(monkeypatch):
    """Replace the number of columns and say whether stdout is a terminal."""

    def terminal(columns: str | None, isatty: bool = False) -> None:
        monkeypatch.delenv("COLUMNS", raising=False)
        if columns is not None:
            monkeypatch.setenv("COLUMNS", columns)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: isatty)

    return terminal


@pytest.mark.parametrize("isatty", [True, False])
@pytest.mark.parametrize("columns", ["20", "56", "57", "200"])
def test_figures_are_never_wrapped(terminal, capsys, columns, isatty):
    terminal(columns, isatty)
    print_table(["shape", ">ms", ">20-80 %", ">error", ">MiB"], [["8 x 4096 of 16 heads", *FIGURES]])
    printed = capsys.readouterr().out.split()
    assert [word for word in printed if word in FIGURES] == FIGURES
    assert {"8", "x", "4096", "of", "16", "heads"} <= {*printed}


@pytest.mark.parametrize("columns", ["60", "80", "120"])
@pytest.mark.parametrize("isatty", [True, False])
def test_a_pipe_and_a_terminal_honour_columns_without_padding(terminal, capsys, columns, isatty):
    terminal(columns, isatty)
    print_table(COLUMNS, ROWS)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= int(columns)
    assert all(line == line.rstrip() for line in lines)


def test_a_pipe_without_columns_has_one_line_per_row(terminal, capsys):
    terminal(None)
    print_table(COLUMNS, ROWS)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(ROWS)
    assert ROWS[0][0] in lines[2]


def test_names_are_never_broken(terminal, capsys):
    terminal("50")
    print_table(["name", "about"], [["preconditioned_deltanet", "lightning_attention and path_attention " * 3]] * 2)
    assert capsys.readouterr().out.count("preconditioned_deltanet") == 2


def test_one_line_shortens_texts_instead_of_wrapping_them(terminal, capsys):
    terminal("40")
    print_table(["name", "equation"], [["mla", "c_t = norm(W x_t), k_t = [W_k c_t, r_t], o_t = 1"]], one_line=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:] == ["mla   c_t = norm(W x_t), k_t = [W_k ..."]


def test_one_line_shortens_on_a_very_narrow_terminal(terminal, capsys):
    terminal("8")
    print_table(["name", "equation"], [["mla", "a b c d e f g h i"]], one_line=True)
    assert capsys.readouterr().out.splitlines()[2:] == ["mla   a b ..."]


def test_empty_columns_are_omitted(terminal, capsys):
    terminal("80")
    print_table(["backend", ">ms", ">MiB", ""], [["fla", "1.5", "", ""], ["triton", "", "", ""]])
    assert capsys.readouterr().out.splitlines()[0] == "backend   ms"


def test_a_sentence_of_several_names_is_printed_once_and_wrapped(terminal, capsys):
    terminal("60")
    sentence = "it needs tensors on 'cuda', got 'cpu', and it needs the package of its kernels."
    print_notes([("fla", sentence), ("triton", sentence), ("triton", "it has no backward.")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("fla, triton: it needs")
    assert lines[1].startswith("  ")
    assert lines[2:] == ["triton: it has no backward."]


def test_tables_and_lines_are_printed_on_an_ascii_stream(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", stream)
    print_table(["name"], [["Öztürk"]])
    print_line("Öztürk")
    assert stream.buffer.getvalue().decode() == "name\n------\n\\xd6zt\\xfcrk\n\\xd6zt\\xfcrk\n"


@pytest.mark.parametrize("to_file", [True, False])
def test_lines_are_printed_at_once_while_a_bar_is_drawn(monkeypatch, to_file):
    monkeypatch.setenv("TERM", "xterm")
    stdout, stderr = io.StringIO() if to_file else Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "stderr", stderr)
    with progress() as report:
        report("training", 1, 2, "a note")
        print_piece("a row\n")
        written = (stdout if to_file else stderr).getvalue()
        assert "a row\n" in written
    assert "a note" in stderr.getvalue()
    assert ("a row" in stderr.getvalue()) != to_file
