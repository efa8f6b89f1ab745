"""The tensors of the operator of a decode step, as its kernel reads them."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from deltazoo.backends.torch_ext.custom_op import mark_written
from deltazoo.backends.triton.operands import ready


def step_tensors(call: Any, rows_apart: Sequence[str], in_place: Sequence[str]) -> dict[str, Any]:
    """Return the tensors of a NamedTuple by name.

    Args: rows_apart: tensors whose rows may be apart. in_place: tensors that the kernel updates; `finish` follows it.
    """
    tensors: dict[str, Any] = {}
    for name, x in call._asdict().items():
        if x is None or not isinstance(x, Tensor):
            tensors[name] = None
        elif name in rows_apart:
            tensors[name] = x if x.stride(1) == 1 else x.contiguous()
        else:
            tensors[name] = x.contiguous() if name in in_place else ready(x)
    return tensors


def finish(call: Any, tensors: dict[str, Any], in_place: Sequence[str]) -> None:
    """Copy tensors that the kernel could not update directly."""
    for name in in_place:
        mark_written(getattr(call, name), tensors[name])
