"""Run a kernel, with little work on the host where a call like it has been made before."""

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

_compiled: dict[Hashable, Any] = {}
_WIDE = 16  # bytes; Triton compiles another kernel for a pointer that is no multiple


def run(
    kernel: Any,
    programs: int,
    tensors: Sequence[Tensor | TensorDescriptor | None],
    numbers: Sequence[int | float],
    constants: Sequence[Hashable],
    warps: int = 4,
    stages: int = 1,
    registers: int | None = None,
) -> None:
    """Run a Triton kernel: its parameters are tensors or descriptors of such, numbers (none specialised), constants.

    Triton's own launch looks at each argument anew, which takes longer than a small kernel runs. Here the compiled
    kernel is kept by all that it was compiled for (constants, the tensors' dtypes and alignment, the device), and gets
    bare pointers. Debugging knobs of Triton count when a kernel first runs.
    """
    if programs == 0:
        return
    pointers: list[Any] = []
    kinds: list[Hashable] = []
    for x in tensors:
        if isinstance(x, Tensor):
            pointers.append(x.data_ptr())
            kinds.append((x.dtype, pointers[-1] % _WIDE == 0))
        else:
            pointers.append(x)
            kinds.append(None if x is None else (x.base.dtype, *x.block_shape))
    first = tensors[0]
    assert isinstance(first, Tensor)
    key = (kernel.fn, first.get_device(), warps, stages, registers, *kinds, *constants)
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[(programs, 1, 1)](*pointers, *numbers, *constants)
        return
    options = {} if registers is None else {"maxnreg": registers}
    compiled = kernel[(programs,)](*tensors, *numbers, *constants, num_warps=warps, num_stages=stages, **options)
    if compiled is not None and all(abs(x) < 2**31 for x in numbers):  # the interpreter compiles nothing
        _compiled[key] = compiled
