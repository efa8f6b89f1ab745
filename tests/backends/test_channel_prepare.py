"""The Hopper kernel that prepares decays per channel, on a CPU against float64: each of its outputs.

Gluon is emulated (gluon_on_cpu.py) and the inline PTX interpreted (ptx_on_cpu.py).
"""

import pytest
import torch
from gluon_on_cpu import Timing, kernels, launcher

from deltazoo.backends.triton.operands import Prepared, ScanKind, ScanOperands, problem_of
from deltazoo.backends.triton.runtime.launcher import group

pytest.importorskip("triton", reason="the kernels need the package triton")
C = 64


def draw(shape, dtype, delta, own, regime):
    """Draw operands. Regimes: strong: decays of -20 and -60; zero: decays of 0; parallel: keys that hardly differ."""
    B, T, H, HV, K, lengths = shape
    random = torch.Generator().manual_seed(0)

    def normal(*sizes):
        return torch.randn(*sizes, generator=random)

    k = torch.nn.functional.normalize(normal(B, T, H, K), dim=-1)
    if regime == "parallel":
        k = torch.nn.functional.normalize(torch.ones(K) + 0.02 * k, dim=-1)
    log_decay = torch.nn.functional.logsigmoid(normal(B, T, HV, K)) / (16 if regime == "parallel" else 2)
    if regime == "strong":
        log_decay = torch.where(normal(B, T, HV, K) > 1, -20.0, log_decay)
        log_decay[:, 5:40:7] = -60.0
        log_decay[:, 60:61] = -1e4
    if regime == "zero":
        log_decay = torch.zeros(B, T, HV, K)
    strength = torch.sigmoid(normal(B, T, HV)) if regime != "parallel" else torch.ones(B, T, HV)
    long = 1000.0 if dtype == torch.bfloat16 else 1.0  # a product of two such rows exceeds float16
    return ScanOperands(
        q=(long * normal(B, T, H, K)).to(dtype), k=k.to(dtype), v=torch.empty(B, T, HV, 8, dtype=dtype),
        log_decay=log_decay, b=strength if delta else None, w=strength,
        e=(k if regime == "parallel" else -k).roll(1, -1).to(dtype) if own else None,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int() if lengths else None,
    )  # fmt: skip


def chunks_of(x, s):
    """Yield each chunk's slot, row of the batch, and tokens."""
    if x.cu_seqlens is None:
        yield from (
            (n * -(-s.T // C) + t // C, n, slice(t, min(t + C, s.T))) for n in range(s.N) for t in range(0, s.T, C)
        )
        return
    for n, (start, end) in enumerate(x.cu_seqlens.unfold(0, 2, 1).tolist()):
        for c, t in enumerate(range(start, end, C)):
            yield start // C + n + c, 0, slice(t, min(t + C, end))


def expected(x, kind, s, n, tokens, hv):
    """Return Q, W, E, 2^Gend, T and P of one chunk in float64."""
    h = hv * s.H // s.HV
    q, k = (y[n, tokens, h].double() for y in (x.q, x.k))
    e = k if x.e is None else x.e[n, tokens, h].double()
    a = (x.log_decay[n, tokens, hv].double() * 1.4426950408889634).clamp(min=-96)
    b = torch.ones(len(q), dtype=torch.float64) if x.b is None else x.b[n, tokens, hv].double()
    G = a.cumsum(0)
    G_read = G - a if (kind.read == "before") else G
    G_erase = G - a if kind.erase_from == "previous" else G
    i = torch.arange(len(q))
    lower, causal = i[:, None] > i, i[:, None] >= i + int(kind.read == "before")

    def products(x, G_x, mask):
        exponents = torch.where(mask[:, :, None], G_x[:, None] - G[None], -torch.inf)
        return (x[:, None] * k[None] * exponents.exp2()).sum(-1)

    A = b[:, None] * products(e, G_erase, lower)
    T = torch.linalg.inv(torch.eye(len(q), dtype=torch.float64) + (A if kind.delta else 0 * A))
    Q, W, E = kind.scale * q * G_read.exp2(), k * (G[-1] - G).exp2(), b[:, None] * e * G_erase.exp2()
    return Q, W, E, G[-1].exp2(), T if kind.delta else 0 * T, kind.scale * products(q, G_read, causal)


def stored_tiles(tile, dtype):
    """Read T and P from a stored tile [C, C + 8]."""
    below = torch.arange(C)[:, None] // 8 - torch.arange(C) // 8
    diagonal = tile[:, C:].double().repeat(1, 8)
    T = torch.where(below > 0, tile[:, :C].double(), torch.where(below == 0, diagonal, 0))
    P = torch.where(below <= 0, tile[:, :C].contiguous().view(dtype).double(), 0).T
    return T, P


def error(actual, expected):
    """Relative error; of results that underflow in float16, the absolute error times 1000."""
    return float((actual.double() - expected).norm() / expected.norm().clamp(min=1e-3))


SHORT = (1, 130, 1, 2, 64, ())
PACKED = (1, 135, 1, 1, 40, (70, 0, 1, 64))
WIDE = (1, 64, 1, 1, 136, ())


@pytest.mark.parametrize(
    ("dtype", "regime"),
    [
        pytest.param(
            dtype, regime, marks=[] if (dtype, regime) == (torch.bfloat16, "ordinary") else pytest.mark.kernels
        )
        for dtype in (torch.bfloat16, torch.float16)
        for regime in ("ordinary", "strong", "zero", "parallel")
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("shape", "delta", "own", "erase_previous", "read_before", "late"),
    [
        (SHORT, True, False, False, False, True),
        (PACKED, True, True, True, False, False),
        (SHORT, False, False, False, False, False),
        (PACKED, False, False, False, True, True),
        (WIDE, True, False, True, True, False),
        (PACKED, True, True, False, True, True),
    ],
)
def test_every_output_matches_float64(monkeypatch, shape, delta, own, erase_previous, read_before, late, dtype, regime):
    monkeypatch.setattr(Timing, "late", late)
    (module,) = kernels("sm90.channel_prepare").values()
    x = draw(shape, dtype, delta, own, regime)
    kind = ScanKind(
        delta, "previous" if erase_previous else "decayed", "before" if read_before else "after", False, False, 0.3
    )
    s = problem_of(x, kind)
    out = Prepared.empty(x.q, s, C, save=True)
    for tensor in out:
        tensor.fill_(float("nan"))
    tensors = x._asdict() | out._asdict() | {"cu": x.cu_seqlens}
    traits = {
        "H": s.H, "HV": s.HV, "K": s.K, "C": C, "DELTA": delta, "ERASE_KEY": own, "ERASE_CHANNELS": False,
        "ERASE": delta, "WRITE": True, "ERASE_PREVIOUS": erase_previous, "READ_BEFORE": read_before, "PACKED": s.packed,
    }  # fmt: skip
    kernel = module.sm90_channel_prepare_kernel
    tensors["gmem"], constants = group(kernel, tensors, traits)
    run = launcher(None)(kernel, tensors, {"traits": constants})
    run(s.slots(C) * s.HV, {"N": s.N, "T": s.T, "scale": kind.scale})
    rounding = torch.finfo(dtype).eps / 2
    operands = torch.finfo(torch.float16).eps  # two of them are rounded to float16
    assert torch.isfinite(out.scaled).all()
    for slot, n, tokens in chunks_of(x, s):
        for hv in range(s.HV):
            length = tokens.stop - tokens.start
            *scaled, end, T, P = expected(x, kind, s, n, tokens, hv)
            for actual, value in zip(out.scaled[:, n, tokens, hv], scaled, strict=False):
                assert error(actual, value) < rounding
            assert error(out.gates[slot, hv, : s.K], end) < 1e-4
            assert out.gates[slot, hv, s.K :].tolist() == [*x.w[n, tokens, hv].tolist(), *[0.0] * (C - length)]
            assert out.decay_bounds[slot, hv] == 0
            actual_T, actual_P = stored_tiles(out.wy_tiles[slot, hv, 0], dtype)
            assert error(actual_P[:length, :length], P) < rounding + operands
            assert error(actual_T[:length, :length], T) < (2e-3 if regime == "parallel" else 5e-4)
            assert not actual_P[length:].any() and not actual_P[:, length:].any()
            padding = actual_T[length:, length:]
            assert torch.equal(padding, torch.eye(C - length).double() * float(delta))
