"""The inter-chunk scan operator: values and gradients, torch.library.opcheck, and the triangular inverse."""

from typing import Any

import pytest
import torch
from torch import Tensor

from deltazoo.backends.compile.chunk_operands import ChunkOperands
from deltazoo.backends.compile.chunk_scan import chunk_scan
from deltazoo.backends.compile.inverse import unit_lower_inverse

N, Z, C, K, V = 3, 2, 4, 3, 2


def operands(groups: int, kind: str, packed: bool = False, requires_grad: bool = True) -> ChunkOperands:
    """Draw operands. kind: "additive", "delta", "own" (with an erase key), "dplr" (decays inside the keys, KV)."""
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> Tensor:
        return (0.5 * torch.randn(shape, dtype=torch.float64, generator=generator)).requires_grad_(requires_grad)

    G, M, is_dplr = groups, C, kind == "dplr"
    lower = torch.ones(M, M).tril(-1)
    sequence = torch.tensor([1, 2, 2]) if packed else None
    return ChunkOperands(
        q=draw(N, Z, C, K),
        k=draw(N, Z, M, K),
        v=draw(N, Z, G, M, V),
        attn=draw(N, Z, G, C, M),
        state=draw(3 if packed else 1, Z, G, K, V),
        a=None if kind == "additive" else (draw(N, Z, G, M, M).detach() * lower).requires_grad_(requires_grad),
        e=draw(N, Z, M, K) if kind in ("own", "dplr") else None,
        scale_q=None if is_dplr else draw(N, Z, G, C),
        scale_e=None if is_dplr or kind == "additive" else draw(N, Z, G, M),
        scale_k=None if is_dplr else draw(N, Z, G, M),
        gamma=draw(N, Z, G, K if is_dplr else 1),
        kv=draw(N, Z, G, K, V) if is_dplr else None,
        sequence=sequence,
    )


def equations(x: ChunkOperands) -> tuple[Tensor, Tensor]:
    """Compute the equations of `chunk_scan`'s docstring chunk by chunk; differentiable by autograd."""
    n_chunks, M = x.q.shape[0], x.v.shape[3]
    states = list(x.state.unbind(0))
    outputs = []

    def scaled(scale: Tensor | None, n: int, y: Tensor) -> Tensor:
        return y if scale is None else scale[n].unsqueeze(-1) * y

    for n in range(n_chunks):
        row = 0 if x.sequence is None else int(x.sequence[n])
        S = states[row]
        V_new = x.v[n]
        if x.a is not None:
            E = x.k[n] if x.e is None else x.e[n]
            eye = torch.eye(M, dtype=x.q.dtype)
            V_new = torch.linalg.solve(eye + x.a[n], x.v[n] - scaled(x.scale_e, n, E.unsqueeze(1) @ S))
        outputs.append(scaled(x.scale_q, n, x.q[n].unsqueeze(1) @ S) + x.attn[n] @ V_new)
        if x.gamma is not None:
            S = S * x.gamma[n].unsqueeze(-1)
        S = S + x.k[n].unsqueeze(1).transpose(-1, -2) @ scaled(x.scale_k, n, V_new)
        states[row] = S if x.kv is None else S + x.kv[n]
    return torch.stack(outputs), torch.stack(states)


CASES = [(1, "additive"), (3, "additive"), (1, "delta"), (3, "delta"), (2, "own"), (1, "own"), (1, "dplr")]


@pytest.mark.parametrize("segment", [2, 16])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("groups", "kind"), CASES)
def test_values_and_gradients_match_the_equations(
    groups: int, kind: str, packed: bool, segment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltazoo.backends.compile.chunk_scan.SEGMENT", segment)
    x, y = operands(groups, kind, packed), operands(groups, kind, packed)
    out, expected_out = chunk_scan(x), equations(y)
    cotangents = [torch.randn_like(tensor) for tensor in expected_out]
    for actual, expected in zip(out, expected_out, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)
    leaves = [(a, b) for a, b in zip(x, y, strict=True) if a is not None and a.requires_grad]
    grads = torch.autograd.grad(out, [a for a, _ in leaves], cotangents)
    expected_grads = torch.autograd.grad(expected_out, [b for _, b in leaves], cotangents)
    for actual, expected, (leaf, _) in zip(grads, expected_grads, leaves, strict=True):
        if leaf is x.a:  # only the strictly lower triangle is an operand
            actual, expected = actual.tril(-1), expected.tril(-1)
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_values_without_gradients_match_the_equations() -> None:
    x = operands(2, "own", packed=True)
    with torch.no_grad():
        for actual, expected in zip(chunk_scan(x), equations(x), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


def test_second_derivative_raises() -> None:
    x = operands(1, "delta")
    (grad,) = torch.autograd.grad(chunk_scan(x)[0].square().sum(), [x.q], create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        grad.sum().backward()


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize(("groups", "kind"), [(1, "additive"), (2, "own"), (1, "dplr")])
def test_operators_pass_opcheck(groups: int, kind: str, save: bool) -> None:
    x = operands(groups, kind, packed=groups == 2, requires_grad=False)
    torch.library.opcheck(torch.ops.deltazoo.chunk_scan.default, (*x, 2, False, save))
    if not save:
        return
    o, final_state, v_new, t, segment_states = torch.ops.deltazoo.chunk_scan.default(*x, 2, False, True)
    erases = x.a is not None
    backward: tuple[Any, ...] = (
        o, final_state, x.state, segment_states, x.q, x.k, v_new if erases else x.v, x.attn, t if erases else None,
        x.e, x.scale_q, x.scale_e, x.scale_k, x.gamma, x.kv, x.sequence, 2, False,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.deltazoo.chunk_scan_backward.default, backward)


@pytest.mark.parametrize("size", [1, 7, 16, 48, 64])
def test_inverse_is_accurate_for_near_parallel_keys(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    keys = torch.randn(5, 1, 8, generator=generator) + 0.02 * torch.randn(5, size, 8, generator=generator)
    keys = torch.nn.functional.normalize(keys, dim=-1).double()
    for beta in (0.99, 1.99):
        a = (beta * keys @ keys.transpose(1, 2)).tril(-1)
        exact = torch.linalg.inv(a + torch.eye(size, dtype=torch.float64))
        for dtype, bound in ((torch.float64, 1e-13), (torch.float32, 5e-6)):
            error = (unit_lower_inverse(a.to(dtype)).double() - exact).norm() / exact.norm()
            assert error < bound, (beta, dtype, float(error))
