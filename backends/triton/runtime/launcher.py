"""Launch a kernel by the handle of its first compilation, to save host time.

Triton's own launch inspects every argument of every call, which takes longer than a small kernel runs. Measured on an
H200 with the eager gated delta rule, forward and backward: packed 5.45 -> 2.88 ms; later, 1 x 2048 tokens with 16/32
heads, 1.92 -> 1.47 ms. Tested with torch 2.11 / Triton 3.6 and torch 2.13 / Triton 3.7.1, whose compiled kernels are
called as handle[grid](*arguments, stream=...). `CACHED_LAUNCH = False` uses Triton's launch for kernels that no
recording repeats (replay.py).
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeAlias

from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from deltazoo.backends.triton.runtime import precompile
from deltazoo.backends.triton.runtime.options import options_of
from deltazoo.backends.triton.support import Options
from deltazoo.backends.update.watch import RunRecord, is_watched, record_run

CACHED_LAUNCH = True
Operand: TypeAlias = Tensor | TensorDescriptor | None
_OPTIONS = Options()
_compiled: dict[Hashable, Any] = {}
_ALIGNMENT = 16  # bytes; Triton compiles another kernel for other pointers


def launcher(
    kernel: Any,
    tensors: Mapping[str, Operand | tuple[Operand, ...]],
    traits: Mapping[str, Hashable],
    options: Options = _OPTIONS,
) -> Callable[[int, Mapping[str, int | float]], None]:
    """Prepare launches of a Triton kernel on the current stream.

    The kernel's parameters are tensors, tensor descriptors or NamedTuples of tensors; numbers (none specialised); and
    compile-time traits, in this order. Each receives the value of its name; names that are no parameter are ignored.
    The compiled kernel is cached by everything that it depends on: traits, dtypes and alignment of the tensors, and the
    device. It gets bare pointers. Triton's debugging knobs take effect when a kernel first runs. While `precompile`
    traces an operator, kernels are compiled, and not launched.

    Returns: a function of the number of programs and the kernel's numbers by name.
    """
    given: list[Operand | tuple[Operand, ...]] = []
    pointers: list[Any] = []
    numbered: list[str] = []
    constants: list[Hashable] = []
    layouts: list[Hashable] = []
    for name in kernel.arg_names:
        if name in tensors:
            x = tensors[name]
            given.append(x)
            if isinstance(x, tuple):
                pointers.append(tuple(_addresses(x, layouts)))
            else:
                pointers += _addresses((x,), layouts)
        elif name in traits:
            constants.append(traits[name])
        else:
            numbered.append(name)
    first = given[0][0] if isinstance(given[0], tuple) else given[0]
    assert isinstance(first, Tensor)
    traced_device = precompile.tracing.device
    device = first.get_device() if traced_device is None else traced_device.index
    options = options_of(kernel, constants, layouts, options, device)
    warps, stages, registers, overlap = options
    cache_key = (kernel.fn, *options, *constants, *layouts, device)
    compiled = _compiled.get(cache_key) if CACHED_LAUNCH else None
    recorder = precompile.tracing.recorder
    stream = None if compiled is None or traced_device is not None else current_stream(device)

    def launch(programs: int, numbers: Mapping[str, int | float]) -> None:
        nonlocal compiled, stream
        if programs == 0:
            return
        values = [numbers[name] for name in numbered]
        if recorder is not None:
            record = RunRecord("triton", kernel.__name__, programs, warps)
            recorder.launch(compiled, given, (*values, *constants), record)
            return
        if traced_device is None and is_watched():
            record_run(RunRecord("triton", kernel.__name__, programs, warps))
        if compiled is not None:
            if traced_device is None:
                compiled[(programs, 1, 1)](*pointers, *values, *constants, stream=stream)
            return
        arguments = (*given, *values, *constants)
        limits = {"num_warps": warps, "num_stages": stages} | ({} if registers is None else {"maxnreg": registers})
        if overlap:
            limits["launch_pdl"] = True
        if traced_device is not None:
            warm_up = lambda: kernel.warmup(*arguments, grid=(programs,), **limits)  # noqa: E731
            precompile.compile_kernel(cache_key, kernel, warm_up)
            return
        precompile.await_kernel(cache_key)
        handle = kernel[(programs,)](*arguments, **limits)
        # the interpreter returns no handle; numbers beyond 32 bits are compiled as int64
        if CACHED_LAUNCH and handle is not None and all(abs(x) < 2**31 for x in values):
            compiled = _compiled[cache_key] = handle
            stream = current_stream(device)

    return launch


def group(kernel: Any, tensors: Mapping[str, Any], traits: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return a kernel's parameters `gmem` and `traits`. Each field receives the value of its name."""
    pointers = kernel.Pointers._make([tensors[name] for name in kernel.Pointers._fields])
    return pointers, kernel.Traits._make([traits[name] for name in kernel.Traits._fields])


def _addresses(operands: tuple[Operand, ...], layouts: list[Hashable]) -> list[Any]:
    """Return what a compiled kernel gets for operands, and append what its code depends on to `layouts`."""
    addresses: list[Any] = []
    for x in operands:
        if isinstance(x, Tensor):
            pointer = x.data_ptr()
            addresses.append(pointer)
            layouts += (x.dtype, pointer % _ALIGNMENT == 0)
        else:
            addresses.append(x)
            layouts.append(None if x is None else (x.base.dtype, *x.block_shape))
    return addresses


def current_stream(device: int) -> int:
    """Return the handle of the current stream of a device."""
    return int(driver.active.get_current_stream(device))


def is_hooked() -> bool:
    """Whether a hook of Triton observes launches."""
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return any(getattr(hook, "calls", hook) for hook in hooks)
