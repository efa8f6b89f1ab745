"""The kernels of softmax weights over time against float64: in Triton's interpreter, or on a GPU."""

import itertools

import pytest
import torch
from assembly import disassemble
from compiling import Compiler
from torch import Tensor
from torch.autograd import forward_ad
from triton_cases import DEVICE, INTERPRETED, needs_triton

from deltazoo import watch
from deltazoo.backends.io.errors import UnsupportedError
from deltazoo.backends.ops.time_softmax import INITIAL, SCORE_BOUND, TimeSoftmaxCall, refusals, time_softmax
from deltazoo.backends.triton.operands import with_token_stride
from deltazoo.backends.triton.time_softmax import op
from deltazoo.mixers import LightNet
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.parts.attention.running_logsumexp import softmax_over_time

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


def draw(name: str, dtype: torch.dtype) -> TimeSoftmaxCall:
    """Draw scores, some beyond the bound, the sums before them, and the bounds."""
    B, T, D, bounds, has_state = CASES[name]
    torch.manual_seed(0)
    raw = (8 * torch.randn(B, T, D)).clamp(-33, 33).to(DEVICE, dtype)
    raw[:, T // 3 : T // 3 + 5] = 40.0
    raw[:, T // 2 : T // 2 + 5] = -40.0
    N = len(bounds) - 1 if bounds else B
    state = (10 * torch.randn(N, D)).to(DEVICE).requires_grad_() if has_state else None
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=DEVICE) if bounds else None
    return TimeSoftmaxCall(raw.requires_grad_(), state, cu_seqlens)


def exact(x: TimeSoftmaxCall) -> TimeSoftmaxCall:
    raw, state = (None if y is None else y.detach().double().requires_grad_() for y in x[:2])
    assert raw is not None
    return TimeSoftmaxCall(raw, state, x.cu_seqlens)


def expected(x: TimeSoftmaxCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return log a, w and the last z of each sequence, 0 outside of the sequences."""
    score = x.raw.clamp(-SCORE_BOUND, SCORE_BOUND)
    B, T, D = x.raw.shape
    pieces = [(b, 0, T) for b in range(B)]
    if x.cu_seqlens is not None:
        pieces = [(0, start, stop) for start, stop in itertools.pairwise(x.cu_seqlens.tolist())]
    log_decay, w, last = torch.zeros_like(x.raw), torch.zeros_like(x.raw), []
    for n, (b, start, stop) in enumerate(pieces):
        first = x.raw.new_full((D,), INITIAL) if x.state is None else x.state[n]
        z = torch.cat([first[None], score[b, start:stop]]).logcumsumexp(0)
        at = torch.tensor(b, device=x.raw.device), torch.arange(start, stop, device=x.raw.device)
        log_decay = log_decay.index_put(at, z[:-1] - z[1:])
        w = w.index_put(at, (score[b, start:stop] - z[1:]).exp())
        last.append(z[-1])
    return log_decay, w, torch.stack(last)


def leaves(x: TimeSoftmaxCall) -> list[Tensor]:
    return [y for y in x[:2] if y is not None]


def error(actual: Tensor, reference: Tensor) -> float:
    return float((actual.detach().double() - reference.detach()).norm() / reference.detach().norm())


@needs_triton
@pytest.mark.parametrize(("name", "dtype"), [pytest.param(*PRODUCT[0], marks=pytest.mark.kernel_smoke), *PRODUCT[1:]])
def test_weights_decays_and_gradients(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(op, "_ROWS", 4)  # so that several tiles of chunks are summed
    x = draw(name, dtype)
    reference = exact(x)
    references = expected(reference)
    with watch() as log:
        results = time_softmax(x)
        weights = [torch.randn_like(y) for y in references]
        gradients = torch.autograd.grad(results, leaves(x), [w.to(y) for w, y in zip(weights, results, strict=True)])
    used = {"score_sums_kernel", "sum_before_kernel", "time_softmax_kernel"}
    used |= {"sum_gradients_kernel", "sum_after_kernel", "time_softmax_backward_kernel"}
    assert used <= set(log.kernels)
    half = {torch.float32: 0.0, torch.bfloat16: 3e-3, torch.float16: 4e-4}[dtype]  # of the rounding of w and gradients
    # the first decay without a state is negligible, and rounded to a normal number
    assert error(results[0].clamp(min=-69), references[0].clamp(min=-69)) < 1e-6
    assert error(results[1], references[1]) < max(half, 2e-6)
    assert error(results[2], references[2]) < 1e-6
    if x.cu_seqlens is not None:
        assert not any(y[:, int(x.cu_seqlens[-1]) :].any() for y in results[:2])
    loss = sum((y * w.to(r).double()).sum() for y, w, r in zip(references, weights, results, strict=True))
    for actual, expected_gradient in zip(gradients, torch.autograd.grad(loss, leaves(reference)), strict=True):
        assert error(actual, expected_gradient) < max(half, 2e-5)


@needs_triton
@pytest.mark.parametrize("which", [0, 1, 2], ids=["decay", "weight", "state"])
def test_the_gradient_of_one_result(which: int) -> None:
    x = draw("a pack with empty sequences", torch.float32)
    reference = exact(x)
    result, exact_result = time_softmax(x)[which], expected(reference)[which]
    weight = torch.randn_like(exact_result)
    gradients = torch.autograd.grad(result, leaves(x), weight.float())
    for actual, y in zip(gradients, torch.autograd.grad(exact_result, leaves(reference), weight), strict=True):
        assert error(actual, y) < 2e-5


@needs_triton
def test_an_empty_sequence_passes_the_gradient_of_its_state_on() -> None:
    state = torch.full((2, 3), INITIAL, device=DEVICE, requires_grad=True)
    bounds = torch.tensor([0, 0, 10], dtype=torch.int32, device=DEVICE)
    _, _, z = time_softmax(TimeSoftmaxCall(torch.randn(1, 10, 3, device=DEVICE), state, bounds))
    (gradient,) = torch.autograd.grad(z.sum() * 65536, state)
    assert gradient[0].eq(65536).all() and gradient.isfinite().all()


@needs_triton
def test_second_derivatives_equal_float64() -> None:
    x = draw("a pack with empty sequences", torch.float32)
    gradients = []
    for call, results in ((x, time_softmax(x)), ((reference := exact(x)), expected(reference))):
        torch.manual_seed(1)
        weights = [torch.randn(y.shape).to(y) for y in results]
        first = torch.autograd.grad(results, leaves(call), weights, create_graph=True)
        gradients.append(torch.autograd.grad(sum(y.square().sum() for y in first), leaves(call)))
    for actual, y in zip(*gradients, strict=True):
        assert error(actual, y) < 1e-4


@needs_triton
def test_a_tangent_is_refused_and_takes_the_plain_form() -> None:
    with forward_ad.dual_level():
        raw = forward_ad.make_dual(torch.randn(1, 9, 2, device=DEVICE), torch.randn(1, 9, 2, device=DEVICE))
        with torch.no_grad(), pytest.raises(UnsupportedError, match=r"triton_time_softmax.*forward-mode derivative"):
            time_softmax(TimeSoftmaxCall(raw, None, None))
        assert refusals(raw) == ["it has no rule for the transforms of torch.func and forward-mode derivatives."]


@needs_triton
def test_scores_that_grow_and_shrink_keep_their_digits() -> None:
    """A score far above the sum before it, and many far below it."""
    raw = torch.full((1, 200, 2), -20.0, device=DEVICE)
    raw[:, 60] = 20.0
    raw[:, 130] = 31.0
    x = TimeSoftmaxCall(raw, None, None)
    results, (log_decay, w, _) = time_softmax(x), expected(exact(x))
    torch.testing.assert_close(results[1].double(), w.detach(), rtol=1e-5, atol=0)
    # atol: the reference is a difference of two z in float64
    torch.testing.assert_close(results[0].double()[:, 1:], log_decay.detach()[:, 1:], rtol=1e-5, atol=1e-14)


@needs_triton
def test_a_part_of_a_wider_tensor_is_read_in_place() -> None:
    wide = torch.randn(2, 70, 48, device=DEVICE)
    part = wide[:, :, 16:32].requires_grad_()
    assert with_token_stride(part)[0] is part
    copied = part.detach().contiguous().requires_grad_()
    weights = [torch.randn_like(copied), torch.randn_like(copied)]
    results = []
    for raw in (part, copied):
        log_decay, w, last = time_softmax(TimeSoftmaxCall(raw, None, None))
        results.append([log_decay, w, last, *torch.autograd.grad([log_decay, w], raw, weights)])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


@needs_triton
def test_nan_stays_in_its_sequence() -> None:
    raw = torch.randn(1, 200, 2, device=DEVICE)
    raw[:, 90] = torch.nan
    bounds = torch.tensor([0, 80, 140, 200], dtype=torch.int32, device=DEVICE)
    log_decay, w, last = time_softmax(TimeSoftmaxCall(raw, None, bounds))
    for x in (log_decay, w):
        assert x[:, :90].isfinite().all() and x[:, 140:].isfinite().all()
        assert x[:, 90:140].isnan().all()
    assert last.isnan().tolist() == [[False] * 2, [True] * 2, [False] * 2]


@needs_triton
def test_the_plain_form_is_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    raw, state, bounds = draw("a pack with empty sequences", torch.float32)
    assert bounds is not None
    context, results = Context(cu_seqlens=bounds), []
    for reasons in ([], ["it is off."]):
        module = "deltazoo.mixers.parts.attention.running_logsumexp"
        monkeypatch.setattr(f"{module}.refusals", lambda _, reasons=reasons: reasons)
        log_decay, w, last = softmax_over_time(raw.detach(), state, context)
        results.append([log_decay[:, : bounds[-1]], w[:, : bounds[-1]], last])
    for actual, plain in zip(*results, strict=True):
        torch.testing.assert_close(actual, plain, rtol=1e-4, atol=1e-5)


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
    log_decay, w, final, before = op._forward(raw, state, bounds)
    op._backward(raw, state, bounds, before, final, log_decay, w, final)
    assert len(compiler.compiled) == (8 if packed else 6)
    for name, kernel in compiler.compiled:
        instructions = disassemble(kernel.asm["cubin"])
        assert "STL" not in instructions, name  # a spill
        if not packed and name not in ("sum_before_kernel", "sum_after_kernel"):
            assert "SHFL" not in instructions and "BAR.SYNC" not in instructions, name
