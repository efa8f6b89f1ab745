"""Measure `deltazoo train` on GPUs: python train.py [seconds] [gpus] [parts]; rows are printed as they are measured.

Parts, separated by commas; default: several,speed,curves. "several": the command on each GPU at once, and on all of
them with DDP and FSDP2. "speed": the training step that `deltazoo bench --model` times; the command on one GPU, and
with packed documents; the first step of a process with warm caches; the time for which checkpoints of all GPUs stop the
training. "curves": the losses of one GPU and of several with the same rows. Rows of one GPU run at the same time, each
on its own; a row and the one it is compared with use the same GPU. "cpu" as the number of GPUs rehearses all rows with
tiny models on two CPU processes.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from statistics import median

import torch

BEGIN = time.monotonic()
SECONDS = float(sys.argv[1]) if len(sys.argv) > 1 else 230.0
REHEARSAL = sys.argv[2:3] == ["cpu"]
GPUS = 2 if REHEARSAL else int(sys.argv[2]) if len(sys.argv) > 2 else torch.cuda.device_count()
PARTS = (sys.argv[3] if len(sys.argv) > 3 else "several,speed,curves").split(",")
OUT = Path(os.environ.get("OUT", "build/train"))
WORK = Path(tempfile.gettempdir()) / "deltazoo-train"  # checkpoints of several GB, outside $OUT
STACKS = {
    "395M": "{width: 2048, depth: 6, vocab: 32000, pattern: gated_deltanet, tied: true}",
    "1.3B": "",  # the preset gated-deltanet-1.3b
    "small": "{width: 512, depth: 4, vocab: 257, pattern: 3*gated_deltanet + attention, tied: true}",
}
LENGTH, ROWS = 4096, {"395M": 8, "1.3B": 4}  # sequences per GPU and step
if REHEARSAL:
    tiny = "{width: 32, depth: 2, vocab: 257, pattern: gated_deltanet(heads=2), tied: true}"
    STACKS, LENGTH = dict.fromkeys(STACKS, tiny), 64


def left() -> float:
    return SECONDS - (time.monotonic() - BEGIN)


def row(label: str, /, **figures: object) -> None:
    line = f"{label:40s}" + "  ".join(f"{key} {value}" for key, value in figures.items())
    print(line, flush=True)
    with (OUT / "rows.txt").open("a") as file:
        file.write(line + "\n")


def stack_file(name: str) -> str:
    if not STACKS[name]:
        return "gated-deltanet-1.3b"
    path = WORK / f"{name}.yaml"
    path.write_text(STACKS[name] + "\n")
    return str(path)


def environment_of(gpu: int | None) -> dict[str, str]:
    environment = dict(os.environ)
    if gpu is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(GPUS)))).split(",")
        environment["CUDA_VISIBLE_DEVICES"] = visible[gpu]
    return environment


def finished(label: str, command: list[str], gpu: int | None) -> str | None:
    """Run a command, on one GPU unless it is None; return its stdout, or print a row and return None."""
    if left() < 15:
        row(label, skipped="no time left")
        return None
    environment = environment_of(gpu)
    log = OUT / f"{label.replace(' ', '-').replace('/', '')}.txt"
    with log.with_suffix(".err").open("w") as errors, log.open("w") as output:
        process = subprocess.Popen([sys.executable, *command], stdout=output, stderr=errors, env=environment)
        try:
            process.wait(left() - 10)
        except subprocess.TimeoutExpired:
            process.terminate()  # a launcher ends its processes
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            row(label, failed="no time left")
            return None
    if process.returncode:
        row(label, failed=log.with_suffix(".err").read_text().strip().splitlines()[-1:])
        return None
    return log.read_text()


def bench(name: str, steps: int = 16) -> None:
    """Print the tokens/s of the step that `bench --model` times: bfloat16 weights, fused AdamW."""
    from deltazoo.blocks.inspect.model_calls import OurCalls
    from deltazoo.blocks.spec.stack_spec import StackSpec

    device = "cpu" if REHEARSAL else "cuda"
    spec = StackSpec.load(stack_file(name))
    tokens = torch.randint(spec.vocab, (ROWS[name], LENGTH), device=device)
    step = OurCalls(spec, None, tokens, torch.bfloat16).training_step()
    seconds = []
    for _ in range(2 if REHEARSAL else steps):
        start = time.perf_counter()
        step()
        if not REHEARSAL:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    print(tokens.numel() / median(seconds[len(seconds) // 2 :]))


def bench_step(name: str, gpu: int) -> float:
    label = f"{name} bench step"
    arguments = [__file__, "230", "cpu" if REHEARSAL else "1", f"bench={name}"]
    found = finished(label, arguments, gpu)
    if found is None:
        return 0.0
    row(label, tokens_s=f"{float(found):,.0f}")
    return float(found)


def command(name: str, folder: Path, gpus: int, rows: int, steps: int, *options: str) -> list[str]:
    return [
        "-m", "deltazoo", "train", stack_file(name), "--out", str(folder), "--device", "cpu" if REHEARSAL else "cuda",
        "--precision", "bfloat16", "--batch", str(rows), "--length", str(LENGTH), "--steps", str(steps),
        "--set", "evaluation.batches=1", "--set", "checkpoint.best=false", "--set", "checkpoint.keep=1", "--json",
        *(["--gpus", str(gpus)] if gpus > 1 else []), *(["--no-compile"] if REHEARSAL else []), *options,
    ]  # fmt: skip


def folder_of(label: str) -> Path:
    """Return the folder of a run, which does not exist."""
    folder = WORK / "runs" / label.replace(" ", "-").replace("/", "")
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def train(label: str, name: str, gpus: int, gpu: int | None, rows: int, steps: int, *options: str) -> dict:
    """Run the command and return its JSON output; {} if it fails."""
    folder = folder_of(label)
    found = finished(label, command(name, folder, gpus, rows, steps, *options), gpu)
    shutil.rmtree(folder, ignore_errors=True)
    return {} if found is None else json.loads(found)


def steady(label: str, name: str, gpus: int, gpu: int | None, *options: str) -> float:
    """Run the command for three points without a checkpoint, kill it, and return tokens/s of the last point.

    During the first point memory for checkpoints is pinned.
    """
    folder, steps = folder_of(label), 2 if REHEARSAL else 12
    every = ("--every", str(steps), "--set", "checkpoint.every=100000", "--text", str(WORK / "text.txt"))
    arguments = command(name, folder, gpus, ROWS[name] * gpus, 100000, *every, *options)
    points: list[dict] = []
    with (OUT / f"{label.replace(' ', '-')}.err").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, *arguments], stdout=errors, stderr=errors, env=environment_of(gpu), start_new_session=True
        )
        while process.poll() is None and len(points) < 3 and left() > 2:
            time.sleep(0.2)
            with suppress(OSError, json.JSONDecodeError):
                lines = (folder / "metrics.jsonl").read_text().splitlines()
                points = [point for point in map(json.loads, lines) if point.get("tokens_per_second")]
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)
    speeds = [point["tokens_per_second"] for point in points]
    if not speeds:
        row(label, failed=(OUT / f"{label.replace(' ', '-')}.err").read_text().strip().splitlines()[-1:])
        return 0.0
    last = points[-1]
    row(
        label, tokens_s=" ".join(f"{x:,.0f}" for x in speeds), peak=f"{100 * (last.get('peak_share') or 0):.1f}%",
        GiB=f"{last.get('memory_gib') or 0:.1f}", data=f"{100 * last['data_share']:.2f}%",
    )  # fmt: skip
    return float(speeds[-1])


def several(name: str, modes: tuple[str, ...]) -> None:
    """Compare one run on all GPUs with runs on each GPU at the same time."""
    with ThreadPoolExecutor(GPUS) as pool:
        alone = list(pool.map(lambda gpu: steady(f"{name} GPU {gpu} alone", name, 1, gpu), range(GPUS)))
    row(f"{name} {GPUS} GPUs alone", tokens_s=f"{sum(alone):,.0f}", slowest_times_gpus=f"{GPUS * min(alone):,.0f}")
    for mode in modes:
        label = f"{name} {mode} {GPUS} GPUs"
        share(f"{label} / alone", steady(label, name, GPUS, None, "--parallel", mode), sum(alone) * all(alone))


def speed(label: str, name: str, gpus: int, gpu: int | None, rows: int = 0, *options: str) -> float:
    """Print a row, and return tokens/s of the first point.

    A checkpoint ends the run. On several GPUs the larger model has another in the middle of a longer run: a save waits
    until the one before is written.
    """
    start, steps = time.monotonic(), 2 if REHEARSAL else 16
    saves, points = (2, 3) if gpus > 1 and name == "1.3B" else (1, 2)
    every = ("--every", str(steps), "--set", f"checkpoint.every={points * steps}", "--text", str(WORK / "text.txt"))
    found = train(label, name, gpus, gpu, rows or ROWS[name] * gpus, points * saves * steps, *every, *options)
    if not found:
        return 0.0
    first, last = found["points"][1], found["points"][-1]
    row(
        label, tokens_s=f"{first['tokens_per_second']:,.0f}", at_the_end=f"{last['tokens_per_second']:,.0f}",
        peak=f"{100 * (first['peak_share'] or 0):.1f}%", GiB=f"{first['memory_gib'] or 0:.1f}",
        data=f"{100 * first['data_share']:.2f}%", first_step_s=f"{found['first_step_s']:.1f}",
        first_call_s=f"{found['first_call_s']:.1f}", wall_s=f"{time.monotonic() - start:.0f}",
        stops_s=" ".join(f"{x:.2f}" for x in found["checkpoint_stops_s"]),
    )  # fmt: skip
    return float(first["tokens_per_second"])


def share(label: str, figure: float, reference: float) -> None:
    if figure and reference:
        row(label, share=f"{100 * figure / reference:.1f}%")


def one_gpu(name: str, gpu: int) -> float:
    """Measure the bench step and the command, and with warm caches the first step of another process."""
    reference = bench_step(name, gpu)
    label = f"{name} one GPU"
    found = speed(label, name, 1, gpu)
    share(f"{label} / bench step", found, reference)
    if name == "395M":
        again = train(
            f"{name} first step", name, 1, gpu, ROWS[name], 2, "--every", "2", "--text", str(WORK / "text.txt")
        )
        if again:
            row(f"{name} first step, warm", s=f"{again['first_step_s']:.1f}", call_s=f"{again['first_call_s']:.1f}")
    return found


def packing(gpu: int) -> None:
    """Compare rows of documents of mean length 700 with rows that are one document each."""
    draw, lines = random.Random(0), []
    while sum(map(len, lines)) < 4_000_000:
        size = min(8000, max(20, int(draw.expovariate(1 / 700))))
        lines.append(json.dumps({"text": "".join(draw.choices("etaoin shrdlu", k=size))}))
    (WORK / "documents.jsonl").write_text("\n".join(lines) + "\n")
    source, folder = str(WORK / "documents.jsonl"), str(WORK / "data")
    shutil.rmtree(folder, ignore_errors=True)
    data = ["-m", "deltazoo", "data", source, "--tokenizer", "bytes", "--held-out", "0.05", "--out", folder]
    if finished("deltazoo data", data, gpu) is None:
        return
    dense = speed("395M dense 4 rows", "395M", 1, gpu, 4)
    packed = speed("395M packed 4 rows", "395M", 1, gpu, 4, "--text", folder)
    share("395M packed / dense", packed, dense)


def losses(label: str, gpus: int, gpu: int | None, steps: int, *options: str) -> dict[int, float]:
    """Return the validation loss by step of a small hybrid on Python sources."""
    steps = 6 if REHEARSAL else steps
    every = ("--every", str(max(2, steps // 10)), "--length", "64" if REHEARSAL else "512", "--lr", "1e-3")
    found = train(label, "small", gpus, gpu, 32, steps, *every, *options)
    return {point["step"]: point["validation_bits"] for point in found["points"]} if found else {}


def compare(label: str, first: dict[int, float], second: dict[int, float]) -> None:
    if first and second:
        worst = max(abs(second[step] - bits) / bits for step, bits in first.items())
        last = max(first)
        row(label, largest_difference=f"{worst:.1e}", last=f"{first[last]:.4f} {second[last]:.4f}", points=len(first))


def curves(gpu: int) -> Callable[[], None]:
    """Train on one GPU twice, with other passes; return what compares them with several GPUs."""
    wide = ("--precision", "float32", "--backend", "compile")
    one = losses("curve one GPU", 1, gpu, 300)
    split = losses("curve one GPU, 4 passes", 1, gpu, 300, "--set", "batch.micro_rows=8")
    compare("bf16 300 steps, one GPU, 1 / 4 passes", one, split)
    float32 = losses("curve float32 one GPU", 1, gpu, 20, *wide)

    def on_several() -> None:
        for mode in ("fsdp", "ddp"):
            found = losses(f"curve {mode} {GPUS} GPUs", GPUS, None, 300, "--parallel", mode)
            compare(f"bf16 300 steps, one / {GPUS} GPUs {mode}", one, found)
        found = losses(f"curve float32 {GPUS} GPUs", GPUS, None, 20, "--parallel", "ddp", *wide)
        compare(f"float32 20 steps, one / {GPUS} GPUs ddp", float32, found)

    return on_several


def main() -> None:
    for folder in (OUT, WORK):
        folder.mkdir(parents=True, exist_ok=True)
    if PARTS[0].startswith("bench="):
        bench(PARTS[0].removeprefix("bench="))
        return
    (WORK / "text.txt").write_bytes(bytes(32 + i * 7 % 90 for i in range(1 << 20)) * 4)
    name = "CPU" if REHEARSAL else torch.cuda.get_device_name()
    row("device", name=name, gpus=GPUS, torch=torch.__version__)
    if GPUS > 1 and "several" in PARTS:
        several("1.3B", ("fsdp",))
        several("395M", ("fsdp", "ddp"))
    with ThreadPoolExecutor(1 if REHEARSAL else GPUS) as pool:
        lanes = [pool.submit(one_gpu, name, n % GPUS) for n, name in enumerate(("395M", "1.3B")) if "speed" in PARTS]
        if "speed" in PARTS:
            pool.submit(packing, 2 % GPUS).add_done_callback(lambda done: done.result())
        curved = pool.submit(curves, 3 % GPUS) if "curves" in PARTS else None
        for lane in lanes:
            lane.result()
    if GPUS > 1 and "speed" in PARTS:
        speed(f"1.3B fsdp {GPUS} GPUs, checkpoints", "1.3B", GPUS, None, 0, "--parallel", "fsdp")
    if GPUS > 1 and curved is not None:
        curved.result()()
    row("time", s=f"{time.monotonic() - BEGIN:.0f}")
    shutil.rmtree(WORK, ignore_errors=True)


if __name__ == "__main__":
    main()
