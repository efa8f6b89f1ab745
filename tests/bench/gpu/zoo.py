"""Time every mixer's layer beside FLA's: python zoo.py [OUT] [MIXER...]

Width 2048, 4 x 4096 tokens, bf16, forward and backward; then decoding of 64 rows after 512 tokens. All layers are
first compiled, each in a process of its own with empty caches, which gives the time of the first call; the timed run
shares these caches. The layers are spread over all visible GPUs. Needs a CUDA device.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

import torch

TRAINING = ("--shape", "B=4 T=4096", "--directions", "forward,backward")
DECODING = ("--shape", "B=64 T=512", "--directions", "decode")
COMMON = ("--width", "2048", "--dtype", "bfloat16", "--device", "cuda")
PEER = ("--peer", "fla")
PER_GPU = 6  # processes that compile on one GPU at a time: each takes up to 10 GB of its memory


def main() -> None:
    from deltazoo.backends.update import registry

    out = Path(sys.argv[1] if len(sys.argv) > 1 else "zoo")
    names = sys.argv[2:] or registry.names(registry.MIXERS)
    with tempfile.TemporaryDirectory() as caches:
        compile_layers(names, out, Path(caches))
        time_layers(names, out, Path(caches))
    print(torch.cuda.get_device_name())


def compile_layers(names: list[str], out: Path, caches: Path) -> None:
    """Compile all layers and write the seconds of their first calls to OUT/first_calls.json."""
    seconds: dict[str, dict[str, float | list[str] | None]] = {}

    def compile_one(name: str, gpu: str) -> None:
        with tempfile.TemporaryDirectory() as own:
            seconds[name] = first_calls(name, environment(gpu, Path(own)))
            print(name, "first calls, s:", seconds[name], flush=True)
            shutil.copytree(own, caches, dirs_exist_ok=True)
        for options in (TRAINING, DECODING):  # only compiles FLA's kernels
            bench(["--layer", name, *PEER, *options, "--seconds", "0.1"], environment(gpu, caches))

    out.mkdir(parents=True, exist_ok=True)
    spread(compile_one, names, gpus() * PER_GPU)
    (out / "first_calls.json").write_text(json.dumps(seconds, indent=1))


def first_calls(name: str, variables: dict[str, str]) -> dict[str, float | list[str] | None]:
    """Return the seconds of a layer's first call by direction, or why it failed."""
    seconds: dict[str, float | list[str] | None] = {}
    for options in (TRAINING, DECODING):
        text = bench(["--layer", name, *options, "--rounds", "3", "--seconds", "0.1", "--json"], variables)
        rows = json.loads(text)["rows"] if text else []
        seconds |= {row["direction"]: row["first_call_s"] or row["refused"] for row in rows}
    return seconds


def time_layers(names: list[str], out: Path, caches: Path) -> None:
    """Time all layers beside FLA's, one process per GPU, into OUT/training_GPU.md and OUT/decoding_GPU.md."""
    devices = gpus()

    def time_part(part: int, gpu: str) -> None:
        layers = [argument for name in names[part :: len(devices)] for argument in ("--layer", name)]
        for label, options in (("training", TRAINING), ("decoding", DECODING)):
            table = ["--markdown", str(out / f"{label}_{part}.md"), "--seconds", "1"]
            with open(out / f"{label}_{part}.txt", "w") as rows:  # as they are measured
                bench([*layers, *PEER, *options, *table], environment(gpu, caches), rows)

    spread(time_part, range(len(devices)), devices)


def bench(options: list[str], variables: dict[str, str], output: IO[str] | int = subprocess.PIPE) -> str:
    """Run `deltazoo bench` and return what it prints, or write it to a file."""
    command = [sys.executable, "-m", "deltazoo", "bench", *options, *COMMON]
    return subprocess.run(command, env=variables, stdout=output, stderr=subprocess.DEVNULL, text=True).stdout


def environment(gpu: str, caches: Path) -> dict[str, str]:
    """Return the environment of a process that sees one GPU and keeps its compiled code in a folder."""
    folders = {"TRITON_CACHE_DIR": f"{caches}/t", "TORCHINDUCTOR_CACHE_DIR": f"{caches}/i"}
    return os.environ | folders | {"CUDA_VISIBLE_DEVICES": gpu}


def gpus() -> list[str]:
    """Return the visible GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]


def spread(function: Callable[[Any, str], None], items: Iterable[Any], places: list[str]) -> None:
    """Call function(item, GPU) for every item, one call per entry of `places` at a time."""
    free: SimpleQueue[str] = SimpleQueue()
    for place in places:
        free.put(place)

    def call(item: Any) -> None:
        gpu = free.get()
        try:
            function(item, gpu)
        finally:
            free.put(gpu)

    pool = ThreadPoolExecutor(len(places))
    try:
        list(pool.map(call, items))
    finally:
        pool.shutdown(cancel_futures=True)


if __name__ == "__main__":
    main()
