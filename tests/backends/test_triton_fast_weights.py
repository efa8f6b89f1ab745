"""The kernels of TTT-Linear and the neural memory against plain torch in float64: in the interpreter, or on a GPU."""

import re

import numpy as np
import pytest
import torch
from assembly import disassemble, missing_waits, overwritten_operands, wrong_descriptor_addresses
from compiling import Compiler
from fast_weight_cases import DENSE, PACKED, convert, detached, draw_memory, draw_ttt, tensors
from triton_cases import DEVICE, INTERPRETED, needs_triton

from deltazoo import watch
from deltazoo.backends.ops.fast_weights import neural_memory as memory_module
from deltazoo.backends.ops.fast_weights import ttt_linear as ttt_module
from deltazoo.backends.ops.fast_weights.neural_memory import neural_memory
from deltazoo.backends.ops.fast_weights.neural_memory_chunks import MemoryGradients, MemoryOperands
from deltazoo.backends.ops.fast_weights.ttt_linear import ttt_linear
from deltazoo.backends.ops.fast_weights.ttt_linear_chunks import TTTGradients, TTTOperands, TTTResult, TTTState
from deltazoo.backends.torch_ext.devices import DeviceSpec, installed_triton
from deltazoo.backends.triton.fast_weights import launch

HOPPER = DeviceSpec("a Hopper GPU", "cuda", (9, 0), 132, 232448, installed_triton())
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-3, torch.float16: 5e-3}
LONG = ([(0, 41, 0, 1)], 41)
SMALL = ([(0, 5, 2, 0), (5, 0, 1, 0), (5, 4, 0, 1)], 10)


@pytest.fixture(autouse=True)
def kernels_in_the_interpreter(monkeypatch):
    monkeypatch.setattr(memory_module, "SEGMENT", 2)
    if INTERPRETED:
        monkeypatch.setattr(launch, "_forward_precision", lambda x: "tf32x3")  # the interpreter has no "bf16x3"
        monkeypatch.setattr(ttt_module, "_supported", lambda x: x.q.dtype != torch.float64)
        monkeypatch.setattr(memory_module, "_supported", lambda x, size: x.q.dtype != torch.float64)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm().clamp(min=1e-9))


def check(x, run, dtype: torch.dtype, kernels: dict[str, int]) -> None:
    """Compare results and gradients, and the update of the state in place."""
    rounded = convert(convert(x, dtype, torch.float32), torch.float64)
    expected = run(rounded)
    weights = [torch.randn_like(y) for y in expected]
    weights[0] = weights[0].to(dtype).double()
    expected += torch.autograd.grad(expected, tensors(rounded), weights)
    x = convert(x, dtype, torch.float32)
    with watch() as log:
        actual = run(x)
        actual += torch.autograd.grad(actual, tensors(x), [y.to(z.dtype) for y, z in zip(weights, actual, strict=True)])
    assert log.kernels == kernels
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert error(a.detach(), b.detach()) < TOLERANCE[dtype] * (1 if i < len(weights) else 2), i
    with torch.no_grad():
        for a, b in zip(run(detached(x)), expected[: len(weights)], strict=True):
            assert error(a, b.detach()) < TOLERANCE[dtype]


def run_ttt(x):
    o, state = ttt_linear(x)
    return [o, *state]


@needs_triton
@pytest.mark.parametrize(
    ("case", "width", "size", "dtype"),
    [
        pytest.param(SMALL, 5, 3, torch.float32, marks=pytest.mark.kernel_smoke),
        (DENSE, 16, 16, torch.bfloat16),
        (LONG, 20, 16, torch.float32),
        (PACKED, 16, 4, torch.float16),
    ],
)
def test_ttt_linear_and_its_gradients(case, width, size, dtype):
    x = draw_ttt(case, width, size, DEVICE)
    check(x, run_ttt, dtype, {"ttt_linear_kernel": 1, "ttt_linear_backward_kernel": 1})


def check_memory(x, size: int, dtype: torch.dtype) -> None:
    def run(x):
        o, state = neural_memory(x, size)
        return [o, *state]

    kernels = {"neural_memory_kernel": 1, "neural_memory_backward_kernel": 1}
    check(x, run, dtype, kernels | {"memory_gates_kernel": 2, "memory_gates_backward_kernel": 1})


def with_lower_rates(x):
    """Rates up to 1 give outputs of 1e6 and multiply a relative error of q, k, v by 4 to 21: too much for TF32."""
    return x._replace(theta=(0.2 * x.theta).detach().requires_grad_())


@needs_triton
@pytest.mark.parametrize(
    ("case", "widths", "size", "dtype", "strong"),
    [
        pytest.param(SMALL, (4, 6), 3, torch.float16, True, marks=pytest.mark.kernel_smoke),
        (PACKED, (4, 6), 3, torch.bfloat16, False),
        (LONG, (16, 32), 16, torch.bfloat16, True),
        (SMALL, (5, 5), 4, torch.bfloat16, False),
        (DENSE, (20, 20), 16, torch.float16, True),
    ],
)
def test_the_neural_memory_and_its_gradients(case, widths, size, dtype, strong):
    x = draw_memory(case, widths, 1 if widths[0] == widths[1] else 2, strong, DEVICE)
    check_memory(x if widths[0] == widths[1] else with_lower_rates(x), size, dtype)


@pytest.fixture
def truncated_products(monkeypatch):
    """Truncate the operands of products to 11 bits, as tensor cores do in tf32."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot = InterpreterBuilder.create_dot

    def truncate(x):
        return TensorHandle((x.data.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32), x.dtype)

    def create_dot(self, a, b, *others):
        return dot(self, truncate(a), truncate(b), *others)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.kernel_smoke
@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_truncated_products_of_the_neural_memory_stay_within_the_tolerance(truncated_products):
    check_memory(with_lower_rates(draw_memory(LONG, (16, 32), 2, strong=True)), 16, torch.float16)


@needs_triton
@pytest.mark.parametrize(
    "name", [pytest.param("ttt_linear", marks=pytest.mark.kernel_smoke), "two layers", "one layer"]
)
def test_a_decode_step_is_one_launch_and_equals_plain_torch(name):
    tokens = ([(0, 1, 2, 0), (1, 1, 0, 0), (2, 0, 1, 0), (3, 1, 0, 1)], 4)
    if name == "ttt_linear":
        x, run = draw_ttt(tokens, 20, 3, DEVICE), run_ttt
    else:
        x = draw_memory(
            tokens, (20, 24) if name == "two layers" else (20, 20), 1 + (name == "two layers"), device=DEVICE
        )

        def run(x):
            o, state = neural_memory(x, 3)
            return [o, *state]

    x = detached(convert(x, torch.float16, torch.float32))
    x = type(x)(*(y.transpose(0, 1) if hasattr(y, "dim") and y.shape[:2] == (1, 4) else y for y in x))
    with torch.no_grad():
        expected = run(detached(convert(x, torch.float64)))
        with watch() as log:
            actual = run(x)
    kernel = "ttt_linear_step_kernel" if name == "ttt_linear" else "neural_memory_step_kernel"
    assert log.kernels == {kernel: 1}
    for a, b in zip(actual, expected, strict=True):
        assert error(a, b) < (1e-3 if a.dtype == torch.float16 else 1e-5)


@pytest.mark.kernels
@pytest.mark.skipif(INTERPRETED, reason="needs Triton's compiler, not its interpreter")
@pytest.mark.parametrize("name", ["ttt_linear", "neural_memory"])
def test_compiled_kernels_divide_columns_among_warps_and_have_no_known_fault(name):
    N, T, H, E, inner, slots = 1, 16, 2, 64, 128, 2
    tokens = [torch.empty(N, T, H, E, dtype=torch.bfloat16) for _ in range(4)]
    gates, spans = [torch.empty(N, T, H) for _ in range(3)], torch.empty(N, 4, dtype=torch.int32)
    compiler = Compiler(all=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "launcher", compiler)
        patch.setattr(launch.problems, "device_spec", lambda index: HOPPER)
        if name == "ttt_linear":
            W, b = torch.empty(N, H, E, E), torch.empty(N, H, E)
            x = TTTOperands(*tokens[:3], gates[0], torch.empty(16), b[0], b[0], W[0], b[0], W, W, b, b, spans)
            out = TTTResult(tokens[3], W, W, b, b, tokens[0].float())
            launch.ttt_forward(x, out)
            launch.ttt_step(x, tokens[3])
            launch.ttt_backward(
                x, out, tokens[3], TTTState(W, W, b, b),
                out=TTTGradients(*tokens[:3], gates[0], torch.empty(16), b[0], b[0], W, W, b, b),
            )  # fmt: skip
        else:
            layers = [torch.empty(N, H, E, inner), torch.empty(N, H, inner, E)]
            x = MemoryOperands(*tokens[:3], *gates, [y[0] for y in layers], layers * 3, spans)
            checkpoints = torch.empty(slots, H, 4, E * inner)
            launch.memory_forward(x, 16, 16, o=tokens[3], state=layers * 3, checkpoints=checkpoints)
            launch.memory_step(x, 16, tokens[3])
            out = MemoryGradients(*tokens[:3], *gates, layers * 3)
            launch.memory_backward(x, checkpoints, tokens[3], size=16, segment=16, out=out)
    assert len({kernel for kernel, _ in compiler.compiled}) == (3 if name == "ttt_linear" else 5)
    for _, compiled in compiler.compiled:
        text = disassemble(compiled.asm["cubin"])
        assert not wrong_descriptor_addresses(text) + missing_waits(text) + overwritten_operands(text)
        layouts = re.findall(
            r"versionMajor = 2, versionMinor = 0, warpsPerCTA = \[(\d+), (\d+)\]", compiled.asm["ttgir"]
        )
        assert all(rows == "1" for rows, _ in layouts)
