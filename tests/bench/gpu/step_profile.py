"""Print the kernels of a captured decoding step: python step_profile.py [compiled] MODEL[:BATCH[:PROMPT]]...

MODEL is a name of generate.py. For each kernel: launches in a step, and microseconds from the end of the kernel before
it to its end: a kernel that starts early ends after the one before it. Needs a CUDA device.
"""

import collections
import gc
import itertools
import json
import sys
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

STEPS = 8


def kernel_lines(call):
    """A line for each kernel of a call, with its time and number of launches, and the launches of the call."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("cat") == "kernel"]
    kernels = sorted((e["ts"] + e["dur"], e["dur"], f"{e['name'][:90]} {e['args'].get('grid', '')}") for e in events)
    count, time = collections.Counter(), collections.Counter()
    for (before, *_), (end, duration, kernel) in itertools.pairwise([(-float("inf"), 0, ""), *kernels]):
        count[kernel] += 1
        time[kernel] += min(end - before, duration + 20)
    lines = [
        f"    {us / STEPS:8.1f} us {count[kernel] / STEPS:6.1f} x  {kernel}" for kernel, us in time.most_common(24)
    ]
    return lines, len(kernels) / STEPS


def report(name, batch, length, compile):
    from generate import build, prompt, seconds

    from deltazoo.blocks import Decoder

    model = build(name)
    decoder = Decoder(model, batch, length + 300, compile).capture()
    decoder.prefill(prompt(model, batch, length))
    for _ in range(3):
        decoder.step()
    took = min(seconds(lambda: [decoder.step() for _ in range(20)]) for _ in range(3)) / 20
    lines, launches = kernel_lines(decoder.step)
    print(f"{name}, B = {batch}, prompt {length}: {1e6 * took:.0f} us, {launches:.0f} launches")
    print("\n".join(lines), flush=True)


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
