"""Slots of a decode batch: a row of slot -1 has no state."""

import pytest
import torch

from deltazoo.backends.compile import CompileBackend
from deltazoo.backends.conformance.cases import Case, draw
from deltazoo.backends.measure.shapes import Shape
from deltazoo.backends.update.dispatch import bind
from deltazoo.backends.update.reference import ReferenceBackend
from deltazoo.backends.update.spec import UpdateSpec


@pytest.mark.parametrize("backend", [ReferenceBackend(), CompileBackend(compiled=False)], ids=lambda x: x.name)
@pytest.mark.parametrize("slots", [[-1, 0, 3, -1], [2, -1, -1, 0], [-1] * 4, [3, 1, 2, 0], []], ids=str)
def test_row_of_slot_minus_1_has_zero_output_and_changes_no_state(backend, slots):
    case = Case(UpdateSpec(decay="head", beta="head"), Shape("step", B=len(slots), T=1, H=1, HV=2, K=4, V=3))
    inputs, bound = draw(case)._replace(state=None), bind(case.spec, backend)
    rows = [row for row, slot in enumerate(slots) if slot >= 0]
    inputs.v[[row for row, slot in enumerate(slots) if slot < 0]] = torch.nan
    states = torch.randn(4, 2, 4, 3, generator=torch.Generator().manual_seed(0))
    expected_states, expected_o = states.clone(), torch.zeros(len(slots), 1, 2, 3)
    for row in rows:
        token = inputs._replace(**{n: x[row : row + 1] for n, x in inputs._asdict().items() if x is not None})
        expected_o[row] = bound.step_(token, expected_states[slots[row] : slots[row] + 1])[0]
    o = bound.step_(inputs, states, torch.tensor(slots, dtype=torch.int64))
    torch.testing.assert_close(o, expected_o)
    torch.testing.assert_close(states, expected_states)
