"""The kernels of the delta rule with momentum against plain torch in float64: in the interpreter, or on a GPU.

G chunk slots, C tokens of a chunk, N sequences, H heads, K key width, V value width
"""

import pytest
import torch
from assembly import disassemble, missing_waits, overwritten_operands, wrong_descriptor_addresses
from compiling import Compiler
from triton_cases import DEVICE, INTERPRETED, needs_triton

from deltazoo import watch
from deltazoo.backends.ops import momentum as module
from deltazoo.backends.ops.momentum import momentum_step_
from deltazoo.backends.ops.momentum_chunks import MomentumOperands, MomentumSaved, MomentumToken
from deltazoo.backends.triton.momentum import launch
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.parts.memory.momentum import MomentumInputs, momentum_delta_rule

H = 2
EXACT = torch.float32 if INTERPRETED else torch.bfloat16  # the interpreter has no products in bfloat16
KERNELS = {
    f"momentum_{name}_kernel": 1 for name in ("prepare", "scan", "states", "reverse", "pairs", "gradients", "gates")
}


@pytest.fixture(autouse=True)
def kernels_in_the_interpreter(monkeypatch):
    if INTERPRETED:
        monkeypatch.setattr(module, "_supported", lambda x: x.q.dtype != torch.float64)
        monkeypatch.setattr(module, "runs_momentum", lambda *_: True)


def draw(T: int, K: int, V: int, strong: bool = False) -> MomentumInputs:
    """Draw the gates as the layer does, in float64. strong: some decays forget everything."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, T, H, width, dtype=torch.float64, device=DEVICE) for width in (K, K, V))
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    gates = torch.rand(4, 1, T, H, dtype=torch.float64, device=DEVICE)
    eta = 2 * gates[0]
    square = (2 * eta).square()
    log_alpha, log_mu, beta = -torch.log1p(square) - gates[1], -2 * gates[2], gates[3] * square / (1 + square)
    if strong:
        log_alpha, log_mu = (torch.where(gates[0] > 0.8, -60.0, x) for x in (log_alpha, log_mu))
    return MomentumInputs(q * K**-0.5, k, log_alpha, log_mu, beta, eta, v)


@needs_triton
@pytest.mark.parametrize(
    ("bounds", "K", "V", "dtype", "strong"),
    [
        pytest.param([0, 20], 16, 16, torch.float16, False, marks=pytest.mark.kernel_smoke),
        ([0, 70, 70, 200], 80, 40, EXACT, True),
        ([0, 0, 129, 131], 20, 100, EXACT, False),
    ],
)
def test_the_scan_and_its_gradients(bounds, K, V, dtype, strong):
    inputs = draw(bounds[-1] + 1, K, V, strong)
    N = len(bounds) - 1
    state = [torch.randn(N, H, K, V, dtype=torch.float64, device=DEVICE) for _ in range(2)]
    context = Context(cu_seqlens=torch.tensor(bounds, dtype=torch.int32, device=DEVICE))
    weights = None

    def run(inputs, state):
        nonlocal weights
        leaves = [x.detach().requires_grad_() for x in (*inputs, *state)]
        o, new = momentum_delta_rule(MomentumInputs(*leaves[:7]), leaves[7:], context)
        results = [o, *new]
        weights = [torch.randn_like(x) for x in results] if weights is None else weights
        gradients = torch.autograd.grad(results, leaves, [w.to(y.dtype) for w, y in zip(weights, results, strict=True)])
        return [x.detach() for x in results], gradients

    inputs = inputs._replace(**{name: getattr(inputs, name).to(dtype).double() for name in "qkv"})
    expected, expected_gradients = run(inputs, state)
    narrow = MomentumInputs(*(x.to(dtype) if n in "qkv" else x.float() for n, x in inputs._asdict().items()))
    with watch() as log:
        actual, gradients = run(narrow, [s.float() for s in state])
    assert log.kernels == KERNELS
    limits = [1e-4] * 12 if dtype == torch.float32 else [5e-3] * 3 + [1e-2] * 2 + [2e-2] * 4 + [1e-2] * 3
    pairs = zip([*actual, *gradients], [*expected, *expected_gradients], limits, strict=True)
    for i, (value, reference, limit) in enumerate(pairs):
        error = float((value.double() - reference).norm() / reference.norm().clamp(min=1e-9))
        assert error < limit, i


@needs_triton
@pytest.mark.kernel_smoke
def test_a_decode_step_is_one_launch_and_equals_the_chunks():
    inputs = draw(1, 20, 40)
    state = [torch.randn(1, H, 20, 40, dtype=torch.float64, device=DEVICE) for _ in range(2)]
    expected = momentum_delta_rule(inputs, state, Context())
    q, k, log_alpha, log_mu, beta, eta, v = (x[:, 0].float() for x in inputs)
    S, N = (x.float() for x in state)
    with torch.no_grad(), watch() as log:
        o = momentum_step_(MomentumToken(q, k, v, log_alpha.exp(), log_mu.exp(), beta, eta, S, N))
    assert log.kernels == {"momentum_step_kernel": 1}
    for value, reference in zip([o[:, None], S, N], [expected[0], *expected[1]], strict=True):
        torch.testing.assert_close(value.double(), reference, rtol=1e-5, atol=1e-5)


@pytest.mark.kernels
@pytest.mark.skipif(INTERPRETED, reason="needs Triton's compiler, not its interpreter")
def test_compiled_kernels_without_an_initial_state_have_no_known_fault(monkeypatch):
    G, C, K, V, N = 4, 64, 64, 64, 2
    q, v = (torch.empty(G, C, H, width, dtype=torch.bfloat16) for width in (K, V))
    gate, state = torch.empty(G, C, H), torch.empty(N, H, 2, K, V)
    square, gates = torch.empty(G, H, C, C, dtype=torch.bfloat16), torch.empty(G, H, 6, C)
    x = MomentumOperands(q, q, v, gate, gate, gate, gate, None, torch.tensor([0, 2, 4], dtype=torch.int32))
    compiler = Compiler(all=True)
    monkeypatch.setattr(launch, "launcher", compiler)
    launch.forward(x, v, state, square, square, gates, v)
    out = [q, q, v, gate, gate, gate, gate, state]
    launch.backward(x, MomentumSaved(square, square, gates, v), v, state, out=out, scratch=2**20)
    assert {name for name, _ in compiler.compiled} == set(KERNELS)
    for _, compiled in compiler.compiled:
        text = disassemble(compiled.asm["cubin"])
        assert not wrong_descriptor_addresses(text) + missing_waits(text) + overwritten_operands(text)
