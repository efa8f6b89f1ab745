"""Check and time decays per channel on a Hopper GPU: python tests/bench/gpu/channel.py [NAME=TREE]...

TREE is the root of a checkout (the package itself); by default base=the current directory and new=the parent of this
file's folder. The last tree is checked against float64; all are timed, in the order given. About 100 s on 16 cores.
Kernels are compiled first, in parallel processes. Prints ms forward and forward + backward (CUDA graphs, L2 flushed,
medians), peak MiB of a step with its results, and microseconds by kernel of one step.
"""

import collections
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHAPES = {"8x4096": (8, 4096, 16), "1x8192": (1, 8192, 32)}
JOBS = {  # name: spec, shape, strong
    "kda": ("kda", "8x4096", False), "kda strong": ("kda", "8x4096", True), "gla": ("gla", "8x4096", False),
    "gdn2": ("gdn2", "8x4096", False), "kda 1x8192": ("kda", "1x8192", False),
    "kda 1x8192 without segments": ("kda", "1x8192", False),
}  # fmt: skip
COMPILE = ("kda", "gla", "gdn2", "kda 1x8192", "kda 1x8192 without segments")


def specs():
    from deltazoo import UpdateSpec

    return {
        "kda": UpdateSpec(decay="channel", beta="head"),
        "gla": UpdateSpec(decay="channel", transition="additive"),
        "gdn2": UpdateSpec(decay="channel", beta="channel"),
        "early": UpdateSpec(decay="channel", beta="head", read="before", erase_from="previous"),
        "rwkv6": UpdateSpec(decay="channel", transition="additive", read="before"),
        "rwkv7": UpdateSpec(decay="channel", transition="dplr"),
    }


def draw(name, B, T, H, strong, grad):
    import torch

    from deltazoo import UpdateInputs

    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*sizes):
        return torch.randn(*sizes, generator=generator, device="cuda")

    def unit(x):
        return torch.nn.functional.normalize(x, dim=-1)

    x = {"q": unit(normal(B, T, H, 128)), "k": unit(normal(B, T, H, 128)), "v": normal(B, T, H, 128)}
    if name == "gdn2":
        x |= {"erase": normal(B, T, H, 128).sigmoid(), "write": normal(B, T, H, 128).sigmoid()}
    x = {key: tensor.bfloat16() for key, tensor in x.items()}
    x["log_decay"] = torch.nn.functional.logsigmoid(normal(B, T, H, 128)) * (3 if strong else 1 / 16)
    if name == "kda":
        x["beta"] = normal(B, T, H).sigmoid()
    return UpdateInputs(**{key: tensor.requires_grad_() if grad else tensor for key, tensor in x.items()})


def bench(call, n):
    import torch

    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    cache = torch.empty(64 * 2**20, dtype=torch.int32, device="cuda")
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


def bind_step(job, grad, tokens=None):
    """Return a call that runs the update, with `grad` and its backward; tokens: T, by default of the shape."""
    import torch

    from deltazoo import bind
    from deltazoo.backends.triton import TritonBackend

    name, shape, strong = JOBS[job]
    B, T, H = SHAPES[shape]
    x = draw(name, B, tokens or T, H, strong, grad)
    config = None
    if "without segments" in job:
        from deltazoo.backends.triton.lower import lower
        from deltazoo.backends.triton.resolve import resolve

        config = resolve(*lower(specs()[name], x, ""), grad=True)[1].changed(split=0)
    bound = bind(specs()[name], TritonBackend(config))
    if not grad:
        return lambda: bound(x)
    leaves = [tensor for tensor in x if tensor is not None and tensor.requires_grad]
    d_o = torch.randn_like(x.v)

    def step():
        o = bound(x).o
        return o, torch.autograd.grad(o, leaves, d_o)

    return step


def compile_job(job):
    """Run a short step, which compiles the kernels of the job (sizes of heads are constants, T is not)."""
    import torch

    tokens = None if "1x8192" in job else 1024
    bind_step(job, False, tokens)()
    bind_step(job, True, tokens)()
    torch.cuda.synchronize()


def time_jobs(tree):
    import torch

    for job in JOBS:
        try:
            forward = bench(bind_step(job, False), 15)
            step = bind_step(job, True)
            both = bench(step, 15)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            results = step()
            torch.cuda.synchronize()
            peak = (torch.cuda.max_memory_allocated() - before) / 2**20
            again = step()
            torch.cuda.synchronize()
            same = all(torch.equal(a, b) for a, b in zip((results[0], *results[1]), (again[0], *again[1])))
            finite = all(bool(a.isfinite().all()) for a in (results[0], *results[1]))
            del results, again
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                step()
                torch.cuda.synchronize()
            times, launches = collections.Counter(), collections.Counter()
            for event in profile.key_averages():
                kernel = event.key.removesuffix("_kernel")[:44]
                times[kernel] += event.self_device_time_total
                launches[kernel] += event.count
            kernels = ", ".join(f"{key} {us:.0f} x {launches[key]}" for key, us in times.most_common(9) if us > 3)
            print(f"{tree:6s} {job:12s} forward {forward:.3f} both {both:.3f} peak {peak:.0f} MiB", end=" ")
            print(f"deterministic {same} finite {finite} | {kernels}", flush=True)
        except Exception as error:
            print(f"{tree:6s} {job:12s} FAILED {repr(error)[-300:]}", flush=True)
        torch.cuda.empty_cache()


CHECKS = [  # spec, shape, dtype, state (another one would compile all kernels again), regimes
    ("kda", ("whole", 2, 256, 2, 2, 128, 128), "bfloat16", "none", ("ordinary", "decays", "parallel")),
    ("kda", ("pack", 1, 700, 1, 2, 128, 128, (300, 0, 1, 64, 335)), "bfloat16", "given", ("ordinary", "decays")),
    ("kda", ("odd", 2, 200, 2, 2, 72, 104), "float16", "given", ("ordinary", "decays", "parallel")),
    ("gla", ("whole", 2, 256, 2, 2, 128, 128), "bfloat16", "given", ("ordinary", "decays")),
    ("gdn2", ("whole", 2, 256, 2, 2, 128, 128), "bfloat16", "none", ("ordinary", "decays", "parallel")),
    ("early", ("whole", 2, 256, 2, 2, 128, 128), "bfloat16", "given", ("ordinary", "decays")),
    ("rwkv6", ("pack", 1, 700, 1, 2, 64, 64, (300, 0, 1, 64, 335)), "bfloat16", "none", ("ordinary", "decays")),
    ("rwkv7", ("heads", 2, 192, 2, 2, 64, 64), "bfloat16", "given", ("ordinary", "decays")),
]


def check(number):
    import torch

    from deltazoo.backends.conformance import Case
    from deltazoo.backends.conformance.compare import compare
    from deltazoo.backends.shapes import Shape
    from deltazoo.backends.triton import TritonBackend

    spec, (*sizes,), dtype, state, regimes = CHECKS[number]
    lengths = sizes.pop() if isinstance(sizes[-1], tuple) else ()
    for regime in regimes:
        case = Case(specs()[spec], Shape(*sizes, lengths=lengths), getattr(torch, dtype), regime, state=state)
        report = compare(TritonBackend(), case, device="cuda", outputs="both" if state == "given" else "o")
        worst = max(report.errors, key=lambda x: x.relative / x.limit, default=None)
        text = f"{worst.tensor} {worst.relative:.1e} of {worst.limit:.1e}" if worst else str(report)[-200:]
        wrong = worst is None or report.failures
        print("FAILED" if wrong else "ok", spec, sizes[0], dtype, regime, state, text, *report.failures, flush=True)

def main(words):
    began = time.time()
    here = Path(__file__).resolve().parents[1]
    trees = dict(word.split("=", 1) for word in words) or {"base": os.getcwd(), "new": str(here)}
    roots = {}
    for name, tree in trees.items():
        roots[name] = tempfile.mkdtemp()
        os.symlink(Path(tree).resolve(), Path(roots[name]) / "deltazoo")

    def start(tree, *arguments):
        environment = os.environ | {
            "PYTHONPATH": roots[tree], "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
            "TRITON_CACHE_DIR": os.path.join(roots[tree], "cache"),
        }  # fmt: skip
        command = [sys.executable, os.path.abspath(__file__), "--run", *arguments]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def finish(label, process, deadline):
        try:
            text = process.communicate(timeout=max(1, deadline - (time.time() - began)))[0]
        except subprocess.TimeoutExpired:
            process.kill()
            text = process.communicate()[0] + "\nstopped: no time is left"
        if text.strip():
            print("\n".join(text.strip().splitlines()[-30:]), flush=True)
        if process.returncode:
            print(f"{label}: exit status {process.returncode}", flush=True)

    compiling = {(tree, job): start(tree, "compile", job) for tree in trees for job in COMPILE}
    checks = {number: start([*trees][-1], "check", str(number)) for number in range(len(CHECKS))}
    for label, process in compiling.items():
        finish(label, process, 75)
    print(f"compiled [{time.time() - began:.0f} s]", flush=True)
    for number, process in checks.items():
        finish(f"check {number}", process, 80)
    print(f"checked [{time.time() - began:.0f} s]", flush=True)
    for tree in trees:
        finish(tree, start(tree, "time", tree), 118)
        print(f"{tree} timed [{time.time() - began:.0f} s]", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        action, argument = sys.argv[2:]
        {"compile": compile_job, "check": lambda n: check(int(n)), "time": time_jobs}[action](argument)
    else:
        main(sys.argv[1:])
