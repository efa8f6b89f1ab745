"""YAML 1.2 and JSON files: scalar types, round trips, and error messages."""

from pathlib import Path

import pytest
import yaml

from deltazoo.backends.errors import ConfigError
from deltazoo.blocks import document

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
        ("missing/x.yaml", None, "cannot read"),
    ],
)
def test_errors_name_the_file_and_the_problem(tmp_path: Path, name: str, text: str | None, sentence: str):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=sentence.replace("(", "\\(")):
        document.read(tmp_path / name)
