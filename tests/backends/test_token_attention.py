"""Attention of one token with its norms, rotation and cache against float64: in Triton's interpreter, or on a GPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from triton_cases import DEVICE, needs_triton

from deltazoo.backends.ops.gemv import Norm
from deltazoo.backends.ops.rms_norm import rms_norm
from deltazoo.backends.ops.token_attention import TokenOperands, Turn, attend_token_
from deltazoo.backends.triton.attention import launch, token_op
from deltazoo.mixers.parts.rope_scaling import RopeScaling
from deltazoo.mixers.parts.rotary import apply_rotary, rotation_at

B, G, E, S = 2, 2, 12, 40
SCALE = 0.4
YARN = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
CASES: dict[str, tuple[int, Turn | None, RopeScaling | None, bool, bool]] = {
    "plain": (4, None, None, False, False),
    "rotation": (2, Turn(6, 100.0), None, False, False),
    "half of the channels, norm, gate": (6, Turn(3, 1e4), None, True, True),
    "norm, as many key heads": (2, Turn(3, 1e4), None, True, True),
    "scaled frequencies": (4, Turn(6, 1e4, tuple(YARN.frequencies(1e4, 6))), YARN, False, True),
}


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def heads_of(x: Tensor, norm: Norm | None, turn: Turn | None, scaling: RopeScaling | None, at: Tensor) -> Tensor:
    """Norm and rotation of heads x [B, .., E] in float64."""
    x = x.double()
    if norm is not None:
        x = rms_norm(x, norm.weight.double(), norm.eps)
    if turn is not None:
        x = apply_rotary(x[:, None], rotation_at(at[:, None], turn.pairs, turn.theta, torch.float64, scaling))[:, 0]
    return x


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_a_token_attends_to_the_cache_and_joins_it(name, dtype, monkeypatch):
    monkeypatch.setattr(launch, "_BYTES_BY_ROWS", 1)  # tiles of 16 keys, two in a part
    H, turn, scaling, normed, gated = CASES[name]
    k, v = (draw(B, S, G, E, seed=seed).to(dtype) for seed in (1, 2))
    position = torch.tensor([7, 3 * S + 5], device=DEVICE)  # the second row has overwritten its oldest tokens
    norm = Norm(draw(E, seed=3) + 1.5, 1e-3) if normed else None
    wide = draw(B, (H + 2 * G) * E + 4, seed=4).to(dtype)
    qkv, gate = wide[:, :-4], draw(B, H * E, seed=5).to(dtype) if gated else None
    before = k.clone(), v.clone(), position.clone()
    o = attend_token_(TokenOperands(qkv, norm, norm, gate), k, v, position, turn, SCALE)

    q_new, k_new, v_new = (x.view(B, -1, E) for x in qkv.split([H * E, G * E, G * E], 1))
    q_new, k_new = (heads_of(x, norm, turn, scaling, before[2]) for x in (q_new, k_new))
    assert torch.equal(position, before[2] + 1)
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3}[dtype]
    for b in range(B):
        slot, filled = int(before[2][b]) % S, min(int(before[2][b]) + 1, S)
        keys, values = before[0][b].double(), before[1][b].double()
        keys[slot], values[slot] = k_new[b], v_new[b].double()
        torch.testing.assert_close(k[b].double(), keys, rtol=tolerance, atol=tolerance)
        assert torch.equal(v[b].double(), values)
        keys, values = (x[:filled].repeat_interleave(H // G, 1) for x in (keys, values))
        weights = (SCALE * torch.einsum("he,she->hs", q_new[b], keys)).softmax(-1)
        expected = torch.einsum("hs,she->he", weights, values).flatten()
        if gate is not None:
            expected = expected * gate[b].double().sigmoid()
        torch.testing.assert_close(o[b].double(), expected, rtol=tolerance, atol=tolerance)


@needs_triton
def test_large_caches_are_read_with_tensor_cores(monkeypatch):
    results = []
    for most in (token_op.MOST_BYTES_BY_ROWS, 0):
        monkeypatch.setattr(token_op, "MOST_BYTES_BY_ROWS", most)
        k, v, position = draw(B, S, G, E, seed=1), draw(B, S, G, E, seed=2), torch.tensor([7, 99], device=DEVICE)
        x = TokenOperands(draw(B, 3 * G * E, seed=3))
        results.append(attend_token_(x, k, v, position, Turn(6, 100.0), SCALE))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@needs_triton
def test_the_operator_passes_opcheck():
    H = 4
    arguments = (
        draw(B, (H + 2 * G) * E, seed=0), None, None, None, draw(B, S, G, E, seed=1), draw(B, S, G, E, seed=2),
        torch.tensor([3, 9], device=DEVICE), None, 6, 1e4, [], 0.0, SCALE,
    )  # fmt: skip
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.deltazoo.triton_attend_token_.default, arguments, test_utils=tests)


@needs_triton
@pytest.mark.parametrize("make", [lambda x: x.contiguous(), lambda x: x.mT.contiguous().mT])
def test_rows_of_any_layout_are_read(make: Callable[[Tensor], Tensor]):
    qkv, turn = draw(B, 6 * E, seed=0), Turn(6, 1e4)
    results = []
    for x in (qkv, make(qkv)):
        k, v, position = draw(B, S, G, E, seed=1), draw(B, S, G, E, seed=2), torch.tensor([3, 9], device=DEVICE)
        results.append(attend_token_(TokenOperands(x), k, v, position, turn, SCALE))
    assert torch.equal(*results)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("page", [0, 64])
def test_tokens_of_one_cache_in_a_cuda_graph_read_the_position_before_each(page):
    """A kernel may start before the one that counts the token before."""
    H, S, before, turn = 4, 128, 61, Turn(6, 1e4)
    table = torch.arange(1, 1 + B * S // page, device=DEVICE).view(B, -1).int() if page else None
    shape = (1 + B * S // page, page) if page else (B, S)
    kept = draw(*shape, G, E, seed=1), draw(*shape, G, E, seed=2), torch.full((B,), before, device=DEVICE)
    tokens = [TokenOperands(draw(B, (H + 2 * G) * E, seed=seed)) for seed in range(8)]
    k, v, position = (x.clone() for x in kept)

    def call(token: TokenOperands) -> Tensor:
        return attend_token_(token, k, v, position, turn, SCALE, table)

    expected = []
    for token in tokens:
        expected.append(call(token))
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call(token) for token in tokens]
    for _ in range(10):
        for x, old in zip((k, v, position), kept, strict=True):
            x.copy_(old)
        graph.replay()
        assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))
        assert position.tolist() == [before + len(tokens)] * B
