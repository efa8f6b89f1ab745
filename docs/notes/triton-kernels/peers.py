"""Time the triton backend beside its peers: python peers.py OUT.json [eager] [graphs] [fla] [flash_qla]

Needs a CUDA device and the packages fla-core, flash-qla, tilelang with nvcc. FlashQLA compiles for up to 40 s a shape and
direction the first time; flash-linear-attention tunes at its first call.
"""

import json
import sys

import torch

from deltazoo import UpdateSpec
from deltazoo.backends.bench import BenchConfig, bench
from deltazoo.backends.shapes import SHAPES

GATED, DELTA = UpdateSpec(decay="head", beta="head"), UpdateSpec(beta="head")
ADDITIVE = UpdateSpec(decay="head", transition="additive")
BOTH, DECODE = ("forward", "backward"), ("decode",)
JOBS = [
    (GATED, "pack_8x4096", BOTH, True),
    (GATED, "dense_8x4096", BOTH, False),
    (GATED, "pack_4x8192", BOTH, False),
    (GATED, "dense_1x8192", BOTH, False),
    (GATED, "dense_1x32768", BOTH, False),
    (DELTA, "dense_8x4096", BOTH, False),
    (ADDITIVE, "dense_8x4096", BOTH, False),
    (GATED, "decode_64", DECODE, True),
]


def main() -> None:
    out, *wanted = sys.argv[1:]
    peers = [name for name in ("fla", "flash_qla") if name in wanted] or ["fla", "flash_qla"]
    found = []
    for graphs in [name == "graphs" for name in ("eager", "graphs") if name in wanted] or [False, True]:
        for spec, shape, directions, errors in JOBS:
            config = BenchConfig(
                directions=directions, device="cuda", dtype="bfloat16", seconds=1.5, graphs=graphs,
                errors=errors and not graphs,
            )
            result = bench(spec, [SHAPES[shape]], ["triton", *peers], config)
            print("graphs" if graphs else "eager", result.markdown(), flush=True)
            found.append(json.loads(result.model_dump_json()))
            with open(out, "w") as file:
                json.dump(found, file)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
