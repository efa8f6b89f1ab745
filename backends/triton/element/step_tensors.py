"""The tensors of the operator of a decode step, as its kernel reads them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.custom_op import mark_written
from deltazoo.backends.triton.operands import ready


def step_tensors(call: Any, rows_apart: Sequence[str], in_place: Sequence[str]) -> dict[str, Any]:
    """Return the tensors of a NamedTuple by name, None where one is missing; its numbers and names are left out.

    Args: rows_apart: tensors whose rows may be apart. in_place: tensors that the kernel updates; `finish` follows it.
    """
    tensors: dict[str, Any] = {}
    for name, x in call._asdict().items():
        if x is None:
            tensors[name] = None
        elif not isinstance(x, Tensor):
            continue
        elif name in rows_apart:
            tensors[name] = x if x.stride(1) == 1 else x.contiguous()
        else:
            tensors[name] = x.contiguous() if name in in_place else ready(x)
    return tensors


def rows_equally_apart(tensors: dict[str, Any], names: Sequence[str]) -> None:
    """Copy these tensors if their rows are not equally far apart, for kernels with one stride for all of them."""
    given = {name: tensors[name] for name in names if tensors[name] is not None}
    if len({x.stride(0) for x in given.values()}) > 1:
        columns = torch.cat(list(given.values()), 1).split([x.shape[1] for x in given.values()], 1)
        tensors.update(zip(given, columns, strict=True))


def finish(call: Any, tensors: dict[str, Any], in_place: Sequence[str]) -> None:
    """Copy tensors that the kernel could not update directly."""
    for name in in_place:
        mark_written(getattr(call, name), tensors[name])
