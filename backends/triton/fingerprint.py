"""A fingerprint of each kernel's code: a record of a launch table holds while it says the same."""

import functools
import hashlib
import io
import tokenize
from collections.abc import Iterator
from importlib.resources import files

# The files that a kernel's text stands in.
_SCAN = ("scan_hopper", "scan_room", "states_hopper")
_WALK = ("walk_hopper", "walk_room", "walk_copies", "walk_steps", "walk_sums", "replay_walk")
_REVERSE = ("reverse", "reverse_hopper", *_SCAN, *_WALK)
_SOURCES: dict[str, tuple[str, ...]] = {
    "split": ("scan", *_REVERSE, "hopper", "join", "squares", "layout"),
    "scan": ("scan", *_SCAN, "hopper", "squares", "layout"),
    "replay": ("scan", *_SCAN, "hopper", "squares", "layout"),
    "reverse": (*_REVERSE, "gradients", "hopper", "squares", "layout"),
    "prepare": ("prepare", "prepare_hopper", "ptx", "hopper", "squares", "layout"),
    "gradients": ("gradients", "gradients_hopper", "hopper", "layout"),
    "decode": ("decode", "micro_step"),
    "fused_step": ("fused_step", "micro_step"),
}


@functools.cache
def source_of(kernel: str) -> str:
    """A fingerprint of a kernel's code; comments, docstrings and blank lines do not count."""
    folder = files("deltazoo.backends.triton") / "kernels"
    texts = [folder / f"{name}.py" for name in _SOURCES.get(kernel, (kernel, "squares", "layout"))]
    code = " ".join(word for text in texts for word in _code_of(text.read_text(encoding="utf-8")))
    return hashlib.sha256(code.encode()).hexdigest()[:12]


_FORMATTED = {n for n, name in tokenize.tok_name.items() if name.startswith("FSTRING_")}


def _code_of(text: str) -> Iterator[str]:
    """The words of a Python source, with its blocks, without comments and docstrings; the same in any Python."""
    begins = True  # a statement
    opened = []  # f-strings: one word each, as before Python 3.12, which takes them apart
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in _FORMATTED:
            if tokenize.tok_name[token.type].endswith("START"):
                opened.append(token.start)
            elif tokenize.tok_name[token.type].endswith("END"):
                start = opened.pop()
                if not opened:
                    yield _between(text, start, token.end)
            begins = False
            continue
        if opened:
            continue
        says_nothing = token.type in (tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER)
        docstring = begins and token.type == tokenize.STRING
        if says_nothing or docstring or (begins and token.type == tokenize.NEWLINE):
            continue
        begins = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        yield tokenize.tok_name[token.type] if begins else token.string


def _between(text: str, start: tuple[int, int], end: tuple[int, int]) -> str:
    """The text from one (line, column) to another, lines from 1 on."""
    lines = text.splitlines(keepends=True)[start[0] - 1 : end[0]]
    lines[-1] = lines[-1][: end[1]]
    lines[0] = lines[0][start[1] :]
    return "".join(lines)
