"""User errors: exit code 2, one sentence on stderr, no traceback and nothing on stdout."""

import copy
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils._pytree import tree_structure

from deltazoo.cli.terminal.errors import report_user_errors, user_error_message

CASES = {
    "unknown mixer": (
        ("show", "gated_deltanett"),
        "deltazoo: unknown mixer, backend or preset 'gated_deltanett'; did you mean 'gated_deltanet'?",
    ),
    "a name like no other": (("show", "nope"), "unknown mixer, backend or preset 'nope'. Known: "),
    "part of a device's name": (
        ("show", "kda", "--device-name", "H200"),
        "'AMD Instinct MI300X', got 'H200'; did you mean 'NVIDIA H200'?",
    ),
    "an option whose field has another name": (
        ("train", "gated-deltanet-small", "--lr", "nan"),
        "deltazoo: --lr must be a finite number, got nan",
    ),
    "unknown preset": (("build", "gated-deltanet-h3"), "unknown preset 'gated-deltanet-h3'; did you mean"),
    "no such file": (("build", "nowhere.yaml"), "nowhere.yaml"),
    "a folder to build": (("build", "/usr"), "/usr is a folder: give a stack file, such as /usr/stack.yaml"),
    "a folder to show": (("show", "/usr"), "/usr is a folder: give a stack file, such as /usr/stack.yaml"),
    "a pattern as the stack": (
        ("build", "2*kda + attention"),
        "'2*kda + attention' is a pattern and no file or preset: set the field pattern (--pattern) and the sizes",
    ),
    "a mixer as the stack": (("build", "kda"), "'kda' is a pattern and no file or preset: set the field pattern"),
    "no fields to build": (("build",), "needs width, depth, pattern, got none of them"),
    "too few fields to build": (
        ("build", "--pattern", "kda", "--depth", 2),
        "needs width, depth, pattern, got depth, pattern",
    ),
    "unknown layer": (("build", "--pattern", "gdnx", "--width", "8", "--depth", "1", "--vocab", "9"), "'gdnx'"),
    "bad width": (("build", "gated-deltanet", "--width", "wide"), "'--width'"),
    "unknown field to set": (
        ("build", "deltanet-swa", "--set", "layers.sliding_window.windw=3"),
        "layers.sliding_window.windw: unknown key; did you mean 'window'?",
    ),
    "invalid plot suffix": (("build", "gated-deltanet-small", "--plot", "x.txt"), "'x.txt'"),
    "unknown stack to compare": (("diff", "samba", "sambo"), "did you mean 'samba'"),
    "invalid save suffix": (("build", "gated-deltanet-small", "--save", "x.txt"), "'x.txt'"),
    "too wide": (
        ("show", "kda", "--width", "10000000000000"),
        "not enough memory: the size of a tensor exceeds 64 bits",
    ),
    "wider than an int64": (("show", "kda", "--width", "9" * 30), "not enough memory: the size of a tensor exceeds"),
    "true as a number": (
        ("build", "gated-deltanet-small", "--set", "width=true"),
        "width must be an integer, got True",
    ),
    "too deep": (("build", "gated-deltanet-small", "--depth", "2000000000"), "depth must be at most 10000"),
    "a file as save folder": (
        ("build", "gated-deltanet-small", "--save", "/dev/null/x.yaml"),
        "/dev/null/x.yaml cannot be written: /dev/null is not a folder",
    ),
    "unknown kind": (("list", "mixer"), "'mixer'"),
    "unknown device": (("show", "kda", "--device", "tpu9"), "'tpu9'"),
    "no stack to train": (("train",), "give a FILE or a PRESET, model in --config, or --resume FOLDER"),
    "no steps": (("train", "gated-deltanet-small", "--steps", "0"), "steps must be at least"),
    "missing device": (("train", "gated-deltanet-small", "--device", "cuda:99"), "got 'cuda:99'"),
    "no text": (("train", "gated-deltanet-small", "--text", "/no/text"), "/no/text: No such file or directory"),
    "a folder as text": (
        ("train", "gated-deltanet-small", "--text", "/"),
        "/ has no index.json: encode it with deltazoo data / --out DATA",
    ),
    "no checkpoint": (("train", "--resume", "/no/run"), "/no/run is not a checkpoint folder: it does not exist"),
    "resume with settings": (
        ("train", "samba", "--resume", "/no/run", "--out", "x", "--batch", "9", "--lr", "1", "--no-compile"),
        "--resume takes the stack and the folder of the run, so omit samba and --out; to branch a run, resume a copy",
    ),
    "no model to generate with": (("generate", "/no/run"), "/no/run is not a checkpoint folder"),
    "negative temperature": (
        ("generate", "/no/run", "--temperature", "-1"),
        "temperature must be at least 0",
    ),
    "unknown shape": (("bench", "--shape", "cpux"), "unknown shape 'cpux'; did you mean 'cpu'?"),
    "bad sizes": (("bench", "--shape", "H=2 K=x"), "K must be an integer"),
    "unknown size": (("bench", "--shape", "H=2 K=4 T=3 Z=1"), "Z: unknown field. Known: name, B"),
    "misspelt size": (("bench", "--shape", "T=4 H=2 KK=16"), "K is required; KK: unknown field; did you mean 'K'?"),
    "no update": (("bench", "--mixer", "attention"), "'attention' has no update"),
    "unknown direction": (
        ("bench", "--directions", "forwrd"),
        "deltazoo: --directions must be 'forward', 'backward' or 'decode', got 'forwrd'; did you mean 'forward'?",
    ),
    "unknown backend": (("bench", "--backends", "referense"), "did you mean 'reference'?"),
    "unknown baseline": (("bench", "--backends", "reference", "--baseline", "fla"), "got 'fla'"),
    "no check": (("check", "/no/check.yaml"), "/no/check.yaml"),
    "unknown option": (("list", "--jsn"), "--jsn"),
    "unknown command": (("lst",), "lst"),
}


@pytest.mark.parametrize(("arguments", "message"), CASES.values(), ids=CASES)
def test_a_user_error_is_one_sentence_with_exit_code_2(run, arguments, message):
    result = run(*arguments)
    assert result.code == 2
    assert message in " ".join(result.err.replace("│", " ").split())
    assert result.out == ""
    assert "Traceback" not in result.err


def test_an_unknown_key_in_a_file_suggests_the_nearest(run, tmp_path):
    path = tmp_path / "stack.yaml"
    path.write_text("{width: 16, depth: 1, vocab: 256, pattern: gated_deltanet, dpeth: 3}")
    result = run("build", path)
    assert result.code == 2
    assert "dpeth" in result.err
    assert "did you mean 'depth'?" in result.err


def test_check_refuses_a_file_of_another_kind_in_one_sentence(run, stack_file, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.touch()
    for path, got in ((stack_file, "{'depth': 2, "), (empty, "None\n")):
        message = run("check", path).err
        assert message.startswith(
            f"deltazoo: {path} is not a check file: it must have the keys spec and shapes, got {got}"
        )


def test_binary_and_short_texts_are_refused(run, stack_file, tmp_path):
    for data, message in ((b"\x7fELF\0\0" * 9, "must contain text, got a binary file"), (b"few", "at least 20 bytes")):
        path = tmp_path / "text"
        path.write_bytes(data)
        result = run("train", stack_file, "--text", path)
        assert result.code == 2
        assert str(path) in result.err
        assert message in result.err


def test_debug_raises_the_error(run):
    from deltazoo import DeltazooError

    with pytest.raises(DeltazooError, match="unknown preset"):
        run("--debug", "build", "nothing")
    assert run("build", "nothing").code == 2


def test_other_errors_keep_their_traceback():
    assert user_error_message(RuntimeError("a bug")) is None
    assert user_error_message(BrokenPipeError(32, "Broken pipe")) is None


def test_the_cli_imports_neither_torch_nor_pydantic():
    code = "import sys, deltazoo.cli; print([name for name in ('torch', 'triton', 'pydantic') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_every_command_has_a_json_option(ok):
    commands = "list show build train generate evaluate bench check tune merge-tables doctor demo schema"
    for command in commands.split():
        assert "--json" in ok(command, "--help").out


def test_a_part_without_effect_is_one_warning_on_stderr(run):
    result = run("build", "olmo-hybrid-tiny", "--depth", "3", "--json")
    assert result.code == 0
    unreached = "attention in the pattern '3*gated_deltanet + attention' is not reached"
    assert result.err == f"deltazoo: warning: {unreached}: depth=3 has no layer for it\n"
    assert result.json["stack"]["depth"] == 3


def test_an_interrupted_command_says_so(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("deltazoo.blocks.data.text.load_text", interrupt)
    result = run("demo")
    assert (result.code, result.err) == (130, "\ndeltazoo: interrupted\n")


def test_warnings_of_torch_about_its_own_code_are_not_printed():
    def command():
        copy.deepcopy(tree_structure(0))  # warns in torch 2.13, as a hit of the compilation cache does
        for module in ("torch", "torch.utils._pytree", "copyreg", "torchao.quantization"):
            warnings.warn_explicit(f"deprecated in {module}", FutureWarning, f"{module}.py", 1, module=module)

    with pytest.warns(FutureWarning) as printed:
        report_user_errors(command)()
    assert [str(warning.message) for warning in printed] == ["deprecated in torchao.quantization"]
