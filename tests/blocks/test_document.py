"""YAML 1.2 and JSON files: scalar types, round trips, and error messages."""

import time
from pathlib import Path

import pytest
import yaml

from deltazoo.backends.io import yaml_text
from deltazoo.backends.io.errors import ConfigError
from deltazoo.blocks.spec import document
from deltazoo.blocks.spec.stack_spec import StackSpec

TEXT = """
word: off
also: yes
number: 1e-5
point: .5
whole: 3
ten: 010
hex: 0x10
octal: 0o10
time: 1:04
truth: true
nothing: null
date: 2024-01-01
nested: {list: [1, no, 2.0]}
"""
VALUES = {
    "word": "off", "also": "yes", "number": 1e-5, "point": 0.5, "whole": 3, "ten": 10, "hex": 16,
    "octal": 8, "time": "1:04", "truth": True, "nothing": None,
    "date": "2024-01-01", "nested": {"list": [1, "no", 2.0]},
}  # fmt: skip


def test_yaml_scalars_follow_version_1_2():
    read = document.parse(TEXT, ".yaml", "text")
    assert read == VALUES
    assert [type(value) for value in read.values()] == [type(value) for value in VALUES.values()]


@pytest.mark.parametrize("name", ["x.yaml", "x.yml", "x.json"])
def test_write_and_read_round_trip(tmp_path: Path, name: str):
    document.write(tmp_path / name, VALUES)
    assert document.read(tmp_path / name) == VALUES


def test_pyyaml_reads_the_same_values(tmp_path: Path):
    document.write(tmp_path / "x.yaml", VALUES)
    assert yaml.safe_load((tmp_path / "x.yaml").read_text()) == VALUES


def test_strings_that_look_like_other_types_stay_strings():
    data = {"a": ["1e5", "0o17", "off", "null", "1_000", "2024-01-01", "true", "~", "", "1.", "x: y", "a # b", "é"]}
    for text in (yaml_text.dump(data), f"a: {yaml_text.dump_inline(data['a'])}"):
        assert document.parse(text, ".yaml", "") == yaml.safe_load(text) == data


def test_a_value_without_mappings_is_on_one_line_if_it_fits():
    shared = {"mixer": "kda", "heads": 2}
    data = {"width": 3, "layers": {"a": shared, "b": {"mixer": [shared, shared], "long": [*range(100, 140)]}}}
    assert yaml_text.dump(data, 60) == (
        "width: 3\nlayers:\n  a: {mixer: kda, heads: 2}\n  b:\n    mixer:\n"
        "    - {mixer: kda, heads: 2}\n    - {mixer: kda, heads: 2}\n    long:\n"
        + "".join(f"    - {n}\n" for n in range(100, 140))
    )
    inner = {
        "layers": {"a": {"mixer": [shared, shared], "mlp": "none", "short": [1, 2]}},
        "flat": {"list": [1, 2], "x": 3},
    }
    assert yaml_text.dump(inner) == (
        "layers:\n  a:\n    mixer:\n    - {mixer: kda, heads: 2}\n    - {mixer: kda, heads: 2}\n    mlp: none\n"
        "    short: [1, 2]\nflat: {list: [1, 2], x: 3}\n"
    )
    assert yaml_text.dump_inline(shared) == "{mixer: kda, heads: 2}"


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("x.yaml", "a: 1\nb: 2\na: 3\n", "the key 'a' is repeated in line 3"),
        ("x.yaml", "a: 1\na: 3\n", "x.yaml: the key 'a' is repeated in line 2"),
        ("x.yaml", "a: 1\n? [b, c]\n: 2\n", "a key must be a name, got a list or a mapping in line 2"),
        ("x.json", '{"a": ' * 9000, "cannot be read"),
        ("x.json", '{"a": 1, "a": 2}', "the key 'a' is repeated"),
        ("x.yaml", "- 1\n", "must contain a mapping"),
        ("x.yaml", "a: [1\n", "cannot be read"),
        ("x.json", "{", "cannot be read"),
        ("x.yaml", "", "must contain a mapping"),
        ("x.toml", "a = 1", "must end in .yaml, .yml, .json"),
        ("missing/x.yaml", None, r"cannot read \S*/missing/x\.yaml: No such file or directory$"),
        ("x.yaml", "a: 1\nb: !color red\n", "a value must not have a tag, got '!color' in line 2$"),
        ("x.yaml", "a: !!python/name:os.system x\n", "a value must not have a tag, got .*os.system' in line 1$"),
    ],
)
def test_errors_name_the_file_and_the_problem(tmp_path: Path, name: str, text: str | None, sentence: str):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=sentence.replace("(", "\\(")):
        document.read(tmp_path / name)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(ConfigError, match=rf"^cannot write {tmp_path}/x\.yaml: No space left on device$"):
        document.write(tmp_path / "x.yaml", VALUES)


def nested_aliases(levels: int, merge: bool = False) -> str:
    """A text of a few hundred bytes that describes 9 ** levels values."""
    lines = ["a0: &a0 {x: 1}" if merge else "a0: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9]"]
    for i in range(1, levels):
        aliases = ", ".join([f"*a{i - 1}"] * 9)
        lines.append(f"a{i}: &a{i} {{<<: [{aliases}]}}" if merge else f"a{i}: &a{i} [{aliases}]")
    return "\n".join(lines)


HOSTILE = {
    "nested aliases": (nested_aliases(9), "at most 10,000 values, aliases expanded, got"),
    "nested merges": (nested_aliases(12, merge=True), "at most 10,000 values"),
    "aliases in a chain": (
        "\n".join(["a0: &a0 []", *(f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 99))]),
        "levels deep, got 100",
    ),
    "a value in itself": ("width: &a [*a]", "a value must not contain itself, as that in line 1 does"),
    "deep lists": ("width: " + "[" * 200 + "]" * 200, "nested at most 50 levels deep, got more"),
    "very deep lists": ("width: " + "[" * 500, "nested at most 50 levels deep, got more"),
    "a long integer": ("width: " + "9" * 10_000, "cannot be read"),
}


@pytest.mark.parametrize(("text", "message"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_yaml_is_refused_at_once_in_a_short_message(tmp_path: Path, text: str, message: str):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    start = time.process_time()
    with pytest.raises(ConfigError) as raised:
        StackSpec.load(path)
    assert time.process_time() - start < 1
    assert message in str(raised.value)
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize("text", ['{"a": ' + "[" * 300 + "]" * 300 + "}", '{"a": ' + "9" * 10_000 + "}"])
def test_hostile_json_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        StackSpec.load(path)
    assert len(str(raised.value)) < 500


def test_aliases_are_allowed():
    data = document.parse("a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}", ".yaml", "text")
    assert data == {"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1, "y": 2}}


def test_values_in_messages_are_cut():
    with pytest.raises(ConfigError) as raised:
        StackSpec(width=8, depth=1, vocab=9, pattern="kda", layers=[["x" * 1000] * 1000] * 1000)
    assert len(str(raised.value)) < 400
