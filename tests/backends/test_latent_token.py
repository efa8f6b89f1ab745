"""A token of multi-head latent attention by the kernels around it, against float64: in the interpreter, or on a GPU."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from triton_cases import DEVICE, DTYPES, needs_triton

from deltazoo.backends.ops.rms_norm import rms_norm
from deltazoo.backends.triton.attention import latent_op, latent_token_op
from deltazoo.backends.triton.attention.latent_token_op import LatentTokenCall, attend_latent_token_
from deltazoo.mixers.parts.rope_scaling import RopeScaling
from deltazoo.mixers.parts.rotary import apply_rotary, rotation_at

TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
YARN = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
EPS, SCALE = 1e-4, 0.3


class Sizes(NamedTuple):
    """rotates: whether r rotates. gate: channels of a head's gate."""

    B: int
    S: int
    H: int
    K: int
    V: int
    C: int
    R: int
    rotates: bool = True
    gate: int = 0


CASES: dict[str, tuple[Sizes, RopeScaling | None]] = {
    "several tiles of rows, gate per head": (Sizes(70, 9, 2, 8, 12, 40, 6, gate=1), None),
    "several tiles of channels, gate per channel": (Sizes(3, 40, 3, 20, 70, 72, 8, gate=70), None),
    "scaled frequencies": (Sizes(2, 40, 3, 12, 16, 24, 12), YARN),
    "no rotation": (Sizes(2, 40, 2, 12, 6, 16, 3, rotates=False), None),
    "no r": (Sizes(1, 40, 5, 12, 6, 16, 0, rotates=False), None),
    "many heads": (Sizes(1, 40, 140, 5, 4, 16, 16), None),
}


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def case(x: Sizes, dtype: torch.dtype, scaling: RopeScaling | None = None, position: Tensor | None = None):
    widths = [x.H * (x.K + x.R), x.C + x.R, x.H * x.gate]
    q, latent, gate = draw(x.B, sum(widths) + 3, seed=0).to(dtype)[:, 3:].split(widths, 1)
    seen = (torch.arange(x.B) * 17 + x.S - 1).to(DEVICE)  # the rows after the first have overwritten their oldest token
    return LatentTokenCall(
        q, latent, gate if x.gate else None, draw(x.C, seed=1).to(dtype) + 1.5,
        (draw(x.H * (x.K + x.V), x.C, seed=2) * x.C**-0.5).to(dtype), position,
        draw(x.B, x.S, 1, x.C + x.R, seed=3).to(dtype), seen,
        x.H, x.R // 2 if x.rotates else 0, 1e4,
        [*scaling.frequencies(1e4, x.R // 2)] if scaling else [], EPS, SCALE,
    )  # fmt: skip


def take_parts(monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    """Let sequences have up to this many parts, of one tile or more: the interpreter is a device of one SM."""
    device_spec = latent_op.device_spec
    monkeypatch.setattr(latent_op, "device_spec", lambda index: device_spec(index)._replace(processors=1024))
    monkeypatch.setattr(latent_op, "_TILE_BYTES", 16)
    monkeypatch.setattr(latent_token_op, "_MAX_PARTS", parts)


def expected(call: LatentTokenCall, scaling: RopeScaling | None) -> tuple[Tensor, Tensor]:
    """Return o and the new cache, from the equations in float64."""
    (B, S, _, E), H, C = call.cache.shape, call.heads, call.weight.shape[1]
    R = E - C
    q, latent, cache = call.q.double().view(B, H, -1), call.latent.double(), call.cache[:, :, 0].double()
    K = q.shape[2] - R
    w = call.weight.double().view(H, -1, C)
    c, r = rms_norm(latent[:, :C], call.norm_weight.double(), call.eps), latent[:, C:]
    if call.pairs:
        position = call.seen if call.position is None else call.position
        rotation = rotation_at(position[:, None], call.pairs, call.theta, torch.float64, scaling)
        q = torch.cat([q[..., :K], apply_rotary(q[:, None, :, K:], rotation)[:, 0]], -1)
        r = apply_rotary(r[:, None], rotation)[:, 0]
    rows = torch.arange(B, device=DEVICE)
    cache[rows, call.seen % S] = torch.cat([c, r], -1)
    is_empty = torch.arange(S, device=DEVICE) > call.seen[:, None]
    k = torch.einsum("bsc,hkc->bshk", cache[..., :C], w[:, :K])
    scores = torch.einsum("bhk,bshk->bhs", q[..., :K], k) + torch.einsum("bhr,bsr->bhs", q[..., K:], cache[..., C:])
    p = (SCALE * scores).masked_fill(is_empty[:, None], -torch.inf).softmax(-1)
    o = torch.einsum("bhs,bsc,hvc->bhv", p, cache[..., :C], w[:, K:])
    if call.gate is not None:
        o = o * call.gate.double().view(B, H, -1).sigmoid()
    return o.flatten(1), cache


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name",
    [pytest.param("scaled frequencies", marks=pytest.mark.kernel_smoke), *sorted({*CASES} - {"scaled frequencies"})],
)
def test_a_token_attends_to_the_cache_and_joins_it(name, dtype, monkeypatch):
    take_parts(monkeypatch, 4)
    sizes, scaling = CASES[name]
    call = case(sizes, dtype, scaling)
    seen, reference = call.seen.clone(), expected(call, scaling)
    o = attend_latent_token_(call)
    assert torch.equal(call.seen, seen + 1)
    for ours, wide in zip((o, call.cache[:, :, 0]), reference, strict=True):
        assert (ours.double() - wide).norm() <= TOLERANCES[dtype] * wide.norm()


@needs_triton
def test_positions_of_ten_million_rotate_as_in_float64():
    x = Sizes(2, 8, 2, 4, 4, 16, 64)
    position = torch.tensor([10_000_019, 9_999_991], device=DEVICE)
    call = case(x, torch.float32, position=position)
    _, cache = expected(call, None)
    attend_latent_token_(call)
    rows, slot = torch.arange(x.B, device=DEVICE), (call.seen - 1) % x.S
    r, wide = call.cache[rows, slot, 0, x.C :], cache[rows, slot, x.C :]
    assert (r.double() - wide).norm() <= 5e-7 * wide.norm()
    # angles in float32 are off by far more
    narrow = position[:, None].float() * 1e4 ** (-torch.arange(x.R // 2, device=DEVICE) / (x.R // 2))
    left, right = call.latent[:, x.C :].split(x.R // 2, 1)
    turned = torch.cat([left * narrow.cos() - right * narrow.sin(), right * narrow.cos() + left * narrow.sin()], 1)
    assert (turned.double() - wide).norm() > 1e-2 * wide.norm()


@needs_triton
@pytest.mark.parametrize("parts", [1, 2, 64])
def test_any_number_of_parts_gives_the_same_result(parts, monkeypatch):
    take_parts(monkeypatch, parts)
    call = case(Sizes(1, 1030, 1, 6, 20, 24, 4), torch.float32)
    reference, _ = expected(call, None)
    torch.testing.assert_close(attend_latent_token_(call).double(), reference, rtol=1e-4, atol=1e-5)


@needs_triton
def test_the_operator_passes_opcheck():
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    call = case(Sizes(2, 20, 2, 8, 4, 16, 4, gate=1), torch.float32)
    torch.library.opcheck(torch.ops.deltazoo.triton_attend_latent_token_.default, tuple(call), test_utils=tests)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tokens_of_one_cache_in_a_cuda_graph_read_the_position_before_each():
    """A kernel may start before the one that counts the token before."""
    first = case(Sizes(2, 100, 16, 128, 128, 512, 64), torch.bfloat16)._replace(
        seen=torch.tensor([61, 7], device=DEVICE)
    )
    kept = first.cache.clone(), first.seen.clone()
    calls = [first._replace(q=draw(*first.q.shape, seed=seed).bfloat16()) for seed in range(8)]
    expected_outputs = []
    for call in calls:
        expected_outputs.append(attend_latent_token_(call))
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [attend_latent_token_(call) for call in calls]
    for _ in range(10):
        for x, old in zip((first.cache, first.seen), kept, strict=True):
            x.copy_(old)
        graph.replay()
        assert all(torch.equal(*pair) for pair in zip(results, expected_outputs, strict=True))
        assert torch.equal(first.seen, kept[1] + len(calls))
