"""Time the triton backend beside its peers: python peers.py OUT.json LETTERS BACKEND,BACKEND,... [eager] [warm]

LETTERS select jobs of JOBS below. Calls are captured in CUDA graphs, or with `eager` queued; `warm` only fills the
compilation caches. Needs a CUDA device and the packages fla-core, flash-qla, tilelang with nvcc. At the first call
FlashQLA compiles for up to 40 s per kernel, and flash-linear-attention for two minutes; it tunes in each process.
"""

import json
import sys

import torch

from deltazoo import UpdateSpec
from deltazoo.backends.measure.benchmark import BenchConfig, bench
from deltazoo.backends.shapes import SHAPES

GATED, DELTA = UpdateSpec(decay="head", beta="head"), UpdateSpec(beta="head")
ADDITIVE = UpdateSpec(decay="head", transition="additive")
JOBS = {
    "p": (GATED, "pack_8x4096"),
    "d": (GATED, "dense_8x4096"),
    "g": (GATED, "pack_4x8192"),
    "1": (GATED, "dense_1x8192"),
    "3": (GATED, "dense_1x32768"),
    "x": (DELTA, "dense_8x4096"),
    "a": (ADDITIVE, "dense_8x4096"),
    "s": (GATED, "decode_64"),
}


def main() -> None:
    out, letters, backends, *options = sys.argv[1:]
    results = []
    for letter in letters:
        spec, shape = JOBS[letter]
        config = BenchConfig(
            directions=("decode",) if letter == "s" else ("forward", "backward"),
            device="cuda",
            dtype="bfloat16",
            seconds=0.01 if "warm" in options else 1.0,
            graphs=not {"eager", "warm"} & {*options},
            errors=letter == "p",
        )
        result = bench(spec, [SHAPES[shape]], backends.split(","), config)
        print(result.markdown(), flush=True)
        results.append(json.loads(result.model_dump_json()))
        with open(out, "w") as file:
            json.dump(results, file)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
