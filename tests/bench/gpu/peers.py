"""Time the triton backend against other libraries: python peers.py OUT.json JOB,... BACKEND,... [eager] [warm]

JOB is a key of JOBS below. Calls are captured in CUDA graphs, or with `eager` queued. `warm` limits each job to 0.01 s:
run it first to fill the compilation caches, and discard its numbers. Errors are measured for the job "packed" only.
Needs a CUDA device and the packages of the peers: fla-core; flash-qla, tilelang with nvcc; nvidia-cudnn-frontend,
nvidia-cutlass-dsl, apache-tvm-ffi. First calls take up to a minute: FlashQLA
compiles, and flash-linear-attention autotunes in every process.
"""

import json
import sys

import torch

from deltazoo import UpdateSpec
from deltazoo.backends.measure.benchmark import BenchConfig, bench
from deltazoo.backends.measure.shapes import SHAPES

GATED, DELTA = UpdateSpec(decay="head", beta="head"), UpdateSpec(beta="head")
ADDITIVE = UpdateSpec(decay="head", transition="additive")
KDA, GLA = UpdateSpec(decay="channel", beta="head"), UpdateSpec(decay="channel", transition="additive")
RWKV7 = UpdateSpec(decay="channel", transition="dplr")
JOBS = {
    "packed": (GATED, "pack_8x4096"),
    "dense": (GATED, "dense_8x4096"),
    "packed_4x8192": (GATED, "pack_4x8192"),
    "long": (GATED, "dense_1x8192"),
    "longer": (GATED, "dense_1x32768"),
    "delta": (DELTA, "dense_8x4096"),
    "additive": (ADDITIVE, "dense_8x4096"),
    "kda": (KDA, "dense_8x4096"),
    "gla": (GLA, "dense_8x4096"),
    "rwkv7": (RWKV7, "dense_8x4096"),
    "decode": (GATED, "decode_64"),
}


def main() -> None:
    out, jobs, backends, *options = sys.argv[1:]
    results = []
    for job in jobs.split(","):
        spec, shape = JOBS[job]
        config = BenchConfig(
            directions=("decode",) if job == "decode" else ("forward", "backward"),
            device="cuda",
            dtype="bfloat16",
            seconds=0.01 if "warm" in options else 1.0,
            graphs=not {"eager", "warm"} & {*options},
            errors=job == "packed",
        )
        result = bench(spec, [SHAPES[shape]], backends.split(","), config)
        print(result.markdown(), flush=True)
        results.append(json.loads(result.model_dump_json()))
        with open(out, "w") as file:
            json.dump(results, file)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
