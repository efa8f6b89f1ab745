"""Zero the rows after the last sequence of a pack, in the results of an operator beside the update."""

import math
from collections.abc import Mapping

from torch import Tensor

from deltazoo.backends.triton.support import Options

_PROGRAMS = 64


def zero_tail(cu_seqlens: Tensor | None, tensors: Mapping[str, Tensor]) -> None:
    """Zero the rows from cu_seqlens[-1] on; without a pack there are none.

    Args: tensors: [1, T, ...], by the pointers of `zero_tail_kernel`: v, log_decay, and q, k and e of equal sizes.
    """
    from deltazoo.backends.triton.chunk.kernels.portable.zero_tail import zero_tail_kernel
    from deltazoo.backends.triton.runtime.launcher import group, launcher

    if cu_seqlens is None:
        return
    width = {name: math.prod(x.shape[2:]) for name, x in tensors.items()}
    traits = {
        "HK": width.get("k", width.get("q", 1)), "HV": 1, "V": width.get("v", 1), "DECAYS": width.get("log_decay", 1),
        "BLOCK": 1024,
    }  # fmt: skip
    pointers = {**dict.fromkeys(zero_tail_kernel.Pointers._fields), **tensors, "cu": cu_seqlens}
    gmem, constants = group(zero_tail_kernel, pointers, traits)
    run = launcher(zero_tail_kernel, {"gmem": gmem}, {"traits": constants}, Options(4))
    run(_PROGRAMS, {"N": cu_seqlens.shape[0] - 1, "T": next(iter(tensors.values())).shape[1]})
