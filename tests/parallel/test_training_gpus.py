"""`deltazoo train` on four GPUs with NCCL equals one GPU, and survives what ends a run. Models are tiny, in float64."""

import signal
from pathlib import Path

import pytest
import torch
from launched import Ended, prepare, run
from test_training import SKIP, assert_equal_runs, one_line

from deltazoo.blocks.checkpoints.sharded import saved_steps

DEVICE = "cuda"
FOUR = ("--gpus", "4")
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs"),
]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder of an uninterrupted run on one GPU, and the arguments of the command."""
    folder = tmp_path_factory.mktemp("whole")
    arguments = [*prepare(folder), "--device", DEVICE]
    ended = run([*arguments, "--out", str(folder / "run")])
    assert ended.code == 0, ended
    return folder / "run", arguments


def assert_resumes(folder: Path, expected: Path, *options: str) -> None:
    """Continue a run to its end, and compare it with the uninterrupted one."""
    ended = run(["--resume", str(folder), *options])
    assert ended.code == 0, ended
    assert_equal_runs(folder, expected)


def killed(ended: Ended, folder: Path) -> bool:
    line = one_line(ended)
    start, end = "deltazoo: rank 1 (process ", f"deltazoo train --resume {folder} --gpus 4"
    return ended.code == 137 and line.startswith(start) and "was ended by SIGKILL" in line and line.endswith(end)


def hangs(ended: Ended, folder: Path) -> bool:
    line = one_line(ended)
    kept = f"; the last checkpoint is of step 3 in {folder}"
    return ended.code == 3 and ": rank 1 is at launched.py:" in line and line.endswith(kept)


def frozen(ended: Ended, folder: Path) -> bool:
    line = one_line(ended)
    kept = f"; the last checkpoint is of step 3 in {folder}"
    return ended.code == 3 and ": rank 1 does not answer" in line and line.endswith(kept)


@pytest.mark.parametrize(
    ("fault", "holds", "then"),
    [
        ("1:4:kill", killed, ("--gpus", "2")),
        ("1:4:freeze", frozen, ("--gpus", "1")),
        ("1:4:hang", hangs, ("--device", "cpu", "--gpus", "1")),
    ],
    ids=["kill", "freeze", "hang"],
)
def test_a_process_that_is_lost_is_named_and_fewer_continue(whole, tmp_path, fault, holds, then) -> None:
    expected, arguments = whole
    folder = tmp_path / "run"
    options = ("--set", f"parallel.timeout={60 if holds is killed else 10}", "--set", "checkpoint.background=false")
    ended = run([*arguments, "--out", str(folder), *FOUR, *options], fault)
    assert holds(ended, folder), ended
    assert saved_steps(folder) == [3]
    assert_resumes(folder, expected, *then)


@pytest.mark.parametrize("fault", ["1:4:term", ""], ids=["of one process", "of the launcher"])
def test_sigterm_saves_and_fsdp_continues_ddp(whole, tmp_path, fault) -> None:
    expected, arguments = whole
    folder = tmp_path / "run"
    ended = run([*arguments, "--out", str(folder), *FOUR], fault, None if fault else signal.SIGTERM)
    assert ended.code == 128 + signal.SIGTERM, ended
    step = saved_steps(folder)[-1]
    assert one_line(ended) == (
        f"stopped by SIGTERM after step {step}; checkpoint in {folder}; continue with: deltazoo train --resume {folder}"
    )
    assert_resumes(folder, expected, *FOUR, "--parallel", "fsdp")


def test_nan_of_one_process_skips_steps_and_names_it(whole, tmp_path) -> None:
    expected, arguments = whole
    folder = tmp_path / "run"
    ended = run([*arguments, "--out", str(folder), *FOUR, "--parallel", "fsdp", *SKIP], "1:3:nan")
    assert ended.code == 2, ended
    assert len(ended.err) == 2, ended
    assert ended.err[0].startswith("step 4 is skipped: ") and "the loss of rank 1 is not finite" in ended.err[0]
    assert ended.err[1].startswith("deltazoo: the training diverged after step 5: 2 steps in a row were skipped: ")
    assert_resumes(folder, expected, "--gpus", "2", "--parallel", "ddp")


@pytest.mark.parametrize(
    "options",
    [
        ("--set", "evaluation.positions=true"),
        ("--parallel", "fsdp", "--set", "parallel.shard=2"),
        ("--context-parallel", "4", "--set", "parallel.layout=zigzag"),
        ("--context-parallel", "2", "--parallel", "fsdp", "--set", "batch.micro_rows=1"),
    ],
    ids=["ddp", "hsdp", "context", "fsdp and context"],
)
def test_four_gpus_equal_one(whole, tmp_path, options) -> None:
    expected, arguments = whole
    ended = run([*arguments, "--out", str(tmp_path / "run"), *FOUR, *options])
    assert ended.code == 0, ended
    exchange = [line for line in ended.err if line.startswith("context parallelism: ")]
    assert ended.err == exchange and len(exchange) == ("--context-parallel" in options), ended
    assert_equal_runs(tmp_path / "run", expected)
