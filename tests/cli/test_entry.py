"""The command itself: `python -m deltazoo`, --version and shell completion."""

import os
import platform
import shutil
import subprocess
import sys
from functools import cache
from importlib.metadata import version

import pytest

import deltazoo
from deltazoo.cli.terminal import completion

RUN = [sys.executable, "-m", "deltazoo"]


@cache
def output(*arguments: str, **environment: str) -> str:
    process = subprocess.run(
        [*RUN, *arguments], capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    return process.stdout


def test_python_m_deltazoo_is_the_command(tmp_path):
    assert "Usage: deltazoo [OPTIONS] COMMAND" in output("--help", COLUMNS="100")
    process = subprocess.run([*RUN, "build", "no-such-preset"], capture_output=True, text=True, check=False)
    assert process.returncode == 2
    assert process.stderr.startswith("deltazoo: unknown preset 'no-such-preset'")


SCRIPT = """
import sys
from deltazoo.cli import main
sys.path.remove("")  # a script has its own folder there
try:
    main()
except SystemExit:
    import near
"""


def test_the_script_finds_a_module_of_the_current_folder(tmp_path):
    (tmp_path / "near.py").write_text("print('found')")
    command = [sys.executable, "-c", SCRIPT, "--version"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert process.stdout.splitlines()[-1] == "found"


def test_version_prints_the_versions_of_what_computes(ok):
    lines = ok("--version").out.splitlines()
    assert lines[0] == f"deltazoo {deltazoo.__version__}"
    assert lines[1].startswith(f"python {platform.python_version()} ({platform.system()} ")
    assert lines[2] == f"torch {version('torch')}"
    assert lines[3].startswith("triton ")


def test_version_does_not_import_torch():
    code = (
        "import sys; sys.argv = ['deltazoo', '--version']; from deltazoo.cli import main\n"
        "try: main()\nexcept SystemExit: print([n for n in ('torch', 'triton') if n in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.endswith("[]\n")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("train qwen3-next", "qwen3-next qwen3-next-tiny"),
        ("show kd", "kda"),
        ("show fl", "fla flash_qla flashinfer"),
        ("diff jamba griffin-", "griffin-tiny"),
        ("bench --backends compile,refer", "compile,reference"),
        ("bench --backends compile,comp", ""),
        ("generate runs --device cu", "cuda"),
        ("bench --mixer gated_deltap", "gated_deltaproduct"),
        ("tune --mixer kda,rwkv7,rw", "kda,rwkv7,rwkv4 kda,rwkv7,rwkv6 kda,rwkv7,rwkv_channel_mix"),
        ("show kda --device-name AM", r"AMD\ Instinct\ MI300X"),
        ("tune --device-name A", r"AMD\ Instinct\ MI300X"),
        ("merge", "merge-tables"),
    ],
)
@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_bash_completes_names(words, expected, tmp_path):
    """The script that --show-completion prints, run by bash as after a TAB."""
    command = tmp_path / "deltazoo"
    command.write_text(f"#!/bin/sh\nexec {sys.executable} -m deltazoo\n")
    command.chmod(0o755)
    script = output("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    count = len(words.split())
    tab = (
        f'COMP_WORDS=(deltazoo {words}) COMP_CWORD={count}\n_deltazoo_completion {command}\necho "${{COMPREPLY[*]}}"\n'
    )
    process = subprocess.run(["bash", "-c", script + tab], capture_output=True, text=True, check=True)
    assert process.stdout.split() == expected.split()


def test_completion_imports_no_torch():
    code = (
        "import sys; from deltazoo.cli.terminal import completion as c\n"
        "c.complete_name(''), c.complete_stack(''), c.complete_backends(''), c.complete_mixers('')\n"
        "assert c.complete_device_name('NVIDIA H2') == ['NVIDIA H200']\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_completion_lists_every_mixer_backend_and_preset():
    names = set(completion.complete_name(""))
    assert {*deltazoo.presets(), "kda", "gated_deltanet", "triton", "reference"} <= names
