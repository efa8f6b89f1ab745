"""Sphinx extension: equations in plain text, S_t = d_t S_(t-1) + k_t v_t^T, become LaTeX; arXiv numbers become links.

The package prints its equations in a terminal, so docstrings and docs/zoo.md hold them as plain text.
"""

import re
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

GREEK = {
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "eta",
    "theta",
    "kappa",
    "lambda",
    "mu",
    "nu",
    "phi",
    "psi",
    "rho",
    "sigma",
    "tau",
    "omega",
}
OPERATORS = {"exp", "log", "max", "min", "sum"}  # LaTeX has commands for them
FUNCTIONS = {
    "Diag",
    "Re",
    "Im",
    "GLU",
    "bound",
    "cond",
    "conv",
    "conv1d",
    "gelu",
    "memory",
    "norm",
    "rate",
    "scale",
    "shared",
    "shift",
    "sigmoid",
    "silu",
    "softmax",
    "softplus",
    "ssm",
    "step",
    "temperature",
    "update",
}
WORDS = {
    "an",
    "and",
    "as",
    "by",
    "each",
    "for",
    "if",
    "in",
    "is",
    "of",
    "on",
    "or",
    "over",
    "per",
    "the",
    "to",
    "token",
    "up",
    "where",
    "with",
}  # between formulas
SYMBOLS = {
    "<=": r"\leq",
    ">=": r"\geq",
    "->": r"\rightarrow",
    "<-": r"\leftarrow",
    "...": r"\ldots",
    "*": r"\odot",
    "{": r"\{",
    "}": r"\}",
}
TOKEN = re.compile(
    r"""
      (?P<space>\s+)
    | (?P<setting>[a-z_]+="[^"]*")
    | (?P<snake>[a-z]{3,}(?:_[a-z]{3,})+)
    | (?P<number>\d+(?:\.\d+)?(?:e-?\d+)?)
    | (?P<hyphened>[A-Za-z]{2,}(?:-[A-Za-z0-9]+)+)
    | (?P<name>[A-Za-z]+\d*)
    | (?P<symbol><=|>=|->|<-|\.\.\.|[-+*/()\[\]{}|,;:=<>^_~.'])
    """,
    re.VERBOSE,
)
ARXIV = re.compile(r"(?:arXiv )?\b(\d\d(?:0[1-9]|1[0-2])\.\d{5})\b")


def latex(text: str, strict: bool = False) -> str | None:
    """Convert an equation in plain text into LaTeX.

    Args: strict: return None if the text has words beyond WORDS; otherwise they become text between the formulas.
    """
    tokens = _tokens(text.strip())
    if tokens is None or "=" not in (token for _, token in tokens):
        return None
    if strict and not all(_is_known(kind, token) for kind, token in tokens):
        return None
    joined = re.sub(r" +", " ", " ".join(part for part in _parts(tokens) if part))
    joined = re.sub(r" \} \\text\{ ", " ", re.sub(r" (?=[_^]\{)", "", joined))
    return re.sub(r" \} (?=[,.;:])", "} ", joined)  # no space between a word and a comma


def _tokens(text: str) -> list[tuple[str, str]] | None:
    """Split a text into kinds and tokens; None if a character has no meaning in an equation."""
    tokens, end = [], 0
    for match in TOKEN.finditer(text):
        if match.start() != end:
            return None
        end = match.end()
        kind = str(match.lastgroup)
        if kind == "space":
            if len(match[0]) > 2:
                tokens.append(("wide", ""))
            elif tokens:
                tokens.append((kind, " "))
        else:
            tokens.append((kind, match[0]))
    return tokens if end == len(text) else None


def _is_known(kind: str, token: str) -> bool:
    if kind in ("snake", "hyphened"):
        return False
    return kind != "name" or _is_symbol(token) or token in FUNCTIONS | WORDS


def _is_symbol(name: str) -> bool:
    letters = name.rstrip("0123456789")
    return len(letters) <= 2 or name in GREEK or name in OPERATORS or name in ("sqrt", "grad")


def _parts(tokens: list[tuple[str, str]]) -> Iterator[str]:
    i = 0
    while i < len(tokens):
        token = tokens[i][1]
        if token in ("_", "^"):
            script, i = _script(tokens, i + 1, token)
            yield f"{token}{{{script}}}"
            continue
        if token == "sqrt" and tokens[i + 1 : i + 2] == [("symbol", "(")]:
            inner, i = _group(tokens, i + 1)
            yield rf"\sqrt{{{inner}}}"
            continue
        if tokens[i + 1 : i + 2] == [("symbol", "~")]:
            yield rf"\tilde{{{token}}}"
            i += 2
            continue
        yield _single(tokens, i)
        i += 1


def _single(tokens: list[tuple[str, str]], i: int) -> str:
    kind, token = tokens[i]
    if kind == "wide":
        return r"\qquad"
    if kind == "space":
        return ""
    if kind in ("snake", "setting"):
        return rf"\texttt{{{token.replace('_', chr(92) + '_')}}}"
    if kind == "hyphened":
        return rf"\text{{ {token} }}"
    if token == "." and i + 1 < len(tokens):
        return r"\cdot" if tokens[i - 1][0] == tokens[i + 1][0] == "space" else "."
    if kind == "number":
        return token
    if token == "," and i + 1 < len(tokens) and tokens[i + 1][0] == "space":
        return r",\;"
    if token == "sum" and tokens[i + 1 : i + 2] != [("symbol", "_")]:
        return r"\text{ sum }"
    if kind == "symbol":
        return SYMBOLS.get(token, token)
    return _name(token, [token for kind, token in tokens[i + 1 : i + 3] if kind in ("name", "hyphened")])


def _name(token: str, next_names: list[str]) -> str:
    if token in GREEK or token in OPERATORS:
        return "\\" + token
    if token == "grad":
        return r"\nabla"
    if token == "ln":
        return r"\operatorname{LN}"  # layer norm
    if token in FUNCTIONS:
        return rf"\operatorname{{{token}}}"
    is_article = token == "a" and bool(next_names) and not _is_symbol(next_names[0]) and next_names[0] not in WORDS
    if token in WORDS or is_article or not _is_symbol(token):
        return rf"\text{{ {token} }}"
    letters = token.rstrip("0123456789")
    digits = token[len(letters) :]
    symbol = letters if len(letters) == 1 else rf"\mathrm{{{letters}}}"
    return f"{{{symbol}_{{{digits}}}}}" if digits else symbol


def _script(tokens: list[tuple[str, str]], i: int, sign: str) -> tuple[str, int]:
    """Return the LaTeX of the subscript or superscript that begins at token i, and the index behind it."""
    token = tokens[i][1]
    if token in "({":
        inner, end = _group(tokens, i)
        is_index = sign == "^" and inner == "l"  # S^(l), a level
        return (f"({inner})" if is_index else inner), end
    if token == "-":  # K^-1/2
        end = i + 2
        if tokens[end : end + 1] == [("symbol", "/")] and tokens[end + 1][0] == "number":
            end += 2
        return "".join(token for _, token in tokens[i:end]), end
    if sign == "^" and token == "T":
        return r"\top", i + 1
    if token in GREEK:
        return "\\" + token, i + 1
    return (token if len(token) <= 2 else rf"\mathrm{{{token}}}"), i + 1


def _group(tokens: list[tuple[str, str]], i: int) -> tuple[str, int]:
    """Return the LaTeX between the bracket at token i and its partner, and the index behind it."""
    depth, end = 0, i
    while True:
        depth += {"(": 1, "{": 1, ")": -1, "}": -1}.get(tokens[end][1], 0)
        if depth == 0:
            return " ".join(part for part in _parts(tokens[i + 1 : end]) if part), end + 1
        end += 1


def block(lines: list[str], strict: bool = False) -> list[str] | None:
    """Return the lines of LaTeX for a block of equations, one row for each line, or None if one is no equation."""
    rows = [latex(part, strict) for line in lines for part in re.split(r";  +(?=\S)", line.strip())]
    found = [row for row in rows if row is not None]
    if not found or len(found) < len(rows):
        return None
    rows = [*(rf"& {row} \\" for row in found[:-1]), f"& {found[-1]}"]
    return [r"\begin{aligned}", *rows, r"\end{aligned}"]


def zoo_page(text: str) -> str:
    """Replace the equations of docs/zoo.md, paragraphs and indented lines, by math directives."""
    paragraphs = []
    for paragraph in text.split("\n\n"):
        is_indented = paragraph.startswith("    ")
        is_equation = is_indented or (" = " in paragraph and not paragraph.startswith(("#", "- ")))
        lines = paragraph.splitlines() if is_indented else [paragraph.replace("\n", " ")]  # prose is wrapped
        rows = block(lines) if is_equation else None
        paragraphs.append(paragraph if rows is None else "\n".join(["```{math}", *rows, "```"]))
    return "\n\n".join(paragraphs)


class ArxivLinks(SphinxPostTransform):
    """Link the arXiv numbers in the text of a page."""

    default_priority = 400

    def run(self, **kwargs: Any) -> None:
        for text in list(self.document.findall(nodes.Text)):
            if not ARXIV.search(text.astext()) or _is_inside(
                text, (nodes.reference, nodes.literal, nodes.literal_block)
            ):
                continue
            parts: list[nodes.Node] = []
            end = 0
            for match in ARXIV.finditer(text.astext()):
                parts.append(nodes.Text(text.astext()[end : match.start()]))
                parts.append(nodes.reference("", match[0], refuri=f"https://arxiv.org/abs/{match[1]}"))
                end = match.end()
            text.parent.replace(text, [*parts, nodes.Text(text.astext()[end:])])


def _is_inside(node: nodes.Node, kinds: tuple[type[nodes.Node], ...]) -> bool:
    while node.parent is not None:
        node = node.parent
        if isinstance(node, (*kinds, nodes.math, nodes.math_block, nodes.title)):
            return True
    return False


def convert_zoo(app: Sphinx, name: str, source: list[str]) -> None:
    if name == "zoo":
        source[0] = zoo_page(source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", convert_zoo)
    app.add_post_transform(ArxivLinks)
    return {"parallel_read_safe": True}
