"""Host time of the parts of an eager step: python host.py; microseconds, 20th percentile of 300 calls each.

Gated delta rule, bfloat16, K = V = 128, 1 x 2048 dense with 16 / 32 heads; needs a CUDA device.
"""

import time

import torch
from perf import both, inputs

from deltazoo import UpdateSpec, bind
from deltazoo.backends.triton import TritonBackend
from deltazoo.backends.triton.chunk import op
from deltazoo.backends.triton.chunk.backward import backward
from deltazoo.backends.triton.chunk.forward import forward
from deltazoo.backends.triton.chunk.op import resolve
from deltazoo.backends.triton.lower import lower
from deltazoo.backends.triton.operands import Gradients, Saved
from deltazoo.backends.update.base import UpdateMeta
from deltazoo.backends.update.check import check


def report(name, call, n=300):
    for _ in range(10):
        call()
    times = []
    for i in range(n):
        if i % 20 == 0:
            torch.cuda.synchronize()  # before the launch queue is full
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    torch.cuda.synchronize()
    print(f"{name:44s} {sorted(times)[n // 5] * 1e6:8.1f}", flush=True)


class EmptyFunction(torch.autograd.Function):
    """An autograd.Function with the same number of operands that computes nothing."""

    @staticmethod
    def forward(ctx, q, *others):
        ctx.others = len(others)
        return q.view_as(q)

    @staticmethod
    def backward(ctx, d):
        return d, *(None for _ in range(ctx.others))


spec, shape = UpdateSpec(decay="head", beta="head"), (1, 2048, 16, 32, None)
backend = TritonBackend()
bound, x, xg = bind(spec, backend), inputs(spec, *shape), inputs(spec, *shape, grad=True)
do, leaves = torch.randn_like(x.v), [t for t in xg if t is not None and t.requires_grad]
step = both(bound, xg, do)
report("forward", lambda: bound(x))
report("forward + backward", step)
report("forward with gradients", lambda: bound(xg))
o = bound(xg).o
report("backward", lambda: torch.autograd.grad(o, leaves, do, retain_graph=True))
report("check", lambda: check(spec, x))
report("choice of the backend", lambda: bound.backend_for(UpdateMeta.of(x)))
report("operands of the kernels", lambda: lower(spec, x, ""))
xo, kind = lower(spec, x, "")[:2]
xgo = lower(spec, xg, "").operands
empty = EmptyFunction.apply(*[t for t in xgo if t is not None], *kind)
report("an empty autograd.Function", lambda: EmptyFunction.apply(*[t for t in xgo if t is not None], *kind))
d_empty = torch.randn_like(empty)
report("backward of an empty autograd.Function", lambda: torch.autograd.grad(empty, [xg.q], d_empty, retain_graph=True))
report("the autograd.Function", lambda: op._EagerScan.apply(*xgo, kind))
with torch.no_grad():
    report("the operator", lambda: op._scan_op(*xo, *kind, True))
    report("the body of the operator", lambda: op._scan_impl(*xo, *kind, True))
    out = op._scan_op(*xo, *kind, True)
    arguments = (*xo, out[2], do, None, *kind)
    report("the backward's operator", lambda: op._backward_op(*arguments))
    report("the body of the backward's operator", lambda: op._backward_impl(*arguments))
    plan = resolve(xo, kind, True)
    saved = Saved.of(out[2], plan.problem, plan.config.chunk, plan.checkpoint_chunks)
    report("the plan", lambda: resolve(xo, kind, True))
    report("launches of the forward", lambda: forward(xo, kind, plan))
    report("launches of the backward", lambda: backward(xo, kind, saved, do, None, plan))
    report("allocation of the gradients", lambda: Gradients.empty(xo, kind))
    report("torch.empty of 128 MiB", lambda: torch.empty_like(x.q))
    report("a device context", lambda: torch.cuda.device_of(x.q).__enter__())
