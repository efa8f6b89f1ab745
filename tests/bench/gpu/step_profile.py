"""Print the kernels of a captured decoding step: python step_profile.py [compiled] MODEL[:BATCH[:PROMPT]]...

MODEL is a name of generate.py. For each kernel and grid: launches in a step, and microseconds from its start to the
start of the next kernel, of which overlapping kernels share the time. Needs a CUDA device.
"""

import collections
import gc
import itertools
import json
import sys
import tempfile
from pathlib import Path

import torch
from generate import build, prompt, seconds
from torch.profiler import ProfilerActivity, profile

from deltazoo.blocks import Decoder

STEPS = 8


def kernels_of(call):
    """The start and the duration in us, and the name with the grid, of the kernels of `STEPS` calls, in order."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("cat") == "kernel"]
    return sorted((e["ts"], e["dur"], f"{e['name'][:90]} {e['args'].get('grid', '')}") for e in events)


def report(name, batch, length, compile):
    model = build(name)
    decoder = Decoder(model, batch, length + 300, compile).capture()
    decoder.prefill(prompt(model, batch, length))
    for _ in range(3):
        decoder.step()
    took = min(seconds(lambda: [decoder.step() for _ in range(20)]) for _ in range(3)) / 20
    kernels = kernels_of(decoder.step)
    count, time = collections.Counter(), collections.Counter()
    for (start, duration, kernel), (following, *_) in itertools.pairwise(kernels):
        count[kernel] += 1
        time[kernel] += min(following - start, duration + 20)
    print(f"{name}, B = {batch}, prompt {length}: {1e6 * took:.0f} us, {len(kernels) / STEPS:.0f} launches")
    for kernel, us in time.most_common(24):
        print(f"    {us / STEPS:8.1f} us {count[kernel] / STEPS:6.1f} x  {kernel}", flush=True)


def main():
    words = sys.argv[1:]
    for word in words:
        if word == "compiled":
            continue
        name, *sizes = word.split(":")
        batch, length = (int(size) for size in (*sizes, *(1, 512)[len(sizes) :]))
        report(name, batch, length, "compiled" in words)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
