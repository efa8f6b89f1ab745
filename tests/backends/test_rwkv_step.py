"""A token of RWKV-6 by few kernels: in Triton's interpreter, or on a GPU."""

import copy

import pytest
import torch
from torch import Tensor
from triton_cases import DEVICE, DTYPES, needs_triton

from deltazoo import watch
from deltazoo.backends.ops import gemv
from deltazoo.backends.triton.decode import ddlerp_op, rwkv_op
from deltazoo.backends.triton.decode.ddlerp_op import DDLerpCall, ddlerp
from deltazoo.backends.triton.operands import flatten
from deltazoo.mixers import RWKV6
from deltazoo.mixers.core.delta_mixer import DeltaMixer
from deltazoo.mixers.core.mixer import Place

D = 32
HALF = DTYPES[1]  # the interpreter multiplies no matrices in bfloat16
TOLERANCES = {torch.float32: 1e-6, torch.float16: 6e-4, torch.bfloat16: 6e-3}


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def shift_case(B: int, D: int, R: int, dtype: torch.dtype) -> DDLerpCall:
    P = 5
    call = DDLerpCall(
        draw(B, D, seed=0), draw(B, D, seed=1), draw(D, seed=2), draw(P, D, seed=3),
        D**-0.5 * draw(P * R, D, seed=4), R**-0.5 * draw(P, R, D, seed=5),
    )  # fmt: skip
    return DDLerpCall(*(x.to(dtype) for x in call))


def shifted(call: DDLerpCall) -> Tensor:
    """Return the shifted inputs from the equations in float64."""
    x, previous, mix_x, mix, down, up = (tensor.double() for tensor in call)
    z = ((x + (previous - x) * mix_x) @ down.T).unflatten(-1, up.shape[:2])
    low_rank = torch.einsum("bpr,prd->bpd", z.tanh(), up)
    return x[:, None] + (previous - x)[:, None] * (mix + low_rank)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("B", "D", "R", "splits"),
    [
        pytest.param(3, 40, 3, 16, marks=pytest.mark.kernel_smoke),
        (1, 300, 32, 16),
        (18, 300, 40, 2),
        (64, 136, 16, 1),
    ],
)
def test_shifted_inputs_equal_their_equations(B, D, R, splits, dtype, monkeypatch):
    monkeypatch.setattr(ddlerp_op, "_SPLITS", splits)
    call = shift_case(B, D, R, dtype)
    ours, wide = ddlerp(call), shifted(call)
    assert ours.dtype == dtype
    assert (ours.double() - wide).norm() <= TOLERANCES[dtype] * wide.norm()


@needs_triton
def test_the_operator_of_the_shift_passes_opcheck():
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    call = shift_case(2, 24, 3, torch.float32)
    torch.library.opcheck(torch.ops.deltazoo.triton_ddlerp.default, tuple(call), test_utils=tests)


@needs_triton
@pytest.mark.parametrize("version", [6, 7])
def test_the_operator_of_the_step_passes_opcheck(version):
    B, H, K, V, R = 2, 2, 8, 12, 3
    r, k, v, g, low = draw(B, 2 * H * K + 2 * H * V + R, seed=0).split([H * K, H * K, H * V, H * V, R], 1)
    of_keys, of_values = draw(H * K, seed=1), draw(H * V, seed=2)
    weights = rwkv_op.RWKVWeights(draw(H * K, R, seed=3), of_keys, of_keys, of_values, of_values, 1e-5)
    call = rwkv_op.RWKVCall(
        draw(B, D, seed=4), draw(B, D, seed=5), draw(B, H, K, V, seed=6), weights, r, k, v, low_decay=low, g=g
    )
    if version == 7:
        rate, gate = draw(H * K, R, seed=7), draw(H * V, R, seed=8)
        weights = weights._replace(rate=rate, rate_bias=of_keys, gate=gate, xi=of_keys, alpha=of_keys)
        call = call._replace(weights=weights, g=None, low_rate=low, low_gate=low)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.deltazoo.triton_rwkv_step_.default, flatten(call), test_utils=tests)


@torch.no_grad()
def decode(
    mixer: DeltaMixer, x: Tensor, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> tuple[list[Tensor], list[str]]:
    """Return the outputs of all tokens but the first two, and the new state; and the kernels of the last token."""
    with monkeypatch.context() as patch:
        patch.setattr(gemv, "kernel_refusals", lambda *_: [] if packed else ["it is off."])
        state = mixer.init_state(x.shape[0])
        mixer(x[:, :2], state)
        outputs = []
        for t in range(2, x.shape[1]):
            with watch() as record:
                outputs.append(mixer(x[:, t : t + 1], state).y)
    return [*outputs, *state.values()], [run.name for run in record.runs]


@needs_triton
@pytest.mark.parametrize("small_bytes", [0, 1 << 20])
@pytest.mark.parametrize(("rows", "dtype"), [(1, torch.float32), (2, torch.float32), (1, HALF), (18, HALF)])
def test_a_step_is_as_exact_as_one_by_parts(rows, dtype, small_bytes, monkeypatch):
    """In 16 bits the error of the path by parts is the measure. The maps of low rank are applied by both kernels."""
    monkeypatch.setattr(rwkv_op, "_SMALL_BYTES", small_bytes)
    monkeypatch.setattr(rwkv_op, "_JOINT_BYTES", small_bytes)
    torch.manual_seed(0)
    mixer = RWKV6(heads=2, key_width=16, mix_rank=5, decay_rank=9).build(D, Place(1, 2), "triton").to(DEVICE)
    assert isinstance(mixer, DeltaMixer)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape).to(DEVICE))
    mixer = mixer.to(dtype)
    x = draw(rows, 5, D, seed=1).to(dtype)
    wide_mixer = copy.deepcopy(mixer).double()
    wide_mixer.rebind("reference")
    exact, _ = decode(wide_mixer, x.double(), monkeypatch, packed=False)
    separate, _ = decode(mixer, x, monkeypatch, packed=False)
    packed, kernels = decode(mixer, x, monkeypatch, packed=True)
    product = "gemv" if rows == 1 or dtype == torch.float32 else "few_rows"
    low_rank = [] if small_bytes else ["rwkv_low_rank_kernel"]
    assert kernels[:2] == ["ddlerp_down_kernel", "ddlerp_kernel"]
    step = kernels.index("rwkv_step_kernel")
    assert kernels[step - len(low_rank) : step] == low_rank
    is_product = [name.startswith(product) for name in kernels]
    assert any(is_product[2:step]) and any(is_product[step:])
    for ours, by_parts, wide in zip(packed, separate, exact, strict=True):
        assert ours.dtype == by_parts.dtype
        errors = [float((y.double() - wide).norm() / wide.norm()) for y in (ours, by_parts)]
        assert errors[0] <= 1.25 * errors[1] + 1e-6
