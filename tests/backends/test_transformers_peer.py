"""The adapter to transformers: outputs, states, gradients and decoding against the reference, and refusals."""

import pytest
import torch

from deltazoo import UpdateMeta, UpdateSpec
from deltazoo.backends.conformance.cases import Case, draw
from deltazoo.backends.measure.benchmark import BenchConfig, bench
from deltazoo.backends.measure.shapes import Shape
from deltazoo.backends.peers.transformers import TransformersBackend
from deltazoo.backends.update.reference import ReferenceBackend

pytest.importorskip("transformers", minversion="5.23", reason="the adapter is written for transformers 5.23")

SPECS = {
    "gated": UpdateSpec(decay="head", beta="head"),
    "scaled": UpdateSpec(decay="head", beta="head", scale=0.25),
    "scale 0": UpdateSpec(decay="head", beta="head", scale=0.0),
    "fixed": UpdateSpec(decay="fixed", beta="head"),
    "no beta": UpdateSpec(decay="head"),
    "negative": UpdateSpec(decay="head", beta="head", negative_eigenvalues="both"),
    "efla": UpdateSpec(decay="head", beta="head", reparam="efla"),
    "delta": UpdateSpec(beta="head"),
    "kda": UpdateSpec(decay="channel", beta="head"),
    "kda efla": UpdateSpec(decay="channel", beta="head", reparam="efla"),
}
LONG = Shape("long", 2, 70, 2, 2, 4, 6)  # one chunk of 64 and a shorter one
GROUPED = Shape("grouped", 2, 9, 2, 4, 4, 4)


def shapes_of(spec):
    return [LONG] if spec.decay == "channel" else [LONG, GROUPED]


@pytest.mark.parametrize("state", ["given", "none"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_adapter_computes_the_spec_and_its_gradients(spec, state):
    for shape in shapes_of(spec):
        inputs = draw(Case(spec, shape, state=state))
        leaves = [x.requires_grad_() for x in inputs if x is not None]
        results = []
        for backend in (TransformersBackend(), ReferenceBackend()):
            out = backend.forward(spec, inputs)
            loss = out.o.square().sum() + out.state.sum()
            results.append((*out, *torch.autograd.grad(loss, leaves, materialize_grads=True)))
        for x, expected in zip(*results, strict=True):
            torch.testing.assert_close(x, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("slots", [None, torch.tensor([2, 0])], ids=["rows", "slots"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_adapter_decodes_in_place(spec, slots):
    inputs = draw(Case(spec, LONG._replace(T=1)))
    states = inputs.state if slots is None else torch.cat([inputs.state, inputs.state])[:3].clone()
    expected_states, token = states.clone(), inputs._replace(state=None)
    expected = ReferenceBackend().step_(spec, token, expected_states, slots)
    o = TransformersBackend().step_(spec, token, states, slots)
    torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(states, expected_states, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("spec", "change", "reason"),
    [
        (SPECS["gated"], {"packed": True}, "it does not keep packed sequences apart."),
        (SPECS["gated"], {"dtype": torch.float64}, "it computes in float32, got float64."),
        (SPECS["kda"], {"HV": 4}, "a decay per channel needs HV = H, got HV=4, H=2."),
        (UpdateSpec(transition="additive"), {}, "transition must be 'delta', got 'additive'."),
        (UpdateSpec(decay="channel", beta="channel"), {}, "beta must be 'none' or 'head', got 'channel'."),
        (UpdateSpec(decay="head", householders=3), {}, "householders must be 1, got 3."),
    ],
)
def test_refusal_states_the_reason(spec, change, reason):
    meta = UpdateMeta("cpu", torch.float32, 2, 2, 4, 4)._replace(**change)
    assert TransformersBackend().unsupported(spec, meta) == [reason]


def test_benchmark_on_a_cpu_times_the_adapter():
    config = BenchConfig(rounds=3, seconds=0.1)
    rows = bench(SPECS["gated"], [LONG], ["reference", TransformersBackend()], config).timed
    ours = [row for row in rows if row.backend == "transformers"]
    assert [row.direction for row in ours] == ["forward", "backward", "decode"]
    assert all(0 < row.error < 1e-5 for row in ours)
