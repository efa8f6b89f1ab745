"""Replay the allocations and launches of an operator's body, without running its Python code.

For short inputs that code takes longer than the kernels. Two calls with equal dtypes and sizes of the tensors, and
equal other arguments, allocate the same buffers and launch the same kernels. The first call runs the body, which
compiles the kernels. The second runs it on meta tensors and records its allocations, its launches and the torch
operations that write to tensors. The second and all later calls replay this recording. Scratch buffers, which only
kernels access, share one allocation, which is freed at the end of the call. A body that does anything else cannot be
replayed and runs in every call. `REPLAY = False` disables replay.

A launch calls `CompiledKernel.run`, which is private to Triton. Measured on an H100 with the eager gated delta rule,
1 x 2048 tokens with 16/32 heads, forward and backward: 2.13 -> 1.24 ms.
"""

import functools
import logging
from collections.abc import Callable, Hashable, Sequence
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.devices import tf32_allowed
from deltazoo.backends.torch_ext.recording import NotReplayableError, Operation, RecordingMode
from deltazoo.backends.triton.operands import ready
from deltazoo.backends.triton.runtime import precompile, table
from deltazoo.backends.update.watch import RunRecord, is_watched, record_run

REPLAY = True
_ALIGNMENT = 512  # bytes, as in the caching allocator of torch
_log = logging.getLogger(__name__)

Body = Callable[..., Sequence[Tensor]]


class _Source(NamedTuple):
    """An argument of a launch: a buffer, a view of a buffer, or a tensor descriptor of a buffer.

    Args:
        buffer: the number of the buffer.
        offset: of the view in the buffer, in bytes.
        describe: makes the tensor descriptor; None for a buffer or a view.
    """

    buffer: int
    offset: int = 0
    describe: Callable[[Tensor], Any] | None = None


# The sources of a kernel's parameters: of one tensor, or of a NamedTuple of tensors.
_Sources = list[_Source | list[_Source | None] | None]


class _Launch(NamedTuple):
    """A launch of a compiled kernel.

    Args:
        compiled: the handle of the kernel.
        run: its function that launches. function, metadata: arguments of `run`.
        select: picks the kernel's tensor arguments, or tuples of them, from the arguments of all launches.
        values: the kernel's numbers and constants.
        record: what `watch` records.
        programs: the size of the grid.
    """

    compiled: Any
    run: Callable[..., None]
    function: Any
    metadata: Any
    select: Callable[[list[Any]], tuple[Any, ...]]
    values: tuple[Any, ...]
    record: RunRecord
    programs: int


class Recorder(RecordingMode):
    """A recording mode that also records launches.

    While it is `precompile.tracing.recorder`, `launcher` calls `launch` instead of launching.
    """

    def launch(self, compiled: Any, tensors: Sequence[Any], values: tuple[Any, ...], record: RunRecord) -> None:
        """Record a launch. Raises: NotReplayableError if the kernel is not compiled."""
        if compiled is None:
            raise NotReplayableError(f"{record.name} is not compiled")
        sources: _Sources = [[*map(self._source, x)] if isinstance(x, tuple) else self._source(x) for x in tensors]
        self.steps.append((compiled, sources, values, record))

    def _source(self, x: Any) -> _Source | None:
        if x is None:
            return None
        if not isinstance(x, Tensor):
            fields = {name: value for name, value in vars(x).items() if name != "base"}
            return _Source(self.number(x.base), 0, functools.partial(_descriptor, type(x), fields))
        source = _Source(*self.locate(x))
        if source.offset % 16:
            raise NotReplayableError("a view does not start at a multiple of 16 bytes")
        return source


def _descriptor(kind: type, fields: dict[str, Any], base: Tensor) -> Any:
    """Make a tensor descriptor without the checks of its class, which the recorded descriptor has passed."""
    descriptor: Any = object.__new__(kind)
    vars(descriptor).update(fields, base=base)
    return descriptor


class Program:
    """The allocations, launches and torch operations of a body, for arguments of given dtypes and sizes.

    Args:
        recorder: the recording of one run of the body.
        arguments: the number of tensors among the arguments of the body.
        result: the tensors that the body returned.
    """

    def __init__(self, recorder: Recorder, arguments: int, result: Sequence[Tensor]) -> None:
        from deltazoo.backends.triton.runtime import launcher

        self._type: Callable[..., Any] = type(result)
        returned = [recorder.number(x) for x in result]
        # The tensors of a call: its arguments, the allocations that must be tensors, the shared allocation.
        self._allocated: list[tuple[Any, ...]] = []  # sizes, strides and dtype of all but the arguments
        standalone = [*range(arguments), *sorted(x for x in recorder.standalone if x >= arguments)]
        self._places = {number: (tensor, 0) for tensor, number in enumerate(standalone)}
        offset = 0
        for number, x in enumerate(recorder.buffers[arguments:], arguments):
            if number in self._places:
                self._allocated.append((tuple(x.shape), x.stride(), x.dtype))
            else:
                self._places[number] = (len(standalone), offset)
                offset += -(-x.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._allocated.append(((offset,), (1,), torch.uint8))
        self._result = _selector([self._places[number][0] for number in returned])
        # The arguments of all launches are one list: the addresses of the tensors, then views and descriptors, None.
        self._tensors = len(standalone) + 1
        self._views: list[tuple[int, int, Callable[[Tensor], Any] | None]] = []  # tensor, offset in bytes, describe
        self._steps = [
            x.renumbered(lambda number: self._places[number][0]) if isinstance(x, Operation) else self._launch(*x)
            for x in recorder.steps
        ]
        self._current_stream, self._is_hooked = launcher.current_stream, launcher.is_hooked

    def _launch(self, compiled: Any, sources: _Sources, values: tuple[Any, ...], record: RunRecord) -> _Launch:
        select = _selector([[*map(self._argument, x)] if isinstance(x, list) else self._argument(x) for x in sources])
        return _Launch(
            compiled, compiled.run, compiled.function, compiled.packed_metadata, select, values, record,
            record.programs,
        )  # fmt: skip

    def _argument(self, source: _Source | None) -> int:
        """Return the index of a launch's argument in the list of all arguments."""
        if source is None:
            return -1
        tensor, offset = self._places[source.buffer]
        view = (tensor, offset + source.offset, source.describe)
        if view == (tensor, 0, None):
            return tensor
        if view not in self._views:
            self._views.append(view)
        return self._tensors + self._views.index(view)

    def __call__(self, tensors: list[Tensor], pointers: list[Any]) -> Any:
        """Allocate and launch on the current stream.

        Args:
            tensors: those among the arguments of the body; the call appends the tensors that it allocates.
            pointers: their addresses; the call appends the other arguments of the launches.
        Returns: what the body would return.
        """
        device = tensors[0].device
        for sizes, strides, dtype in self._allocated:
            # empty_strided parses its arguments faster than empty: 1.1 and 2.2 us
            x = torch.empty_strided(sizes, strides, dtype=dtype, device=device)
            tensors.append(x)
            pointers.append(x.data_ptr())
        pointers += [
            pointers[tensor] + offset if describe is None else describe(tensors[tensor])
            for tensor, offset, describe in self._views
        ]
        pointers.append(None)
        stream = self._current_stream(device.index)
        watched, hooked = is_watched(), self._is_hooked()
        for step in self._steps:
            if isinstance(step, Operation):
                step.run(tensors)
                continue
            compiled, run, function, metadata, select, values, record, programs = step
            if watched:
                record_run(record)
            if hooked:
                compiled[(programs, 1, 1)](*select(pointers), *values, stream=stream)
            else:
                run(programs, 1, 1, stream, function, metadata, None, None, None, *select(pointers), *values)
        return self._type(self._result(tensors))


def _selector(indices: Sequence[int | list[int]]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """Return a function from a list to the tuple of its elements at these indices; for a list of indices, a tuple."""
    if len(indices) > 1 and not any(isinstance(x, list) for x in indices):
        return itemgetter(*indices)
    parts = [_selector(x) if isinstance(x, list) else itemgetter(x) for x in indices]
    if len(parts) == 1:  # a tuple of one element costs less than that of a loop
        first = parts[0]
        return lambda x: (first(x),)
    return lambda x: tuple([part(x) for part in parts])


class _Entry:
    """The calls of a body with equal dtypes, sizes and other arguments.

    has_run: whether the body has run, so that its kernels are compiled. program: None before the recording, False if
    the body cannot be replayed.
    """

    has_run = False
    program: Program | Literal[False] | None = None


@functools.lru_cache(maxsize=1024)
def _entry(body: Body, *key: Hashable) -> _Entry:
    return _Entry()


@table.cleared_with_tables
def clear() -> None:
    """Forget all recordings."""
    _entry.cache_clear()


def replayed(body: Body) -> Body:
    """Decorate the body of an operator so that calls on a GPU replay a recording.

    The first argument must be a tensor. The body receives contiguous tensors whose addresses are multiples of 16 bytes
    (`ready`). It may depend on torch's tf32 setting only if the first argument is float32, because only then is the
    setting part of the key.
    """

    @functools.wraps(body)
    def call(*arguments: Any) -> Any:
        inputs: list[Any] = []
        tensors: list[Tensor] = []
        pointers: list[Any] = []
        key: list[Hashable] = []
        for x in arguments:
            if x is not None and isinstance(x, Tensor):  # isinstance takes 4 times as long for None
                x = ready(x)
                tensors.append(x)
                pointers.append(x.data_ptr())
                key += (x.dtype, x.shape)
            else:
                key.append(x)
            inputs.append(x)
        first = tensors[0]
        if not (REPLAY and _runs_on_gpu(first)):
            return body(*inputs)
        entry = _entry(body, first.device, first.dtype == torch.float32 and tf32_allowed(), *key)
        if entry.has_run and entry.program is None:
            entry.program = _record(body, inputs)
        if not entry.program:
            result = body(*inputs)
            entry.has_run = True
            return result
        with torch.cuda.device_of(first):
            return entry.program(tensors, pointers)

    return call


def _runs_on_gpu(x: Tensor) -> bool:  # replaced by tests, which replay on the CPU
    return x.is_cuda


def _record(body: Body, arguments: Sequence[Any]) -> Program | Literal[False]:
    """Record a run of a body on meta tensors. Returns: False if it cannot be replayed."""
    inputs = [torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x for x in arguments]
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    recorder = Recorder(tensors)
    tracing = precompile.tracing
    tracing.device, tracing.recorder = arguments[0].device, recorder
    try:
        with recorder:
            result = body(*inputs)
        return Program(recorder, len(tensors), result)
    except Exception:  # calls then run the body, which raises the error if there is one
        _log.debug("%s is not replayed", body, exc_info=True)
        return False
    finally:
        tracing.device = tracing.recorder = None
