"""Times of a step and of each of its kernels: python kernels.py [LETTERS]

d gated delta 8 x 4096 dense, p packed, g packed 4 x 8192 16/64, x delta without decay, a additive, r RetNet,
1 1 x 8192 16/32, 3 1 x 32768 2/8. ms captured with L2 flushed (as perf.py), then microseconds x launches of a step.
"""

import collections
import sys
import time

import torch
from perf import SHAPES, bench, both, inputs

from deltazoo import UpdateSpec, bind
from deltazoo.backends.triton import TritonBackend

GATED, DENSE = UpdateSpec(decay="head", beta="head"), SHAPES["8x4096 16/16"]
JOBS = {
    "d": (GATED, DENSE),
    "p": (GATED, SHAPES["8x4096p 16/16"]),
    "g": (GATED, SHAPES["4x8192p 16/64"]),
    "x": (UpdateSpec(beta="head"), DENSE),
    "a": (UpdateSpec(decay="head", transition="additive"), DENSE),
    "r": (UpdateSpec(decay="fixed", transition="additive"), DENSE),
    "1": (GATED, SHAPES["1x8192 16/32"]),
    "3": (GATED, SHAPES["1x32768 2/8"]),
}

for letter in sys.argv[1] if len(sys.argv) > 1 else JOBS:
    began = time.time()
    spec, shape = JOBS[letter]
    bound, x = bind(spec, TritonBackend()), inputs(spec, *shape)
    forward = bench(lambda bound=bound, x=x: bound(x), n=15)
    x = inputs(spec, *shape, grad=True)
    step = both(bound, x, torch.randn_like(x.v))
    whole = bench(step, n=15)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    took, launches = collections.Counter(), collections.Counter()
    for event in profile.key_averages():
        name = event.key.removesuffix("_kernel")[:40]
        took[name] += event.self_device_time_total / 3
        launches[name] += event.count // 3
    kernels = ", ".join(f"{name} {us:.0f} x {launches[name]}" for name, us in took.most_common(9) if us > 3)
    print(f"{letter} forward {forward:.3f} both {whole:.3f} | {kernels} [{time.time() - began:.0f} s]", flush=True)
