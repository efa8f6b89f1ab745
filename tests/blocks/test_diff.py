"""`diff` lists the fields in which two stacks differ."""

from deltazoo.blocks import preset
from deltazoo.blocks.assemble import assemble
from deltazoo.blocks.inspect.diff import Difference, diff
from deltazoo.blocks.spec import StackSpec


def test_equal_stacks_have_no_differences():
    result = diff(preset("samba-tiny"), preset("samba-tiny"))
    assert (result.same_model, result.differences) == (True, [])


def test_changed_fields_are_listed_with_both_values():
    changed = assemble("deltanet-swa-tiny", settings=["width=32", "layers.sliding_window.window=8", "mlp.bias=true"])
    assert diff(preset("deltanet-swa-tiny"), changed).differences == [
        Difference(path="width", a=64, b=32),
        Difference(path="mlp.bias", a=False, b=True),
        Difference(path="layers.sliding_window.window", a=16, b=8),
    ]


def test_fields_and_layers_of_one_stack_have_one_value():
    nested, plain = preset("nemotron-h-tiny"), preset("falcon-h1-tiny")
    rows = {row.path: row for row in diff(nested, plain).differences}
    assert rows["layers.mlp"].model_fields_set == {"path", "a"}
    mlp = {"width": 192, "activation": "relu2", "gated": False}
    assert rows["layers.mlp"].a == {"mixer": "none", "mlp": mlp}
    assert rows["layers.mlp"].cells()[2] == ""
    assert rows["layers.attention.mixer.heads"].model_fields_set == {"path", "a"}
    assert rows["layers.attention.heads"].b == 2


def test_renamed_layers_differ_but_describe_the_same_model():
    a, b = (StackSpec(width=8, depth=1, vocab=9, pattern=n, layers={n: {"mixer": "kda", "heads": 2}}) for n in "ab")
    result = diff(a, b)
    assert result.same_model
    assert [row.cells() for row in result.differences] == [
        ["pattern", "a", "b"],
        ["layers.a", "{mixer: kda, heads: 2}", ""],
        ["layers.b", "", "{mixer: kda, heads: 2}"],
    ]
