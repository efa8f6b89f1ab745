"""Latent attention of one token against float64: in Triton's interpreter, or on a GPU."""

import pytest
import torch
from torch import Tensor
from triton_cases import DEVICE, needs_triton

from deltazoo.backends.ops.latent_attention import latent_attention
from deltazoo.backends.triton.attention import latent_op

SCALE = 0.3
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3}


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@needs_triton
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("H", "C", "R", "parts"), [pytest.param(3, 24, 8, 4, marks=pytest.mark.kernel_smoke), (20, 16, 6, 2), (2, 40, 0, 1)]
)
def test_heads_attend_to_the_cached_vectors(H, C, R, parts, dtype, monkeypatch):
    device_spec = latent_op.device_spec  # the interpreter is a device of one SM
    monkeypatch.setattr(latent_op, "device_spec", lambda index: device_spec(index)._replace(processors=132))
    monkeypatch.setattr(latent_op, "_MAX_PARTS", parts)
    monkeypatch.setattr(latent_op, "_TILE_BYTES", 16)
    B, S = 4, 70
    q, latent = draw(B, H, C + R, seed=0).to(dtype), draw(B, S, C + R, seed=1).to(dtype)
    ends = torch.tensor([0, 1, 41, S], device=DEVICE)
    assert_attention(q, latent, ends, C, TOLERANCES[dtype])


@needs_triton
@pytest.mark.parametrize(("C", "R"), [(512, 64), (64, 128), (64, 32), (128, 0)])
def test_sizes_of_models(C, R):
    """On Hopper with R of at least 64, latent_attention_sm90_kernel computes these."""
    q, latent = draw(4, 20, C + R, seed=0).half(), draw(4, 330, C + R, seed=1).half()
    assert_attention(q, latent, torch.tensor([0, 1, 129, 330], device=DEVICE), C, TOLERANCES[torch.float16])


def assert_attention(q: Tensor, latent: Tensor, ends: Tensor, C: int, tolerance: float) -> None:
    """Compare with float64. Args: ends: of the rows; the first is empty."""
    is_empty = (torch.arange(latent.shape[1], device=DEVICE) >= ends[:, None])[..., None]
    o = latent_attention(q, latent.masked_fill(is_empty, torch.nan), ends, C, SCALE)
    assert not o[0].any()
    for b in range(1, len(q)):
        z = latent[b, : ends[b]].double()
        expected = (SCALE * q[b].double() @ z.T).softmax(-1) @ z[:, :C]
        assert (o[b].double() - expected).norm() <= tolerance * expected.norm()


@needs_triton
def test_the_operator_passes_opcheck():
    arguments = (draw(2, 3, 24, seed=0), draw(2, 20, 24, seed=1), torch.tensor([3, 20], device=DEVICE), 16, SCALE)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.deltazoo.triton_latent_attention.default, arguments, test_utils=tests)
