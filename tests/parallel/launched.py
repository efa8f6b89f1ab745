"""Run `deltazoo train` in several gloo processes, with a fault that a process injects into itself.

DELTAZOO_FAULT is "rank:step:what": before that step the process with this rank kills itself, hangs, receives a signal,
fills its disk, or gets NaN as its loss. With what = "write", "digest", "complete" or "rename" it kills itself while it
writes its checkpoint number `step`: after the tensors, before a digest, before the folder gets its name, right after.
DELTAZOO_ROWS names a folder: each process appends the digests of the rows that it reads, see `rows_read`. Without both
`run` is the plain command.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

STACK = (
    "{width: 16, depth: 2, vocab: 256, mlp: {width: 16},"
    " pattern: 'gated_deltanet(heads=1) + sliding_window(heads=1, window=4)'}\n"
)
QUICK = (
    "--length", "12", "--batch", "4", "--every", "3", "--steps", "8", "--backend", "reference", "--no-compile",
    "--precision", "float64", "--warmup", "2", "--lr", "0.01",
)  # fmt: skip


_NOTES = ("amdsmi", "parameters; weights, gradients and optimizer")  # the second: of a run on a GPU


class Ended(NamedTuple):
    """How a command ended; err has no progress lines."""

    code: int
    out: str
    err: list[str]


def prepare(folder: Path) -> list[str]:
    """Write a stack and a text; return the arguments that train on them."""
    (folder / "stack.yaml").write_text(STACK)
    (folder / "text.txt").write_text("".join(f"{n} green bottles hanging on the wall\n" for n in range(300)))
    return [str(folder / "stack.yaml"), "--text", str(folder / "text.txt"), *QUICK]


def run(arguments: Sequence[str], fault: str = "", send: int | None = None) -> Ended:
    """Run `deltazoo train` with the fault. Args: send: a signal to the launcher, once a checkpoint is reported."""
    environment = {**os.environ, "DELTAZOO_FAULT": fault, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}
    command = [sys.executable, str(Path(__file__)), "train", *arguments]
    with subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        head = ""
        if send is not None:
            while not head.splitlines() or head.splitlines()[-1].split()[:1] != ["3"]:
                head += process.stdout.readline()
            process.send_signal(send)
        out, err = process.communicate(timeout=120)
    lines = [line for line in err.splitlines() if not line.startswith("training")]
    return Ended(process.returncode, head + out, [line for line in lines if not any(text in line for text in _NOTES)])


def main() -> None:
    """Run the command; its processes run this file, too."""
    from deltazoo.blocks.parallel import launch
    from deltazoo.cli import main as command

    elastic = launch.launch

    def launch_this_file(module: str, arguments: Sequence[str], processes: int) -> None:
        elastic("launched", arguments, processes)

    launch.launch = launch_this_file
    rank, step, what = (os.environ.get("DELTAZOO_FAULT") or "-1:0:").split(":")
    if os.environ.get("RANK", "0") == rank:
        if what in _WRITING:
            _kill_in_write(int(step), what)
        else:
            _inject(int(step), what)
    if os.environ.get("DELTAZOO_ROWS"):
        _record_rows(Path(os.environ["DELTAZOO_ROWS"]) / f"{os.getpid()}.jsonl")
    command()


def rows_read(folder: Path) -> dict[tuple[int, int], set[str]]:
    """Return the digests of all readings of each row by step and index in the step, over all processes."""
    rows: dict[tuple[int, int], set[str]] = {}
    for file in folder.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            with suppress(json.JSONDecodeError):  # the last line of a process that was killed
                step, first, digests = json.loads(line)
                for n, digest in enumerate(digests):
                    rows.setdefault((step, first + n), set()).add(digest)
    return rows


def _record_rows(path: Path) -> None:
    from deltazoo.blocks.training.source import Rows, ShardSource

    rows, begin = ShardSource.rows, ShardSource.begin
    places: list[Any] = []

    def begin_at(source: ShardSource, config: Any, place: Any, state: Any) -> None:
        places.append(place)
        begin(source, config, place, state)

    def record(source: ShardSource, step: int, index: int) -> Rows:
        found, place = rows(source, step, index), places[-1]
        pairs = zip(found.tokens, found.targets, strict=True)
        digests = [hashlib.sha1(x.numpy().tobytes() + y.numpy().tobytes()).hexdigest() for x, y in pairs]
        with path.open("a") as file:
            file.write(json.dumps([step, (index * place.ranks + place.rank) * place.rows, digests]) + "\n")
        return found

    ShardSource.rows, ShardSource.begin = record, begin_at


_WRITING = ("write", "digest", "complete", "rename")


def _kill_in_write(number: int, what: str) -> None:
    from deltazoo.blocks.checkpoints import sharded

    def die(place: str) -> None:
        if number < 0 and what == place:
            os.kill(os.getpid(), signal.SIGKILL)

    def dying_before(place: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def dying(*arguments: Any) -> Any:
            die(place)
            return call(*arguments)

        return dying

    write_data = sharded._Writer.write_data

    def write_and_die(writer: Any, plan: Any, planner: Any) -> Any:
        nonlocal number
        number -= 1
        written = write_data(writer, plan, planner)
        die("write")
        return written

    sharded._Writer.write_data = write_and_die
    sharded._digest = dying_before("digest", sharded._digest)
    sharded._complete = dying_before("complete", sharded._complete)
    sharded.saved_steps = dying_before("rename", sharded.saved_steps)  # called after the folder has got its name


def _inject(at: int, what: str) -> None:
    import torch

    from deltazoo.blocks.training.run import Run
    from deltazoo.blocks.training.step import Stepper

    take_step, losses = Run._take_step, Stepper.losses
    state = {"step": -1}

    def step(run: Run, stop: bool) -> None:
        state["step"] = run.step
        if run.step == at:
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "hang":
                time.sleep(100)
            if what == "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            if what == "term":
                os.kill(os.getpid(), signal.SIGTERM)
            if what == "disk":
                import resource

                resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
        take_step(run, stop)

    def nan_losses(stepper: Stepper, rows: object, by_token: bool = False) -> object:
        found = losses(stepper, rows, by_token)
        if what == "nan" and state["step"] >= at and torch.is_grad_enabled():
            return found._replace(cross_entropy=found.cross_entropy * float("nan"))
        return found

    Run._take_step, Stepper.losses = step, nan_losses


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    main()
