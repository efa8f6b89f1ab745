"""A token of a preconditioned delta rule against float64: in Triton's interpreter, or on a GPU."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton_cases import DEVICE, needs_triton

from deltazoo import UpdateSpec
from deltazoo.backends.conformance.decode_step import FusedOperands, draw_step, make_fused_step
from deltazoo.backends.ops.decode_step import FusedDecodeStep
from deltazoo.backends.triton.decode.fused import StepOptions
from deltazoo.backends.triton.decode.preconditioned_op import FactorKind, SecondMoment, preconditioned_step_

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
KIND = FactorKind(math.log(1.5), 1e-6)
FIELDS = {"norm": "rms", "eps": 1e-5, "gate": "silu"}
STEPS = {
    "head": make_fused_step(UpdateSpec(decay="head", beta="head"), 2, 2, 5, 12, **FIELDS),
    "channel, shared keys": make_fused_step(
        UpdateSpec(decay="channel", beta="head", negative_eigenvalues="erase"), 2, 4, 5, 70, decay_bound=-5.0, **FIELDS
    ),
    "no gate": make_fused_step(
        UpdateSpec(decay="head", beta="head", scale=0.5), 1, 2, 16, 3, silu="", unit="q", norm="layer", eps=1e-5
    ),
}


def case(step: FusedDecodeStep, dtype: torch.dtype) -> tuple[FusedOperands, SecondMoment]:
    operands = draw_step(step, (), dtype=dtype, device=DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(1)
    B, H = 3, step.H
    raw = torch.randn(B, 1, 2 * H + 1, generator=generator, device=DEVICE).to(dtype)  # rows are apart
    parameters = torch.randn(3, H, generator=generator, device=DEVICE)
    moments = torch.rand(B, H, 2, step.K, generator=generator, device=DEVICE)[:, :, :1]  # these and the states, too
    operands = operands._replace(states=torch.stack(2 * [operands.states], 1)[:, 0])
    return operands, SecondMoment(raw[..., :H], raw[..., H : 2 * H], *parameters, moments)


def expected(step: FusedDecodeStep, operands: FusedOperands, moment: SecondMoment) -> tuple[Tensor, Tensor, Tensor]:
    """Return o, the states and the second moments in float64."""
    x = operands.inputs._replace(**{
        name: y.double() for name, y in operands.inputs._asdict().items() if y is not None
    })  # fmt: skip
    m, S = SecondMoment(*(y.double() for y in moment)), operands.states.double()
    H, HV, K = step.H, step.HV, step.K
    streams = zip(x.qkv[:, 0].split([part.channels for part in step.parts], -1), step.parts, strict=True)
    q, k, v = (F.silu(y) if part.silu else y for y, part in streams)
    q, k, v = q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, -1))
    q, k = (
        y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt() if part.unit else y
        for y, part in zip((q, k), step.parts[:2], strict=True)
    )
    decay = (-m.moment_A_log.exp() * F.softplus(m.moment_decay[:, 0] + m.moment_dt_bias)).exp()
    A = decay[..., None] * m.moments[:, :, 0] + m.moment_beta[:, 0].sigmoid()[..., None] * k.square()
    r = (A + KIND.moment_eps).log() - m.center[:, None]
    written = k * (-KIND.log_bound * r / (1 + r.abs())).exp()
    q, k, written = (y.repeat_interleave(HV // H, 1) for y in (q, k, written))
    raw = (x.decay[:, 0] + x.dt_bias).unflatten(-1, (HV, -1))
    rate = x.A_log.exp()[:, None]
    log_decay = -rate * F.softplus(raw) if step.decay_bound is None else step.decay_bound * (rate * raw).sigmoid()
    options, beta = StepOptions.of(step), x.beta[:, 0].sigmoid()[..., None]
    S = log_decay.exp()[..., None] * S
    u = options.write_factor * beta * v - torch.einsum("bhkv,bhk->bhv", S, options.erase_factor * beta * k)
    S = S + written[..., None] * u[..., None, :]
    o = options.scale * torch.einsum("bhkv,bhk->bhv", S, q)
    o = o - o.mean(-1, keepdim=True) if step.norm == "layer" else o
    o = o * (o.square().mean(-1, keepdim=True) + step.eps).rsqrt() * x.norm_weight
    if x.gate is not None:
        o = o * F.silu(x.gate.view_as(o))
    return o[:, None], S, A[:, :, None]


@needs_triton
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", [pytest.param("head", marks=pytest.mark.kernel_smoke), *sorted({*STEPS} - {"head"})])
def test_a_token_equals_its_equations(name, dtype):
    step = STEPS[name]
    operands, moment = case(step, dtype)
    reference = expected(step, operands, moment)
    o = preconditioned_step_(step, operands.inputs, moment, KIND, operands.states)
    assert o.dtype == dtype
    for ours, wide in zip((o, operands.states, moment.moments), reference, strict=True):
        assert (ours.double() - wide).norm() <= TOLERANCES[dtype] * wide.norm()


@needs_triton
def test_the_operator_passes_opcheck():
    step = STEPS["head"]
    operands, moment = case(step, torch.float32)
    arguments = (*operands.inputs, *moment, operands.states, *StepOptions.of(step), *KIND)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.deltazoo.triton_preconditioned_step_.default, arguments, test_utils=tests)
