"""Drafted tokens: `verify_` and `commit_` equal as many calls of `step_`, and refuse wrong arguments."""

import re

import pytest
import torch

from deltazoo import Draft, UpdateInputs, UpdateSpec, bind, watch
from deltazoo.backends.compile import CompileBackend
from deltazoo.backends.conformance.cases import Case, draw
from deltazoo.backends.conformance.drafts import compare_draft
from deltazoo.backends.io.errors import DeviceError, DtypeError, OperandError, ShapeError
from deltazoo.backends.measure.shapes import Shape
from deltazoo.backends.update.base import slice_tokens
from deltazoo.backends.update.reference import ReferenceBackend

GATED = UpdateSpec(decay="head", beta="head")
SPECS = {
    "gated": GATED,
    "rate": UpdateSpec(decay="rate", transition="additive"),
    "dplr": UpdateSpec(decay="channel", transition="dplr"),
    "householders, before": UpdateSpec(decay="fixed", beta="head", householders=2, read="before"),
    "erase before the decay": UpdateSpec(decay="channel", beta="channel", erase_key="own", erase_from="previous"),
}
BACKENDS = pytest.mark.parametrize(
    "backend", [ReferenceBackend(), CompileBackend(compiled=False)], ids=lambda x: x.name
)


def draft_inputs(spec=GATED, B=4, n=3, dtype=torch.float32):
    return draw(Case(spec, Shape("draft", B, n, 1, 2, 8, 5), dtype))._replace(state=None)


def normal_states(B=4, seed=0):
    return torch.randn(B, 2, 8, 5, generator=torch.Generator().manual_seed(seed))


def stepped(bound, inputs, states, accepted):
    """o of all tokens, and each row's state after its accepted tokens, by `step_`."""
    states, want, outputs = states.clone(), states.clone(), []
    for t in range(inputs.q.shape[1]):
        outputs.append(bound.step_(slice_tokens(inputs, t, t + 1), states))
        for row, count in enumerate(accepted):
            if count == t + 1:
                want[row] = states[row]
    return torch.cat(outputs, 1), want


@BACKENDS
@pytest.mark.parametrize("accepted", [[0, 0, 0, 0], [3, 3, 3, 3], [0, 1, 2, 3], [2, 0, 3, 1]], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_commit_advances_each_state_by_its_accepted_tokens(backend, name, accepted):
    inputs, bound = draft_inputs(SPECS[name]), bind(SPECS[name], backend)
    states = normal_states()
    want_o, want = stepped(bound, inputs, states, accepted)
    before = states.clone()
    o, draft = bound.verify_(inputs, states)
    assert torch.equal(states, before)
    torch.testing.assert_close(o, want_o)
    bound.commit_(draft, states, None, torch.tensor(accepted, dtype=torch.int32))
    torch.testing.assert_close(states, want)
    assert torch.equal(states[[m == 0 for m in accepted]], before[[m == 0 for m in accepted]])


@BACKENDS
def test_repeated_tokens_are_written_as_often_as_they_are_accepted(backend):
    one = draft_inputs(n=1)
    inputs = UpdateInputs(*(None if x is None else x.expand(-1, 4, *x.shape[2:]) for x in one))
    bound, states = bind(GATED, backend), normal_states()
    _, want = stepped(bound, inputs, states, [4, 3, 2, 1])
    _, draft = bound.verify_(inputs, states)
    bound.commit_(draft, states, None, torch.tensor([4, 3, 2, 1], dtype=torch.int32))
    torch.testing.assert_close(states, want)


@BACKENDS
def test_two_rounds_of_drafts_equal_decoding_of_the_accepted_tokens(backend):
    bound, states = bind(GATED, backend), normal_states()
    want = states.clone()
    for seed, accepted in ((0, [1, 3, 0, 2]), (1, [3, 0, 2, 1])):
        inputs = draw(Case(GATED, Shape("draft", 4, 3, 1, 2, 8, 5), seed=2 * seed))._replace(state=None)
        _, want = stepped(bound, inputs, want, accepted)
        _, draft = bound.verify_(inputs, states)
        bound.commit_(draft, states, None, torch.tensor(accepted, dtype=torch.int32))
    torch.testing.assert_close(states, want)


@BACKENDS
def test_accepted_outside_of_the_draft_counts_as_the_nearest(backend):
    inputs, bound = draft_inputs(), bind(GATED, backend)
    states, want = normal_states(), normal_states()
    _, draft = bound.verify_(inputs, states)
    bound.commit_(draft, states, None, torch.tensor([-(2**31), -1, 4, 2**31 - 1], dtype=torch.int32))
    bound.commit_(draft, want, None, torch.tensor([0, 0, 3, 3], dtype=torch.int32))
    assert torch.equal(states, want)


@BACKENDS
@pytest.mark.parametrize("slots", [[-1, 0, 4, -1], [2, -1, -1, 0], [-1] * 4, [3, 1, 2, 0]], ids=str)
def test_drafts_in_slots_equal_drafts_of_single_rows(backend, slots):
    inputs, bound, accepted = draft_inputs(), bind(GATED, backend), torch.tensor([2, 3, 0, 1], dtype=torch.int32)
    rows = [row for row, slot in enumerate(slots) if slot >= 0]
    inputs.v[[row for row, slot in enumerate(slots) if slot < 0]] = torch.nan
    states = normal_states(5)
    want, want_o = states.clone(), torch.zeros(4, 3, 2, 5)
    for row in rows:
        single = UpdateInputs(*(None if x is None else x[row : row + 1] for x in inputs))
        o, draft = bound.verify_(single, want[slots[row] : slots[row] + 1])
        want_o[row] = o[0]
        bound.commit_(draft, want[slots[row] : slots[row] + 1], None, accepted[row : row + 1])
    o, draft = bound.verify_(inputs, states, torch.tensor(slots))
    bound.commit_(draft, states, torch.tensor(slots), accepted)
    torch.testing.assert_close(o, want_o)
    torch.testing.assert_close(states, want)


@BACKENDS
def test_an_empty_batch_is_accepted(backend):
    inputs, bound, states = draft_inputs(B=0), bind(GATED, backend), normal_states(3)
    o, draft = bound.verify_(inputs, states, torch.zeros(0, dtype=torch.int64))
    bound.commit_(draft, states, torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int32))
    assert o.shape == (0, 3, 2, 5)
    assert torch.equal(states, normal_states(3))


@pytest.mark.graphs
@BACKENDS
@pytest.mark.parametrize("name", ["gated", "dplr"])
def test_verify_and_commit_compile_to_one_graph(backend, name):
    bound, inputs = bind(SPECS[name], backend), draft_inputs(SPECS[name])
    slots = torch.tensor([3, 0, -1, 1])

    def decode(inputs: UpdateInputs, states: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
        o, draft = bound.verify_(inputs, states, slots)
        bound.commit_(draft, states, slots, accepted)
        return o

    torch._dynamo.reset()
    compiled = torch.compile(decode, fullgraph=True, backend="aot_eager")
    for accepted in ([0, 1, 2, 3], [3, 0, 3, 2]):
        counts = torch.tensor(accepted, dtype=torch.int32)
        states, want = normal_states(), normal_states()
        o, want_o = compiled(inputs, states, counts), decode(inputs, want, counts)
        torch.testing.assert_close(o, want_o)
        torch.testing.assert_close(states, want)


def test_watch_records_verify_and_commit():
    bound, states = bind(GATED, "reference"), normal_states()
    with watch() as log:
        _, draft = bound.verify_(draft_inputs(), states)
        bound.commit_(draft, states, None, torch.ones(4, dtype=torch.int32))
    assert [run.name for run in log.runs] == ["verify", "commit"]


def test_verify_has_no_gradient():
    inputs, bound = draft_inputs(), bind(GATED, "compile")
    inputs.v.requires_grad_()
    o, draft = bound.verify_(inputs, normal_states())
    assert not o.requires_grad and not draft.values.requires_grad


VERIFY = [
    ({"n": 0}, {}, ShapeError, "verify_ decodes at least one drafted token per row: q must have T >= 1, got T = 0"),
    ({}, {"state": normal_states()}, OperandError, "verify_ reads `states`; inputs.state must be None"),
    ({}, {"states": normal_states(5)}, ShapeError, "states must have shape [4, 2, 8, 5], got [5, 2, 8, 5]"),
    ({}, {"states": normal_states().double()}, DtypeError, "states must be torch.float32, got torch.float64"),
    ({}, {"slots": torch.zeros(3, dtype=torch.int64)}, ShapeError, "slots must have shape [4], got [3]"),
]


@pytest.mark.parametrize(("sizes", "change", "error", "message"), VERIFY, ids=[case[-1] for case in VERIFY])
def test_wrong_argument_of_verify_is_refused(sizes, change, error, message):
    inputs = draft_inputs(**sizes)._replace(state=change.get("state"))
    with pytest.raises(error, match=re.escape(message)):
        bind(GATED, "reference").verify_(inputs, change.get("states", normal_states()), change.get("slots"))


INT32, META = torch.int32, torch.device("meta")
COMMIT = [
    ({"accepted": [1, 1, 1, 1]}, OperandError, "accepted must be a tensor, got list"),
    ({"accepted": torch.zeros(3, dtype=INT32)}, ShapeError, "accepted must have shape [4], got [3]"),
    ({"accepted": torch.zeros(4)}, DtypeError, "accepted must be torch.int32, got torch.float32"),
    ({"accepted": torch.zeros(4, dtype=INT32, device=META)}, DeviceError, "accepted must be on cpu"),
    ({"states": normal_states(5)}, ShapeError, "states must have shape [4, 2, 8, 5], got [5, 2, 8, 5]"),
    ({"draft": torch.zeros(4)}, OperandError, "draft must be the Draft that verify_ returned, got Tensor"),
    (
        {"draft": Draft(draft_inputs(), torch.zeros(4, 2, 1, 2, 5))},
        ShapeError,
        "draft.values must have shape [4, 3, 1, 2, 5], got [4, 2, 1, 2, 5]",
    ),
    ({"draft": Draft(draft_inputs())}, OperandError, "draft.values is missing: backend 'compile' must have made the"),
]


@pytest.mark.parametrize(("change", "error", "message"), COMMIT, ids=[case[-1] for case in COMMIT])
def test_wrong_argument_of_commit_is_refused(change, error, message):
    bound = bind(GATED, "compile")
    _, draft = bound.verify_(draft_inputs(), normal_states())
    arguments = {"draft": draft, "states": normal_states(), "slots": None, "accepted": torch.zeros(4, dtype=INT32)}
    with pytest.raises(error, match=re.escape(message)):
        bound.commit_(**arguments | change)


class ReadsRejectedTokens(ReferenceBackend):
    """Accepts every drafted token: rejected tokens, whose values may be NaN, reach the states."""

    name = "reads_rejected_tokens"

    def commit_(self, spec, draft, states, slots, accepted):
        super().commit_(spec, draft, states, slots, torch.full_like(accepted, 99))


def test_nan_of_rejected_tokens_is_named_as_the_check_s_own():
    shape = Shape("draft", 1, 4, 1, 1, 8, 8)
    failures = compare_draft(ReadsRejectedTokens(), Case(GATED, shape, torch.float32, seed=1)).failures
    assert "state has elements that are NaN or infinite" in failures
    assert failures[-1] == (
        "this check puts NaN on purpose into the values of rejected tokens; "
        "neither accepted tokens nor states may depend on them"
    )
    assert not any("on purpose" in failure for failure in compare_draft("reference", Case(GATED, shape, torch.float32)))
