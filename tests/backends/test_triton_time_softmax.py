"""The kernels of softmax weights over time against float64: in Triton's interpreter, or on a GPU."""

import itertools

import pytest
import torch
from assembly import disassemble
from compiling import Compiler
from torch import Tensor
from triton_cases import DEVICE, INTERPRETED, needs_triton

from deltazoo import watch
from deltazoo.backends.ops.time_softmax import TimeSoftmaxCall, time_softmax
from deltazoo.backends.triton.time_softmax import op
from deltazoo.mixers import LightNet
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.parts.attention.running_logsumexp import INITIAL, SCORE_BOUND, softmax_over_time

# B, T, channels, bounds of packed sequences, whether there is a state
CASES = {
    "one chunk": (1, 40, 4, (), True),
    "several chunks": (2, 150, 6, (), False),
    "a pack with empty sequences": (1, 160, 5, (0, 0, 70, 71, 71, 150), True),
    "a pack without states": (1, 130, 3, (0, 66, 130), False),
}
if not INTERPRETED:
    CASES["many chunks"] = (1, 65537, 2048, (0, 1, 30000, 30000, 65537), True)
    CASES["rows of a batch"] = (3, 4100, 100, (), True)
DTYPES = (torch.float32,) if INTERPRETED else (torch.float32, torch.bfloat16, torch.float16)
PRODUCT = list(itertools.product(CASES, DTYPES))


def draw(name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Draw scores, some beyond the bound, the sums before them, and the bounds."""
    B, T, D, bounds, has_state = CASES[name]
    torch.manual_seed(0)
    raw = (8 * torch.randn(B, T, D)).clamp(-33, 33).to(DEVICE, dtype)
    raw[:, T // 3 : T // 3 + 5] = 40.0
    raw[:, T // 2 : T // 2 + 5] = -40.0
    N = len(bounds) - 1 if bounds else B
    state = (10 * torch.randn(N, D)).to(DEVICE).requires_grad_() if has_state else None
    return raw.requires_grad_(), state, torch.tensor(bounds, dtype=torch.int32, device=DEVICE) if bounds else None


def expected(raw: Tensor, state: Tensor | None, bounds: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return log a, w and the last z of each sequence, 0 outside of the sequences."""
    score = raw.clamp(-SCORE_BOUND, SCORE_BOUND)
    B, T, D = raw.shape
    pieces = [(b, 0, T) for b in range(B)]
    if bounds is not None:
        pieces = [(0, start, stop) for start, stop in itertools.pairwise(bounds.tolist())]
    log_decay, w, last = torch.zeros_like(raw), torch.zeros_like(raw), []
    for n, (b, start, stop) in enumerate(pieces):
        first = raw.new_full((D,), INITIAL) if state is None else state[n]
        z = torch.cat([first[None], score[b, start:stop]]).logcumsumexp(0)
        at = torch.arange(start, stop, device=raw.device)
        log_decay = log_decay.index_put((torch.tensor(b, device=raw.device), at), z[:-1] - z[1:])
        w = w.index_put((torch.tensor(b, device=raw.device), at), (score[b, start:stop] - z[1:]).exp())
        last.append(z[-1])
    return log_decay, w, torch.stack(last)


def error(actual: Tensor, reference: Tensor) -> float:
    return float((actual.detach().double() - reference).norm() / reference.norm())


@needs_triton
@pytest.mark.parametrize(("name", "dtype"), [pytest.param(*PRODUCT[0], marks=pytest.mark.kernel_smoke), *PRODUCT[1:]])
def test_weights_decays_and_gradients(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(op, "_ROWS", 4)  # so that several tiles of chunks are summed
    raw, state, bounds = draw(name, dtype)
    exact = [None if x is None else x.detach().double().requires_grad_() for x in (raw, state)]
    references = expected(*exact, bounds)
    with watch() as log:
        results = time_softmax(TimeSoftmaxCall(raw, state, bounds, SCORE_BOUND, INITIAL))
        weights = [torch.randn_like(x) for x in references]
        inputs = [x for x in (raw, state) if x is not None]
        gradients = torch.autograd.grad(results, inputs, [w.to(y) for w, y in zip(weights, results, strict=True)])
    used = {"score_sums_kernel", "sum_before_kernel", "time_softmax_kernel"}
    used |= {"sum_gradients_kernel", "sum_after_kernel", "time_softmax_backward_kernel"}
    assert used <= set(log.kernels)
    half = {torch.float32: 0.0, torch.bfloat16: 3e-3, torch.float16: 4e-4}[dtype]  # of the rounding of w and gradients
    # the first decay without a state is negligible, and rounded to a normal number
    assert error(results[0].clamp(min=-69), references[0].detach().clamp(min=-69)) < 1e-6
    assert error(results[1], references[1].detach()) < max(half, 2e-6)
    assert error(results[2], references[2].detach()) < 1e-6
    if bounds is not None:
        assert not any(y[:, int(bounds[-1]) :].any() for y in results[:2])
    loss = sum((y * w.to(r).double()).sum() for y, w, r in zip(references, weights, results, strict=True))
    expected_gradients = torch.autograd.grad(loss, [x for x in exact if x is not None])
    for actual, reference in zip(gradients, expected_gradients, strict=True):
        assert error(actual, reference) < max(half, 2e-5)


@needs_triton
def test_scores_that_grow_and_shrink_keep_their_digits() -> None:
    """A score far above the sum before it, and many far below it."""
    raw = torch.full((1, 200, 2), -20.0, device=DEVICE)
    raw[:, 60] = 20.0
    raw[:, 130] = 31.0
    results = time_softmax(TimeSoftmaxCall(raw, None, None, SCORE_BOUND, INITIAL))
    log_decay, w, _ = expected(raw.double(), None, None)
    torch.testing.assert_close(results[1].double(), w, rtol=1e-5, atol=0)
    torch.testing.assert_close(results[0].double()[:, 1:], log_decay[:, 1:], rtol=1e-5, atol=1e-14)  # of float64


@needs_triton
def test_a_part_of_a_wider_tensor_is_read_in_place() -> None:
    wide = torch.randn(2, 70, 48, device=DEVICE)
    results = time_softmax(TimeSoftmaxCall(wide[:, :, 16:32], None, None, SCORE_BOUND, INITIAL))
    copied = time_softmax(TimeSoftmaxCall(wide[:, :, 16:32].contiguous(), None, None, SCORE_BOUND, INITIAL))
    assert all(torch.equal(x, y) for x, y in zip(results, copied, strict=True))


@needs_triton
def test_nan_stays_in_its_sequence() -> None:
    raw = torch.randn(1, 200, 2, device=DEVICE)
    raw[:, 90] = torch.nan
    bounds = torch.tensor([0, 80, 140, 200], dtype=torch.int32, device=DEVICE)
    log_decay, w, last = time_softmax(TimeSoftmaxCall(raw, None, bounds, SCORE_BOUND, INITIAL))
    for x in (log_decay, w):
        assert x[:, :90].isfinite().all() and x[:, 140:].isfinite().all()
    assert w[:, 90:140].isnan().all() and last.isnan().tolist() == [[False] * 2, [True] * 2, [False] * 2]


@needs_triton
def test_the_plain_form_is_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    raw, state, bounds = draw("a pack with empty sequences", torch.float32)
    monkeypatch.setattr("deltazoo.mixers.parts.attention.running_logsumexp.refusals", lambda _: [])
    context = Context(cu_seqlens=bounds)
    actual = softmax_over_time(raw.detach(), state, context)
    monkeypatch.setattr("deltazoo.mixers.parts.attention.running_logsumexp.refusals", lambda _: ["it is off."])
    plain = softmax_over_time(raw.detach(), state, context)
    end = int(bounds[-1])
    torch.testing.assert_close(actual[1][:, :end], plain[1][:, :end], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(actual[2], plain[2], rtol=1e-5, atol=1e-5)


def test_other_calls_give_their_reason() -> None:
    mixer = LightNet(heads=2).build(16, backend="reference")
    with watch() as log:
        mixer(torch.randn(1, 3, 16))
    reasons = [run.reason for run in log.runs if run.name == "softmax over time"]
    assert reasons == ["it needs tensors on 'cuda', got 'cpu'."]


@pytest.mark.kernels
@pytest.mark.skipif(INTERPRETED, reason="needs Triton's compiler, not its interpreter")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_sum_the_tokens_of_a_chunk_without_other_threads(
    packed: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Compiler(all=True)
    monkeypatch.setattr("deltazoo.backends.triton.runtime.launcher.launcher", compiler)
    raw = torch.empty(1, 4096, 3 * 2048, dtype=dtype)[..., 2048:4096]
    bounds, state = (torch.tensor([0, 7, 4096], dtype=torch.int32), torch.empty(2, 2048)) if packed else (None, None)
    arguments = (raw, state, bounds, SCORE_BOUND, INITIAL)
    log_decay, w, final, before = op._forward(*arguments)
    op._backward(*arguments, before, final, log_decay, w, final)
    assert len(compiler.compiled) == (8 if packed else 6)
    for name, kernel in compiler.compiled:
        instructions = disassemble(kernel.asm["cubin"])
        assert "STL" not in instructions, name  # a spill
        if not packed and name not in ("sum_before_kernel", "sum_after_kernel"):
            assert "SHFL" not in instructions and "BAR.SYNC" not in instructions, name
