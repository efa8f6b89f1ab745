"""The solution of least squares in plain torch against direct solutions in float64; its kernels compiled for sm_90."""

import pytest
import torch
from least_squares_cases import CASES, Case, draw, exact_solution, relative_error

from deltazoo.backends.ops.least_squares import conjugate_gradients, solve, solve_step_


@pytest.mark.parametrize("name", CASES)
def test_solution_equals_the_direct_one(name):
    systems, b = draw(CASES[name], torch.float64)
    x = solve(systems, b, 40)
    assert relative_error(x, exact_solution(systems, b)[0]) < 1e-11
    assert relative_error(solve(*draw(CASES[name], torch.float32), 40), exact_solution(systems, b)[0]) < 3e-5


def test_a_step_adds_its_token_and_solves():
    systems, b = draw(Case(3, 1, 2, 16), torch.float64)
    x, final = exact_solution(systems, b)
    assert relative_error(solve_step_(systems, b, 40), x) < 1e-12
    assert relative_error(systems.state, final) < 1e-14


def test_conjugate_gradients_take_at_most_the_given_number_of_steps():
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    matrix, b = factor @ factor.mT, torch.randn(2, 6, generator=generator, dtype=torch.float64)
    multiplied = []

    def multiply(p):
        multiplied.append(p)
        return p @ matrix

    errors = []
    for steps in (1, 2, 6):
        multiplied.clear()
        errors.append(relative_error(conjugate_gradients(multiply, b, steps), torch.linalg.solve(matrix, b.mT).mT))
        assert len(multiplied) == steps
    assert errors[0] > errors[1] > errors[2] and errors[2] < 1e-7
    assert conjugate_gradients(multiply, torch.zeros_like(b), 6).eq(0).all()


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_kernels_show_no_fault_of_ptxas(dtype, monkeypatch):
    pytest.importorskip("triton", reason="compiles kernels")
    from assembly import disassemble, missing_waits, overwritten_operands, wrong_descriptor_addresses
    from compiling import Compiler

    from deltazoo.backends.triton.least_squares import op
    from deltazoo.backends.triton.runtime import launcher

    compiler = Compiler(all=True)
    monkeypatch.setattr(launcher, "launcher", compiler)
    k, gate, shift = torch.empty(1, 200, 2, 128, dtype=dtype), torch.empty(1, 200, 2), torch.empty(2, 128)
    op.solve(k, k, gate, gate, shift, None, None, 30)
    op.step_(k[:, :1], k[:, :1], gate[:, :1], gate[:, :1], shift, torch.empty(1, 2, 128, 128), 30)
    assert [name for name, _ in compiler.compiled] == ["covariance_kernel", "solve_kernel", "solve_step_kernel"]
    for _, kernel in compiler.compiled:
        text = disassemble(kernel.asm["cubin"])
        assert not [*wrong_descriptor_addresses(text), *missing_waits(text), *overwritten_operands(text)]
