"""`diff` lists the fields in which two stacks differ."""

import itertools

from deltazoo.blocks import preset
from deltazoo.blocks.inspect.diff import Difference, diff
from deltazoo.blocks.spec import document, presets
from deltazoo.blocks.spec.assemble import assemble
from deltazoo.blocks.spec.stack_spec import StackSpec


def test_equal_stacks_have_no_differences():
    result = diff(preset("samba-tiny"), preset("samba-tiny"))
    assert (result.same_model, result.differences) == (True, [])


def test_changed_fields_are_listed_with_both_values():
    changed = assemble("deltanet-swa-tiny", settings=["width=32", "layers.sliding_window.window=8", "mlp.bias=true"])
    assert diff(preset("deltanet-swa-tiny"), changed).differences == [
        Difference(path="width", a=64, b=32),
        Difference(path="layers.sliding_window.window", a=16, b=8),
        Difference(path="mlp.bias", a=False, b=True),
    ]


def test_fields_of_one_stack_have_one_value():
    nested, plain = preset("nemotron-h-tiny"), preset("falcon-h1-tiny")
    rows = {row.path: row for row in diff(nested, plain).differences}
    mlp = {path: row.a for path, row in rows.items() if path.startswith("layers.mlp.")}
    assert mlp == {
        "layers.mlp.mixer": "none",
        "layers.mlp.mlp.width": 192,
        "layers.mlp.mlp.activation": "relu2",
        "layers.mlp.mlp.gated": False,
    }
    assert rows["layers.mlp.mlp.gated"].model_fields_set == {"path", "a"}
    assert rows["layers.mlp.mlp.gated"].cells() == ["layers.mlp.mlp.gated", "false", ""]
    assert rows["layers.attention.mixer.heads"].model_fields_set == {"path", "a"}
    assert rows["layers.attention.heads"].b == 2


def test_mlps_of_another_type_are_compared_by_the_fields_that_are_set():
    a, b = preset("qwen3-next-tiny"), preset("qwen3.5-tiny")
    assert [row.cells() for row in diff(a, b).differences] == [
        ["mlp.type", "moe", "dense"],
        ["mlp.width", "32", "128"],
        ["mlp.experts", "4", ""],
        ["mlp.shared_width", "32", ""],
        ["mlp.shared_gate", "true", ""],
    ]
    patterns = diff(preset("jamba-tiny"), b).differences
    cells = {row.path: row.cells()[1:] for row in patterns}
    assert cells["mlp"] == ["dense + moe", ""]
    assert cells["mlps.moe.type"] == ["moe", ""]
    assert cells["mlp.type"] == ["", "dense"]


def test_the_cells_are_yaml_of_the_values():
    names = presets.names()
    for a, b in itertools.pairwise(names):
        for row in diff(preset(a), preset(b)).differences:
            for side, cell in zip("ab", row.cells()[1:], strict=True):
                assert not isinstance(getattr(row, side), dict), row
                if side in row.model_fields_set:
                    assert document.parse_value(cell, row.path) == getattr(row, side)


def test_renamed_layers_differ_but_describe_the_same_model():
    a, b = (StackSpec(width=8, depth=1, vocab=9, pattern=n, layers={n: {"mixer": "kda", "heads": 2}}) for n in "ab")
    result = diff(a, b)
    assert result.same_model
    assert [row.cells() for row in result.differences] == [
        ["pattern", "a", "b"],
        ["layers.a.mixer", "kda", ""],
        ["layers.a.heads", "2", ""],
        ["layers.b.mixer", "", "kda"],
        ["layers.b.heads", "", "2"],
    ]
