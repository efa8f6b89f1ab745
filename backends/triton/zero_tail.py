"""Launch of the kernel that zeroes the rows of a pack beyond its last sequence."""

from torch import Tensor

from deltazoo.backends.triton.kernels.zero_tail import zero_tail_kernel
from deltazoo.backends.triton.launcher import launcher
from deltazoo.backends.triton.operands import Sizes

_PROGRAMS = 64
_BLOCK = 1024


def zero_tail(
    s: Sizes, cu_seqlens: Tensor | None, *, v: Tensor, q: Tensor | None = None, k: Tensor | None = None,
    e: Tensor | None = None, log_decay: Tensor | None = None, b: Tensor | None = None, w: Tensor | None = None,
) -> None:  # fmt: skip
    """Zero the rows from cu_seqlens[-1] on of tensors shaped like the operands of these names.

    Only packs have such rows. cu_seqlens[-1] = T, the normal case, costs one launch that writes nothing.
    """
    if cu_seqlens is None:
        return
    zero = launcher(zero_tail_kernel, (v, q, k, e, log_decay, b, w, cu_seqlens), (s.H * s.K, s.HV, s.V, _BLOCK))
    zero(_PROGRAMS, s.N, s.T)
