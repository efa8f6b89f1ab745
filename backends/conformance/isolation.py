"""Isolation of tokens, sequences and heads: no leak of values, of gradients, or of NaN.

B batch, T time, H key heads, HV value heads, K key width, V value width, N packed sequences
"""

from typing import NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.conformance.cases import Case, dense, draw
from deltazoo.backends.conformance.compare import Report, draw_cotangents, limit, refusal, relative_error, rms, run
from deltazoo.backends.update.base import Backend, UpdateInputs, has_time_axis
from deltazoo.backends.update.registry import resolve
from deltazoo.backends.update.spec import UpdateSpec

Device = torch.device | str


def later_tokens_do_not_leak(backend: str | Backend, case: Case, device: Device = "cpu") -> Report:
    """Outputs and their gradients do not depend on later tokens."""
    case = dense(case)
    case = case._replace(shape=case.shape._replace(T=max(2, case.shape.T)))
    inputs = draw(case, device)
    t = (case.shape.T + 1) // 2
    operands = {name: _mask(inputs, name, True) for name in inputs._fields if has_time_axis(inputs, name)}
    for mask in operands.values():
        mask[:, :t] = False
    o, state = _output_masks(case, inputs, False)
    o[:, :t] = True
    return _check_isolation(backend, case, inputs, _Region("a later token", operands, o, state), (False,))


def sequences_do_not_leak(backend: str | Backend, case: Case, device: Device = "cpu") -> Report:
    """A sequence of a batch or pack does not depend on another, in values and gradients, also when that is NaN."""
    if not case.shape.lengths:
        case = case._replace(shape=case.shape._replace(B=max(2, case.shape.B)))
    inputs, lengths = draw(case, device), case.shape.lengths
    # In a pack the first sequence, which could leak into the next one, and the longest.
    changed = dict.fromkeys((0, max(range(len(lengths)), key=lambda n: lengths[n]))) if lengths else {0: None}
    reports = [
        _check_isolation(backend, case, inputs, _sequence_region(case, inputs, n), (False, True)) for n in changed
    ]
    return reports[0]._replace(failures=[failure for report in reports for failure in report.failures])


def heads_do_not_leak(backend: str | Backend, case: Case, device: Device = "cpu") -> Report:
    """A value head does not depend on another, nor a key head on another, also when that is NaN."""
    if case.shape.HV == case.shape.H:
        case = case._replace(shape=case.shape._replace(HV=2 * case.shape.H))
    inputs = draw(case, device)
    report = _check_isolation(backend, case, inputs, _value_head(case, inputs), (False, True))
    if case.shape.H > 1 and not report.refused:
        other = _check_isolation(backend, case, inputs, _key_head(case, inputs), (False, True))
        report = report._replace(failures=report.failures + other.failures)
    return report


class _Region(NamedTuple):
    """A region of the operands, and the outputs that must not depend on it. Masks are bool, shaped as their tensors."""

    description: str
    operands: dict[str, Tensor]
    o: Tensor
    state: Tensor


def _check_isolation(
    backend: str | Backend, case: Case, inputs: UpdateInputs, region: _Region, poisons: tuple[bool, ...]
) -> Report:
    """Replace the region by other, larger values (poison False) or by NaN (True), and compare all results outside."""
    backend = resolve(backend)
    device = inputs.q.device
    refused = refusal(backend, case, device)
    if refused is not None:
        return refused
    d_o, d_state = draw_cotangents(case, inputs)
    cotangents = d_o * region.o, d_state * region.state
    before = run(backend, case.spec, inputs, cotangents)
    other = draw(case._replace(seed=case.seed + 2), device)
    failures = _leaks(case, region, before)
    for poison in poisons:
        changed = {}
        for name, mask in region.operands.items():
            new = getattr(other, name) * (100 if name in ("v", "state") else 1)
            new = torch.full_like(new, float("nan")) if poison else new
            changed[name] = torch.where(mask, new, getattr(inputs, name))
        after = run(backend, case.spec, inputs._replace(**changed), cotangents)
        failures += _differences(case, region, before, after, poison)
    return Report(backend.name, case, [], failures, [])


def _leaks(case: Case, region: _Region, before: dict[str, Tensor]) -> list[str]:
    """Return a sentence for each gradient of the region that is not 0."""
    failures = []
    for operand, mask in region.operands.items():
        gradient = before.get(f"d_{operand}")
        if gradient is not None:
            leak = rms(gradient * mask)
            if leak > limit(case, f"d_{operand}", gradient.device) * rms(gradient):
                failures.append(f"d_{operand} must be 0 at {region.description}, got RMS {leak:.1e}")
    return failures


def _differences(
    case: Case, region: _Region, before: dict[str, Tensor], after: dict[str, Tensor], poison: bool
) -> list[str]:
    """Return a sentence for each result that the region has changed."""
    failures = []
    for name, result in after.items():
        operand = name.removeprefix("d_")
        tolerance = limit(case, name, result.device)
        if name in ("o", "state"):
            outside = getattr(region, name)
        elif operand in region.operands:
            outside = ~region.operands[operand]
        elif poison:
            continue  # the gradient is a sum that includes the region, so it is NaN
        else:
            outside = torch.ones_like(result, dtype=torch.bool)
        error = relative_error(result[outside], before[name][outside], before[name])
        if not error <= tolerance:
            cause = "that is not finite" if poison else "that changes"
            failures.append(f"{name} depends on {region.description} {cause}: it differs by {error:.1e} of its RMS")
    return failures


def _sequence_region(case: Case, inputs: UpdateInputs, n: int) -> _Region:
    """Sequence n, with its initial state."""
    lengths = case.shape.lengths
    start = sum(lengths[:n])
    row, stop = (0, start + lengths[n]) if lengths else (n, case.shape.T)
    operands = {name: _mask(inputs, name, False) for name in inputs._fields if has_time_axis(inputs, name)}
    for mask in operands.values():
        mask[row, start:stop] = True
    if inputs.state is not None:
        operands["state"] = _mask(inputs, "state", False)
        operands["state"][n] = True
    o, state = _output_masks(case, inputs, True)
    o[row, start:stop], state[n] = False, False
    return _Region("another sequence", operands, o, state)


def _value_head(case: Case, inputs: UpdateInputs) -> _Region:
    """Return the last value head."""
    return _heads_region(case, inputs, case.shape.HV - 1, case.shape.H, "another value head")


def _key_head(case: Case, inputs: UpdateInputs) -> _Region:
    """Return the last key head and all value heads that use it."""
    first = case.shape.HV - case.shape.HV // case.shape.H
    return _heads_region(case, inputs, first, case.shape.H - 1, "another key head")


def _heads_region(
    case: Case, inputs: UpdateInputs, first_value_head: int, first_key_head: int, description: str
) -> _Region:
    """All value heads from the first one on, and all key heads from the first one on."""
    operands = {}
    for name, tensor in inputs._asdict().items():
        per_key_head = name in ("q", "k", "erase_key")
        if tensor is None or name == "cu_seqlens" or (per_key_head and first_key_head == case.shape.H):
            continue
        axis = _head_axis(case.spec, name, tensor)
        heads = torch.arange(tensor.shape[axis], device=tensor.device)
        is_changed = heads >= (first_key_head if per_key_head else first_value_head)
        shape = [1] * tensor.dim()
        shape[axis] = -1
        operands[name] = is_changed.view(shape).expand(tensor.shape)
    o, state = _output_masks(case, inputs, True)
    o[:, :, first_value_head:], state[:, first_value_head:] = False, False
    return _Region(description, operands, o, state)


def _head_axis(spec: UpdateSpec, name: str, tensor: Tensor) -> int:
    if name == "state":
        return 1
    if name == "rate" or (name == "log_decay" and tensor.dim() < 3):
        return 0
    is_scalar = name in ("beta", "step") or (name == "log_decay" and tensor.dim() == 3)
    is_scalar |= name in ("erase", "write") and spec.beta == "separate"
    return tensor.dim() - (1 if is_scalar else 2)


def _output_masks(case: Case, inputs: UpdateInputs, value: bool) -> tuple[Tensor, Tensor]:
    """Masks of o and state, filled with one value."""
    _, B, T, _, HV, K, V, _ = case.shape
    device = inputs.q.device
    o = torch.full((B, T, HV, V), value, device=device)
    return o, torch.full((case.shape.sequences, HV, K, V), value, device=device)


def _mask(inputs: UpdateInputs, name: str, value: bool) -> Tensor:
    return torch.full_like(getattr(inputs, name), value, dtype=torch.bool)
