"""Measure `deltazoo train` on GPUs: python train.py [seconds] [gpus]; each row is printed as soon as it is measured.

Rows: the training step that `deltazoo bench --model` times; the command on one GPU; the command on several with DDP and
FSDP2, against so many times one GPU; with the first step of each process, and the time for which checkpoints stop the
training. The text is arbitrary: the losses mean nothing.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch

from deltazoo.blocks.inspect.model_calls import OurCalls
from deltazoo.blocks.spec.stack_spec import StackSpec

OUT = Path(os.environ.get("OUT", "build/train"))
STACKS = {
    "395M": "{width: 2048, depth: 6, vocab: 32000, pattern: gated_deltanet, tied: true}",
    "1.3B": None,  # the preset gated-deltanet-1.3b
}
LENGTH, ROWS = 4096, {"395M": 8, "1.3B": 4}  # sequences per GPU and step
BEGIN = time.monotonic()
SECONDS = float(sys.argv[1]) if len(sys.argv) > 1 else 230.0
GPUS = int(sys.argv[2]) if len(sys.argv) > 2 else torch.cuda.device_count()


def left() -> float:
    return SECONDS - (time.monotonic() - BEGIN)


def row(label: str, /, **figures: object) -> None:
    print(f"{label:44s}", "  ".join(f"{key} {value}" for key, value in figures.items()), flush=True)


def stack_file(name: str) -> str:
    if STACKS[name] is None:
        return "gated-deltanet-1.3b"
    path = OUT / f"{name}.yaml"
    path.write_text(STACKS[name] + "\n")
    return str(path)


def bench_step(name: str, steps: int = 12) -> float:
    """Return the tokens/s of the step that `bench --model` times: bfloat16, fused AdamW."""
    spec = StackSpec.load(stack_file(name))
    tokens = torch.randint(spec.vocab, (ROWS[name], LENGTH), device="cuda")
    step = OurCalls(spec, None, tokens, torch.bfloat16).training_step()
    for _ in range(3):
        step()
    seconds = []
    for _ in range(steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return tokens.numel() / median(seconds)


def command(label: str, name: str, gpus: int, steps: int, *options: str) -> dict:
    """Run the command, print a row, and return its figures; {} if it fails or the time is up."""
    if left() < 25:
        row(label, skipped="no time left")
        return {}
    folder = OUT / "runs" / label.replace(" ", "-").replace(",", "")
    arguments = [
        "train", stack_file(name), "--out", str(folder), "--text", str(OUT / "text.txt"), "--device", "cuda",
        "--precision", "bfloat16", "--batch", str(ROWS[name] * gpus), "--length", str(LENGTH), "--steps", str(steps),
        "--every", str(steps), "--set", "evaluation.batches=1", "--set", "checkpoint.best=false",
        "--set", "checkpoint.keep=1", "--gpus", str(gpus), "--json", *options,
    ]  # fmt: skip
    start = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "deltazoo", *arguments], capture_output=True, text=True, timeout=max(20, left())
        )
    except subprocess.TimeoutExpired:
        row(label, failed="timeout")
        return {}
    (OUT / f"{folder.name}.txt").write_text(done.stdout + done.stderr)
    if done.returncode:
        row(label, failed=done.stderr.strip().splitlines()[-1:])
        return {}
    training = json.loads(done.stdout)
    last = training["points"][-1]
    row(
        label, tokens_s=f"{last['tokens_per_second']:,.0f}", peak=f"{100 * (last['peak_share'] or 0):.1f}%",
        GiB=f"{last['memory_gib']:.1f}", data=f"{100 * last['data_share']:.2f}%",
        first_step_s=f"{training['first_step_s']:.1f}", wall_s=f"{time.monotonic() - start:.0f}",
        stops_s=" ".join(f"{x:.2f}" for x in training["checkpoint_stops_s"]),
    )  # fmt: skip
    shutil.rmtree(folder, ignore_errors=True)
    return {"speed": last["tokens_per_second"]}


def share(label: str, figures: dict, reference: float) -> None:
    if figures and reference:
        row(label, share=f"{100 * figures['speed'] / reference:.1f}%")


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "text.txt").write_bytes(bytes(32 + i * 7 % 90 for i in range(1 << 20)) * 2)
    row("device", name=torch.cuda.get_device_name(), gpus=GPUS, torch=torch.__version__)
    for name in os.environ.get("RUN_ONLY", "395M 1.3B").split():
        bench = 0.0
        try:
            bench = bench_step(name)
            row(f"{name} bench step", tokens_s=f"{bench:,.0f}")
        except torch.OutOfMemoryError as error:
            row(f"{name} bench step", failed=str(error).splitlines()[0])
        torch.cuda.empty_cache()
        one = command(f"{name} one GPU", name, 1, 24)
        share(f"{name} one GPU / bench step", one, bench)
        if GPUS > 1:
            modes = ("fsdp", "ddp") if name == "395M" else ("fsdp",)
            for mode in modes:
                several = command(f"{name} {mode} {GPUS} GPUs", name, GPUS, 24, "--parallel", mode)
                share(f"{name} {mode} / {GPUS} x one GPU", several, GPUS * one.get("speed", 0.0))
    for name, gpus in (("395M", 1), ("1.3B", GPUS)):
        command(f"{name} checkpoints", name, gpus, 36, "--parallel", "fsdp", "--set", "checkpoint.every=12")


if __name__ == "__main__":
    main()
