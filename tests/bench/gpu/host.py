"""Where the host's time of an eager step goes: python host.py; microseconds, the 20th percentile of 300 calls each.

Of a gated delta rule, bfloat16, K = V = 128, 8 x 4096 dense; needs a CUDA device.
"""

import time

import torch
from perf import SHAPES, both, inputs

from deltazoo import UpdateSpec, bind
from deltazoo.backends.base import UpdateMeta
from deltazoo.backends.check import check
from deltazoo.backends.triton import TritonBackend, op
from deltazoo.backends.triton import backward as backwards
from deltazoo.backends.triton import forward as launch
from deltazoo.backends.triton.operands import Prepared


def took(what, call, n=300):
    for _ in range(10):
        call()
    times = []
    for i in range(n):
        if i % 20 == 0:
            torch.cuda.synchronize()  # before the queue is full
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    torch.cuda.synchronize()
    print(f"{what:44s} {sorted(times)[n // 5] * 1e6:8.1f}", flush=True)


class Nothing(torch.autograd.Function):
    """As many operands and results as the real one, and no work."""

    @staticmethod
    def forward(ctx, q, *others):
        ctx.others = len(others)
        return q.view_as(q)

    @staticmethod
    def backward(ctx, d):
        return d, *(None for _ in range(ctx.others))


spec, shape = UpdateSpec(decay="head", beta="head"), SHAPES["8x4096 16/16"]
backend = TritonBackend()
bound, x, xg = bind(spec, backend), inputs(spec, *shape), inputs(spec, *shape, grad=True)
do, leaves = torch.randn_like(x.v), [t for t in xg if t is not None and t.requires_grad]
step = both(bound, xg, do)
took("forward", lambda: bound(x))
took("forward + backward", step)
took("forward, to be differentiated", lambda: bound(xg))
o = bound(xg).o
took("backward", lambda: torch.autograd.grad(o, leaves, do, retain_graph=True))
took("check", lambda: check(spec, x))
took("which backend", lambda: bound.backend_for(UpdateMeta.of(x)))
took("the kernels' operands", lambda: backend._operands(spec, x))
xo, kind = backend._operands(spec, x)
xgo, _ = backend._operands(spec, xg)
nothing = Nothing.apply(*[t for t in xgo if t is not None], *kind)
took("an autograd.Function of nothing", lambda: Nothing.apply(*[t for t in xgo if t is not None], *kind))
took("its backward", lambda: torch.autograd.grad(nothing, [xg.q], do, retain_graph=True))
took("the autograd.Function", lambda: op._ChunkScan.apply(*xgo, *kind))
with torch.no_grad():
    took("the operator", lambda: op._scan_op(*xo, *kind, True))
    took("its body", lambda: op._scan_impl(*xo, *kind, True))
    out = op._scan_op(*xo, *kind, True)
    saved = (*xo, *out[2:], do, None, *kind)
    took("the backward's operator", lambda: op._backward_op(*saved))
    took("its body", lambda: op._backward_impl(*saved))
    written, config, s = kind.writes(xo), launch.resolve(xo, kind), launch.Sizes.of(xo, 64)
    prepared = Prepared(*out[2:5])
    took("which config", lambda: launch.resolve(xo, kind))
    took("prepare", lambda: launch.prepare(written, kind, config, True))
    took("launches of the backward", lambda: backwards.backward(written, kind, prepared, out[5], do, None, config))
    d = backwards.Gradients.empty(written, kind)
    took("room for the gradients", lambda: backwards.Gradients.empty(written, kind))
    scratch = backwards._Scratch(written, kind, s, 128 * 8, d.v, True)
    sums, carry = backwards._Sums(written, kind, s, 2), launch.empty(x.q, 8, 16, 128, 128)
    cut = launch.Cut(1, 0, 16, 16, 4)

    def walk():
        return backwards._walk(written, kind, prepared, s, cut, do, carry, scratch, sums, d, None)

    took("a launcher", walk)
    go = walk()
    took("a launch of the walk", lambda: go(3))
    took("zeros", lambda: carry.zero_())
    took("torch.empty of 128 MiB", lambda: torch.empty_like(x.q))
    took("a device context", lambda: torch.cuda.device_of(x.q).__enter__())
