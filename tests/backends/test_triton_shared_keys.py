"""Additive updates whose value heads share keys against the reference in float64: in the interpreter, or on a GPU."""

import pytest
import torch
from assembly import disassemble, missing_waits, overwritten_operands, wrong_descriptor_addresses
from compiling import Compiler
from triton_cases import DEVICE, INTERPRETED, needs_triton

from deltazoo import UpdateInputs, UpdateSpec, update, watch
from deltazoo.backends.triton.shared_keys import launch
from deltazoo.backends.triton.shared_keys.operands import SharedKeyBackwardCall, SharedKeyOperands

SPEC = UpdateSpec(decay="head", transition="additive", scale=0.5)
HALF = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter has no products in bfloat16
KERNELS = {
    "shared_key_sums_kernel": 1, "shared_key_scan_kernel": 2, "shared_key_output_kernel": 1,
    "shared_key_gradients_kernel": 1,
}  # fmt: skip


def draw(T: int, H: int, M: int, K: int, decays: str) -> UpdateInputs:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, T, H * n, w, device=DEVICE).to(HALF).double() for n, w in ((1, K), (1, K), (M, 1)))
    log_decay = -torch.rand(1, T, H * M, dtype=torch.float64, device=DEVICE)
    if decays == "strong":
        log_decay = torch.where(log_decay < -0.8, -60.0, log_decay)
    elif decays == "forgets":
        log_decay[:, ::7] = -1000.0
    return UpdateInputs(q, k, v, log_decay=log_decay)


@needs_triton
@pytest.mark.parametrize(
    ("bounds", "H", "M", "K", "decays"),
    [
        pytest.param([0, 20], 1, 16, 16, "weak", marks=pytest.mark.kernel_smoke),
        ([0, 70, 70, 140], 2, 20, 80, "strong"),
        ([0, 1, 150], 1, 60, 64, "forgets"),
    ],
)
def test_outputs_and_gradients(bounds, H, M, K, decays):
    inputs, N = draw(bounds[-1], H, M, K, decays), len(bounds) - 1
    state = torch.randn(N, H * M, K, 1, dtype=torch.float64, device=DEVICE)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    weights = [torch.randn(1, bounds[-1], H * M, 1, device=DEVICE).to(HALF), torch.randn(state.shape, device=DEVICE)]

    def run(q, k, v, log_decay, state, backend):
        leaves = [x.detach().requires_grad_() for x in (q, k, v, log_decay, state)]
        x = UpdateInputs(*leaves[:3], log_decay=leaves[3], state=leaves[4], cu_seqlens=cu_seqlens)
        out = update(SPEC, x, backend=backend)
        loss = (out.o.double() * weights[0].double()).sum() + (out.state.double() * weights[1]).sum()
        return [out.o.detach(), out.state.detach(), *torch.autograd.grad(loss, leaves)]

    exact = (inputs.q, inputs.k, inputs.v, inputs.log_decay)
    expected = run(*exact, state, "reference")
    with watch() as log:
        actual = run(*(x.to(HALF) for x in exact[:3]), exact[3].float(), state.float(), "triton")
    assert log.kernels == KERNELS
    names = ("o", "state", "dq", "dk", "dv", "d_log_decay", "d_state")
    for name, value, reference in zip(names, actual, expected, strict=True):
        limit = {"o": 5e-3, "state": 5e-3, "d_log_decay": 2e-2}.get(name, 1e-2)
        assert float((value.double() - reference).norm() / reference.norm()) < limit, name


@pytest.mark.kernels
@pytest.mark.skipif(INTERPRETED, reason="needs Triton's compiler, not its interpreter")
def test_compiled_kernels_without_an_initial_state_have_no_known_fault(monkeypatch):
    B, T, H, M, K = 2, 128, 2, 64, 128
    q, v = (torch.empty(B, T, H * n, width, dtype=torch.bfloat16) for n, width in ((1, K), (M, 1)))
    x = SharedKeyOperands(q, q, v, torch.empty(B, T, H * M), None, None)
    sums, states = torch.empty(4, 64, H * M), torch.empty(4, H, K, M, dtype=torch.bfloat16)
    final = torch.empty(B, H * M, K, 1)
    compiler = Compiler(all=True)
    monkeypatch.setattr(launch, "launcher", compiler)
    launch.forward(x, 1.0, o=v, final=final, sums=sums, states=states)
    launch.backward(SharedKeyBackwardCall(x, sums, states, v, final, 1.0), [q, q, v, x.log_decay, final])
    assert len(compiler.compiled) == 5
    for _, compiled in compiler.compiled:
        text = disassemble(compiled.asm["cubin"])
        assert not wrong_descriptor_addresses(text) + missing_waits(text) + overwritten_operands(text)
