"""Time the triton backend through autograd: python perf.py [PREFIX OF A SHAPE'S NAME | specs]...

Gated delta rule on five shapes, then other specs on 8 x 4096 dense, bf16, K = V = 128 with 16 heads (RWKV-7: 64 heads
of 64). Prints ms of the forward and of forward and backward, captured in a CUDA graph and eager, with L2 flushed before
each call; and the peak memory of a step, gradients included. Needs a CUDA device. Uses the public API only, so that it
also measures other versions.

Decays per channel are weak, logsigmoid(N(0, 1)) / 16, or strong, 3 logsigmoid(N(0, 1)).
"""

import statistics
import sys
import time

import torch

from deltazoo import UpdateInputs, UpdateSpec, bind
from deltazoo.backends.triton import TritonBackend

DEVICE = "cuda"
SHAPES = {  # B, T, H, HV, lengths
    "8x4096p 16/16": (1, 32768, 16, 16, [4096] * 8),
    "8x4096 16/16": (8, 4096, 16, 16, None),
    "4x8192p 16/64": (1, 32768, 16, 64, [8192] * 4),
    "1x8192 16/32": (1, 8192, 16, 32, None),
    "1x32768 2/8": (1, 32768, 2, 8, None),
}
GATED = UpdateSpec(decay="head", beta="head")
OTHERS = {
    "delta": UpdateSpec(beta="head"),
    "additive": UpdateSpec(decay="head", transition="additive"),
    "retnet": UpdateSpec(decay="fixed", transition="additive"),
    "negative": UpdateSpec(decay="head", beta="head", negative_eigenvalues="both"),
    "own": UpdateSpec(decay="head", beta="head", erase_key="own"),
    "comba": UpdateSpec(decay="head", beta="separate", erase_from="previous"),
    "efla": UpdateSpec(decay="head", beta="head", reparam="efla"),
    "kda weak": UpdateSpec(decay="channel", beta="head"),
    "kda strong": UpdateSpec(decay="channel", beta="head"),
    "gla weak": UpdateSpec(decay="channel", transition="additive"),
    "gdn2 weak": UpdateSpec(decay="channel", beta="channel"),
    "rwkv7": UpdateSpec(decay="channel", transition="dplr"),
}


def bench(call, n=25, graph=True):
    """The median time of n calls in ms."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            call()
        call = captured.replay
    cache = torch.empty(64 * 2**20, dtype=torch.int32, device=DEVICE)
    times = []
    for _ in range(n):
        cache.zero_()
        start, stop = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def inputs(spec, B, T, H, HV, lengths, K=128, V=128, grad=False, dtype=torch.bfloat16, strong=False):
    """Random operands without a state, equal for equal sizes."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(*sizes):
        return torch.randn(*sizes, generator=generator, device=DEVICE)

    def unit(x):
        return torch.nn.functional.normalize(x, dim=-1)

    x = {"q": unit(normal(B, T, H, K)), "k": unit(normal(B, T, H, K)), "v": normal(B, T, HV, V)}
    x = {name: tensor.to(dtype) for name, tensor in x.items()}
    if spec.decay == "head":
        x["log_decay"] = torch.nn.functional.logsigmoid(normal(B, T, HV) + 3)
    if spec.decay == "fixed":
        x["log_decay"] = -torch.rand(HV, generator=generator, device=DEVICE) * 0.1
    if spec.decay == "channel":
        x["log_decay"] = torch.nn.functional.logsigmoid(normal(B, T, HV, K)) * (3 if strong else 1 / 16)
    if spec.transition == "dplr":
        removal_key = unit(normal(B, T, HV, K))
        x |= {"a": -removal_key.to(dtype), "b": (removal_key * normal(B, T, HV, K).sigmoid()).to(dtype)}
    if spec.beta == "channel":
        x["erase"], x["write"] = (normal(B, T, HV, n).sigmoid().to(dtype) for n in (K, V))
    if spec.beta == "separate":
        x["erase"], x["write"] = (normal(B, T, HV).sigmoid() for _ in range(2))
    if spec.beta == "head":
        x["beta"] = normal(B, T, HV).sigmoid()
    if spec.erase_key == "own":
        x["erase_key"] = unit(x["k"].float() + 0.3 * unit(normal(B, T, H, K))).to(dtype)
    if lengths:
        bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        x["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    if grad:
        x = {name: tensor.requires_grad_() if tensor.is_floating_point() else tensor for name, tensor in x.items()}
    return UpdateInputs(**x)


def both(bound, x, do):
    """Return a call that computes o and the gradients of all operands."""
    leaves = [tensor for tensor in x if tensor is not None and tensor.requires_grad]

    def step():
        o = bound(x).o
        return o, torch.autograd.grad(o, leaves, do)

    return step


def peak(call):
    """The peak memory of a call in MiB, its results included."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = call()
    torch.cuda.synchronize()
    peak_bytes = torch.cuda.max_memory_allocated() - before
    del results
    return peak_bytes / 2**20


def main(words):
    began = time.time()
    bound = bind(GATED, TritonBackend())
    for name, shape in SHAPES.items():
        if words and not any(name.startswith(word) for word in words):
            continue
        x = inputs(GATED, *shape)
        forward = [bench(lambda x=x: bound(x), graph=graph) for graph in (True, False)]
        x = inputs(GATED, *shape, grad=True)
        step = both(bound, x, torch.randn_like(x.v))
        steps = [bench(step, graph=graph) for graph in (True, False)]
        print(
            f"{name:15s} fwd graph {forward[0]:.3f} eager {forward[1]:.3f}; both graph {steps[0]:.3f} eager "
            f"{steps[1]:.3f}; peak {peak(step):.0f} MiB  [{time.time() - began:.0f} s]",
            flush=True,
        )
    for name, spec in OTHERS.items():
        if words and "specs" not in words and not any(name.startswith(word) for word in words):
            continue
        bound = bind(spec, TritonBackend())
        shape, widths = SHAPES["8x4096 16/16"], {}
        if spec.transition == "dplr":
            shape, widths = (8, 4096, 64, 64, None), {"K": 64, "V": 64}
        widths["strong"] = name.endswith("strong")
        x = inputs(spec, *shape, **widths)
        forward = [bench(lambda x=x, bound=bound: bound(x), graph=graph) for graph in (True, False)]
        x = inputs(spec, *shape, grad=True, **widths)
        step = both(bound, x, torch.randn_like(x.v))
        steps = [bench(step, graph=graph) for graph in (True, False)]
        print(
            f"{name:15s} fwd graph {forward[0]:.3f} eager {forward[1]:.3f}; both graph {steps[0]:.3f} eager "
            f"{steps[1]:.3f}; peak {peak(step):.0f} MiB  [{time.time() - began:.0f} s]",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
