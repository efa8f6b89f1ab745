"""A token of attention to memory slots by one kernel against float64: in Triton's interpreter, or on a GPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton_cases import DEVICE, needs_triton

from deltazoo.backends.triton.decode.softmax_slots_op import SoftmaxSlotsCall, softmax_slots_step_

TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 5e-3}
SIZES = {  # B rows, H heads, M slots, K, V
    "small": (2, 3, 5, 6, 7),
    "odd keys, two tiles": (1, 1, 300, 7, 30),
    "one key": (1, 2, 3, 1, 4),
}


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def case(name: str, dtype: torch.dtype) -> SoftmaxSlotsCall:
    B, H, M, K, V = SIZES[name]
    products = 2 * draw(B, 2 * H * K + 2 * H * V + H * M + 1, seed=0).to(dtype)  # the rows of each operand are apart
    qkv, raw, gate = products[:, :-1].split([2 * H * K + H * V, H * M, H * V], 1)
    raw[:, 0], raw[:, -1] = 50, -50  # beyond the bounds of scores
    position = torch.tensor([1_000_003, 0], device=DEVICE)[:B]
    return SoftmaxSlotsCall(
        H, qkv, raw, gate, position, z=3 * draw(B, H * M, seed=1), keys=draw(B, H * M, K, 1, seed=2),
        values=draw(B, H, M, V, seed=3), norm_weight=draw(V if M > 5 else H * V, seed=4).to(dtype), norm="rms",
        norm_eps=1e-3, activation="silu", theta=10000.0, scale=0.5,
    )  # fmt: skip


def expected(call: SoftmaxSlotsCall) -> tuple[Tensor, ...]:
    """Return o, and the new z, keys and values, in float64."""
    position, given = call.position, {n: x.double() if isinstance(x, Tensor) else x for n, x in call._asdict().items()}
    call = SoftmaxSlotsCall(**given)
    B, H, M, V = call.values.shape
    K = call.keys.numel() // (B * H * M)
    q, k, v = (x.view(B, H, -1) for x in call.qkv.split([H * K, H * K, H * V], 1))
    half = K // 2
    angle = position[:, None, None] * call.theta ** (
        -torch.arange(half, device=DEVICE, dtype=torch.float64) / max(half, 1)
    )
    rotation = torch.polar(torch.ones_like(angle), angle)

    def rotate(x: Tensor) -> Tensor:
        y = torch.complex(x[..., :half], x[..., half : 2 * half]) * rotation
        return torch.cat([y.real, y.imag, x[..., 2 * half :]], 2)

    score = call.raw.clamp(-32, 32)
    z = torch.logaddexp(call.z, score)
    decay, write = ((x - z).exp().view(B, H, M, 1) for x in (call.z, score))
    keys = decay * call.keys.view(B, H, M, K) + write * rotate(k)[:, :, None]
    values = decay * call.values + write * v[:, :, None]
    share = (call.scale * (keys * rotate(q)[:, :, None]).sum(3)).softmax(2)
    o = (values * share[..., None]).sum(2)
    o = o * (o.square().mean(2, keepdim=True) + call.norm_eps).rsqrt() * call.norm_weight.view(-1, V)
    return (o * F.silu(call.gate.view(B, H, V))).flatten(1), z, keys.view(call.keys.shape), values


@needs_triton
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.kernel_smoke] * (name == "small")) for name in SIZES]
)
def test_a_token_equals_its_equations(name, dtype):
    call = case(name, dtype)
    reference = expected(call)
    for ours, wide in zip((softmax_slots_step_(call), call.z, call.keys, call.values), reference, strict=True):
        assert (ours.double() - wide).norm() <= TOLERANCES[dtype] * wide.norm()


@needs_triton
def test_nan_of_a_score_stays_in_its_head():
    call = case("small", torch.float32)
    call.raw[1, 5] = torch.nan  # the first slot of the second head
    o = softmax_slots_step_(call)
    assert o.view(2, 3, 7).isnan().all(2).nonzero().tolist() == [[1, 1]]
    assert call.z.isnan().nonzero().tolist() == [[1, 5]]
    assert call.values.isnan().any(3).nonzero().tolist() == [[1, 1, 0]]


@needs_triton
def test_the_operator_passes_opcheck():
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(
        torch.ops.deltazoo.triton_softmax_slots_step_.default, tuple(case("small", torch.float32)), test_utils=tests
    )
