"""A token of attention to routed slots by one kernel against float64: in Triton's interpreter, or on a GPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton_cases import DEVICE, needs_triton

from deltazoo.backends.triton.element.routed_slots_op import RoutedSlotsCall, routed_slots_step_

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def case(
    B: int, heads: tuple[int, int], M: int, K: int, V: int, dtype: torch.dtype, active: int = 3, softmax: bool = False
) -> RoutedSlotsCall:
    """Return a call. Args: heads: H and G."""
    H, G = heads
    sizes = (H * K, G * K, G * V, G, G * M)
    q, k, v, decay, scores = draw(B, sum(sizes) + 1, seed=0).to(dtype)[:, :-1].split(sizes, 1)  # their rows are apart
    return RoutedSlotsCall(
        q, k, v, decay, scores, *(1 + 0.1 * draw(2, K, seed=1).to(dtype)), *draw(2, G, seed=2).to(dtype),
        keys=draw(B, H * M, K, 1, seed=3), values=draw(B, H, M, V, seed=4), active=active, softmax=softmax, scale=0.7,
        eps=1e-5,
    )  # fmt: skip


def expected(call: RoutedSlotsCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return o and the new states from the equations in float64."""
    q, k, v, decay, scores, q_weight, k_weight, A_log, dt_bias, keys, values = (x.double() for x in call[:11])
    (B, H, M, V), K, G = call.values.shape, len(q_weight), len(A_log)
    q, k = (F.rms_norm(F.silu(x.view(B, -1, K)), (K,), w, call.eps) for x, w in ((q, q_weight), (k, k_weight)))
    scores, v = scores.view(B, G, M), F.silu(v.view(B, G, V))
    r = torch.zeros_like(scores)
    for b in range(B):
        for g in range(G):
            order = sorted(range(M), key=lambda m: (-scores[b, g, m].item(), m))[: call.active]
            shares = scores[b, g].softmax(0) if call.softmax else scores[b, g].sigmoid()
            r[b, g, order] = shares[order] if call.softmax else shares[order] / (shares[order].sum() + 1e-9)
    log_a = -r * (A_log.exp() * F.softplus(decay + dt_bias))[..., None]
    log_a, k, v = (x.repeat_interleave(H // G, 1) for x in (log_a, k, v))
    a, w = log_a.exp()[..., None], -torch.expm1(log_a)[..., None]
    keys = a * keys.view(B, H, M, K) + w * k[:, :, None]
    values = a * values + w * v[:, :, None]
    p = (call.scale * keys @ q[..., None]).softmax(2)
    return (p * values).sum(2).flatten(1), keys, values


@needs_triton
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize(
    ("B", "heads", "M", "K", "V"),
    [pytest.param(2, (2, 2), 8, 16, 8, marks=pytest.mark.kernel_smoke), (3, (4, 2), 9, 5, 12), (1, (1, 1), 64, 32, 64)],
)
def test_a_token_equals_its_equations(B, heads, M, K, V, softmax, dtype):
    call = case(B, heads, M, K, V, dtype, softmax=softmax)
    reference = expected(call)
    results = routed_slots_step_(call), call.keys.view(reference[1].shape), call.values
    for ours, wide in zip(results, reference, strict=True):
        assert (ours.double() - wide).norm() <= TOLERANCES[dtype] * wide.norm()


@needs_triton
@pytest.mark.parametrize("active", [1, 4, 16])
def test_of_equal_scores_the_first_slots_are_active(active):
    call = case(4, (2, 2), 16, 8, 8, torch.float32, active=active)
    call.scores.copy_(call.scores.round())  # about four different numbers
    before, reference = call.keys.view(4, 2, 16, 8).clone(), expected(call)
    routed_slots_step_(call)
    keys = call.keys.view(before.shape)
    torch.testing.assert_close(keys.double(), reference[1], rtol=1e-5, atol=1e-6)
    is_written = (keys != before).any(-1)
    assert torch.equal(is_written, (reference[1] != before.double()).any(-1)) and (is_written.sum(-1) == active).all()


@needs_triton
def test_the_operator_passes_opcheck():
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    call = case(2, (2, 1), 4, 8, 8, torch.float32)
    torch.library.opcheck(torch.ops.deltazoo.triton_routed_slots_step_.default, tuple(call), test_utils=tests)
