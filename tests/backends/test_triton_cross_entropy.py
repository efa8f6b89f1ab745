"""The cross entropy kernel against float64: in Triton's interpreter with TRITON_INTERPRET=1, or on a GPU."""

import math

import pytest
import torch
from assembly import disassemble
from compiling import Compiler
from torch import Tensor
from triton_cases import DEVICE, INTERPRETED, needs_triton

from deltazoo import watch
from deltazoo.backends.ops import cross_entropy
from deltazoo.backends.ops.cross_entropy import linear_cross_entropy
from deltazoo.backends.triton.loss import op as kernel
from deltazoo.backends.triton.loss.op import losses_, refusals

IGNORED = -100
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}
DTYPES = list(TOLERANCE)[: 2 if INTERPRETED else 3]
LOGITS = {
    "random": lambda z: 3 * z,
    "large": lambda z: 2000 * z,
    "equal": lambda z: 0 * z + 7,
    "one certain": lambda z: z.index_fill(1, torch.tensor([2], device=z.device), 500.0),
    "some -inf": lambda z: z.masked_fill(z < -0.5, -math.inf),
}


def draw(rows: int, L: int, name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits whose rows are longer than L in memory, and targets of which every third is ignored."""
    generator = torch.Generator().manual_seed(L)
    wide = torch.full((rows, L + 3), math.nan, dtype=dtype, device=DEVICE)
    logits = wide[:, :L].copy_(LOGITS[name](torch.randn(rows, L, generator=generator).to(DEVICE)))
    targets = logits.float().masked_fill(logits.isinf(), -1e30).argsort(1)[:, -2].clone()
    targets[::3] = IGNORED
    return logits, targets


def definition(
    logits: Tensor, targets: Tensor, scale: Tensor, z_loss: float | None, cap: float | None
) -> tuple[Tensor, Tensor]:
    """The losses and their gradients in float64."""
    raw = logits.double().requires_grad_()
    z = raw if cap is None else cap * (raw / cap).tanh()
    lse, ignored = z.logsumexp(1), targets == IGNORED
    losses = lse - z.gather(1, targets.masked_fill(ignored, 0)[:, None])[:, 0] + (z_loss or 0) * lse.square()
    losses = losses.masked_fill(ignored, 0)
    (gradient,) = torch.autograd.grad((losses * scale.double()).sum(), raw)
    return losses.detach(), gradient


def assert_near(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    error = (actual.double() - expected).norm() / expected.norm().clamp(min=1e-30)
    assert error <= tolerance, float(error)


@needs_triton
@pytest.mark.parametrize(("z_loss", "cap"), [(None, None), (0.01, 5.0)], ids=["", "z cap"])
@pytest.mark.parametrize("L", [5, pytest.param(37, marks=pytest.mark.kernel_smoke), 48])
def test_the_kernel_stores_losses_and_gradients(monkeypatch, L, z_loss, cap):
    monkeypatch.setattr(kernel, "BLOCK", 16)
    for name in LOGITS:
        for dtype in DTYPES:
            if cap is not None and name == "large":
                continue  # every capped logit is +-5, whose gradient is exactly 0
            logits, targets = draw(8, L, name, dtype)
            scale = torch.linspace(-1, 2, 8, device=DEVICE)
            expected, gradient = definition(logits, targets, scale, z_loss, cap)
            losses = torch.full((8,), math.nan, device=DEVICE)
            before = logits.clone()
            losses_(logits, targets, scale, losses, False, IGNORED, z_loss, cap)
            assert torch.equal(logits, before)
            assert_near(losses, expected, 1e-5)
            losses_(logits, targets, scale, losses.fill_(math.nan), True, IGNORED, z_loss, cap)
            assert_near(losses, expected, 1e-5)
            assert_near(logits, gradient, TOLERANCE[dtype])
            assert not logits[targets == IGNORED].any()


@needs_triton
def test_a_target_outside_the_vocabulary_gives_nan():
    logits, _ = draw(4, 9, "random", torch.float32)
    losses = torch.zeros(4, device=DEVICE)
    targets = torch.tensor([3, 9, -1, 2**40], device=DEVICE)
    losses_(logits, targets, None, losses, True, IGNORED, None, None)
    assert losses.isnan().tolist() == [False, True, True, True]


@needs_triton
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_fused_loss_runs_the_kernel(monkeypatch, reduction):
    monkeypatch.setattr(cross_entropy.kernel, "refusals", lambda logits: ())
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 8, generator=generator).to(DEVICE).requires_grad_() for rows in (23, 11))
    targets = torch.randint(0, 11, (23,), generator=generator).to(DEVICE)
    targets[::4] = IGNORED
    results = []
    with watch() as log:
        for a, b in ((x, weight), (x.detach().double().requires_grad_(), weight.detach().double().requires_grad_())):
            loss = linear_cross_entropy(a, b, targets, reduction, z_loss=0.1, cap=3.0, chunk=8)
            results.append([loss.sum().detach(), *torch.autograd.grad(loss.sum() * 3, (a, b))])
            monkeypatch.setattr(cross_entropy.kernel, "refusals", lambda logits: ("planted",))
    assert log.kernels == {"cross_entropy_kernel": 3 if reduction == "mean" else 6}
    for actual, expected in zip(*results, strict=True):
        assert_near(actual, expected, 1e-5)


def test_the_kernel_needs_a_gpu_and_at_most_32_bits():
    assert refusals(torch.zeros(2, 3))
    if not INTERPRETED and torch.cuda.is_available():
        assert not refusals(torch.zeros(2, 3, device="cuda"))
        assert refusals(torch.zeros(2, 3, device="cuda", dtype=torch.float64))


@pytest.mark.kernels
@pytest.mark.skipif(INTERPRETED, reason="needs Triton's compiler, not its interpreter")
@pytest.mark.parametrize("L", [32000, 50257])
def test_the_compiled_kernel_has_no_spills_and_wide_loads(monkeypatch, L):
    compiler = Compiler(all=True)
    monkeypatch.setattr("deltazoo.backends.triton.runtime.launcher.launcher", compiler)
    stride = -(-L // 64) * 64
    logits = torch.empty(2, stride, dtype=torch.bfloat16)[:, :L]
    losses_(logits, torch.zeros(2, dtype=torch.int64), None, torch.empty(2), True, IGNORED, 1e-4, 30.0)
    ((_, compiled),) = compiler.compiled
    assert compiled.metadata.num_warps == kernel.WARPS
    assert "ld.global.v4" in compiled.asm["ptx"]
    assert "st.global.v4" in compiled.asm["ptx"]
    assert "STL" not in disassemble(compiled.asm["cubin"])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("L", [32000, 50257, 151936])
@pytest.mark.parametrize("scale", [1, 100])
def test_large_vocabularies_in_bfloat16(L, scale):
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(512, 256, generator=generator, device="cuda").mul(scale).bfloat16().requires_grad_()
    weight = torch.randn(L, 256, generator=generator, device="cuda").div(16).bfloat16().requires_grad_()
    targets = torch.randint(0, L, (512,), generator=generator, device="cuda")
    targets[::5] = IGNORED
    with watch() as log:
        loss = linear_cross_entropy(x, weight, targets, chunk=200)
    assert log.kernels == {"cross_entropy_kernel": 3}
    actual = [loss, *torch.autograd.grad(loss, (x, weight))]
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    logits = wide[0] @ wide[1].T
    # Logits of 400 have an error of 1 in 16 bits, so the exact gradient is that at the rounded logits.
    logits = logits + (logits.bfloat16().double() - logits).detach()
    expected = torch.nn.functional.cross_entropy(logits, targets)
    expected = [expected, *torch.autograd.grad(expected, wide)]
    for ours, exact in zip(actual, expected, strict=True):
        assert_near(ours.detach(), exact.detach(), 1e-2)
