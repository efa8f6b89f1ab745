"""Flash attention with forget gates against float64: in Triton's interpreter, or on a GPU."""

import itertools

import pytest
import torch
from torch import Tensor
from triton_cases import DEVICE, INTERPRETED, needs_triton

from deltazoo import watch
from deltazoo.backends.ops.forgetting_attention import forgetting_attention
from deltazoo.backends.triton.attention import op as launches
from deltazoo.backends.triton.attention.op import AttentionLaunch

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
    return [x.requires_grad_() for x in (*operands, gates * torch.nn.functional.logsigmoid(raw).to(DEVICE))]


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
    monkeypatch.setattr(launches, "_SUM_ROWS", 16)


@needs_triton
@pytest.mark.parametrize("tiles", TILES, indirect=True)
@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_and_its_gradients(pack, dtype, tiles):
    with watch() as log:
        assert_equals_definition(draw(2 if pack == "batch" else 1, 53, 4, 2, 16, dtype), PACKS[pack])
    assert log.kernels == dict.fromkeys(
        (
            "gate_sums_kernel", "attention_kernel", "query_gradients_kernel", "key_gradients_kernel",
            "gate_gradients_kernel",
        ), 1,
    )  # fmt: skip
