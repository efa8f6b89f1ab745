"""Products of the few rows of a decode step against float64: in Triton's interpreter, or on a GPU."""

import importlib.metadata
import re
import sys

import pytest
import torch
import torch.nn.functional as F
from assembly import disassemble
from compiling import Compiler
from torch import Tensor
from triton_cases import DEVICE, INTERPRETED, needs_triton

from deltazoo import watch
from deltazoo.backends.ops import gemv as module
from deltazoo.backends.ops.gemv import (
    Convolution,
    Norm,
    Shift,
    add_product,
    hidden,
    products,
    products_of_each,
    refusals,
    shifted_products,
)
from deltazoo.backends.ops.rms_norm import rms_norm
from deltazoo.backends.torch_ext.devices import DeviceSpec
from deltazoo.backends.triton.gemv import op

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}
DTYPES = list(TOLERANCE)[: 2 if INTERPRETED else 3]
ACTIVATIONS = {"silu": F.silu, "gelu": lambda x: F.gelu(x, approximate="tanh"), "relu2": lambda x: F.relu(x).square()}


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    error = (actual.double() - expected).norm() / expected.norm().clamp(min=1e-30)
    assert error <= TOLERANCE[actual.dtype], float(error)


def normed(x: Tensor, norm: Norm | None) -> Tensor:
    return x.double() if norm is None else rms_norm(x.double(), norm.weight.double(), norm.eps)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("M", "D", "outputs"),
    [
        pytest.param(1, 40, (9, 1, 3, 4), marks=pytest.mark.kernel_smoke),
        (3, 37, (5, 2)),
        (8, 300, (6,)),
        (2, 16, (1, 1, 1, 1, 7)),
        (33, 264, (40, 1)),
    ],
)
def test_the_products_of_several_maps_and_of_a_norm(M, D, outputs, dtype):
    x, weights = draw(M, 1, D, dtype=dtype), [draw(n, D, dtype=dtype, seed=n) for n in outputs]
    biases = [None if i == 1 else draw(n, dtype=dtype, seed=n) for i, n in enumerate(outputs)]
    for norm in (None, Norm(draw(D, dtype=torch.float32, seed=1), 0.1)):
        for added in ([None] * len(outputs), biases):
            results = products(x, weights, norm, biases=added)
            for y, weight, bias in zip(results, weights, added, strict=True):
                assert_near(y, normed(x, norm) @ weight.double().T + (0.0 if bias is None else bias.double()))


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [True, False])
def test_the_hidden_channels_of_an_mlp(activation, gated, dtype):
    rows = 2 if dtype == torch.float32 else 1
    x, weight = draw(rows, 1, 24, dtype=dtype), draw(14, 24, dtype=dtype, seed=1)
    norm = Norm(draw(24, dtype=dtype, seed=2), 1e-3)
    exact = normed(x, norm) @ weight.double().T
    gate, up = exact.chunk(2, -1) if gated else (exact, 1.0)
    assert_near(hidden(x, weight, norm, activation, gated), ACTIVATIONS[activation](gate) * up)


@needs_triton
def test_the_hidden_channels_of_more_rows():
    x, weight, norm = draw(5, 1, 24, dtype=torch.float16), draw(14, 24, dtype=torch.float16, seed=1), draw(24, seed=2)
    gate, up = (normed(x, Norm(norm, 1e-3)) @ weight.double().T).chunk(2, -1)
    assert_near(hidden(x, weight, Norm(norm, 1e-3), "silu", gated=True), F.silu(gate) * up)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed_input", [True, False])
@pytest.mark.parametrize("M", [1, 2, 5])
def test_products_of_shifted_inputs(M, normed_input, dtype):
    D, rows = 40, (0, 2, 2, 1, 0)
    x, before, mix = draw(M, 1, D, dtype=dtype), draw(M, 1, D, dtype=dtype, seed=1), draw(3, D, dtype=dtype, seed=2)
    weights = [draw(n, D, dtype=dtype, seed=n) for n in (9, 3, 70, 2, 5)]
    norm = Norm(draw(D, seed=3), 0.1) if normed_input else None
    n = x.double() if norm is None else normed(x, norm)
    for y, weight, row in zip(shifted_products(x, weights, norm, Shift(before, mix, rows)), weights, rows, strict=True):
        assert_near(y, (n + (before.double() - n) * mix[row].double()) @ weight.double().T)


@needs_triton
@pytest.mark.parametrize(("M", "dtype"), [(2, torch.float32), (5, torch.float16)])
def test_products_of_inputs_of_their_own(M, dtype):
    sizes = (9, 3, 70, 2, 5, 8, 8, 8, 16)
    x, weights = draw(M, 1, len(sizes), 40, dtype=dtype), [draw(n, 40, dtype=dtype, seed=n) for n in sizes]
    for i, (y, weight) in enumerate(zip(products_of_each(x, weights), weights, strict=True)):
        assert_near(y, x[:, :, i].double() @ weight.double().T)


@needs_triton
@pytest.mark.parametrize(("M", "dtype"), [(1, torch.float32), (5, torch.float16)])
def test_second_maps_read_the_products_of_the_first(M, dtype):
    x = draw(M, 1, 40, dtype=dtype)
    first = [draw(n, 40, dtype=dtype, seed=n) * 0.2 for n in (7, 24, 16, 24, 3, 5, 16, 24, 16)]
    second = [None if i in (0, 4, 5) else draw(30 + i, len(w), dtype=dtype, seed=i) for i, w in enumerate(first)]
    sizes = [len(w if up is None else up) for w, up in zip(first, second, strict=True)]
    biases = [None if i in (0, 1) else draw(n, dtype=dtype, seed=i) for i, n in enumerate(sizes)]
    with watch() as record:
        results = products(x, first, None, second, biases=biases)
    # two launches of first maps; in the first ranks 24 and 16, in the second 16
    assert len([run for run in record.runs if run.name.startswith(("gemv", "few_rows"))]) == 5
    for y, w, up, bias in zip(results, first, second, biases, strict=True):
        low = x.double() @ w.double().T
        exact = low if up is None else low.to(dtype).double() @ up.double().T
        assert_near(y, exact if bias is None else exact + bias.double())


@needs_triton
@pytest.mark.parametrize(("bias", "silu"), [(True, True), (False, False)])
@pytest.mark.parametrize(
    ("M", "dtype", "span"),
    [(2, torch.float32, 512), (1, torch.float16, 512), (5, torch.float16, 512), (5, torch.float16, 100)],
    ids=["two rows", "one row", "few rows", "split"],
)
def test_the_first_map_is_convolved_and_its_product_appended(M, dtype, span, bias, silu, monkeypatch):
    monkeypatch.setattr(op, "_LEAST_SPAN", span)
    C, W, D = 70, 4, 264
    x, weights = draw(M, 1, D, dtype=dtype), [draw(n, D, dtype=dtype, seed=n) * D**-0.5 for n in (C, 3, 20)]
    history, taps = draw(M, W - 1, C, dtype=dtype, seed=1), draw(C, W, dtype=dtype, seed=2)
    added, norm = draw(C, dtype=dtype, seed=3) if bias else None, Norm(draw(D, seed=4), 0.1)
    before = history.clone()
    biases = [draw(C, dtype=dtype, seed=5), None, draw(20, dtype=dtype, seed=6)] if bias else [None] * 3
    results = products(x, weights, norm, (), Convolution(history, taps, added, silu), biases)
    exact = [normed(x, norm) @ weight.double().T for weight in weights]
    exact = [y if b is None else y + b.double() for y, b in zip(exact, biases, strict=True)]
    for y, wide in zip(results[1:], exact[1:], strict=True):
        assert_near(y, wide)
    assert torch.equal(history[:, :-1], before[:, 1:])
    assert_near(history[:, -1:], exact[0])
    inputs = torch.cat([before, history[:, -1:]], 1).double()
    y = (inputs * taps.T.double()).sum(1, keepdim=True) + (0.0 if added is None else added.double())
    assert_near(results[0], F.silu(y) if silu else y)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_residual_is_added_before_the_result_is_rounded(dtype):
    x, weight, residual = draw(3, 1, 20, dtype=dtype), draw(11, 20, dtype=dtype), draw(3, 1, 11, dtype=dtype, seed=3)
    exact = residual.double() + x.double() @ weight.double().T
    assert_near(add_product(residual, x, weight), exact)
    if dtype != torch.float32:
        assert torch.equal(add_product(residual, x, weight), exact.to(dtype))


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_others_and_keeps_its_nan(dtype):
    M = 8 if dtype == torch.float32 else 40
    x, weight, norm = draw(M, 1, 304, dtype=dtype), draw(10, 304, dtype=dtype, seed=1), Norm(draw(304, seed=2), 1e-5)
    together = products(x, [weight], norm)[0]
    for rows in (slice(0, 3), slice(2, 5), slice(3, M - 1)):
        assert torch.equal(products(x[rows], [weight], norm)[0], together[rows])
    x[5, 0, 7] = torch.nan
    y = products(x, [weight], norm)[0]
    assert y[5].isnan().all()
    assert torch.equal(y[:5], together[:5]) and torch.equal(y[6:], together[6:])


@needs_triton
def test_columns_of_a_wider_tensor_are_read_in_place():
    wide, weight = draw(4, 96), draw(6, 32)
    y = op.gemv(wide[:, 32:64], None, 0.0, [weight], None, "", False, None, None, [], [], [])
    assert_near(y, wide[:, 32:64].double() @ weight.double().T)


@needs_triton
def test_wide_inputs_are_split_into_few_blocks(monkeypatch):
    monkeypatch.setattr(op, "launch_of", lambda *_: op.GemvLaunch(rows=2, block=16, warps=1))
    x, weight = draw(1, 4000), draw(3, 4000)
    assert_near(
        op.gemv(x, None, 0.0, [weight], None, "", False, None, None, [], [], []), x.double() @ weight.double().T
    )


@pytest.mark.kernels
@pytest.mark.skipif(INTERPRETED or sys.platform != "linux", reason="needs Triton's compiler, not its interpreter")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("M", [1, 2, 32])
def test_the_kernels_compile_for_hopper_with_wide_loads_and_without_spills(M, dtype, monkeypatch):
    if M > op.MAX_ROWS and dtype == torch.float32:
        pytest.skip("more rows are products of torch in float32")
    compiler = Compiler(all=True)
    monkeypatch.setattr("deltazoo.backends.triton.runtime.launcher.launcher", compiler)
    monkeypatch.setattr(op, "device_spec", lambda _: DeviceSpec("NVIDIA H100", "cuda", (9, 0), 132, 232448))
    x, norm = torch.empty(M, 1, 2400, dtype=dtype), Norm(torch.empty(2400, dtype=dtype), 1e-5)
    convolution = Convolution(*(torch.empty(*n, dtype=dtype) for n in ((M, 3, 7200), (7200, 4))), None, True)
    biases = [torch.empty(7200, dtype=dtype), None, None, torch.empty(3600, dtype=dtype)]
    products(x, [torch.empty(n, 2400, dtype=dtype) for n in (7200, 9, 9, 3600)], norm, (), convolution, biases)
    hidden(x, torch.empty(11776, 2400, dtype=dtype), norm, "silu", gated=True)
    add_product(x, torch.empty(M, 1, 5888, dtype=dtype), torch.empty(2400, 5888, dtype=dtype))
    uses_dots = M >= op.MIN_DOT_ROWS and dtype != torch.float32
    expected = "few_rows_sm90_kernel" if uses_dots else "gemv_kernel"
    kernels = [kernel for name, kernel in compiler.compiled if name == expected]
    assert len(kernels) == 3
    for kernel in kernels:
        ptx = kernel.asm["ptx"]
        has_one_layout = importlib.metadata.version("triton") < "3.7"  # see docs/compiler-bugs.md
        spilled = disassemble(kernel.asm["cubin"]).count("LDL")
        assert spilled <= (0 if has_one_layout or M != 2 else 1)
        if uses_dots:
            copies = [line for line in ptx.splitlines() if "cp.async.cg.shared.global" in line]
            before, after = ptx.split("griddepcontrol.wait", 2)[1:]
            assert copies and all("0x10" in line for line in copies) and "wgmma" in after
            assert "cp.async.cg" in before  # copies of weights before the wait, of x after it
        else:  # weights are read before the wait, x after it
            before, after = ptx.split("griddepcontrol.wait", 2)[1:]
            assert re.search(r"ld\.global\S*v4\.b32", before) and "ld.global" in after
            if has_one_layout:
                assert "convert_layout" not in kernel.asm["ttgir"].split("tt.reduce")[0]


@needs_triton
def test_the_operator_passes_opcheck():
    x, weight = draw(2, 24), draw(6, 24, seed=1)
    arguments = (x, draw(24, seed=2), 1e-5, [weight, weight], None, "", False, None, None, [], [weight[:, 0]], [1])
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.deltazoo.triton_gemv.default, arguments, test_utils=tests)


@pytest.mark.skipif(INTERPRETED, reason="needs the device types of a process without the interpreter")
def test_other_calls_take_plain_torch(monkeypatch):
    monkeypatch.setattr(module, "kernel_refusals", lambda *_: [])
    x = torch.zeros(2, 1, 16)
    with torch.no_grad():
        assert not refusals(x)
        assert refusals(torch.zeros(3, 1, 16)) == ["with more than 2 rows separate products are faster."]
        assert not refusals(torch.zeros(64, 1, 16, dtype=torch.bfloat16))
        many = torch.zeros(65, 1, 16, dtype=torch.bfloat16)
        assert refusals(many) == ["with more than 64 rows separate products are faster."]
        wide = torch.zeros(1, 1, op.MAX_WIDTH + 1)
        assert refusals(wide) == ["rows must have at most 16384 numbers, got 16385."]
        with torch.autocast("cpu", torch.bfloat16):
            assert refusals(x) == ["it needs a call without gradients and autocast."]
    assert refusals(x) == ["it needs a call without gradients and autocast."]


@needs_triton
@pytest.mark.parametrize(("gated", "splits"), [(False, 3), (True, 2)])
def test_sums_over_splits_of_the_inputs_are_added(gated, splits, monkeypatch):
    monkeypatch.setattr(op, "_LEAST_SPAN", 128 if gated else 100)
    monkeypatch.setattr(op, "device_spec", lambda _: DeviceSpec("NVIDIA A100", "cuda", (8, 0), 108, 166912))
    x, weight = draw(5, 300, dtype=torch.float16), draw(70, 300, dtype=torch.float16, seed=1)
    residual = draw(5, 35 if gated else 70, dtype=torch.float16, seed=2)
    with watch() as record:
        y = op.gemv(x, None, 0.0, [weight], residual, "silu", gated, None, None, [], [], [])
    assert [run.name for run in record.runs][-2:] == ["few_rows_kernel", "finish_rows_kernel"]
    assert record.runs[-2].programs == 2 * splits
    exact = x.double() @ weight.double().T
    gate, up = exact.chunk(2, -1) if gated else (exact, 1.0)
    assert_near(y, residual.double() + F.silu(gate) * up)


@pytest.mark.parametrize("D", [2048, 4096, 5888])
@pytest.mark.parametrize("tiles", [1, 10, 32, 38, 57, 66, 67, 96, 500])
@pytest.mark.parametrize("alone", [False, True])
def test_splits_fill_the_multiprocessors(tiles, D, alone):
    span = op.span_of(tiles, D, 132, 128, alone)
    splits = -(-D // span)
    assert span % 128 == 0 or span == D
    if tiles > 66:
        assert splits == 1
    elif splits < D // 512 - 1:  # else the spans are as short as they may be
        filled = 132 // tiles * tiles
        least = (0.85 if tiles > 44 else 0.9) * 132
        assert splits * tiles == (filled if alone and filled >= least else -(-132 // tiles) * tiles)
