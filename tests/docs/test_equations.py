"""Equations in plain text become valid LaTeX; other indented text stays as it is; arXiv numbers are found."""

import sys
from pathlib import Path

import pytest

import deltazoo
from deltazoo.blocks.inspect.catalog import catalog

pytest.importorskip("sphinx", reason="deltazoo[docs] is not installed")
ROOT = Path(deltazoo.__file__).resolve().parent
sys.path.insert(0, str(ROOT / "docs" / "_ext"))

import math_text  # noqa: E402
from math_text import block, latex  # noqa: E402


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("S_t = d_t S_(t-1) + k_t v_t^T", r"S_{t} = d_{t} S_{t - 1} + k_{t} v_{t}^{\top}"),
        ("o_t = K^-1/2 S_t^T q_t", r"o_{t} = K^{-1/2} S_{t}^{\top} q_{t}"),
        ("S~_t = D_t S_{t-1}", r"\tilde{S}_{t} = D_{t} S_{t - 1}"),
        ("g_h = 1 - 2^(-5-h)", "g_{h} = 1 - 2^{- 5 - h}"),
        ("o_t = (S_t^(l))^T q_t", r"o_{t} = ( S_{t}^{(l)} )^{\top} q_{t}"),
        ("y = sum_(s <= t) exp(x1_s * W' v)", r"y = \sum_{s \leq t} \exp ( {x_{1}}_{s} \odot W ' v )"),
        ("r = sqrt(1 - |a|^2)", r"r = \sqrt{1 - | a |^{2}}"),
        ("a_t = b for a head h", r"a_{t} = b \text{ for a head } h"),
        ("no equation here", None),
    ],
)
def test_latex_of_an_equation(text, expected):
    assert latex(text) == expected


@pytest.mark.parametrize(
    "lines",
    [
        ["max_tokens: maximum number of tokens to generate."],
        ["model = deltazoo.load(path)"],
        ["Jamba: normalize=False"],
        ["S_t = d_t S_(t-1)", "3*gdn + swa      three layers, then one"],
    ],
)
def test_text_that_is_no_equation_stays_text(lines):
    assert block(lines, strict=True) is None


def test_the_parts_of_an_update_are_rows():
    assert block(["S_t = k_t v_t^T;  o_t = S_t^T q_t"]) == [
        r"\begin{aligned}",
        r"& S_{t} = k_{t} v_{t}^{\top} \\",
        r"& o_{t} = S_{t}^{\top} q_{t}",
        r"\end{aligned}",
    ]


def test_every_mixer_has_valid_latex():
    from matplotlib.mathtext import MathTextParser

    parser = MathTextParser("agg")
    for entry in catalog(["mixers"]).mixers:
        for text in (entry.equation, *([entry.about] if " = " in entry.about else [])):
            rows = block(text.splitlines())
            assert rows is not None, f"{entry.name}: {text}"
            for row in rows[1:-1]:
                parser.parse(f"${row.removesuffix(chr(92) * 2).removeprefix('& ')}$")


def test_the_zoo_page_has_mathematics_and_keeps_the_rest():
    page = math_text.zoo_page(
        "## kda\n\nS_t = (I - k_t k_t^T) S_(t-1).\n\n    o_t = S_t^T q_t\n\n- source: Kimi, arXiv 2510.26692\n"
    )
    assert page.count("```{math}") == 2
    assert page.startswith("## kda\n\n```{math}\n")
    assert page.endswith("```\n\n- source: Kimi, arXiv 2510.26692\n")


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("Yang 2024, arXiv 2412.06464; RoPE 2104.09864", ["2412.06464", "2104.09864"]),
        ("1.23456, 2413.06464, 12412.06464 and 2412.064640", []),
    ],
)
def test_arxiv_numbers(text, numbers):
    assert math_text.ARXIV.findall(text) == numbers
