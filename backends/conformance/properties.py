"""What must hold of any backend on any case: each property is a function (backend, case, device) -> Report.

B batch, T time, H key heads, HV value heads, K key width, V value width, N packed sequences
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from deltazoo.backends.base import Backend, UpdateInputs
from deltazoo.backends.conformance.cases import Case, dense, draw
from deltazoo.backends.conformance.compare import Report, compare, draw_cotangents, judged, meta_of, refusal, run
from deltazoo.backends.conformance.decode_step import compare_step
from deltazoo.backends.conformance.equivalences import (
    InSegments,
    OneByOne,
    SequenceBySequence,
    Traced,
    WithRepeatedHeads,
)
from deltazoo.backends.conformance.isolation import heads_do_not_leak, later_tokens_do_not_leak, sequences_do_not_leak
from deltazoo.backends.conformance.pairwise import every_spec
from deltazoo.backends.dispatch import bind
from deltazoo.backends.lowering import log_decay
from deltazoo.backends.registry import resolve

Device = torch.device | str
Property = Callable[[str | Backend, Case, Device], Report]


def matches_the_reference(backend: str | Backend, case: Case, device: Device = "cpu") -> Report:
    """Outputs, final state and all gradients are those of the reference in float64."""
    return compare(backend, case, device=device)


def pieces_equal_the_full_sequence(backend: str | Backend, case: Case, device: Device = "cpu") -> Report:
    """A sequence in pieces, the state passed on, is the sequence at once, gradients through the pieces too."""
    return compare(InSegments(resolve(backend)), dense(case), device=device)


def decoding_equals_the_full_sequence(backend: str | Backend, case: Case, device: Device = "cpu") -> Report:
    """`step_`, token by token, in place, with slots and without, is `forward`."""
    steps = OneByOne(resolve(backend))
    report = compare(steps, dense(case), grad=False, device=device)
    wrong = ["step_ must write to the slots of its rows only, and wrote to another"] if steps.trespassed else []
    return report._replace(failures=report.failures + wrong)


def fused_step_matches_reference(backend: str | Backend, case: Case, device: Device = "cpu") -> Report:
    """`fused_decode_step_`, where it is taken, is the lines of `FusedDecodeStep`, in the slots of its rows alone."""
    return compare_step(backend, case, device)


def packing_equals_separate_runs(backend: str | Backend, case: Case, device: Device = "cpu") -> Report:
    """A pack is its sequences each by itself, an empty one included, gradients too."""
    case = case if case.shape.lengths else case._replace(shape=case.shape.packed())
    backend = resolve(backend)
    return _same(backend, SequenceBySequence(backend), case, device)


def grouped_heads_equal_repeated_heads(backend: str | Backend, case: Case, device: Device = "cpu") -> Report:
    """Heads of q and k that serve several heads of v are those heads repeated in memory, gradients summed."""
    shape = case.shape if case.shape.HV > case.shape.H else case.shape._replace(HV=2 * case.shape.H)
    backend = resolve(backend)
    return _same(backend, WithRepeatedHeads(backend), case._replace(shape=shape), device)


def compiles_to_one_graph(backend: str | Backend, case: Case, device: Device = "cpu") -> Report:
    """Inside torch.compile(fullgraph=True) it is one graph, with the same numbers."""
    backend = resolve(backend)
    try:
        return compare(Traced(backend), case, device=device)
    except torch._dynamo.exc.TorchDynamoException as error:
        return Report(backend.name, case, [], [f"it must be one graph under torch.compile, got {error}"], [])


def gradients_of_each_output_alone(backend: str | Backend, case: Case, device: Device = "cpu") -> Report:
    """A loss on o alone, or on the final state alone, has its own gradients."""
    report = compare(backend, case, outputs="o", device=device)
    other = compare(backend, case, outputs="state", device=device)
    return report._replace(errors=report.errors + other.errors, failures=report.failures + other.failures)


def empty_sequence_returns_its_initial_state(backend: str | Backend, case: Case, device: Device = "cpu") -> Report:
    """With T = 0 the final state is a copy of the initial one, bit for bit, and so is its gradient."""
    lengths = (0,) * len(case.shape.lengths)
    case = case._replace(shape=case.shape._replace(T=0, lengths=lengths))
    report = compare(backend, case, device=device)
    if report.refused:
        return report
    inputs = draw(case, device)
    state = bind(case.spec, backend)(inputs).state
    want = torch.zeros_like(state) if inputs.state is None else inputs.state
    wrong = []
    if not torch.equal(state, want):
        wrong.append("with T = 0 the final state must equal the initial state bit for bit")
    if inputs.state is not None and state.numel() and state.data_ptr() == inputs.state.data_ptr():
        wrong.append("with T = 0 the final state must be a copy, got the memory of the initial state")
    return report._replace(failures=report.failures + wrong)


def without_erase_and_write_the_state_decays(backend: str | Backend, case: Case, device: Device = "cpu") -> Report:
    """With beta = 0 (erase and write; b for dplr) the state decays, and o reads the decayed initial state."""
    case = dense(case._replace(state="given"))
    backend, inputs = resolve(backend), draw(case, device)
    zero = {
        name: torch.zeros_like(x)
        for name in ("beta", "erase", "write", "b")
        if (x := getattr(inputs, name)) is not None
    }
    if case.spec.beta == "none":
        zero["v"] = torch.zeros_like(inputs.v)
        if case.spec.transition == "delta":
            zero["k"] = torch.zeros_like(inputs.k)
    inputs = inputs._replace(**zero)
    refused = refusal(backend, case, device)
    if refused is not None:
        return refused
    return judged(backend, case, run(backend, case.spec, inputs, None), _decayed(case, inputs), None)


def inputs_are_not_modified(backend: str | Backend, case: Case, device: Device = "cpu") -> Report:
    """No operand is written to, forward, backward or in `step_`."""
    backend, inputs = resolve(backend), draw(case, device)
    refused = refusal(backend, case, device)
    if refused is not None:
        return refused
    run(backend, case.spec, inputs, draw_cotangents(case, inputs))
    wrong = _changed(inputs, draw(case, device))
    one = dense(case._replace(shape=case.shape._replace(T=1), state="given"))
    token = draw(one, device)
    assert token.state is not None
    bind(case.spec, backend).step_(token._replace(state=None), token.state.clone())
    wrong += _changed(token, draw(one, device))
    return Report(backend.name, case, [], wrong, [])


def uninitialized_memory_is_never_read(backend: str | Backend, case: Case, device: Device = "cpu") -> Report:
    """With NaN in everything that `torch.empty` and its like return, the numbers are the same."""
    with _nan_in_new_memory():
        return compare(backend, case, device=device)


def unsupported_returns_sentences(backend: str | Backend, case: Case, device: Device = "cpu") -> Report:
    """Every spec is taken, or refused for reasons in words, on the case's shape and dtype, dense and packed."""
    backend, shape = resolve(backend), case.shape
    mute = {
        f"a refusal must be a sentence, got {reason!r}"
        for spec in every_spec()
        for packed in (dense(case).shape, shape.packed())
        for grad in (False, True)
        for reason in backend.unsupported(spec, meta_of(packed, case.dtype, device, grad))
        if len(reason.split()) < 4
    }
    return Report(backend.name, case, [], sorted(mute), [])


PROPERTIES: tuple[Property, ...] = (
    matches_the_reference,
    unsupported_returns_sentences,
    pieces_equal_the_full_sequence,
    decoding_equals_the_full_sequence,
    fused_step_matches_reference,
    packing_equals_separate_runs,
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
    """torch fills new memory in its deterministic mode, so that reading it shows."""
    mode = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)


def _same(backend: Backend, detour: Backend, case: Case, device: Device) -> Report:
    """Compare a backend with a detour through itself."""
    inputs = draw(case, device)
    refused = refusal(backend, case, device)
    if refused is not None:
        return refused
    cotangents = draw_cotangents(case, inputs)
    got, want = (run(way, case.spec, inputs, cotangents) for way in (backend, detour))
    return judged(backend, case, got, want, cotangents)


def _decayed(case: Case, inputs: UpdateInputs) -> dict[str, Tensor]:
    """o and state of a sequence in which nothing is written or erased, in closed form and float64."""
    spec, (_, B, T, H, HV, K, *_) = case.spec, case.shape
    assert inputs.state is not None
    log_decays = log_decay(spec, inputs)
    total = inputs.state.new_zeros(B, T, HV, 1) if log_decays is None else log_decays.reshape(B, T, HV, -1)
    total = torch.cat([torch.zeros_like(total[:, :1]), total.double()], 1).cumsum(1)
    states = total.exp().unsqueeze(-1) * inputs.state.double().unsqueeze(1)  # [B, T + 1, HV, K, V]
    read = states[:, :-1] if spec.read == "before" else states[:, 1:]
    q = inputs.q.double().repeat_interleave(HV // H, dim=2)
    scale = K**-0.5 if spec.scale is None else spec.scale
    return {"o": scale * torch.einsum("bthkv,bthk->bthv", read, q), "state": states[:, -1]}


def _changed(inputs: UpdateInputs, copy: UpdateInputs) -> list[str]:
    """Sentences on the operands that are no longer equal to their copies."""
    written = (
        name
        for name, x, y in zip(inputs._fields, inputs, copy, strict=True)
        if x is not None and y is not None and not torch.equal(x, y)
    )
    return [f"{name} must be left alone, and was written to" for name in written]
