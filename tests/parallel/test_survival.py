"""1,000 steps on real text, killed at random moments and resumed, equal an uninterrupted run, on a CPU and on GPUs.

At twice the learning rate rounding errors of float64 grow to 1e-3 within 400 steps, even without interruptions.

python -m pytest -m slow tests/parallel/test_survival.py; -s prints what happened. DELTAZOO_SEED draws other moments.
"""

import os
import random
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from launched import rows_read
from test_training import losses

import deltazoo

pytestmark = pytest.mark.slow
SEED = int(os.environ.get("DELTAZOO_SEED", "0"))
STEPS = 1000
STACK = (
    "{width: 16, depth: 2, vocab: 256, mlp: {width: 16},"
    " pattern: 'gated_deltanet(heads=1) + sliding_window(heads=1, window=16)'}\n"
)
WRITING = ("write", "digest", "complete", "rename")


class Setting(NamedTuple):
    """How a run is interrupted: numbers of processes and of rows per pass to draw from, and of interruptions.

    modes: of the processes, to draw from; rows: of a step.
    """

    precision: str
    processes: tuple[int, ...]
    micro_rows: tuple[int, ...]
    interruptions: int
    modes: tuple[str, ...] = ("ddp",)
    rows: int = 4
    device: str = "cpu"


SETTINGS = {
    "one process": Setting("float32", (1,), (4,), 8),
    "two processes": Setting("float32", (2,), (2,), 8),
    "other processes and passes": Setting("float64", (1, 2), (1, 2), 10),
    "up to four processes, DDP and FSDP2": Setting("float64", (4, 2, 1, 3), (12,), 6, ("ddp", "fsdp"), 12),
    "up to four GPUs, DDP and FSDP2": Setting("float64", (4, 2, 1, 3), (12,), 6, ("ddp", "fsdp"), 12, "cuda"),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of token shards of Python sources."""
    folder = tmp_path_factory.mktemp("data")
    sources = [str(Path(sysconfig.get_path("stdlib"), name)) for name in ("json", "email", "html")]
    command = ["data", *sources, "--tokenizer", "bytes", "--held-out", "0.1", "--out", str(folder / "shards")]
    subprocess.run([sys.executable, "-m", "deltazoo", *command, "--only", "*.py"], check=True, capture_output=True)
    (folder / "stack.yaml").write_text(STACK)
    return folder


class Attempt:
    """A process, perhaps a launcher of others, that trains and records its rows in a folder."""

    def __init__(self, arguments: Sequence[str], rows: Path, fault: str = "") -> None:
        rows.mkdir(exist_ok=True)
        self.rows, self.earlier = rows, {*rows.glob("*.jsonl")}
        environment = {**os.environ, "DELTAZOO_FAULT": fault, "DELTAZOO_ROWS": str(rows), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(Path(__file__).with_name("launched.py")), "train", *arguments]
        self.log = rows.with_suffix(".log").open("a")
        self.process = subprocess.Popen(command, env=environment, stdout=self.log, stderr=self.log)

    def trainers(self) -> list[int]:
        """Return the ids of the processes that have read rows, this one or those that it launched."""
        return [int(path.stem) for path in {*self.rows.glob("*.jsonl")} - self.earlier]

    def wait_for_steps(self, steps: int) -> bool:
        """Wait until a process has read `steps` steps; return False if the run ends before."""
        while self.process.poll() is None:
            new = {*self.rows.glob("*.jsonl")} - self.earlier
            if any(path.read_bytes().count(b"\n") >= steps for path in new):
                return True
            time.sleep(0.02)
        return False

    def end(self, seconds: float = 300) -> int:
        """Wait until all processes have ended; return the exit code."""
        code = self.process.wait(seconds)
        deadline = time.monotonic() + seconds
        while any(_lives(pid) for pid in self.trainers()):
            assert time.monotonic() < deadline, "a process outlives its launcher"
            time.sleep(0.05)
        self.log.close()
        return code


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def settings_of(data: Path, setting: Setting) -> list[str]:
    """Return the arguments of a run, without those of its processes."""
    return [
        str(data / "stack.yaml"), "--text", str(data / "shards"), "--batch", str(setting.rows), "--length", "32",
        "--steps", str(STEPS), "--every", "50", "--set", "checkpoint.every=20", "--set", "evaluation.batches=2",
        "--no-compile", "--precision", setting.precision, "--lr", "0.001", "--set", "parallel.timeout=60",
        "--device", setting.device, *(["--backend", "reference"] if setting.device == "cuda" else []),
    ]  # fmt: skip


def shape(processes: int, micro_rows: int, mode: str) -> list[str]:
    """Return the arguments of the processes of a run."""
    return ["--gpus", str(processes), "--parallel", mode, "--set", f"batch.micro_rows={micro_rows}"]


def uninterrupted(arguments: list[str], setting: Setting, folder: Path) -> Path:
    """Train without interruption; return the folder of the run."""
    processes = shape(setting.processes[0], setting.micro_rows[-1], setting.modes[0])
    attempt = Attempt([*arguments, "--out", str(folder / "run"), *processes], folder / "rows")
    assert attempt.end(1800) == 0, (folder / "rows.log").read_text()
    return folder / "run"


def interrupted(arguments: list[str], setting: Setting, folder: Path, draw: random.Random) -> Iterator[str]:
    """Train with interruptions, and yield what each was."""
    start = [*arguments, "--out", str(folder / "run")]
    for _ in range(setting.interruptions):
        processes, micro, mode = map(draw.choice, (setting.processes, setting.micro_rows, setting.modes))
        what = draw.choice(["kill all", "SIGTERM", draw.choice(WRITING), *["kill one", "kill launcher"][:processes]])
        if what == "kill one" and processes == 1:
            what = "kill all"
        rank = draw.randrange(processes) if what in ("write", "digest") else 0
        fault = f"{rank}:{draw.randrange(3)}:{what}" if what in WRITING else ""
        attempt = Attempt([*start, *shape(processes, micro, mode)], folder / "rows", fault)
        if not fault and attempt.wait_for_steps(draw.randrange(5, 2 * STEPS // setting.interruptions)):
            if what == "SIGTERM":
                attempt.process.send_signal(signal.SIGTERM)
            else:
                trainers = attempt.trainers()
                chosen = {"kill all": [attempt.process.pid, *trainers], "kill one": [draw.choice(trainers)],
                          "kill launcher": [attempt.process.pid]}[what]  # fmt: skip
                for pid in chosen:
                    os.kill(pid, signal.SIGKILL)
        code = attempt.end()
        saved = (folder / "run" / "checkpoints").is_dir() and any((folder / "run" / "checkpoints").glob("step-*"))
        yield f"{processes} processes, {mode}, {micro} rows per pass, {what}: exit code {code}"
        if code == 0:
            return
        if saved:
            start = ["--resume", str(folder / "run")]
    processes = shape(setting.processes[-1], setting.micro_rows[0], setting.modes[-1])
    code = Attempt([*start, *processes], folder / "rows").end(1800)
    assert code == 0, (folder / "rows.log").read_text()[-3000:]


def report(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_that_is_killed_and_resumed_equals_an_uninterrupted_one(data: Path, tmp_path: Path, name: str) -> None:
    setting = SETTINGS[name]
    if setting.device == "cuda" and torch.cuda.device_count() < max(setting.processes):
        pytest.skip(f"needs {max(setting.processes)} GPUs")
    begin = time.monotonic()
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    arguments = settings_of(data, setting)
    with ThreadPoolExecutor(1) as pool:
        expected = pool.submit(uninterrupted, arguments, setting, tmp_path / "whole")
        for line in interrupted(arguments, setting, tmp_path / "parts", random.Random(SEED)):
            report(f"{time.monotonic() - begin:4.0f} s  {line}")
        whole = expected.result()
    rows, wanted = rows_read(tmp_path / "parts" / "rows"), rows_read(tmp_path / "whole" / "rows")
    assert {*wanted} >= {(step, row) for step in range(STEPS) for row in range(setting.rows)}
    assert rows == wanted
    curve, curve_wanted = losses(tmp_path / "parts" / "run"), losses(whole)
    difference = max(abs(curve[step] / bits - 1) for step, bits in curve_wanted.items())
    seconds = time.monotonic() - begin
    report(f"{seconds:4.0f} s  {curve_wanted[STEPS]:.6f} bits per token, largest difference {difference:.1e}")
    assert curve_wanted[STEPS] < 0.7 * curve_wanted[0]
    exact = len(setting.processes) == 1
    assert {*curve} == {*curve_wanted}
    assert difference <= (0 if exact else 1e-9)
    weights = deltazoo.load(tmp_path / "parts" / "run", backend="reference").state_dict()
    for key, weight in deltazoo.load(whole, backend="reference").state_dict().items():
        assert torch.equal(weights[key], weight) if exact else torch.allclose(weights[key], weight, rtol=1e-6)
