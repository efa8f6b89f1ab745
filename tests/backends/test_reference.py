"""The reference against an independent implementation in numpy, with one explicit matrix per step and head.

The reparametrisations are integrated numerically: EFLA by a matrix exponential, Longhorn by a linear solve.
"""

import numpy as np
import pytest
import torch
from scipy.linalg import expm

from deltazoo.backends.conformance.cases import Case, draw
from deltazoo.backends.conformance.pairwise import every_spec, pairwise_cases
from deltazoo.backends.measure.shapes import Shape
from deltazoo.backends.update.base import UpdateInputs
from deltazoo.backends.update.dispatch import bind
from deltazoo.backends.update.reference import ReferenceBackend
from deltazoo.backends.update.spec import UpdateSpec

SMALL = Shape("small", B=2, T=4, H=1, HV=2, K=3, V=2)
PACK = Shape("small_pack", B=1, T=5, H=2, HV=2, K=3, V=2, lengths=(3, 0, 2))
TINY = Shape("tiny", B=1, T=2, H=1, HV=2, K=2, V=1)
CASES = pairwise_cases((SMALL, PACK), (torch.float64,))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_equals_the_recurrence(case):
    inputs = draw(case)
    out = ReferenceBackend().forward(case.spec, inputs)
    o, state = recurrence(case, inputs)
    np.testing.assert_allclose(out.o.numpy(), o, rtol=1e-11, atol=1e-11 * np.abs(o).max(initial=0))
    np.testing.assert_allclose(out.state.numpy(), state, rtol=1e-11, atol=1e-11 * np.abs(state).max(initial=0))


@pytest.mark.slow(reason="every spec instead of a pairwise cover")
@pytest.mark.parametrize("seed", [0, 1])
def test_reference_equals_the_recurrence_for_every_spec(seed):
    for spec in every_spec():
        test_reference_equals_the_recurrence(Case(spec, SMALL, torch.float64, seed=seed))


@pytest.mark.parametrize(
    "case", pairwise_cases((TINY, TINY._replace(name="tiny_pack", lengths=(1, 0, 1))), (torch.float64,)), ids=str
)
def test_gradients_equal_finite_differences(case):
    inputs = draw(case._replace(regime="ordinary"))
    names = [name for name, x in inputs._asdict().items() if x is not None and name != "cu_seqlens"]

    def update(*operands):
        replaced = dict(zip(names, operands, strict=True))
        return tuple(ReferenceBackend().forward(case.spec, inputs._replace(**replaced)))

    assert torch.autograd.gradcheck(update, [getattr(inputs, name).requires_grad_() for name in names])


def test_efla_has_finite_gradients_for_huge_beta():
    x = draw(Case(UpdateSpec(beta="head", reparam="efla"), SMALL))
    beta = torch.full_like(x.beta, 1e13).requires_grad_()
    ReferenceBackend().forward(UpdateSpec(beta="head", reparam="efla"), x._replace(beta=beta)).o.sum().backward()
    assert beta.grad.isfinite().all()


@pytest.mark.parametrize("reparam", ["efla", "longhorn"])
@pytest.mark.parametrize("beta", ["none", "head", "channel"])
def test_gradients_are_correct_for_a_zero_key(reparam, beta):
    spec = UpdateSpec(beta=beta, reparam=reparam, decay="head")
    inputs = draw(Case(spec, SMALL._replace(T=2), torch.float64))
    inputs.k[:, 0] = 0
    names = [name for name, x in inputs._asdict().items() if x is not None]

    def update(*operands):
        return tuple(ReferenceBackend().forward(spec, UpdateInputs(**dict(zip(names, operands, strict=True)))))

    assert torch.autograd.gradcheck(update, [getattr(inputs, name).requires_grad_() for name in names])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_computed_in_float32(dtype):
    case = Case(UpdateSpec(decay="channel", beta="head"), SMALL._replace(T=40), dtype)
    inputs = draw(case)
    wide = UpdateInputs(*(x if x is None else x.float() for x in inputs))
    narrow, full = (ReferenceBackend().forward(case.spec, x) for x in (inputs, wide))
    assert torch.equal(narrow.state, full.state)
    assert torch.equal(narrow.o, full.o.to(dtype))


def recurrence(case: Case, inputs: UpdateInputs) -> tuple[np.ndarray, np.ndarray]:
    """o [B, T, HV, V] and the final states, from a loop over sequences, heads, tokens and micro-steps."""
    x = {name: tensor.numpy() for name, tensor in inputs._asdict().items() if tensor is not None}
    _, B, T, H, HV, K, V, lengths = case.shape
    o, states = np.zeros((B, T, HV, V)), np.zeros((case.shape.sequences, HV, K, V))
    ends = np.cumsum((0, *lengths)) if lengths else None
    for n in range(case.shape.sequences):
        row, first, last = (0, ends[n], ends[n + 1]) if lengths else (n, 0, T)
        for j in range(HV):
            S = x["state"][n, j] if "state" in x else np.zeros((K, V))
            for t in range(first, last):
                previous = S
                for m in range(case.spec.householders):
                    A, W = _step(case.spec, _token(case.spec, x, row, t, m, j, j // (HV // H)), first=m == 0)
                    S = A @ S + W
                scale = K**-0.5 if case.spec.scale is None else case.spec.scale
                o[row, t, j] = (
                    scale * (previous if case.spec.read == "before" else S).T @ x["q"][row, t, j // (HV // H)]
                )
            states[n, j] = S
    return o, states


def _token(spec: UpdateSpec, x: dict[str, np.ndarray], row: int, t: int, m: int, j: int, h: int) -> dict:
    """The operands of one micro-step of value head j with key head h; absent strengths and decays are 1."""
    at = (row, t, m) if spec.householders > 1 else (row, t)
    K, V = x["q"].shape[-1], x["v"].shape[-1]
    token = {"k": x["k"][at][h], "v": x["v"][at][j], "b": np.ones(K), "w": np.ones(V), "d": np.ones(K)}
    if spec.beta == "head":
        token |= {"b": x["beta"][at][j] * np.ones(K), "w": x["beta"][at][j] * np.ones(V)}
    if spec.beta == "separate":
        token |= {"b": x["erase"][at][j] * np.ones(K), "w": x["write"][at][j] * np.ones(V)}
    if spec.beta == "channel":
        token |= {"b": x["erase"][at][j] if "erase" in x else np.ones(K), "w": x["write"][at][j]}
    token["e"] = x["erase_key"][at][h] if spec.erase_key == "own" else token["k"]
    if spec.transition == "dplr":
        token |= {"reads": x["a"][row, t, j], "writes": x["b"][row, t, j]}
    if spec.decay == "fixed":
        token["d"] = np.exp(x["log_decay"][j]) * np.ones(K)
    elif spec.decay == "rate":
        token["d"] = np.exp(x["step"][row, t, j] * x["rate"][j])
    elif spec.decay != "none":
        token["d"] = np.exp(x["log_decay"][row, t, j]) * np.ones(K)
    return token


def _step(spec: UpdateSpec, x: dict, first: bool) -> tuple[np.ndarray, np.ndarray]:
    """A and W of the step S <- A S + W."""
    D = np.diag(x["d"]) if first else np.eye(len(x["k"]))
    I = np.eye(len(x["k"]))
    if spec.transition == "additive":
        return D, np.outer(x["k"], x["w"] * x["v"])
    if spec.transition == "dplr":
        return D + np.outer(x["writes"], x["reads"]), np.outer(x["k"], x["w"] * x["v"])
    rate, source = np.outer(x["k"], x["b"] * x["e"]), np.outer(x["k"], x["w"] * x["v"])
    if spec.reparam == "efla":  # dS/dt = -rate S + source over a time of 1
        joint = expm(np.block([[-rate, source], [np.zeros((source.shape[1], rate.shape[1] + source.shape[1]))]]))
        erased, written = joint[: len(I), : len(I)] - I, joint[: len(I), len(I) :]
    elif spec.reparam == "longhorn":  # S' = S - rate S' + source
        inverse = np.linalg.inv(I + rate)
        erased, written = inverse - I, inverse @ source
    else:
        erased = -rate if spec.negative_eigenvalues == "off" else -2 * rate
        written = 2 * source if spec.negative_eigenvalues == "both" else source
    return (D + erased if spec.erase_from == "previous" else D + erased @ D), written


def test_packed_sequences_are_refused_under_compilation() -> None:
    q, v = torch.randn(1, 4, 1, 2), torch.randn(1, 4, 1, 3)
    inputs = UpdateInputs(q=q, k=q, v=v, cu_seqlens=torch.tensor([0, 1, 4], dtype=torch.int32))
    update = bind(UpdateSpec(), backend="reference")
    with pytest.raises(Exception, match=r"cu_seqlens must be None under torch\.compile: this backend reads its values"):
        torch.compile(update, fullgraph=True, backend="eager")(inputs)
