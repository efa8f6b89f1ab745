"""Flash attention with forget gates against float64: in Triton's interpreter, or on a GPU."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton_cases import DEVICE, INTERPRETED, needs_triton

from deltazoo import watch
from deltazoo.backends.ops.forgetting_attention import attention_with_cache, decode_attention, forgetting_attention
from deltazoo.backends.triton.attention import launch as launches
from deltazoo.backends.triton.attention.launch import AttentionLaunch

TOLERANCES = {  # of o, of the gradients of q, k and v, and of that of the gates
    torch.float32: (1e-5, 1e-5, 1e-4),
    torch.float16: (2e-3, 2e-3, 2e-3),
    torch.bfloat16: (5e-3, 1e-2, 1e-2),
}
DTYPES = list(TOLERANCES)[: 2 if INTERPRETED else 3]
SCALE = 0.3
TILES = {"keys as queries": (16, 16), "more queries": (32, 16), "more keys": (16, 32)}
PACKS = {"batch": None, "pack": [0, 13, 13, 14, 47], "pack with a tail": [0, 0, 33, 50]}


def exact(q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, bounds: list[int] | None) -> Tensor:
    """The definition, sequence by sequence."""
    T, group = q.shape[1], q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    ends = [0, T] if bounds is None else [*bounds, T]
    pieces = []
    for first, last in itertools.pairwise(ends):
        q_n, k_n, v_n, g = (x[:, first:last].transpose(1, 2) for x in (q, k, v, log_f.cumsum(1)))
        scores = SCALE * q_n @ k_n.mT + g[..., :, None] - g[..., None, :]
        future = torch.ones(last - first, last - first, dtype=torch.bool, device=q.device).triu(1)
        pieces.append((scores.masked_fill(future, -torch.inf).softmax(-1) @ v_n).transpose(1, 2))
    return torch.cat(pieces, 1)


def draw(B: int, T: int, H: int, G: int, E: int, dtype: torch.dtype, gates: float = 1.0) -> list[Tensor]:
    """q, k, v and log gates. Args: gates: factor of the log gates."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, T, H, E), (B, T, G, E), (B, T, G, E), (B, T, H)]
    q, k, v, raw = (torch.randn(shape, generator=generator) for shape in shapes)
    operands = [x.to(DEVICE, dtype) for x in (q, k, v)]
    return [x.requires_grad_() for x in (*operands, gates * F.logsigmoid(raw).to(DEVICE))]


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm().clamp(min=1e-30))


def assert_equals_definition(leaves: list[Tensor], bounds: list[int] | None = None) -> None:
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    o = forgetting_attention(*leaves, SCALE, cu_seqlens)
    d_o = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o)
    gradients = torch.autograd.grad(o, leaves, d_o)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    expected = exact(*wide, bounds)
    references = torch.autograd.grad(expected, wide, d_o.double())
    of_o, of_operands, of_gates = TOLERANCES[leaves[0].dtype]
    tolerances = (of_o, of_operands, of_operands, of_operands, of_gates)
    names = ("o", "dq", "dk", "dv", "d_log_f")
    for name, actual, reference, limit in zip(names, (o, *gradients), (expected, *references), tolerances, strict=True):
        assert error(actual.detach(), reference.detach()) <= limit, name


@pytest.fixture
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles, so that small shapes have several."""
    monkeypatch.setattr(launches, "launch_of", lambda *_: AttentionLaunch(*TILES[request.param], 4, 2))
    monkeypatch.setattr(launches, "SUM_ROWS", 16)


@needs_triton
@pytest.mark.parametrize("tiles", TILES, indirect=True)
@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_and_its_gradients(pack, dtype, tiles):
    with watch() as log:
        assert_equals_definition(draw(2 if pack == "batch" else 1, 53, 4, 2, 16, dtype), PACKS[pack])
    assert log.kernels == dict.fromkeys(
        (
            "forget_sums_kernel", "forgetting_attention_kernel", "query_gradients_kernel", "key_gradients_kernel",
            "forget_gradients_kernel",
        ), 1,
    )  # fmt: skip


@needs_triton
@pytest.mark.parametrize("tiles", TILES, indirect=True)
@pytest.mark.parametrize("packed", [False, True])
def test_new_tokens_attend_to_a_cache_that_includes_them(packed, tiles):
    """Sequences of 0, 9 and 30 cached tokens get 20, 0 and 11 new ones; empty slots hold NaN."""
    N, S, H, G, E = 3, 45, 4, 2, 24
    before, counts = torch.tensor([0, 9, 30]), torch.tensor([20, 0, 11])
    q, k, v, log_f = (x.detach() for x in draw(N, S, H, G, E, torch.float32))
    expected = exact(*(x.double() for x in (q, k, v, log_f)), None)
    ends = before + counts
    is_empty = (torch.arange(S) >= ends[:, None]).to(DEVICE)
    sums = log_f.cumsum(1).masked_fill(is_empty[..., None], torch.nan)
    k = torch.cat([k, torch.full_like(k[..., :8], torch.nan)], -1).masked_fill(is_empty[..., None, None], torch.nan)
    v = v.masked_fill(is_empty[..., None, None], torch.nan)
    new = [(n, int(before[n]), int(ends[n])) for n in range(N)]
    wanted = torch.cat([expected[n, first:last] for n, first, last in new])
    if packed:
        tail = torch.full_like(q[0, :5], torch.nan)  # tokens of no sequence
        q = torch.cat([*(q[n, first:last] for n, first, last in new), tail])[None]
        cu_seqlens = torch.tensor([0, 20, 20, 31], dtype=torch.int32, device=DEVICE)
    else:
        padded = F.pad(q, (0, 0, 0, 0, 0, 20), value=torch.nan)
        q, cu_seqlens = torch.stack([padded[n, first : first + 20] for n, first, _ in new]), None
    o = attention_with_cache(q, k, v, sums, before.to(DEVICE), ends.to(DEVICE), SCALE, cu_seqlens)
    actual = o[0, :31] if packed else torch.cat([o[n, :count] for n, count in enumerate(counts.tolist())])
    assert error(actual, wanted) <= 1e-5
    assert not packed or not o[0, 31:].any()


@needs_triton
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_token_attends_to_its_cache(dtype, group, monkeypatch):
    """Caches of 200 slots in four parts, filled to different lengths; empty slots hold NaN."""
    monkeypatch.setattr(launches, "_PROGRAMS_PER_PROCESSOR", 10**6)
    monkeypatch.setattr(launches, "_MAX_PARTS", 4)
    B, S, G, E, V = 4, 600, 2, 24, 16
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, 1, G * group, E), (B, S, G, E), (B, S, G, V)]
    q, k, v = (torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes)
    ends = torch.tensor([0, 1, 333, 600], device=DEVICE)
    is_empty = (torch.arange(S, device=DEVICE) >= ends[:, None])[..., None, None]
    o = decode_attention(q, k.masked_fill(is_empty, torch.nan), v.masked_fill(is_empty, torch.nan), ends, SCALE)
    assert not o[0].any()
    for b in range(1, B):
        keys, values = (x[b, : ends[b]].double().repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
        scores = SCALE * q[b].double().transpose(0, 1) @ keys.mT
        assert error(o[b], (scores.softmax(-1) @ values).transpose(0, 1)) <= TOLERANCES[dtype][0]
