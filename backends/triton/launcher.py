"""Launch a kernel with little work on the host where a call like it has been made before."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from deltazoo.backends.triton import precompile as ahead
from deltazoo.backends.watch import RunRecord, is_watched, record_run

_compiled: dict[Hashable, Any] = {}
_WIDE = 16  # bytes; Triton compiles another kernel for a pointer that is no multiple


def launcher(
    kernel: Any,
    tensors: Sequence[Tensor | TensorDescriptor | None],
    constants: Sequence[Hashable],
    warps: int = 4,
    stages: int = 1,
    registers: int | None = None,
) -> Callable[..., None]:
    """What runs a Triton kernel on the current stream: a function of how many programs, and of the kernel's numbers.

    The kernel's parameters are tensors or descriptors of such, numbers (none specialised), constants. Triton's own
    launch looks at each argument anew, which takes longer than a small kernel runs. Here the compiled kernel is kept by
    all that it was compiled for (constants, the tensors' dtypes and alignment, the device), and gets bare pointers;
    what is launched several times looks its kernel up once. Debugging knobs of Triton count when a kernel first runs.
    Where a body is walked to compile its kernels ahead, they are compiled, and not run.
    """
    pointers: list[Any] = []
    key: list[Hashable] = [kernel.fn, warps, stages, registers, *constants]
    for x in tensors:
        if isinstance(x, Tensor):
            pointer = x.data_ptr()
            pointers.append(pointer)
            key += (x.dtype, pointer % _WIDE == 0)
        else:
            pointers.append(x)
            key.append(None if x is None else (x.base.dtype, *x.block_shape))
    first = tensors[0]
    assert isinstance(first, Tensor)
    walked = ahead.walk.device
    device = first.get_device() if walked is None else walked.index
    key.append(device)
    known = tuple(key)
    compiled = _compiled.get(known)
    stream = None if compiled is None or walked is not None else _stream(device)

    def launch(programs: int, *numbers: int | float) -> None:
        nonlocal compiled, stream
        if programs == 0:
            return
        if walked is None and is_watched():
            record_run(RunRecord("triton", kernel.__name__, programs, warps))
        if compiled is not None:
            if walked is None:
                compiled[(programs, 1, 1)](*pointers, *numbers, *constants, stream=stream)
            return
        given = (*tensors, *numbers, *constants)
        options = {"num_warps": warps, "num_stages": stages} | ({} if registers is None else {"maxnreg": registers})
        if walked is not None:
            ahead.compile_kernel(known, kernel, lambda: kernel.warmup(*given, grid=(programs,), **options))
            return
        ahead.await_kernel(known)
        found = kernel[(programs,)](*given, **options)
        if found is not None and all(abs(x) < 2**31 for x in numbers):  # the interpreter compiles nothing
            compiled = _compiled[known] = found
            stream = _stream(device)

    return launch


def _stream(device: int) -> int:
    return int(driver.active.get_current_stream(device))
