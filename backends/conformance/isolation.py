"""What must not leak: later tokens, other sequences, other heads; in numbers, in gradients, or as a NaN.

B batch, T time, H key heads, HV value heads, K key width, V value width, N packed sequences
"""

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.base import Backend, UpdateInputs
from deltazoo.backends.conformance.cases import Case, dense, draw
from deltazoo.backends.conformance.compare import Report, draw_cotangents, limit, refusal, relative_error, rms, run
from deltazoo.backends.conformance.equivalences import varies_in_time
from deltazoo.backends.registry import resolve

Device = torch.device | str


def later_tokens_do_not_leak(backend: str | Backend, case: Case, device: Device = "cpu") -> Report:
    """Earlier outputs and their gradients do not know later tokens."""
    case = dense(case)
    case = case._replace(shape=case.shape._replace(T=max(2, case.shape.T)))
    inputs = draw(case, device)
    t = (case.shape.T + 1) // 2
    part = {name: _mask(inputs, name, True) for name in inputs._fields if varies_in_time(inputs, name)}
    for mask in part.values():
        mask[:, :t] = False
    o, state = _outputs(case, inputs, False)
    o[:, :t] = True
    return _isolated(backend, case, inputs, _Region("a later token", part, o, state))


def sequences_do_not_leak(backend: str | Backend, case: Case, device: Device = "cpu") -> Report:
    """A sequence of a batch or a pack does not know another, in numbers, gradients, or when that one is not finite."""
    if not case.shape.lengths:
        case = case._replace(shape=case.shape._replace(B=max(2, case.shape.B)))
    inputs = draw(case, device)
    lengths = case.shape.lengths
    longest = max(range(case.shape.sequences), key=lambda n: lengths[n] if lengths else 0)
    start = list(accumulate(lengths, initial=0))[longest] if lengths else 0
    stop = start + lengths[longest] if lengths else case.shape.T
    row = 0 if lengths else longest
    part = {name: _mask(inputs, name, False) for name in inputs._fields if varies_in_time(inputs, name)}
    for mask in part.values():
        mask[row, start:stop] = True
    if inputs.state is not None:
        part["state"] = _mask(inputs, "state", False)
        part["state"][longest] = True
    o, state = _outputs(case, inputs, True)
    o[row, start:stop], state[longest] = False, False
    region = _Region("another sequence", part, o, state)
    return _both(_isolated(backend, case, inputs, region), _isolated(backend, case, inputs, region, poison=True))


def heads_do_not_leak(backend: str | Backend, case: Case, device: Device = "cpu") -> Report:
    """A value head does not know another, nor one key head another, even when that one is not finite."""
    if case.shape.HV == case.shape.H:
        case = case._replace(shape=case.shape._replace(HV=2 * case.shape.H))
    inputs = draw(case, device)
    report = None
    for keys in (False, True) if case.shape.H > 1 else (False,):
        region = _heads_region(case, inputs, keys)
        for poison in (False, True):
            found = _isolated(backend, case, inputs, region, poison)
            report = found if report is None else _both(report, found)
    assert report is not None
    return report


class _Region(NamedTuple):
    """A part of the operands, and the outputs that must not know it. All masks are bool, of their tensors' shapes."""

    what: str
    part: dict[str, Tensor]
    o: Tensor
    state: Tensor


def _isolated(
    backend: str | Backend, case: Case, inputs: UpdateInputs, region: _Region, poison: bool = False
) -> Report:
    """Change the region to other, larger numbers, or to NaN, and look for a difference outside it."""
    backend = resolve(backend)
    refused = refusal(backend, case, inputs.q.device)
    if refused is not None:
        return refused
    d_o, d_state = draw_cotangents(case, inputs)
    cotangents = d_o * region.o, d_state * region.state
    other = draw(case._replace(seed=case.seed + 2), inputs.q.device)
    changed = {}
    for name, mask in region.part.items():
        new = getattr(other, name) * (100 if name in ("v", "state") else 1)
        changed[name] = torch.where(mask, torch.full_like(new, float("nan")) if poison else new, getattr(inputs, name))
    before = run(backend, case.spec, inputs, cotangents)
    after = run(backend, case.spec, inputs._replace(**changed), cotangents)
    failures = []
    for name, got in after.items():
        operand = name.removeprefix("d_")
        if name in ("o", "state"):
            keep = getattr(region, name)
        elif operand in region.part:
            keep = ~region.part[operand]
            leak = rms(before[name] * ~keep)
            if leak > limit(case, name, got.device) * rms(before[name]):
                failures.append(f"{name} must be 0 where outputs do not know {region.what}, got {leak:.1e}")
        elif poison:
            continue  # a sum over the region and the rest
        else:
            keep = torch.ones_like(got, dtype=torch.bool)
        error = relative_error(got[keep], before[name][keep], before[name])
        if not error <= limit(case, name, got.device):
            cause = "that is not finite" if poison else "that changes"
            failures.append(f"{name} knows {region.what} {cause}: it differs by {error:.1e} of its RMS")
    return Report(backend.name, case, [], failures, [])


def _heads_region(case: Case, inputs: UpdateInputs, keys: bool) -> _Region:
    """The last value head; with `keys` the last key head and all value heads that use it."""
    first = case.shape.HV - (case.shape.HV // case.shape.H if keys else 1)
    part = {}
    for name, tensor in inputs._asdict().items():
        if tensor is None or name == "cu_seqlens" or (name in ("q", "k", "erase_key") and not keys):
            continue
        axis = _head_axis(name, tensor)
        heads = torch.arange(tensor.shape[axis], device=tensor.device)
        chosen = heads == case.shape.H - 1 if name in ("q", "k", "erase_key") else heads >= first
        shape = [1] * tensor.dim()
        shape[axis] = -1
        part[name] = chosen.view(shape).expand(tensor.shape)
    o, state = _outputs(case, inputs, True)
    o[:, :, first:], state[:, first:] = False, False
    return _Region("another key head" if keys else "another value head", part, o, state)


def _head_axis(name: str, tensor: Tensor) -> int:
    if name == "state":
        return 1
    if name == "rate" or (name == "log_decay" and tensor.dim() < 3):
        return 0
    by_head = name in ("beta", "step") or (name == "log_decay" and tensor.dim() == 3)
    return tensor.dim() - (1 if by_head else 2)


def _outputs(case: Case, inputs: UpdateInputs, value: bool) -> tuple[Tensor, Tensor]:
    """Masks of o and state, all True or all False."""
    _, B, T, _, HV, K, V, _ = case.shape
    device = inputs.q.device
    o = torch.full((B, T, HV, V), value, device=device)
    return o, torch.full((case.shape.sequences, HV, K, V), value, device=device)


def _mask(inputs: UpdateInputs, name: str, value: bool) -> Tensor:
    return torch.full_like(getattr(inputs, name), value, dtype=torch.bool)


def _both(first: Report, second: Report) -> Report:
    return first._replace(failures=first.failures + second.failures)
