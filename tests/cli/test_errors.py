"""The user's mistakes: exit code 2 and a sentence on stderr that names the thing; no traceback, nothing on stdout."""

import subprocess
import sys

import pytest

from deltazoo.cli.errors import mistake

CASES = {
    "unknown mixer": (("show", "gated_deltanett"), "'gated_deltanett'; did you mean 'gated_deltanet'?"),
    "unknown preset": (("build", "gated-deltanet-h3"), "unknown preset 'gated-deltanet-h3'; did you mean"),
    "no such file": (("build", "nowhere.yaml"), "nowhere.yaml"),
    "nothing to build": (("build",), "needs width, depth, vocab, pattern too"),
    "unknown layer": (("build", "--pattern", "gdnx", "--width", "8", "--depth", "1", "--vocab", "9"), "'gdnx'"),
    "bad width": (("build", "gated-deltanet", "--width", "wide"), "'--width'"),
    "unreadable save": (("build", "gated-deltanet-small", "--save", "x.txt"), "'x.txt'"),
    "nowhere to save": (("build", "gated-deltanet-small", "--save", "/no/folder/x.yaml"), "/no/folder/x.yaml"),
    "unknown kind": (("list", "mixer"), "'mixer'"),
    "unknown device": (("show", "kda", "--device", "tpu9"), "'tpu9'"),
    "nothing to train": (("train",), "give a FILE or a PRESET, or --resume FOLDER"),
    "no steps": (("train", "gated-deltanet-small", "--steps", "0"), "steps: Input should be greater than or equal"),
    "unseen device": (("train", "gated-deltanet-small", "--device", "cuda:99"), "got 'cuda:99'"),
    "no text": (("train", "gated-deltanet-small", "--text", "/no/text"), "/no/text: No such file or directory"),
    "a folder as text": (("train", "gated-deltanet-small", "--text", "/"), "/: Is a directory"),
    "no checkpoint": (("train", "--resume", "/no/run"), "/no/run is no checkpoint folder"),
    "resume and more": (("train", "--resume", "/no/run", "--steps", "9"), "{'steps': 9}"),
    "nothing to write with": (("generate", "/no/run"), "/no/run is no checkpoint folder"),
    "cold": (("generate", "/no/run", "--temperature", "-1"), "temperature: Input should be greater than or equal to 0"),
    "unknown shape": (("bench", "--shape", "cpux"), "unknown shape 'cpux'; did you mean 'cpu'?"),
    "bad sizes": (("bench", "--shape", "H=2 K=x"), "K: Input should be a valid integer"),
    "unknown size": (("bench", "--shape", "H=2 K=4 T=3 Z=1"), "Z: Extra inputs"),
    "no update": (("bench", "--mixer", "attention"), "'attention' has no update"),
    "unknown direction": (("bench", "--directions", "back"), "got 'back'"),
    "unknown backend": (("bench", "--backends", "referense"), "did you mean 'reference'?"),
    "unknown baseline": (("bench", "--backends", "reference", "--baseline", "fla"), "got 'fla'"),
    "no check": (("check", "/no/check.yaml"), "/no/check.yaml"),
    "unknown option": (("list", "--jsn"), "--jsn"),
    "unknown command": (("lst",), "lst"),
}


@pytest.mark.parametrize(("arguments", "names"), CASES.values(), ids=CASES)
def test_a_mistake_is_named_on_stderr_with_exit_code_2(run, arguments, names):
    said = run(*arguments)
    assert said.code == 2
    assert names in " ".join(said.err.replace("│", " ").split())
    assert said.out == ""
    assert "Traceback" not in said.err


def test_a_wrong_key_in_a_file_is_named_with_the_nearest(run, tmp_path):
    path = tmp_path / "stack.yaml"
    path.write_text("{width: 16, depth: 1, vocab: 256, pattern: gated_deltanet, dpeth: 3}")
    said = run("build", path)
    assert said.code == 2
    assert "dpeth" in said.err
    assert "did you mean 'depth'?" in said.err


def test_binary_and_short_texts_are_named(run, stack_file, tmp_path):
    for data, names in ((b"\x7fELF\0\0" * 9, "must hold text, got a binary file"), (b"few", "at least 20 bytes")):
        path = tmp_path / "text"
        path.write_bytes(data)
        said = run("train", stack_file, "--text", path)
        assert said.code == 2
        assert str(path) in said.err
        assert names in said.err


def test_debug_shows_the_traceback(run):
    from deltazoo import DeltazooError

    with pytest.raises(DeltazooError, match="unknown preset"):
        run("--debug", "build", "nothing")
    assert run("build", "nothing").code == 2


def test_what_is_not_the_user_s_mistake_is_not_hidden():
    assert mistake(RuntimeError("a bug")) is None
    assert mistake(BrokenPipeError(32, "Broken pipe")) is None


def test_help_and_version_come_without_torch():
    code = "import sys, deltazoo.cli; print([name for name in ('torch', 'triton', 'pydantic') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_version_is_the_package_s(ok):
    import deltazoo

    assert ok("--version").out == f"deltazoo {deltazoo.__version__}\n"


def test_every_command_takes_json(ok):
    commands = "list show build train generate bench check tune merge-tables doctor demo schema"
    for command in commands.split():
        assert "--json" in ok(command, "--help").out
