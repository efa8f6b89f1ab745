"""Time launches of the products of few rows: python few_rows.py [compile] [M]...

bf16, the maps of a layer of gated-deltanet-1.3b. Prints microseconds and TB/s of weights for each launch of
`few_rows_sm90_kernel` with its norm or sum, for torch's product alone (without what surrounds it), and of a copy. Each
captured graph passes over several copies of the weights, so that they come from memory. compile: only compile. Needs a
CUDA device.
"""

import itertools
import statistics
import sys

import torch
import torch.nn.functional as F

from deltazoo.backends.triton.gemv import op

D, HIDDEN, VALUES = 2400, 5888, 3600
SHAPES = {  # outputs of each map, inputs, norm, gated, residual
    "maps": ((2 * VALUES, 9, 9, VALUES), D, True, False, False),
    "hidden": ((2 * HIDDEN,), D, True, True, False),
    "MLP's output": ((D,), HIDDEN, False, False, True),
    "output": ((D,), VALUES, False, False, True),
    "head": ((32000,), D, False, False, False),
}
LAUNCHES = [
    op.DotLaunch(),
    op.DotLaunch(block=64),
    op.DotLaunch(share=3),
    op.DotLaunch(share=1),
]
BYTES = 3 * 10**8  # of the copies of the weights


def draw(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * shape[-1] ** -0.5


def graph_us(calls):
    """Microseconds per call of a captured graph of the calls."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(12)]
    for event in events:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return 1e3 * statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events)) / len(calls)


def measure(name, M, compile_only):
    sizes, width, norm, gated, residual = SHAPES[name]
    nbytes = 2 * width * sum(sizes)
    count = 1 if compile_only else max(2, BYTES // nbytes)
    layers = [[draw(size, width) for size in sizes] for _ in range(count)]
    x, outputs = draw(M, width), sum(sizes) // (2 if gated else 1)
    y = torch.empty(M, outputs, device="cuda", dtype=torch.bfloat16)
    activation = "silu" if gated else ""
    around = op.Around(draw(width) if norm else None, 1e-5, draw(M, outputs) if residual else None, activation, gated)
    results = []
    launches = [*LAUNCHES] if op.MIN_DOT_ROWS <= M else [op.GemvLaunch(rows) for rows in (1, 2, 4)]
    for launch in launches:
        try:
            calls = [lambda w=w, launch=launch: op.launch_gemv(x, w, around, y, launch) for w in layers]
            if compile_only:
                calls[0]()
            else:
                results.append((graph_us(calls), str(launch)))
        except Exception as error:
            results.append((float("inf"), f"{launch}: {type(error).__name__}: {str(error)[:80]}"))
    if compile_only:
        return
    joined = [torch.cat(w) for w in layers]
    results.append((graph_us([lambda w=w: F.linear(x, w) for w in joined]), "torch"))
    for us, label in sorted(results):
        print(f"{name}, M = {M}: {us:7.1f} us {nbytes / us / 1e6:6.2f} TB/s  {label}", flush=True)


def main():
    compile_only = "compile" in sys.argv
    a, b = (torch.empty(2**28, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    us = graph_us([lambda: a.copy_(b)] * 2)
    print(f"{torch.cuda.get_device_name()}: a copy moves {2 * a.nbytes / us / 1e6:.2f} TB/s", flush=True)
    for M in [int(word) for word in sys.argv[1:] if word.isdigit()] or [1, 8, 32]:
        for name in SHAPES:
            measure(name, M, compile_only)


if __name__ == "__main__":
    main()
