"""Properties that every backend must have on every case: functions (backend, case, device) -> Report.

B batch, T time, H key heads, HV value heads, K key width, V value width, N packed sequences
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from deltazoo.backends.conformance.cases import Case, dense, draw
from deltazoo.backends.conformance.compare import (
    Report,
    case_reference,
    compare,
    draw_cotangents,
    error_report,
    evaluate,
    explain_nan,
    meta_of,
    refusal,
    run,
)
from deltazoo.backends.conformance.decode_step import compare_step
from deltazoo.backends.conformance.drafts import compare_draft
from deltazoo.backends.conformance.equivalences import (
    InPieces,
    RepeatedHeads,
    SequenceBySequence,
    TokenByToken,
    Traced,
)
from deltazoo.backends.conformance.isolation import heads_do_not_leak, later_tokens_do_not_leak, sequences_do_not_leak
from deltazoo.backends.conformance.pairwise import every_spec
from deltazoo.backends.update.base import Backend, UpdateInputs, has_time_axis
from deltazoo.backends.update.dispatch import bind
from deltazoo.backends.update.lowering import log_decay
from deltazoo.backends.update.registry import resolve

Device = torch.device | str
Property = Callable[[str | Backend, Case, Device], Report]


def matches_the_reference(backend: str | Backend, case: Case, device: Device = "cpu") -> Report:
    """Outputs, final state and all gradients match the reference in float64."""
    return compare(backend, case, device=device)


def pieces_equal_the_full_sequence(backend: str | Backend, case: Case, device: Device = "cpu") -> Report:
    """A sequence computed in pieces with the state passed on equals one call, gradients through the pieces too."""
    return compare(InPieces(resolve(backend)), dense(case), device=device)


def decoding_equals_the_full_sequence(backend: str | Backend, case: Case, device: Device = "cpu") -> Report:
    """`step_` token by token, in place, with and without slots, equals `forward`."""
    steps = TokenByToken(resolve(backend))
    report = explain_nan(compare(steps, dense(case), grad=False, device=device), "the slots that belong to no row")
    failures = ["step_ must write only to the slots of its rows"] if steps.wrote_to_other_slots else []
    return report._replace(failures=report.failures + failures)


def drafted_tokens_equal_decoding(backend: str | Backend, case: Case, device: Device = "cpu") -> Report:
    """`verify_` leaves the states unchanged, and `commit_` advances each by its row's accepted tokens."""
    return compare_draft(backend, case, device)


def fused_step_matches_reference(backend: str | Backend, case: Case, device: Device = "cpu") -> Report:
    """`fused_decode_step_` equals the equations of `FusedDecodeStep` and writes only to the slots of its rows."""
    return compare_step(backend, case, device)


def packing_equals_separate_runs(backend: str | Backend, case: Case, device: Device = "cpu") -> Report:
    """A pack equals one call per sequence, including an empty sequence, gradients too."""
    backend = resolve(backend)
    return _compare_with(backend, SequenceBySequence(backend), _packed(case), device)


def rows_after_the_last_sequence_are_zero(backend: str | Backend, case: Case, device: Device = "cpu") -> Report:
    """Rows of a pack after cu_seqlens[-1] get zeros in o and in every gradient, and change nothing else.

    Calls `Backend.forward` directly: on a CPU outside torch.compile such a pack is rejected before the backend runs.
    """
    case, backend = _packed(case), resolve(backend)
    refused = refusal(backend, case, device)
    if refused is not None:
        return refused
    inputs, T = draw(case, device), case.shape.T
    rows = torch.arange(T + 70, device=inputs.q.device) % max(T, 1)  # 70 more rows, which is more than one chunk
    names = [name for name in inputs._fields if has_time_axis(inputs, name)]
    padded = inputs._replace(**{name: getattr(inputs, name)[:, rows] for name in names})
    d_o, d_state = draw_cotangents(case, inputs)
    results = evaluate(partial(backend.forward, case.spec), padded, (d_o[:, rows], d_state))
    failures = []
    for name in ("o", *(f"d_{name}" for name in names)):
        if results[name][:, T:].any():
            failures.append(f"{name} must be 0 in rows after the last sequence")
        results[name] = results[name][:, :T]
    report = error_report(backend, case, results, case_reference(case, "both", device), "both")
    return report._replace(failures=report.failures + failures)


def grouped_heads_equal_repeated_heads(backend: str | Backend, case: Case, device: Device = "cpu") -> Report:
    """Key heads that several value heads share equal key heads repeated in memory, with their gradients summed."""
    shape = case.shape if case.shape.HV > case.shape.H else case.shape._replace(HV=2 * case.shape.H)
    backend = resolve(backend)
    return _compare_with(backend, RepeatedHeads(backend), case._replace(shape=shape), device)


def compiles_to_one_graph(backend: str | Backend, case: Case, device: Device = "cpu") -> Report:
    """torch.compile(fullgraph=True) traces the update into one graph, with the results of the reference."""
    backend = resolve(backend)
    try:
        return compare(Traced(backend), case, device=device)
    except torch._dynamo.exc.TorchDynamoException as error:
        return Report(backend.name, case, [], [f"torch.compile must trace one graph, got {error}"], [])


def gradients_of_each_output_alone(backend: str | Backend, case: Case, device: Device = "cpu") -> Report:
    """A loss on o alone, and one on the final state alone, have the gradients of the reference."""
    report = compare(backend, case, outputs="o", device=device)
    other = compare(backend, case, outputs="state", device=device)
    return report._replace(errors=report.errors + other.errors, failures=report.failures + other.failures)


def empty_sequence_returns_its_initial_state(backend: str | Backend, case: Case, device: Device = "cpu") -> Report:
    """With T = 0 the final state is a bitwise copy of the initial state, and so is its gradient."""
    lengths = (0,) * len(case.shape.lengths)
    case = case._replace(shape=case.shape._replace(T=0, lengths=lengths))
    report = compare(backend, case, device=device)
    if report.refused:
        return report
    inputs = draw(case, device)
    state = bind(case.spec, backend)(inputs).state
    initial_state = torch.zeros_like(state) if inputs.state is None else inputs.state
    failures = []
    if not torch.equal(state, initial_state):
        failures.append("with T = 0 the final state must equal the initial state bit for bit")
    if inputs.state is not None and state.numel() and state.data_ptr() == inputs.state.data_ptr():
        failures.append("with T = 0 the final state must be a copy, got the memory of the initial state")
    return report._replace(failures=report.failures + failures)


def without_erase_and_write_the_state_decays(backend: str | Backend, case: Case, device: Device = "cpu") -> Report:
    """With beta = 0 (erase and write; b for dplr) the state only decays, and o reads the decayed initial state."""
    case = dense(case._replace(state="given"))
    backend, inputs = resolve(backend), draw(case, device)
    names = ["beta", "erase", "write", "b"]
    if case.spec.beta == "none":
        names += ["v", "k"] if case.spec.transition == "delta" else ["v"]
    zeros = {name: torch.zeros_like(x) for name in names if (x := getattr(inputs, name)) is not None}
    inputs = inputs._replace(**zeros)
    refused = refusal(backend, case, device)
    if refused is not None:
        return refused
    return error_report(backend, case, run(backend, case.spec, inputs, None), _decayed_state(case, inputs))


def inputs_are_not_modified(backend: str | Backend, case: Case, device: Device = "cpu") -> Report:
    """Forward, backward, `step_`, `verify_` and `commit_` write to no operand."""
    backend, inputs = resolve(backend), draw(case, device)
    refused = refusal(backend, case, device)
    if refused is not None:
        return refused
    run(backend, case.spec, inputs, draw_cotangents(case, inputs))
    failures = _modified(inputs, draw(case, device))
    one_token = dense(case._replace(shape=case.shape._replace(T=1), state="given"))
    token = draw(one_token, device)
    assert token.state is not None
    bound, states = bind(case.spec, backend), token.state.clone()
    bound.step_(token._replace(state=None), states)
    _, draft = bound.verify_(token._replace(state=None), states)
    bound.commit_(draft, states, None, torch.ones(len(states), dtype=torch.int32, device=device))
    failures += _modified(token, draw(one_token, device))
    return Report(backend.name, case, [], failures, [])


def uninitialized_memory_is_never_read(backend: str | Backend, case: Case, device: Device = "cpu") -> Report:
    """The results are the same when `torch.empty` and similar functions return NaN."""
    with _nan_in_new_memory():
        return explain_nan(compare(backend, case, device=device), "uninitialized memory")


def unsupported_returns_sentences(backend: str | Backend, case: Case, device: Device = "cpu") -> Report:
    """`unsupported` returns [] or sentences, for every spec on the case's shape and dtype, dense and packed."""
    backend, shape = resolve(backend), case.shape
    failures = {
        f"a reason must be a sentence, got {reason!r}"
        for spec in every_spec()
        for layout in (dense(case).shape, shape.packed())
        for grad in (False, True)
        for reason in backend.unsupported(spec, meta_of(layout, case.dtype, device, grad))
        if len(reason.split()) < 4
    }
    return Report(backend.name, case, [], sorted(failures), [])


PROPERTIES: tuple[Property, ...] = (
    matches_the_reference,
    unsupported_returns_sentences,
    pieces_equal_the_full_sequence,
    decoding_equals_the_full_sequence,
    drafted_tokens_equal_decoding,
    fused_step_matches_reference,
    packing_equals_separate_runs,
    rows_after_the_last_sequence_are_zero,
    grouped_heads_equal_repeated_heads,
    compiles_to_one_graph,
    gradients_of_each_output_alone,
    empty_sequence_returns_its_initial_state,
    without_erase_and_write_the_state_decays,
    inputs_are_not_modified,
    uninitialized_memory_is_never_read,
    later_tokens_do_not_leak,
    sequences_do_not_leak,
    heads_do_not_leak,
)


@contextmanager
def _nan_in_new_memory() -> Iterator[None]:
    """Fill uninitialized memory with NaN, as torch does in its deterministic mode."""
    mode = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)


def _packed(case: Case) -> Case:
    return case if case.shape.lengths else case._replace(shape=case.shape.packed())


def _compare_with(backend: Backend, other: Backend, case: Case, device: Device) -> Report:
    """Compare a backend with an equivalent computation instead of the reference."""
    refused = refusal(backend, case, device)
    if refused is not None:
        return refused
    inputs = draw(case, device)
    cotangents = draw_cotangents(case, inputs)
    results, expected = (run(each, case.spec, inputs, cotangents) for each in (backend, other))
    return error_report(backend, case, results, expected, "both")


def _decayed_state(case: Case, inputs: UpdateInputs) -> dict[str, Tensor]:
    """o and state of a sequence without erase and write, in closed form and float64."""
    spec, (_, B, T, H, HV, K, *_) = case.spec, case.shape
    assert inputs.state is not None
    log_decays = log_decay(spec, inputs)
    total = inputs.state.new_zeros(B, T, HV, 1) if log_decays is None else log_decays.reshape(B, T, HV, -1)
    total = torch.cat([torch.zeros_like(total[:, :1]), total.double()], 1).cumsum(1)
    states = total.exp().unsqueeze(-1) * inputs.state.double().unsqueeze(1)  # [B, T + 1, HV, K, V]
    read = states[:, :-1] if spec.read == "before" else states[:, 1:]
    q = inputs.q.double().repeat_interleave(HV // H, dim=2)
    return {"o": spec.scale_of(K) * torch.einsum("bthkv,bthk->bthv", read, q), "state": states[:, -1]}


def _modified(inputs: UpdateInputs, copy: UpdateInputs) -> list[str]:
    """Return a sentence for each operand that differs from its copy."""
    return [
        f"{name} must not be modified"
        for name, x, y in zip(inputs._fields, inputs, copy, strict=True)
        if x is not None and y is not None and not torch.equal(x, y)
    ]
