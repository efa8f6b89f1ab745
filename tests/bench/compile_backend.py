"""Measure the compile backend on a CPU and print Markdown: python tests/bench/compile_backend.py [PART ...]

Parts: speed, memory, length, cold; by default all, in about five minutes. Needs Linux and transformers.
Every part runs in new processes. The shape is B = 1, T = 2048, 8 heads, K = V = 64, float32, two threads;
the peer is transformers' `torch_chunk_gated_delta_rule`. Run on idle cores: the load average is printed, too.
"""

import argparse
import ctypes
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median

HEADS, WIDTH, LENGTH, THREADS, ROUNDS = 8, 64, 2048, 2, 15
LENGTHS = (2048, 4096, 8192, 16384, 32768)
CHILDREN = 5  # processes whose peak memory is reported
DIRECTIONS = ("forward", "forward + backward")


# Child processes: each prints one line of JSON.


def call_of(which: str, direction: str, T: int) -> Callable[[], object]:
    """A call of "compile", "reference" or "transformers" on equal inputs."""
    import torch

    from deltazoo import UpdateInputs, UpdateSpec, bind

    torch.set_num_threads(THREADS)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, T, HEADS, WIDTH, generator=generator) for _ in range(3))
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    log_decay = torch.nn.functional.logsigmoid(torch.randn(1, T, HEADS, generator=generator) + 3)
    beta = torch.randn(1, T, HEADS, generator=generator).sigmoid()
    d_o = torch.randn(1, T, HEADS, WIDTH, generator=generator)
    leaves = [x.requires_grad_(direction != "forward") for x in (q, k, v, log_decay, beta)]
    if which == "transformers":
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

        def run() -> tuple[torch.Tensor, torch.Tensor]:
            return torch_chunk_gated_delta_rule(q, k, v, log_decay, beta, output_final_state=True)
    else:
        bound = bind(UpdateSpec(decay="head", beta="head"), which)

        def run() -> tuple[torch.Tensor, torch.Tensor]:
            return tuple(bound(UpdateInputs(q=q, k=k, v=v, log_decay=log_decay, beta=beta)))

    def forward() -> object:
        with torch.no_grad():
            return run()

    def both() -> object:
        return torch.autograd.grad(run()[0], leaves, d_o)

    return forward if direction == "forward" else both


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def speed() -> object:
    """Milliseconds of each call, alternating with transformers, then with the reference."""
    results = []
    for other, rounds in (("transformers", ROUNDS), ("reference", 5)):
        for direction in DIRECTIONS:
            calls = {name: call_of(name, direction, LENGTH) for name in ("compile", other)}
            for call in calls.values():
                for _ in range(2):
                    call()
            times = {name: [] for name in calls}
            for _ in range(rounds):
                for name, call in calls.items():
                    times[name].append(timed(call))
            results.append([direction, other, times["compile"], times[other]])
    return results


def memory(which: str, direction: str, T: int) -> object:
    """Peak MiB of the second call above the resident memory before it; the first call compiles."""
    call = call_of(which, direction, T)
    call()
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # otherwise memory freed by the first call counts as resident
    before = resident("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    call()
    return resident("VmHWM") - before


def resident(name: str) -> float:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(f"{name}:")) / 1024


def length() -> object:
    """For each length the ms of the first call and the median of three more; and the number of compiled graphs."""
    import torch

    results = []
    for T in LENGTHS:
        call = call_of("compile", "forward + backward", T)
        results.append([T, timed(call), median(timed(call) for _ in range(3))])
    return [results, torch._dynamo.utils.counters["stats"]["unique_graphs"]]


def cold(direction: str) -> object:
    """Seconds of the first call."""
    call = call_of("compile", direction, LENGTH)
    return timed(call) / 1e3


# The parent process.


def child(part: str, *arguments: object, caches: str | None = None) -> object:
    environment = os.environ | ({} if caches is None else {"TORCHINDUCTOR_CACHE_DIR": caches})
    command = [sys.executable, __file__, "--child", part, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.strip().splitlines()[-1])


def load() -> str:
    return f"{os.getloadavg()[0]:.1f}"


def table(head: list[str], rows: list[list[str]]) -> None:
    print(f"\n| {' | '.join(head)} |\n| {' | '.join('---' for _ in head)} |")
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


def spread(values: list[float], digits: int = 1) -> str:
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def report_speed() -> None:
    before, results = load(), child("speed")
    required = {("transformers", 0): "1.5", ("transformers", 1): "2.5", ("reference", 0): "8", ("reference", 1): "50"}
    rows = [
        [direction, other, spread(ours), spread(theirs), f"{median(theirs) / median(ours):.2f}", want, before]
        for (direction, other, ours, theirs), want in zip(results, required.values(), strict=True)
    ]
    table(["speed", "against", "ours, ms", "theirs, ms", "ratio of medians", "asked", "load"], rows)


def report_memory() -> None:
    rows = []
    for direction in DIRECTIONS:
        before = load()
        ours, theirs = [], []
        for _ in range(CHILDREN):
            ours.append(child("memory", "compile", direction, LENGTH))
            theirs.append(child("memory", "transformers", direction, LENGTH))
        ratio = f"{median(ours) / median(theirs):.2f}"
        rows.append(
            [direction, spread(ours, 0), spread(theirs, 0), ratio, "0.5" if direction != "forward" else "", before]
        )
    table(["peak", "ours, MiB", "theirs, MiB", "ratio of medians", "asked at most", "load"], rows)


def report_length() -> None:
    before = load()
    results, graphs = child("length")
    rows = [
        [
            str(T),
            f"{ms:.0f}",
            f"{ms / T * 1e3:.1f}",
            f"{first / 1e3:.2f}",
            f"{child('memory', 'compile', DIRECTIONS[1], T):.0f}",
        ]
        for T, first, ms in results
    ]
    table(["T", "forward + backward, ms", "us a token", "first call, s", "peak, MiB"], rows)
    print(f"\nGraphs compiled for all lengths: {graphs}. Load {before}.")


def report_cold() -> None:
    rows = []
    for direction in DIRECTIONS:
        before = load()
        with tempfile.TemporaryDirectory() as caches:
            rows.append([direction, f"{child('cold', direction, caches=caches):.1f}", "60", before])
    table(["first call, no caches", "s", "asked at most", "load"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=[], help="speed, memory, length, cold")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        part, *arguments = options.child
        measure = {"speed": speed, "memory": memory, "length": length, "cold": cold}[part]
        print(json.dumps(measure(*(int(x) if x.isdigit() else x for x in arguments))))
        return
    reports = {"speed": report_speed, "memory": report_memory, "length": report_length, "cold": report_cold}
    unknown = set(options.parts) - set(reports)
    if unknown:
        parser.error(f"parts are {', '.join(reports)}, got {', '.join(sorted(unknown))}")
    import torch
    import transformers

    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    shape = f"B=1 T={LENGTH} H={HEADS} K=V={WIDTH} float32, {THREADS} threads of {os.cpu_count()} cores"
    print(f"{time.strftime('%Y-%m-%d')}, {versions}, {processor()}, {shape}")
    for part in options.parts or reports:
        reports[part]()


def processor() -> str:
    with open("/proc/cpuinfo") as file:
        return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))


if __name__ == "__main__":
    main()
