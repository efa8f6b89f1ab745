"""The Hopper kernel of latent attention of one token against float64, emulated on a CPU (gluon_on_cpu.py)."""

import pytest
import torch
from gluon_on_cpu import ATTENTION, LAUNCHED, Timing, kernels, launcher

from deltazoo.backends.torch_ext.devices import DeviceSpec
from deltazoo.backends.triton.attention import latent_op

pytest.importorskip("triton", reason="the kernels need the package triton")
pytestmark = pytest.mark.kernels
SCALE = 0.3
TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True, params=[False, True], ids=["copies when issued", "copies when awaited"])
def emulated(request, monkeypatch):
    from deltazoo.backends.triton.attention.kernels import latent_sm90
    from deltazoo.backends.triton.runtime import launcher as runtime

    (module,) = kernels("latent_sm90", package=ATTENTION).values()
    monkeypatch.setattr(latent_sm90, "latent_attention_sm90_kernel", module.latent_attention_sm90_kernel)
    monkeypatch.setattr(runtime, "launcher", launcher(runtime.launcher))
    monkeypatch.setattr(latent_op, "device_spec", lambda _: DeviceSpec("a Hopper GPU", "cuda", (9, 0), 16, 232448))
    monkeypatch.setattr(Timing, "late", request.param)
    LAUNCHED.clear()


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("H", "C", "R", "parts"), [(3, 64, 64, 4), (20, 128, 128, 2), (2, 512, 64, 1)])
def test_heads_attend_to_the_cached_vectors(H, C, R, parts, dtype):
    B, S = 4, 330
    generator = torch.Generator().manual_seed(0)
    q, latent = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((B, H, C + R), (B, S, C + R)))
    ends = torch.tensor([0, 1, 129, S])
    is_empty = (torch.arange(S) >= ends[:, None])[..., None]
    partial, lse, traits = latent_op.attend_parts(q, latent.masked_fill(is_empty, torch.nan), ends, C, SCALE, parts)
    assert LAUNCHED == ["latent_attention_sm90_kernel"] and min(parts, 16 // (B * -(-H // 16))) == traits.PARTS
    assert not partial[0].any() and lse[0].eq(-torch.inf).all()
    weights = (lse - lse.amax(2, keepdim=True)).exp2()
    o = (partial * weights[..., None]).sum(2) / weights.sum(2, keepdim=True)
    for b in range(1, B):
        z = latent[b, : ends[b]].double()
        x = SCALE * q[b].double() @ z.T
        expected = x.softmax(-1) @ z[:, :C]
        assert (o[b].double() - expected).norm() <= TOLERANCES[dtype] * expected.norm()
        torch.testing.assert_close(lse[b].double().exp2().sum(1).log(), x.logsumexp(1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("C", "R", "offset"), [(64, 0, 0), (64, 32, 0), (32, 64, 0), (96, 64, 0), (64, 64, 1)])
def test_other_sizes_and_unaligned_caches_take_the_portable_kernel(C, R, offset, monkeypatch):
    from deltazoo.backends.triton.runtime import launcher as runtime

    launched = []
    monkeypatch.setattr(runtime, "launcher", lambda kernel, *_: lambda *_: launched.append(kernel.__name__))
    q, stored = torch.zeros(2, 3, C + R, dtype=torch.float16), torch.zeros(2 * 70 * (C + R) + 8, dtype=torch.float16)
    latent = stored[offset : offset + 2 * 70 * (C + R)].view(2, 70, C + R)
    latent_op.attend_parts(q, latent, torch.tensor([3, 70]), C, SCALE, 1)
    assert launched == ["latent_attention_kernel"]
