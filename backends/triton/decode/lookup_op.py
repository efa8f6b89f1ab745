"""Operators and launches of drafts by prompt lookup; see `backends.ops.prompt_lookup`.

Triton is imported when a kernel first runs. B batch, C tokens of the history, T tokens of a pass
"""

from typing import Any

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.custom_op import mark_written, operator
from deltazoo.backends.triton.runtime.precompile import compiled_ahead
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import power_of_two

_TOKENS = 1024  # of the history that a program reads at once
_OPTIONS = Options(8)


def draft_(read: Tensor, last: Tensor, history: Tensor) -> None:
    """Write the tokens of a pass."""
    _draft_op(read, last, history)


def append_(*operands: Tensor) -> Tensor:
    """Append the accepted tokens of a pass. Args: chosen, checked, read, last, accepted, history, drawn, left."""
    kept: Tensor = _append_op(*operands)
    return kept


def _draft(read: Tensor, last: Tensor, history: Tensor) -> None:
    from deltazoo.backends.triton.decode.kernels.lookup import lookup_kernel
    from deltazoo.backends.triton.runtime.launcher import launcher

    (B, T), C = read.shape, history.shape[1]
    assert read.is_contiguous() and last.is_contiguous() and history.is_contiguous()
    tensors = {"read": read, "last": last, "history": history}
    with torch.cuda.device_of(read):
        launcher(lookup_kernel, tensors, {"T": T, "BC": _TOKENS}, _OPTIONS)(B, {"C": C})
    mark_written(read, read)


def _append(
    chosen: Tensor, checked: Tensor, read: Tensor, last: Tensor,
    accepted: Tensor, history: Tensor, drawn: Tensor, left: Tensor,
) -> Tensor:  # fmt: skip
    from deltazoo.backends.triton.decode.kernels.lookup import append_kernel
    from deltazoo.backends.triton.runtime.launcher import launcher

    (B, T), C = chosen.shape, history.shape[1]
    chosen, checked, read = chosen.contiguous(), checked.contiguous(), read.contiguous()
    written = {"last": last, "accepted": accepted, "history": history, "drawn": drawn, "left": left}
    assert all(x.is_contiguous() for x in written.values())
    kept = torch.empty_like(checked)
    tensors = {"chosen": chosen, "checked": checked, "read": read, "kept": kept, **written}
    with torch.cuda.device_of(chosen):
        run = launcher(append_kernel, tensors, {"T": T, "BT": power_of_two(T), "BC": _TOKENS}, _OPTIONS)
        run(B, {"C": C})
    for x in written.values():
        mark_written(x, x)
    return kept


def _fake_draft(*operands: Any) -> None:
    return None


def _fake_append(chosen: Tensor, checked: Tensor, *operands: Any) -> Tensor:
    return torch.empty_like(checked)


_draft_op = operator(
    "triton_draft_(Tensor(a!) read, Tensor last, Tensor history) -> ()", _draft, compiled_ahead(_draft, _fake_draft)
)
_append_op = operator(
    "triton_append_drafts_(Tensor chosen, Tensor checked, Tensor read, Tensor(a!) last, Tensor(b!) accepted, "
    "Tensor(c!) history, Tensor(d!) drawn, Tensor(e!) left) -> Tensor",
    _append,
    compiled_ahead(_append, _fake_append),
)
