"""Layer patterns: text and Python's operators give equal terms; errors mark the position."""

import itertools
import re

import pytest

from deltazoo.backends.io.errors import PatternError
from deltazoo.blocks.spec.pattern import expand, parse, unreached
from deltazoo.mixers import GatedDeltaNet
from deltazoo.mixers.core.patterns import At, Name, Spread

a, b, c = Name("a"), Name("b"), Name("c")

PATTERNS = [
    ("a", a, "a a a a a a a"),
    ("3*a + b", 3 * a + b, "a a a b a a a"),
    ("a*3 + b", a * 3 + b, "a a a b a a a"),
    ("2*3*a + b", 2 * 3 * a + b, "a a a a a a b"),
    ("(a + b)*2 + c", (a + b) * 2 + c, "a b a b c a b"),
    ("2*(a + 2*b)", 2 * (a + 2 * b), "a b b a b b a"),
    ("a + (b + c)", a + (b + c), "a b c a b c a"),
    ("a | b", a | b, "a|b a|b a|b a|b a|b a|b a|b"),
    ("a + (b | c | a)", a + (b | c | a), "a b|c|a a b|c|a a b|c|a a"),
    ("2*(a | b) + c", 2 * (a | b) + c, "a|b a|b c a|b a|b c a|b"),
    ("a@[1, 3] else b", At(a, [1, 3], over=b), "b a b a b b b"),
    ("a@[-1, 0] else 2*b + c", At(a, [-1, 0], over=2 * b + c), "a b c b b c a"),
    ("(a | c)@[2] else b", At(a | c, [2], over=b), "b b a|c b b b b"),
    ("spread(a, 2) else b", Spread(a, 2, over=b), "b a b b b a b"),
    ("spread(a, 1) else b", Spread(a, 1, over=b), "b b b a b b b"),
    ("spread(a, 28%) else b", Spread(a, 0.28, over=b), "b a b b b a b"),
    ("spread(a, 1%) else b", Spread(a, 0.01, over=b), "b b b a b b b"),
    ("a@[0] else spread(c, 2) else b", At(a, [0], over=Spread(c, 2, over=b)), "a c b b b c b"),
    (
        'a(heads=6, scale=-0.5, gate=true, key_width=null, kind=off, word="x y", of=[1, 2.5])',
        Name(
            "a",
            (
                ("heads", 6),
                ("scale", -0.5),
                ("gate", True),
                ("key_width", None),
                ("kind", "off"),
                ("word", "x y"),
                ("of", (1, 2.5)),
            ),
        ),
        None,
    ),
]


@pytest.mark.parametrize(("text", "value", "layers"), PATTERNS)
def test_text_and_python_give_the_same_pattern(text, value, layers):
    assert parse(text) == value
    assert parse(str(value)) == value
    if layers:
        expanded = ["|".join(str(part) for part in layer) for layer in expand(value, 7)]
        assert expanded == layers.split()


def test_white_space_is_ignored():
    assert parse("  3 *a\n +\tb ") == parse("3*a+b")


ERRORS = [
    ("", 0, "expected a layer's name, a count or '('"),
    ("3*", 2, "expected a layer's name, a count or '(', got the end"),
    ("a +", 3, "got the end"),
    ("a b", 2, "expected '+', '*', '|' or the end, got 'b'"),
    ("a ~ b", 2, "cannot read '~'"),
    ("a(x={y: 1})", 4, "cannot read '{'; define a layer with nested fields under layers"),
    ("a*b", 1, "'*' takes a count and a layer"),
    ("2.5*a", 0, "expected an integer count, got '2.5'"),
    ("0*a", 0, "at least 1, got 0"),
    ("b + a*0", 6, "at least 1, got 0"),
    ("a@[0, 2, 0] else c", 1, "'@' needs distinct layers, got [0, 2, 0]"),
    ("3", 1, "expected '*' and a layer after the count 3"),
    ("(a + b", 6, "expected ')'"),
    ("a + b | c", 6, "'|' takes single layers, got 'a + b'"),
    ("2*a | b", 4, "'|' takes single layers, got '2*a'"),
    ("a(heads", 7, "expected '=' and a value"),
    ("a(heads=)", 8, "expected a number"),
    ("a(heads=6, heads=7)", 11, "expected a field of a that is not set yet, got 'heads'"),
    ('a(kind="\\q")', 7, "expected a JSON string"),
    ("a(heads=6 kind=x)", 10, "expected ',' or ')'"),
    ("a@[2]", 5, "expected 'else'"),
    ("a@2 else b", 2, "expected '['"),
    ("a@[2.5] else b", 3, "expected a layer index, such as attention@[2, 7]"),
    ("a + b@[2] else c", 5, "'@' takes single layers, got 'a + b'"),
    ("2*(a@[1] else b)", 4, "expected ')'"),
    ("spread(a) else b", 8, "expected ',' and a count or a percentage"),
    ("spread(a, 0) else b", 0, "got 0"),
    ("spread(a, 120%) else b", 0, "a fraction between 0 and 1, got 1.2"),
    ("spread(2*a, 1) else b", 0, "'spread' takes single layers, got '2*a'"),
]


@pytest.mark.parametrize(("text", "column", "sentence"), ERRORS)
def test_an_error_marks_the_position_and_says_what_was_expected(text, column, sentence):
    with pytest.raises(PatternError) as caught:
        parse(text)
    message, shown, caret = str(caught.value).split("\n")
    assert sentence in message
    assert shown == f"    {text}"
    assert caret == " " * (4 + column) + "^"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("a@[7] else b", "layer 7 is outside a depth of 7 (0 to 6)"), ("spread(a, 8) else b", "8 layers do not fit")],
)
def test_layers_outside_the_depth_are_refused(text, sentence):
    with pytest.raises(PatternError, match="depth of 7") as caught:
        expand(parse(text), 7)
    assert sentence in str(caught.value)


def test_at_and_spread_cannot_be_nested_in_other_operators():
    for wrong in (lambda: 2 * At(a, [1], over=b), lambda: a + Spread(a, 1, over=b)):
        with pytest.raises(PatternError, match="place layers of the whole stack"):
            wrong()


def test_spread_gaps_differ_by_at_most_one():
    for depth in range(1, 40):
        for count in range(1, depth + 1):
            layers = expand(Spread(a, count, over=b), depth)
            indices = [i for i, layer in enumerate(layers) if layer == (a,)]
            gaps = {later - earlier for earlier, later in itertools.pairwise(indices)}
            assert len(indices) == count
            assert not gaps or max(gaps) - min(gaps) <= 1
            assert abs(indices[0] - (depth - 1 - indices[-1])) <= 1


def test_a_huge_count_is_expanded_lazily():
    assert expand(10**12 * a + b, 3) == [(a,)] * 3


def test_configs_compose_to_patterns():
    gdn = GatedDeltaNet(heads=6)
    assert expand(2 * gdn + (gdn | GatedDeltaNet()), 4) == [(gdn,), (gdn,), (gdn, GatedDeltaNet()), (gdn,)]
    assert 3 * gdn == gdn * 3 != 2 * gdn


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(" * 3000 + "kda" + ")" * 3000, "nested too deeply"),
        ("9" * 5000 + "*kda", "a count has at most 9 digits"),
        ("kda + " * 5000 + "$", "cannot read '$'"),
    ],
    ids=["parentheses", "digits", "length"],
)
def test_a_hostile_pattern_is_refused_in_a_short_message(text, message):
    with pytest.raises(PatternError, match=re.escape(message)) as raised:
        parse(text)
    assert len(str(raised.value)) < 600


@pytest.mark.parametrize(
    ("text", "depth", "missing"),
    [
        ("3*kda + mla", 3, ["mla"]),
        ("3*kda + mla", 4, []),
        ("kda + mla + kda", 2, []),
        ("mamba2@[0] else kda + mla + kda", 3, []),
        ("mla@[0] else spread(gla, 1) else kda + mla", 2, ["kda"]),
        ("kda(heads=2) + mla + kda(heads=4) + kda(heads=4)", 2, ["kda(heads=4)"]),
        ("(kda | mla)@[0] else mla + kda", 2, []),
        ("mla@[1] else kda + gla", 2, ["gla"]),
        ("mla@[1] else kda + gla", 4, []),
        ("kda | mla", 1, []),
        ("spread(mla, 1) else kda", 1, ["kda"]),
    ],
)
def test_names_that_no_layer_reaches_are_found(text, depth, missing):
    assert [str(name) for name in unreached(parse(text), depth)] == missing
