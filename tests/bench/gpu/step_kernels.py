"""Time a step and each of its kernels: python step_kernels.py [LETTERS] [CHANGE]...

LETTERS select jobs of JOBS below. Each CHANGE modifies the heuristic's launch config: a phase (scan, recompute)
selects its version for sm90, a phase after a minus (-scan) its portable version, and NAME=NUMBER sets a field
(segment_chunks=0).
Prints ms captured in a CUDA graph with L2 flushed (as perf.py), then microseconds x launches of each kernel.
"""

import collections
import sys
import time

import torch
from perf import SHAPES, bench, both, inputs

from deltazoo import UpdateSpec, bind
from deltazoo.backends.triton import TritonBackend
from deltazoo.backends.triton.chunk.heuristic import in_version
from deltazoo.backends.triton.chunk.op import resolve
from deltazoo.backends.triton.lower import lower

GATED, DENSE = UpdateSpec(decay="head", beta="head"), SHAPES["8x4096 16/16"]
ADDITIVE = UpdateSpec(decay="head", transition="additive")
WIDE, FEW = (8, 2048, 32, 32, None, 256, 256), (1, 8192, 8, 8, None, 256, 256)
JOBS = {  # letter: spec, and B, T, H, HV, lengths, K, V
    "d": (GATED, DENSE),
    "p": (GATED, SHAPES["8x4096p 16/16"]),
    "g": (GATED, SHAPES["4x8192p 16/64"]),
    "x": (UpdateSpec(beta="head"), DENSE),
    "e": (UpdateSpec(decay="head", beta="head", erase_key="own"), DENSE),
    "c": (UpdateSpec(decay="head", beta="channel"), DENSE),
    "a": (ADDITIVE, DENSE),
    "D": (UpdateSpec(decay="channel", beta="head"), DENSE),  # KDA
    "A": (UpdateSpec(decay="channel", transition="additive"), DENSE),  # GLA
    "r": (UpdateSpec(decay="fixed", transition="additive"), DENSE),
    "1": (GATED, SHAPES["1x8192 16/32"]),
    "3": (GATED, SHAPES["1x32768 2/8"]),
    "2": (GATED, (8, 4096, 6, 6, None, 192, 384)),
    "0": (GATED, (8, 4096, 6, 6, None, 200, 400)),
    "5": (GATED, (8, 4096, 6, 6, None, 256, 512)),
    "9": (GATED, (4, 4096, 9, 9, None, 200, 400)),  # gated-deltanet-1.3b
    "k": (GATED, WIDE),
    "K": (ADDITIVE, WIDE),
    "f": (GATED, FEW),
    "F": (ADDITIVE, FEW),
    "6": (GATED, (8, 4096, 16, 16, None, 64, 64)),
    "h": (GATED, (8, 4096, 16, 16, None, 32, 64)),
    "b": (ADDITIVE, (8, 4096, 16, 16, None, 64, 64)),
    "t": (ADDITIVE, (8, 4096, 16, 16, None, 32, 64)),
    "n": (GATED, (8, 4096, 9, 9, None, 128, 256)),
    "w": (GATED, (8, 4096, 8, 8, None, 128, 256)),
    "W": (ADDITIVE, (8, 4096, 8, 8, None, 128, 256)),
    "v": (GATED, (8, 4096, 8, 8, None, 128, 200)),
    "l": (GATED, (8, 4096, 8, 8, None, 256, 64)),
    "m": (ADDITIVE, (8, 4096, 1, 32, None, 128, 64)),
}


def config_for(spec, x):
    """The heuristic's config with the changes of the command line; None without changes."""
    operands, kind = lower(spec, x, "")[:2]
    config = resolve(operands, kind, grad=True).config
    changes = {}
    for word in sys.argv[2:]:
        name, _, number = word.removeprefix("-").partition("=")
        launch = getattr(config, name)
        if number:
            changes[name] = int(number)
        elif word[0] == "-":
            portable = {"kernel": "portable"} | ({"stages": 2} if name == "gradients" else {})
            changes[name] = launch.model_copy(update=portable)
        else:
            changes[name] = in_version("sm90", name, launch)
    return config.changed(**changes) if changes else None


for letter in sys.argv[1] if len(sys.argv) > 1 else JOBS:
    began = time.time()
    spec, shape = JOBS[letter]
    x = inputs(spec, *shape)
    bound = bind(spec, TritonBackend(config_for(spec, x)))
    forward = bench(lambda bound=bound, x=x: bound(x), n=15)
    x = inputs(spec, *shape, grad=True)
    step = both(bound, x, torch.randn_like(x.v))
    both_ms = bench(step, n=15)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    times, launches = collections.Counter(), collections.Counter()
    for event in profile.key_averages():
        name = event.key.removesuffix("_kernel")[:40]
        times[name] += event.self_device_time_total / 3
        launches[name] += event.count // 3
    kernels = ", ".join(f"{name} {us:.0f} x {launches[name]}" for name, us in times.most_common(9) if us > 3)
    print(f"{letter} forward {forward:.3f} both {both_ms:.3f} | {kernels} [{time.time() - began:.0f} s]", flush=True)
