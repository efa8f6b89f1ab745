"""Time every mixer's layer beside FLA's: python zoo.py [OUT] [MIXER...]

Width 2048, 4 x 4096 tokens, bf16, forward and backward; then decoding of 64 rows after 512 tokens. All layers are
first compiled in parallel processes, with caches on disk that the timed run shares; that first run reports the first
call of each layer, in a process of its own with empty caches. Needs a CUDA device.
"""

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

TRAINING = ("--shape", "B=4 T=4096", "--directions", "forward,backward")
DECODING = ("--shape", "B=64 T=512", "--directions", "decode")
COMMON = ("--width", "2048", "--dtype", "bfloat16", "--device", "cuda")


def main() -> None:
    from deltazoo.backends.update import registry

    out = Path(sys.argv[1] if len(sys.argv) > 1 else "zoo")
    out.mkdir(parents=True, exist_ok=True)
    names = sys.argv[2:] or registry.names(registry.MIXERS)
    with tempfile.TemporaryDirectory() as caches:
        workers = max(1, min(len(names), (os.cpu_count() or 2) - 2))
        with ThreadPoolExecutor(workers) as pool:
            first = dict(zip(names, pool.map(lambda name: first_calls(name, caches), names), strict=True))
        for name, seconds in first.items():
            print(name, "first calls, s:", seconds, flush=True)
        layers = [part for name in names for part in ("--layer", name)]
        for label, options in (("training", TRAINING), ("decoding", DECODING)):
            table = out / f"{label}.md"
            environment = os.environ | {"TRITON_CACHE_DIR": f"{caches}/t", "TORCHINDUCTOR_CACHE_DIR": f"{caches}/i"}
            command = ["--peer", "fla", *layers, *options, *COMMON, "--markdown", str(table), "--seconds", "2"]
            subprocess.run([sys.executable, "-m", "deltazoo", "bench", *command], env=environment, check=False)
    print(torch.cuda.get_device_name())


def first_calls(name: str, caches: str) -> dict[str, float | list[str] | None]:
    """Compile one layer in a process of its own with its own caches, then add these to the shared ones."""
    environment = os.environ | {"TRITON_CACHE_DIR": f"{caches}/t", "TORCHINDUCTOR_CACHE_DIR": f"{caches}/i"}
    seconds: dict[str, float | list[str] | None] = {}
    for options in (TRAINING, DECODING):
        command = ["--layer", name, *options, *COMMON, "--rounds", "3", "--seconds", "0.1", "--json"]
        run = subprocess.run(
            [sys.executable, "-m", "deltazoo", "bench", *command], env=environment, capture_output=True, text=True
        )
        rows = json.loads(run.stdout)["rows"] if run.stdout else []
        seconds |= {row["direction"]: row["first_call_s"] or row["refused"] for row in rows}
    return seconds


if __name__ == "__main__":
    main()
