"""Check `verify_` and `commit_` with drafts of which each row accepts a different number of tokens.

B batch, n drafted tokens, HV value heads, K key width, V value width, S rows of the states
"""

import torch
from torch import Tensor

from deltazoo.backends.conformance.cases import Case, dense, draw
from deltazoo.backends.conformance.compare import Report, error_report, explain_nan, refusal
from deltazoo.backends.update.base import Backend, UpdateInputs, slice_tokens, state_dtype
from deltazoo.backends.update.dispatch import bind
from deltazoo.backends.update.reference import ReferenceBackend
from deltazoo.backends.update.registry import resolve


def compare_draft(backend: str | Backend, case: Case, device: torch.device | str = "cpu") -> Report:
    """Compare the outputs of drafted tokens and the states after the accepted ones with the reference in float64.

    Uses the case with up to 4 tokens and 6 rows, which accept none, all, half, more than all, fewer than none, and all.
    The values of rejected tokens are NaN in half of the rows. Cases with an even seed have slots; then the last row has
    none, and all other slots of the pool are NaN.
    """
    n = max(1, min(case.shape.T, 4))
    counts = (0, n, n // 2, n + 3, -2, n)
    case, backend = dense(case)._replace(shape=case.shape._replace(B=len(counts), T=n, lengths=())), resolve(backend)
    refused = refusal(backend, case, device, grad=False)
    if refused is not None:
        return refused
    has_slots = case.seed % 2 == 0
    inputs, initial, accepted = _operands(case, counts, device)
    pool, slots = initial.clone(), None
    if has_slots:
        pool = initial.new_full((2 * len(counts) + 1, *initial.shape[1:]), torch.nan)
        slots = torch.arange(2 * len(counts) - 1, -1, -2, device=device)  # odd slots in descending order
        pool[slots] = initial
        slots[-1] = -1
    rows = torch.arange(len(counts), device=device) if slots is None else slots
    before, bound = pool.clone(), bind(case.spec, backend)
    o, draft = bound.verify_(inputs, pool, slots)
    failures = [] if _equal(pool, before) else ["verify_ must not change the states"]
    bound.commit_(draft, pool, slots, accepted)
    others = torch.ones(len(pool), dtype=torch.bool, device=device).index_fill(0, rows[rows >= 0], False)
    if not _equal(pool[others], before[others]):
        failures.append("commit_ must write only to the slots of its rows")
    for row in (0, 4):
        if not _equal(pool[rows[row]], before[rows[row]]):
            failures.append(f"commit_ must not change a state whose row accepts {counts[row]} tokens")
    want_o, want_state = _expected(case, inputs, initial, counts)
    state = pool[rows]
    if has_slots:  # the last row has no state: its output is zero
        want_o[-1], want_state[-1], state[-1] = 0, 0, 0
    hidden = want_o.isnan()  # of rejected tokens that are NaN
    results = {"o": o.masked_fill(hidden, 0), "state": state}
    report = error_report(backend, case, results, {"o": want_o.masked_fill(hidden, 0), "state": want_state})
    place = "the values of rejected tokens" + (", and into the slots that belong to no row" if has_slots else "")
    report = explain_nan(report, f"{place}; neither accepted tokens nor states may depend on them")
    return report._replace(failures=failures + report.failures)


def _operands(case: Case, counts: tuple[int, ...], device: torch.device | str) -> tuple[UpdateInputs, Tensor, Tensor]:
    """Return the drafted tokens, the initial states [B, HV, K, V], and how many tokens each row accepts."""
    inputs, (_, B, _, _, HV, K, V, _) = draw(case, device), case.shape
    initial = inputs.state
    if initial is None:
        initial = inputs.q.new_zeros(B, HV, K, V, dtype=state_dtype(case.dtype))
    for row in (0, 2):
        inputs.v[row, counts[row] :] = torch.nan
    accepted = torch.tensor(counts, dtype=torch.int32, device=device)
    return inputs._replace(state=None), initial.contiguous(), accepted


def _expected(case: Case, inputs: UpdateInputs, initial: Tensor, counts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """o of all tokens, and each row's state after its accepted tokens, by the reference in float64."""
    operands = {name: x.double() for name, x in inputs._asdict().items() if x is not None}
    wide = inputs._replace(**operands, state=initial.double())
    reference, n = ReferenceBackend(), case.shape.T
    after = {m: reference.forward(case.spec, slice_tokens(wide, 0, m)) for m in range(n + 1)}
    states = torch.stack([after[min(max(m, 0), n)].state[row] for row, m in enumerate(counts)])
    return after[n].o, states


def _equal(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are equal bit by bit, up to the kind of NaN."""
    return bool(((x == y) | (x.isnan() & y.isnan())).all())
