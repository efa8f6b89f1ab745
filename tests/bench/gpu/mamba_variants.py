"""Time variants of the elementwise kernels for Mamba-1: python mamba_variants.py [NAME OF A VARIANT]...

8 x 4096 tokens, 4096 channels, 16 states, bf16, a decay by a rate; captured in CUDA graphs, L2 flushed before each call.
Prints the median ms of the forward and of forward + backward, and the largest difference of each result from that of
the present kernels, as a share of the largest value. Needs the package, torch and a GPU.
"""

import importlib.util
import statistics
import sys
import time
from pathlib import Path

import torch

from deltazoo import UpdateInputs, UpdateSpec, bind
from deltazoo.backends.triton import LaunchConfig, TritonBackend
from deltazoo.backends.triton.element import launch
from deltazoo.backends.triton.element.config import ElementConfig, ElementLaunch

DEVICE = "cuda"
FILE = importlib.util.spec_from_file_location("present_scan", Path(__file__).with_name("present_scan.py"))
present_scan = importlib.util.module_from_spec(FILE)
FILE.loader.exec_module(present_scan)
original_launcher = launch.launcher
B4 = {"keys": 4, "channels": 2}
VARIANTS = {  # name: forward launch, backward launch, whether the forward is the present kernel
    "present": (ElementLaunch(keys=16), ElementLaunch(**B4), True),
    # forward
    "f present keys 8": (ElementLaunch(keys=8), None, True),
    "f no masks": (ElementLaunch(keys=16), None, False),
    "f no masks, registers": (ElementLaunch(keys=16, prefetch=1), None, False),
    "f no masks, L2": (ElementLaunch(keys=16, prefetch=2), None, False),
    "f keys 8": (ElementLaunch(keys=8), None, False),
    "f keys 8, L2": (ElementLaunch(keys=8, prefetch=2), None, False),
    # backward; the forward is the present one
    "b rotate": (ElementLaunch(keys=16), ElementLaunch(**B4, prefetch=4), True),
    "b L2": (ElementLaunch(keys=16), ElementLaunch(**B4, prefetch=2), True),
    "b L2, rotate": (ElementLaunch(keys=16), ElementLaunch(**B4, prefetch=6), True),
    "b L1, rotate": (ElementLaunch(keys=16), ElementLaunch(**B4, prefetch=5), True),
    # both
    "keys 8, L2; L2, rotate": (ElementLaunch(keys=8, prefetch=2), ElementLaunch(**B4, prefetch=6), False),
}


def choose(present):
    """Let the forward launch the present kernel, which has no `token_traits`, or the new one."""

    def launcher(kernel, tensors, constants, *rest):
        if present and kernel is launch.element_scan_kernel:
            return original_launcher(present_scan.element_scan_kernel, tensors, constants[:1], *rest)
        return original_launcher(kernel, tensors, constants, *rest)

    launch.launcher = launcher


def bench(call, n=15):
    """The median time of n replays in ms."""
    for _ in range(4):
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


def inputs(B=8, T=4096, D=4096, N=16):
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(*sizes):
        return torch.randn(*sizes, generator=generator, device=DEVICE)

    step = torch.nn.functional.softplus(normal(B, T, D) - 3)
    x = {"q": normal(B, T, 1, N).bfloat16(), "k": normal(B, T, 1, N).bfloat16(), "step": step}
    x["v"] = (step * normal(B, T, D)).unsqueeze(-1).bfloat16()
    x["rate"] = -torch.arange(1, N + 1, device=DEVICE).float().expand(D, N).contiguous()
    return UpdateInputs(**x)


def main(words):
    began = time.time()
    spec = UpdateSpec(decay="rate", transition="additive", scale=1.0)
    x = inputs()
    leaves = UpdateInputs(*(None if t is None else t.detach().clone().requires_grad_() for t in x))
    wanted = [t for t in leaves if t is not None]
    names = ["o"] + [n for n, t in leaves._asdict().items() if t is not None]
    d_o = torch.randn(x.v.shape, generator=torch.Generator(DEVICE).manual_seed(1), device=DEVICE).bfloat16()
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    want = None
    for name, (forward, backward, present) in VARIANTS.items():
        if words and name != "present" and name not in words:
            continue
        choose(present)
        only_forward = backward is None
        config = ElementConfig(every=16, forward=forward, backward=backward or ElementLaunch(**B4))
        bound = bind(spec, TritonBackend(LaunchConfig(element=config)))

        def step():
            o = bound(leaves).o
            return o, *torch.autograd.grad(o, wanted, d_o)

        try:
            first = time.time()
            # detached: a live graph keeps AccumulateGrad nodes of the default stream, which invalidate a capture
            results = tuple(t.detach() for t in step())
            torch.cuda.synchronize()
            compiled = time.time() - first
            want = results if want is None else want
            differences = " ".join(
                f"{n} {((a.float() - b.float()).abs().max() / b.float().abs().max()).item():.1e}"
                for n, a, b in zip(names, results, want, strict=True)
            )
            del results
            saving, both = bench(lambda: bound(leaves).o.detach()), bench(step)
            plain = bench(lambda: bound(x).o)
        except Exception as error:
            print(f"{name}: {str(error)[-300:]}", flush=True)
            continue
        print(
            f"{name:24s} forward {plain:.3f}, with checkpoints {saving:.3f}; both {both:.3f}  [{differences}]"
            f" first call {compiled:.1f} s, {time.time() - began:.0f} s", flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
