"""Check and time DPLR (RWKV-7): python tests/bench/gpu/pair.py [check|time|profile]....

Run "check" and "time" as two commands: most of either is the compilation of the kernels, whose time was not measured on a GPU.

Checks a handful of shapes against the float64 reference, marked (strong) and unmarked (weak) chunks, packed and dense, then
times base (main, or the tree that BASE names) and this tree, each in its own process: RWKV-7 64 x 64 and 32 x 128 at 8 x 4096,
forward; forward + backward; CUDA graphs, L2 flushed, medians, peak memory; then a profile by kernel.

Run it from the root of the worktree (with deltazoo on the path as elsewhere: PYTHONPATH=build/typing, or the package installed in
place). BASE=PATH: the path to put on PYTHONPATH for the base, e.g. a second checkout's build/typing; without it only this tree is timed.
"""

import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
import multiprocessing
from functools import partial

import torch

from deltazoo import UpdateInputs, UpdateSpec, bind
from deltazoo.backends.triton import TritonBackend

SPEC = UpdateSpec(decay="channel", transition="dplr")
BEFORE = UpdateSpec(decay="channel", transition="dplr", read="before")
BEGAN = time.time()
DEVICE = os.environ.get("CHECK_ON", "cuda")  # cpu: to try the checks in the interpreter


def check_case(n):
    from deltazoo.backends.conformance import Case, draw
    from deltazoo.backends.conformance.compare import compare, draw_cotangents, reference_results, relative_error, run
    from deltazoo.backends.shapes import Shape

    torch.set_num_threads(1)
    name, spec, shape, dtype, regime = CASES[n]
    try:
        shape = Shape(name, *shape[:6], **shape[6]) if len(shape) > 6 else Shape(name, *shape)
        if regime not in ("weak", "mixed", "none"):
            report = compare(TritonBackend(), Case(spec, shape, dtype, regime), device=DEVICE)
            worst = max((x.relative / x.limit for x in report.errors), default=float("nan"))
            text = " ".join(f"{x.tensor} {x.relative:.1e}/{x.limit:.0e}" for x in report.errors)
            return name, regime, str(dtype), worst, text + " ".join(report.failures) + str(report.refused or "")
        # RWKV-7's own range: natural log decay in [-0.6065, 0]; "mixed": some channels decay by e^-20 per token; "none": no decay
        case = Case(spec, shape, dtype, "ordinary")
        x = draw(case, DEVICE)
        decay = -0.6065 * torch.rand_like(x.log_decay)
        if regime == "mixed":
            decay = torch.where(torch.rand_like(decay) < 0.002, -20.0, decay)
        if regime == "none":
            decay = decay * 0
        x = x._replace(log_decay=decay.requires_grad_())
        got = partial(run, TritonBackend())(spec, x, draw_cotangents(case, x))
        want = reference_results(spec, x, draw_cotangents(case, x))
        limits = {"o": 5e-3, "state": 5e-3, "d_log_decay": 2e-2}
        errors = {k: relative_error(got[k], want[k], want[k]) for k in want}
        worst = max(e / limits.get(k, 1e-2) if e == e else float("inf") for k, e in errors.items())
        return name, regime, str(dtype), worst, " ".join(f"{k} {e:.1e}" for k, e in errors.items())
    except Exception as error:
        return name, regime, str(dtype), float("nan"), repr(error)[-600:]


A64, A128 = (2, 300, 3, 3, 64, 64), (1, 200, 2, 2, 128, 128)
PACK = (1, 700, 2, 2, 64, 64, {"lengths": (300, 0, 1, 64, 335)})
BF, FP, F32 = torch.bfloat16, torch.float16, torch.float32
CASES = [
    ("64", SPEC, A64, BF, "ordinary"), ("64", SPEC, A64, BF, "decays"), ("64", SPEC, A64, BF, "parallel"),
    ("64", SPEC, A64, BF, "weak"), ("64", SPEC, A64, BF, "mixed"), ("64", SPEC, A64, BF, "none"),
    ("64 before", BEFORE, A64, BF, "weak"), ("64 before", BEFORE, A64, BF, "ordinary"),
    ("pack", SPEC, PACK, BF, "ordinary"), ("pack", SPEC, PACK, BF, "weak"),
    ("128", SPEC, A128, BF, "ordinary"), ("128", SPEC, A128, BF, "weak"), ("128", SPEC, A128, BF, "parallel"),
    ("128 before", BEFORE, A128, BF, "mixed"),
    ("long", SPEC, (1, 2500, 1, 1, 64, 64), BF, "weak"), ("long", SPEC, (1, 2500, 1, 1, 64, 64), BF, "ordinary"),
    ("busy", SPEC, (2, 330, 64, 64, 64, 64), BF, "weak"),
    ("64", SPEC, A64, FP, "ordinary"), ("64", SPEC, A64, FP, "weak"), ("64", SPEC, A64, F32, "ordinary"),
    ("odd", SPEC, (1, 130, 1, 2, 40, 72), BF, "ordinary"),
]  # fmt: skip


def check():
    with ProcessPoolExecutor(12, mp_context=multiprocessing.get_context("spawn")) as pool:
        for result in pool.map(check_case, range(len(CASES))):
            print("ok    " if result[3] <= 1 else "FAILED", *result, flush=True)
    print(f"checked in {time.time() - BEGAN:.0f} s", flush=True)


def bench(call, n=15):
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    cache = torch.empty(64 * 2**20, dtype=torch.int32, device=DEVICE)
    times = []
    for _ in range(n):
        cache.zero_()
        start, stop = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def inputs(H, K, grad, decay):
    generator = torch.Generator("cuda").manual_seed(0)
    B, T = 8, 4096

    def normal(*sizes):
        return torch.randn(*sizes, generator=generator, device=DEVICE)

    def unit(x):
        return torch.nn.functional.normalize(x, dim=-1)

    x = {"q": unit(normal(B, T, H, K)), "k": unit(normal(B, T, H, K)), "v": normal(B, T, H, K)}
    if decay == "rwkv7":  # the layer's range
        x["log_decay"] = -0.6065 * normal(B, T, H, K).sigmoid()
    else:
        x["log_decay"] = torch.nn.functional.logsigmoid(normal(B, T, H, K)) * (3 if decay == "strong" else 1 / 16)
    key = unit(normal(B, T, H, K))
    x |= {"a": -key, "b": key * normal(B, T, H, K).sigmoid()}
    x = {n: t if n == "log_decay" else t.bfloat16() for n, t in x.items()}
    return UpdateInputs(**{n: t.requires_grad_() if grad else t for n, t in x.items()})


def both(bound, x, do):
    leaves = [t for t in x if t is not None and t.requires_grad]

    def step():
        o = bound(x).o
        return o, torch.autograd.grad(o, leaves, do)

    return step


def timing(profile):
    import deltazoo

    print(deltazoo.__file__, torch.__version__, torch.cuda.get_device_name(), flush=True)
    bound = bind(SPEC, TritonBackend())
    for H, K, decay in ((64, 64, "rwkv7"), (64, 64, "weak"), (64, 64, "strong"), (32, 128, "rwkv7")):
        if profile == "base" and decay in ("rwkv7", "strong") and K == 64:
            continue
        x = inputs(H, K, False, decay)
        forward = bench(lambda x=x: bound(x))
        del x
        torch.cuda.empty_cache()
        x = inputs(H, K, True, decay)
        do = torch.randn_like(x.v)
        step = both(bound, x, do)
        total = bench(step)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = step()
        torch.cuda.synchronize()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        del results
        print(f"{H} x {K} {decay}: forward {forward:.3f}, both {total:.3f} ms, peak {peak:.0f} MiB [{time.time() - BEGAN:.0f} s]", flush=True)
        if profile != "base":
            from torch.profiler import ProfilerActivity
            from torch.profiler import profile as profiler

            with profiler(activities=[ProfilerActivity.CUDA]) as p:
                step()
                torch.cuda.synchronize()
            rows = sorted(p.key_averages(), key=lambda r: -r.device_time_total)[:12]
            for r in rows:
                print(f"    {r.device_time_total:9.0f} us {r.count:4d} x {r.key[:90]}", flush=True)
        del x, do, step
        torch.cuda.empty_cache()


def variants():
    """Other launches of the portable scans for 64 x 64; only with the word "variants"."""
    from deltazoo.backends.devices import DeviceSpec
    from deltazoo.backends.triton.config import Launch
    from deltazoo.backends.triton.heuristic import heuristic
    from deltazoo.backends.triton.plan import Problem

    for H, K in ((64, 64), (32, 128)):
        problem = Problem(torch.bfloat16, 8, 4096, H, H, K, K, True, True, "channel", False, pair=True)
        base = heuristic(problem, DeviceSpec.current())
        x = inputs(H, K, True, "rwkv7")
        do = torch.randn_like(x.v)
        for tile, warps, stages in ((64, 4, 1), (64, 4, 2), (64, 8, 1), (64, 8, 2), (32, 4, 1), (128, 8, 1)):
            scan = Launch(tile=tile, warps=warps, stages=stages)
            try:
                bound = bind(SPEC, TritonBackend(base.changed(scan=scan, recompute=scan, reverse=scan)))
                with torch.no_grad():
                    forward = bench(lambda: bound(x), 7)
                print(f"{H} x {K} scans {tile} {warps} {stages}: forward {forward:.3f} both {bench(both(bound, x, do), 7):.3f}", flush=True)
            except Exception as error:
                print(f"{H} x {K} scans {tile} {warps} {stages}: {repr(error)[-200:]}", flush=True)
        del x, do
        torch.cuda.empty_cache()


if __name__ == "__main__":
    words = sys.argv[1:]
    if "worker" in words:
        timing(words[-1])
        sys.exit()
    if not words or "check" in words:
        check()
    if not words or "time" in words:
        base = os.environ.get("BASE")
        for label, path in (("new", None), ("base", base)):
            if label == "base" and not base:
                continue
            env = dict(os.environ) | ({"PYTHONPATH": path} if path else {})
            subprocess.run([sys.executable, os.path.abspath(__file__), "worker", label], env=env, check=False)
    if "variants" in words:
        variants()
    print(f"{time.time() - BEGAN:.0f} s")
