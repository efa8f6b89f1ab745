"""65,537 tokens in a pack with empty sequences and strong gates, against float64: the kernels of single mixers.

Where the exact result takes T^2 work, only some tokens have a gradient of o; those of all operands are compared.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from fast_weight_cases import convert, draw_memory, draw_ttt, tensors
from torch import Tensor
from triton_cases import DEVICE, INTERPRETED, needs_triton

from deltazoo import watch
from deltazoo.backends.ops.accumulated_rotary import RotaryOperands, rotate
from deltazoo.backends.ops.fast_weights.neural_memory import neural_memory
from deltazoo.backends.ops.fast_weights.ttt_linear import ttt_linear
from deltazoo.backends.ops.forgetting_attention import forgetting_attention
from deltazoo.backends.ops.least_squares import LeastSquares, solve
from deltazoo.backends.ops.log_linear import LevelOperands, level_scan
from deltazoo.backends.ops.path_attention import PathInputs, path_attention
from deltazoo.mixers.parts.memory.log_linear_chunks import scan_packed

pytestmark = [
    pytest.mark.cuda,
    needs_triton,
    pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device: the interpreter takes hours"),
]

T = 65_537
BOUNDS = (0, 0, T - 25_000, T - 25_000, T)
TOKENS = (0, 64, BOUNDS[1] + 999, BOUNDS[2] - 1, BOUNDS[2], BOUNDS[2] + 63, T - 2, T - 1)  # with a gradient of o
SCALE = 0.3
DTYPE = torch.bfloat16
RESULT, GRADIENT = 5e-3, 1e-2  # relative errors in bfloat16


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE)


def gates(*shape: int) -> Tensor:
    """Log gates near 0, and one in a thousand that forgets everything."""
    strong = torch.rand(shape, generator=torch.Generator().manual_seed(9)).to(DEVICE) < 1e-3
    return torch.where(strong, -60.0, 1e-3 * F.logsigmoid(normal(*shape, seed=8))).float()


def bounds() -> Tensor:
    return torch.tensor(BOUNDS, dtype=torch.int32, device=DEVICE)


def start_of(t: int) -> int:
    """Return the first token of the sequence of token t."""
    return max(bound for bound in BOUNDS if bound <= t)


def leaf(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x in a dtype, and the same numbers in float64, as leaves."""
    low = x.to(dtype)
    return low.requires_grad_(), low.detach().double().requires_grad_()


def leaves(*operands: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return the operands in bfloat16, those of one number per head in float32; and in float64."""
    pairs = [leaf(x, DTYPE if x.dtype == torch.float64 else torch.float32) for x in operands]
    return [x for x, _ in pairs], [x for _, x in pairs]


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.detach().double() - expected.detach()).norm() / expected.detach().norm())


def assert_equal(o: Tensor, expected: Tensor, low: list[Tensor], wide: list[Tensor], limits: dict[int, float]) -> None:
    """Compare results [.., tokens, ..] and the gradients of the operands. limits: other tolerances, by operand."""
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(o)
    assert error(o, expected) < RESULT
    gradients = torch.autograd.grad(o, low, weight)
    exact = torch.autograd.grad(expected, wide, weight.double())
    for i, pair in enumerate(zip(gradients, exact, strict=True)):
        assert pair[0].isfinite().all(), i
        assert error(*pair) < limits.get(i, GRADIENT), i


def test_attention_with_forget_gates():
    low, wide = leaves(normal(1, T, 2, 64), normal(1, T, 1, 64, seed=1), normal(1, T, 1, 64, seed=2), gates(1, T, 2))
    q, k, v, log_f = wide
    rows = []
    for t in TOKENS:
        span = slice(start_of(t), t + 1)
        later = log_f[0, span].flip(0).cumsum(0).flip(0) - log_f[0, span]  # log f_(s+1) + ... + log f_t
        scores = SCALE * torch.einsum("hd,sd->sh", q[0, t], k[0, span, 0]) + later
        rows.append(torch.einsum("sh,sv->hv", scores.softmax(0), v[0, span, 0]))
    o = forgetting_attention(*low, SCALE, bounds())[0, list(TOKENS)]
    assert_equal(o, torch.stack(rows), low, wide, {})


@pytest.mark.parametrize("width", [64, 128])
def test_path_attention(width):
    w = F.normalize(normal(1, T, 1, width, seed=3), dim=-1)
    operands = [normal(1, T, 1, width), *(normal(1, T, 1, width, seed=i) for i in (1, 2)), w]
    beta = 0.02 * torch.sigmoid(normal(1, T, 1, seed=4)).float()
    low, wide = leaves(*operands, beta, gates(1, T, 1))
    q, k, v, w, beta, log_f = (y[0, :, 0] for y in wide)
    rows = [_path_row(t, q, k, v, w, beta, log_f) for t in TOKENS]
    sums = [low[5][:, first:end].double().cumsum(1) for first, end in itertools.pairwise(BOUNDS)]
    x = PathInputs(*low[:5], torch.cat(sums, 1), bounds())
    o = path_attention(x, SCALE)[0, list(TOKENS), 0]
    assert_equal(o, torch.stack(rows), low, wide, {4: 2 * GRADIENT, 5: 2 * GRADIENT})


def _path_row(t: int, q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, log_f: Tensor) -> Tensor:
    """Return o_t. Block by block, from the last: y = H_(s+1) ... H_t q_t, and k_s^T y for the tokens s of the block."""
    first, scores, y, C = start_of(t), [], q[t], 512
    for end in range(t + 1, first, -C):
        block = slice(max(first, end - C), end)
        ws, betas, ks = w[block].flip(0), beta[block].flip(0), k[block].flip(0)
        # y_i = y - sum over j < i of w_j a_j with a_i = beta_i w_i . y_i
        lower = torch.eye(len(ws)).to(ws) + (betas[:, None] * (ws @ ws.mT)).tril(-1)
        a = torch.linalg.solve_triangular(lower, (betas * (ws @ y))[:, None], upper=False)[:, 0]
        scores.append(ks @ y - (ks @ ws.mT).tril(-1) @ a)
        y = y - ws.mT @ a
    span = slice(first, t + 1)
    later = log_f[span].flip(0).cumsum(0) - log_f[span].flip(0)
    return (SCALE * torch.cat(scores) + later).softmax(0) @ v[span].flip(0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("delta", [False, True])
def test_log_linear_attention(delta, dtype):
    HV, K, V, L = 2, 64, 64, 17
    unit = [F.normalize(normal(1, T, 1, K, seed=i), dim=-1) for i in (0, 1)]
    erase = [torch.sigmoid(normal(1, T, HV, seed=5)).float()] if delta else []
    weights = 0.1 + normal(1, T, HV, L, seed=6).abs().float()
    operands = [*unit, normal(1, T, HV, V, seed=2), gates(1, T, HV), *erase, weights]
    pairs = [leaf(x, dtype if x.dtype == torch.float64 else torch.float32) for x in operands]
    low, wide = ([pair[i] for pair in pairs] for i in (0, 1))
    o = level_scan(LevelOperands(*low[:4], *(low[4:5] if delta else [None]), low[-1], cu=bounds()))[0]
    levels = o.new_zeros(1, L - 7, HV, K, V, dtype=torch.float64)
    expected = scan_packed([*wide[:2], wide[3], *wide[4:], wide[2]], bounds(), levels)
    assert_equal(o, expected, low, wide, dict.fromkeys(range(3, len(low)), 2 * GRADIENT))


def spans() -> list[tuple[int, int, int, int]]:
    return [(first, end - first, 0, 1) for first, end in itertools.pairwise(BOUNDS)]


def compare(x, run) -> None:
    """Compare the results and gradients of kernels in bfloat16 with those of plain torch in float64."""
    wide = convert(convert(x, DTYPE, torch.float32), torch.float64)
    low = convert(x, DTYPE, torch.float32)
    with watch() as log:
        actual = run(low)
    assert len(log.kernels) > 0
    expected = run(wide)
    weights = [normal(*y.shape, seed=i).to(y) for i, y in enumerate(actual)]
    assert error(actual[0], expected[0]) < RESULT
    gradients = torch.autograd.grad(actual, tensors(low), weights)
    exact = torch.autograd.grad(expected, tensors(wide), [y.double() for y in weights])
    for i, pair in enumerate(zip(gradients, exact, strict=True)):
        assert pair[0].isfinite().all(), i
        assert error(*pair) < GRADIENT, i


def test_ttt_linear():
    x = draw_ttt((spans(), T), 64, 16, DEVICE)

    def run(x):
        o, state = ttt_linear(x)
        return [o, *state]

    compare(x._replace(eta=x.eta / 64), run)


def test_the_neural_memory():
    x = draw_memory((spans(), T), (64, 128), 2, device=DEVICE)
    forgets = torch.rand(x.alpha.shape, generator=torch.Generator().manual_seed(7)).to(DEVICE) < 1e-3
    k = F.normalize(x.k, dim=-1)
    x = x._replace(
        k=k, v=k.flip(-1) + 0.1 * x.v, theta=0.02 * x.theta, alpha=torch.where(forgets, 1.0, 0.01 * x.alpha),
        eta=torch.where(forgets, 0.0, x.eta),
    )  # fmt: skip

    def run(x):
        o, state = neural_memory(x, 16)
        return [o, *state]

    compare(x, run)


def test_least_squares():
    k, b = F.normalize(F.silu(normal(1, T, 2, 128)), dim=-1).to(DTYPE), normal(1, T, 2, 128, seed=1).to(DTYPE)
    beta, shift = torch.sigmoid(normal(1, T, 2, seed=2)).float(), 0.25 + F.softplus(normal(2, 128, seed=3)).float()
    log_decay = gates(1, T, 2)
    x = solve(LeastSquares(k, log_decay, beta, shift, None, bounds()), b, 60)
    for t in TOKENS:
        span = slice(start_of(t), t + 1)
        later = log_decay[0, span].double().flip(0).cumsum(0).flip(0) - log_decay[0, span]
        strength = beta[0, span] * later.exp()
        keys = k[0, span].double()
        matrix = torch.einsum("sh,shk,shl->hkl", strength, keys, keys) + torch.diag_embed(shift.double())
        assert error(x[0, t], torch.linalg.solve(matrix, b[0, t].double())) < RESULT, t


def test_accumulated_rotations():
    K, R, HV = 64, 16, 2
    operands = [normal(1, T, 1, K), normal(1, T, 1, K, seed=1), normal(HV, K, seed=2), normal(HV, K, seed=3)]
    rate = (3 * torch.tanh(normal(1, T, R, seed=4))).float()
    low, wide = leaves(*operands, rate, F.softplus(normal(1, T, HV, seed=5)).float())
    results = rotate(RotaryOperands(*low, None, bounds()))
    q, k, q_bias, k_bias, rate, dt = wide
    steps = rate[:, :, None] * dt[..., None]
    angle = torch.cat([steps[:, first:end].cumsum(1) for first, end in itertools.pairwise(BOUNDS)], 1)
    turn = torch.polar(torch.ones_like(angle), angle)
    turned = []
    for x, bias in ((q, q_bias), (k, k_bias)):
        y = x + bias
        z = torch.complex(y[..., :R], y[..., R : 2 * R]) * turn
        turned.append(torch.cat([z.real, z.imag, y[..., 2 * R :]], -1))
    o = torch.stack([results.q, results.k], -1)
    assert_equal(o, torch.stack(turned, -1), low, wide, {})
