"""`deltazoo train` on several gloo processes equals one process, and survives what ends a run."""

import json
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launched import Ended, prepare, run
from typer.testing import CliRunner

import deltazoo
from deltazoo.blocks.checkpoints.sharded import saved_steps, step_folder
from deltazoo.blocks.parallel.config import ParallelConfig
from deltazoo.blocks.parallel.launch import LOST_CONNECTION
from deltazoo.blocks.parallel.ranks import Ranks, check_sizes
from deltazoo.blocks.parallel.watchdog import Watchdog
from deltazoo.cli import app

pytestmark = [
    pytest.mark.runs,
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo"),
]
EXACT = 1e-9
SKIP = ("--set", "optimizer.skips=2")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder of an uninterrupted run of one process, and the arguments of the command."""
    folder = tmp_path_factory.mktemp("whole")
    arguments = prepare(folder)
    ended = CliRunner().invoke(app, ["train", *arguments, "--out", str(folder / "run")])
    assert ended.exit_code == 0, ended.output
    return folder / "run", arguments


def losses(folder: Path) -> dict[int, float]:
    """Return the validation loss by step."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {record["step"]: record["validation_bits"] for record in records if "setting" not in record}


def assert_equal_runs(folder: Path, expected: Path, tolerance: float = EXACT) -> None:
    """Compare the curves and the weights."""
    actual, wanted = losses(folder), losses(expected)
    assert {step: actual[step] for step in wanted} == pytest.approx(wanted, rel=tolerance)
    weights = deltazoo.load(folder, backend="reference").state_dict()
    for name, weight in deltazoo.load(expected, backend="reference").state_dict().items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-6, atol=1e-7)


def one_line(ended: Ended) -> str:
    """Return the only line on stderr."""
    assert len(ended.err) == 1, ended
    return ended.err[0]


def test_fsdp_with_accumulation_equals_one_process(whole: tuple[Path, list[str]], tmp_path: Path) -> None:
    expected, arguments = whole
    options = ("--gpus", "2", "--parallel", "fsdp", "--set", "batch.micro_rows=1", "--set", "logging.groups=true")
    ended = run([*arguments, "--out", str(tmp_path / "run"), *options])
    assert (ended.code, ended.err) == (0, [])
    assert_equal_runs(tmp_path / "run", expected)
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    norms = last["gradient_norms"]
    assert sum(norm**2 for norm in norms.values()) ** 0.5 == pytest.approx(last["gradient_norm"], rel=1e-9)
    one = json.loads((expected / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=1e-7)


@pytest.mark.parallel
@pytest.mark.parametrize(
    "options",
    [
        ("--gpus", "2"),
        ("--gpus", "4", "--parallel", "fsdp", "--set", "parallel.shard=2"),
        ("--gpus", "2", "--context-parallel", "2", "--set", "parallel.layout=zigzag"),
        ("--gpus", "4", "--context-parallel", "2", "--parallel", "fsdp"),
    ],
    ids=["ddp", "hsdp", "context", "fsdp and context"],
)
def test_processes_equal_one(whole: tuple[Path, list[str]], tmp_path: Path, options: tuple[str, ...]) -> None:
    expected, arguments = whole
    ended = run([*arguments, "--out", str(tmp_path / "run"), *options, "--set", "evaluation.positions=true"])
    assert (ended.code, ended.err) == (0, [])
    assert_equal_runs(tmp_path / "run", expected)


@pytest.mark.parallel
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("--gpus", "2"), ("--gpus", "2", "--parallel", "fsdp")),
        (("--gpus", "2", "--parallel", "fsdp"), ()),
        (("--gpus", "4", "--parallel", "fsdp"), ("--gpus", "2", "--parallel", "ddp")),
        ((), ("--gpus", "2", "--parallel", "fsdp")),
    ],
    ids=["ddp to fsdp", "fsdp to one process", "four to two", "one to fsdp"],
)
def test_another_number_of_processes_resumes_up_to_rounding(
    whole: tuple[Path, list[str]], tmp_path: Path, before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    expected, arguments = whole
    assert run([*arguments, "--out", str(tmp_path / "run"), "--until", "5", *before]).code == 0
    ended = run(["--resume", str(tmp_path / "run"), *after])
    assert ended.code == 0, ended
    assert_equal_runs(tmp_path / "run", expected)


@pytest.mark.parallel
def test_as_many_processes_resume_bit_for_bit(whole: tuple[Path, list[str]], tmp_path: Path) -> None:
    _, arguments = whole
    options = ("--gpus", "2", "--parallel", "fsdp")
    for name, until in (("at once", "8"), ("in parts", "5")):
        assert run([*arguments, "--out", str(tmp_path / name), "--until", until, *options]).code == 0
    assert run(["--resume", str(tmp_path / "in parts"), "--gpus", "2"]).code == 0
    expected, actual = (deltazoo.load(tmp_path / name).state_dict() for name in ("at once", "in parts"))
    assert all(torch.equal(actual[name], weight) for name, weight in expected.items())
    assert losses(tmp_path / "in parts")[8] == losses(tmp_path / "at once")[8]


@pytest.mark.parallel
@pytest.mark.parametrize(
    ("fault", "code", "start", "then"),
    [
        (
            "1:4:kill",
            137,
            "rank 1 (process ",
            ") was ended by SIGKILL; continue with: deltazoo train --resume {run} --gpus 2",
        ),
        (
            "0:4:kill",
            137,
            "rank 0 (process ",
            ") was ended by SIGKILL; continue with: deltazoo train --resume {run} --gpus 2",
        ),
        ("1:4:hang", 3, "no progress for 4 s in ", " of step 5: rank 1 is at launched.py:"),
        (
            "1:4:freeze",
            3,
            "no progress for 4 s in ",
            " of step 5: rank 1 does not answer; the last checkpoint is of step 3",
        ),
        ("1:4:disk", 2, "cannot write {run}/checkpoints/step-000000006: rank 1: File too large; ", "of step 3 is kept"),
    ],
    ids=["kill", "kill the first", "hang", "freeze", "full disk"],
)
def test_a_fault_of_one_process_is_one_sentence_and_the_last_checkpoint_continues(
    whole: tuple[Path, list[str]], tmp_path: Path, fault: str, code: int, start: str, then: str
) -> None:
    expected, arguments = whole
    folder = tmp_path / "run"
    options = ("--gpus", "2", "--set", "parallel.timeout=4", "--set", "checkpoint.background=false")
    ended = run([*arguments, "--out", str(folder), *options], fault)
    assert ended.code == code, ended
    line = one_line(ended)
    assert line.startswith(f"deltazoo: {start.format(run=folder)}"), line
    assert then.format(run=folder) in line, line
    assert saved_steps(folder) == [3]
    assert run(["--resume", str(folder)]).code == 0
    assert_equal_runs(folder, expected)


@pytest.mark.parallel
def test_statistics_of_sharded_weights_are_refused_in_one_line(whole: tuple[Path, list[str]], tmp_path: Path) -> None:
    _, arguments = whole
    ended = run([*arguments, "--out", str(tmp_path / "run"), "--gpus", "2", "--parallel", "fsdp", "--watch"])
    assert ended.code == 2
    assert one_line(ended) == "deltazoo: logging.watch needs whole weights: use parallel.mode ddp, got fsdp"


@pytest.mark.parallel
def test_nan_of_one_process_skips_steps_and_names_it(whole: tuple[Path, list[str]], tmp_path: Path) -> None:
    expected, arguments = whole
    folder = tmp_path / "run"
    ended = run([*arguments, "--out", str(folder), "--gpus", "2", *SKIP], "1:3:nan")
    assert ended.code == 2
    assert ended.err[0].startswith("step 4 is skipped: ") and "the loss of rank 1 is not finite" in ended.err[0]
    assert ended.err[1].startswith("deltazoo: the training diverged after step 5: 2 steps in a row were skipped: ")
    assert ended.err[1].endswith(f"holds step 3: deltazoo train --resume {folder} --lr RATE continues from there")
    assert len(ended.err) == 2
    assert run(["--resume", str(folder), "--gpus", "2"]).code == 0
    assert_equal_runs(folder, expected)


@pytest.mark.parallel
@pytest.mark.parametrize("fault", ["1:4:term", ""], ids=["of one process", "of the launcher"])
def test_sigterm_saves_on_all_processes_and_says_how_to_continue(
    whole: tuple[Path, list[str]], tmp_path: Path, fault: str
) -> None:
    expected, arguments = whole
    folder = tmp_path / "run"
    ended = run([*arguments, "--out", str(folder), "--gpus", "2"], fault, None if fault else signal.SIGTERM)
    assert ended.code == 128 + signal.SIGTERM
    step = saved_steps(folder)[-1]
    assert one_line(ended) == (
        f"stopped by SIGTERM after step {step}; checkpoint in {folder}; continue with: deltazoo train --resume {folder}"
    )
    assert run(["--resume", str(folder), "--gpus", "2"]).code == 0
    assert_equal_runs(folder, expected)


@pytest.mark.parallel
def test_a_truncated_checkpoint_and_changed_data_are_found_by_all_processes(
    whole: tuple[Path, list[str]], tmp_path: Path
) -> None:
    expected, arguments = whole
    folder = tmp_path / "run"
    shutil.copytree(expected, folder)
    assert saved_steps(folder) == [6, 8]
    file = step_folder(folder, 8) / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-9])
    ended = run(["--resume", str(folder), "--gpus", "2"])
    assert ended.code == 0
    assert one_line(ended).endswith("; the checkpoint before it is of step 6: continuing from it")
    assert_equal_runs(folder, expected)
    text = Path(arguments[2])
    before = text.read_text()
    text.write_text(before.upper())
    try:
        ended = run(["--resume", str(folder), "--gpus", "2", "--steps", "9"])
    finally:
        text.write_text(before)
    assert ended.code == 2
    assert one_line(ended) == f"deltazoo: {text} has changed since the run was trained on it"


_BLOCKED = """
import signal, threading, time, torch.distributed as dist
from deltazoo.blocks.parallel import watchdog
from deltazoo.blocks.parallel.ranks import Ranks
watchdog._LOST = 0.5
dist.distributed_c10d._get_default_store = lambda: None
signal.signal(signal.SIGTERM, lambda *_: None)

def wait_for_figures():
    threading.Event().wait({wait})

with watchdog.Watchdog(Ranks(0, 2), 900, print, ({waiting!r},)) as dog:
    if {agreed}:
        dog.agree()
    print("ready", flush=True)
    wait_for_figures()
"""


@pytest.mark.parametrize(
    ("wait", "waiting", "agreed", "code"),
    [
        (30, "wait_for_figures", False, LOST_CONNECTION),
        pytest.param(3, "another", False, 0, marks=pytest.mark.parallel),
        pytest.param(3, "wait_for_figures", True, 0, marks=pytest.mark.parallel),
    ],
    ids=["waits for others", "is busy", "waits while others write"],
)
def test_a_process_that_waits_for_a_lost_one_ends_after_sigterm(
    wait: int, waiting: str, agreed: bool, code: int
) -> None:
    script = _BLOCKED.format(wait=wait, waiting=waiting, agreed=agreed)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == code


def test_a_watchdog_may_be_used_outside_of_the_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: None)
    errors: list[Exception] = []

    def use() -> None:
        try:
            with Watchdog(Ranks(0, 2), 900, print, ()) as dog:
                dog.beat("in step 1")
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert errors == []


def test_sizes_that_do_not_fit_are_refused() -> None:
    assert check_sizes(4, ParallelConfig(mode="fsdp", shard=2, context=2)) is None
    assert check_sizes(4, ParallelConfig(context=3)) == (
        "parallel.context must divide the number of processes, 4, got 3"
    )
    assert "parallel.shard must divide the number of processes, 4" in str(
        check_sizes(4, ParallelConfig(mode="fsdp", shard=3))
    )
