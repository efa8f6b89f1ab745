"""Time the fused linear cross entropy on a GPU: python loss.py [CHUNK]...

32,768 tokens, width 2048, vocabularies of 32,000, 50,257 and 151,936, bf16: forward + backward with the Triton kernel,
in chunks of the default or CHUNK tokens, with torch's operations in its place, and torch.nn.functional.cross_entropy of
all logits where they fit. Prints the matrix products alone, medians of CUDA graphs, the peak memory of a step, and
errors relative to float64 on 2,048 of the tokens.
"""

import statistics
import sys
from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor

from deltazoo.backends.ops import cross_entropy
from deltazoo.backends.ops.cross_entropy import linear_cross_entropy

N, D = 32768, 2048
PRODUCT_CHUNK = 4096


def bench(call: Callable[[], object], n: int = 11) -> str:
    """Return the median of the call in a CUDA graph, and the peak memory of an eager call."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(n):
        start, stop = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return f"{statistics.median(times):.2f} ms, peak {peak:.0f} MiB"


def with_gradients(loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return loss.detach(), *torch.autograd.grad(loss, inputs)


def products(x: Tensor, weight: Tensor) -> None:
    """The three matrix products of a step."""
    logits = x.new_empty(PRODUCT_CHUNK, len(weight))
    d_weight = torch.zeros(weight.shape, device="cuda")
    for rows in x.split(PRODUCT_CHUNK):
        torch.mm(rows, weight.T, out=logits)
        torch.mm(logits, weight)
        cross_entropy.add_product_(d_weight, logits.T, rows)


def measure(L: int, chunks: list[int | None]) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(N, D, generator=generator, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(L, D, generator=generator, device="cuda").div(D**0.5).bfloat16().requires_grad_()
    targets = torch.randint(0, L, (N,), generator=generator, device="cuda")

    def fused(chunk: int | None = None) -> object:
        return with_gradients(linear_cross_entropy(x, weight, targets, chunk=chunk), x, weight)

    def of_all_logits() -> object:
        return with_gradients(torch.nn.functional.cross_entropy(x @ weight.T, targets), x, weight)

    print(f"L {L}: products {bench(lambda: products(x.detach(), weight.detach()))}", flush=True)
    for chunk in chunks:
        print(f"  kernel, chunk {chunk or 'default'}: {bench(lambda chunk=chunk: fused(chunk))}", flush=True)
    with patch.object(cross_entropy.kernel, "is_supported", lambda logits: False):
        print(f"  torch's operations: {bench(fused)}", flush=True)
    if L < 100_000:
        print(f"  F.cross_entropy: {bench(of_all_logits)}", flush=True)
    part = slice(0, 2048)
    exact_x, exact_weight = (t.detach().double().requires_grad_() for t in (x[part], weight))
    exact_loss = torch.nn.functional.cross_entropy(exact_x @ exact_weight.T, targets[part])
    exact = with_gradients(exact_loss, exact_x, exact_weight)
    ours = with_gradients(linear_cross_entropy(x[part], weight, targets[part]), x, weight)
    ours = ours[0], ours[1][part], ours[2]
    errors = [float((a.double() - e).norm() / e.norm()) for a, e in zip(ours, exact, strict=True)]
    print("  errors of loss, d_x, d_weight:", *(f"{error:.1e}" for error in errors), flush=True)


if __name__ == "__main__":
    print(torch.__version__, torch.cuda.get_device_name())
    for vocabulary in (32000, 50257, 151936):
        measure(vocabulary, [None, *map(int, sys.argv[1:])])
        torch.cuda.empty_cache()
