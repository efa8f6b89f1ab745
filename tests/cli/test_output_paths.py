"""Every command that writes a file creates the missing folders of its path, and refuses a folder that is a file."""

import json

import pytest

from deltazoo import StackSpec

BENCH = (
    "bench",
    "--shape",
    "plain",
    "--rounds",
    3,
    "--seconds",
    0.1,
    "--backends",
    "reference",
    "--directions",
    "decode",
)


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"version": 3, "device": "NVIDIA H200", "records": []}))
    return path


def commands(tmp_path, table, stack_file):
    """Return the commands that write a file, without its path."""
    return {
        "stack.yaml": ("build", stack_file, "--save"),
        "stack.svg": ("build", stack_file, "--plot"),
        "bench.md": (*BENCH, "--markdown"),
        "bench.png": (*BENCH, "--plot"),
        "merged.json": ("merge-tables", table, "--out"),
    }


@pytest.mark.parametrize("name", ["stack.yaml", "stack.svg", "bench.md", "bench.png", "merged.json"])
def test_missing_folders_of_an_output_are_created(ok, run, tmp_path, table, stack_file, name):
    command = commands(tmp_path, table, stack_file)[name]
    path = tmp_path / "new" / "folder" / name
    ok(*command, path)
    assert path.stat().st_size > 0
    below_a_file = table / name
    result = run(*command, below_a_file)
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert f"{below_a_file} cannot be written: {table} is not a folder" in result.err


def test_an_output_that_is_a_folder_is_refused(run, tmp_path, stack_file):
    folder = tmp_path / "folder.yaml"
    folder.mkdir()
    result = run("build", stack_file, "--save", folder)
    assert (result.code, result.err) == (2, f"deltazoo: {folder} is a folder: give the path of a file to write\n")


def test_a_saved_stack_and_a_run_below_a_file_are_refused(run, tmp_path, table, stack_file, text_file):
    StackSpec.load(stack_file).save(tmp_path / "a" / "b" / "stack.json")
    assert StackSpec.load(tmp_path / "a" / "b" / "stack.json") == StackSpec.load(stack_file)
    result = run("train", stack_file, "--text", text_file, "--out", table / "run", "--steps", 1, "--no-compile")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "is a file" in result.err
