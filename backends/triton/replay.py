"""Repeat what an operator's body does without its Python code, which takes longer than short inputs compute.

A body allocates the same buffers and launches the same kernels whenever dtypes, sizes and traits of its arguments are
equal. The first such call runs it. The second runs it on meta tensors and records buffers, launches and other torch
operations; this and later calls only allocate the buffers and launch. Buffers that only kernels use are parts of one
allocation, which is freed at the end of the call. A body that does something else runs in every call. With `REPLAY =
False` every body does.
"""

import functools
import logging
from collections.abc import Callable, Hashable, Sequence
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.devices import tf32_allowed
from deltazoo.backends.torch_ext.recording import NotRepeatableError, Operation, RecordingMode
from deltazoo.backends.triton import precompile
from deltazoo.backends.triton.operands import ready
from deltazoo.backends.watch import RunRecord, is_watched, record_run

REPLAY = True
_ALIGNMENT = 512  # bytes; that of torch's allocator
_log = logging.getLogger(__name__)

Body = Callable[..., Sequence[Tensor]]


class _Source(NamedTuple):
    """A launch's argument: a buffer, a view of it, or a tensor descriptor.

    Args: fields: the attributes of the descriptor except `base`.
    """

    buffer: int
    offset: int = 0
    descriptor: type | None = None
    fields: dict[str, Any] | None = None

    def find(self, tensors: list[Tensor | None], pointers: list[Any]) -> Any:
        """Return the argument in a call with these buffers."""
        if self.descriptor is None:
            return pointers[self.buffer] + self.offset
        descriptor: Any = object.__new__(self.descriptor)  # without the checks, which the recorded one has passed
        vars(descriptor).update(self.fields or {}, base=tensors[self.buffer])
        return descriptor


class _Launch(NamedTuple):
    """A launch of a compiled kernel.

    Args:
        select: picks the pointers of the tensors. values: the kernel's numbers and constants.
        record: for `watch`.
    """

    compiled: Any
    select: Callable[[list[Any]], tuple[Any, ...]]
    values: tuple[Any, ...]
    record: RunRecord

    def run(self, pointers: list[Any], stream: int, hooked: bool) -> None:
        """Launch on a stream. hooked: a hook of Triton observes launches."""
        compiled, programs = self.compiled, self.record.programs
        if hooked:
            compiled[(programs, 1, 1)](*self.select(pointers), *self.values, stream=stream)
            return
        compiled.run(
            programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
            *self.select(pointers), *self.values,
        )  # fmt: skip


class Recorder(RecordingMode):
    """Also records launches: `launcher` calls `launch` while this is `precompile.tracing.recorder`."""

    def launch(self, compiled: Any, tensors: Sequence[Any], values: tuple[Any, ...], record: RunRecord) -> None:
        """Record a launch. Raises: NotRepeatableError if the kernel is not compiled."""
        if compiled is None:
            raise NotRepeatableError(f"{record.name} is not compiled")
        self.steps.append((compiled, [self._source(x) for x in tensors], values, record))

    def _source(self, x: Any) -> _Source | None:
        if x is None:
            return None
        if not isinstance(x, Tensor):
            fields = {name: value for name, value in vars(x).items() if name != "base"}
            return _Source(self.number(x.base), 0, type(x), fields)
        source = _Source(*self.locate(x))
        if source.offset % 16:
            raise NotRepeatableError("a view does not start at a multiple of 16 bytes")
        return source


class Program:
    """The allocations, launches and torch operations of a body, for arguments of given dtypes and sizes.

    Args:
        recorder: it has recorded one run of the body. arguments: how many tensors the body takes.
        result: what the body returned.
    """

    def __init__(self, recorder: Recorder, arguments: int, result: Sequence[Tensor]) -> None:
        from deltazoo.backends.triton import launcher

        self._type: Callable[..., Any] = type(result)
        self._result = [recorder.number(x) for x in result]
        standalone = recorder.standalone.union(self._result)
        self._allocated: list[Any] = []  # sizes and dtype, or the offset in the shared allocation
        self._bytes = 0
        for number, x in enumerate(recorder.buffers[arguments:], arguments):
            if number in standalone:
                self._allocated.append((x.shape, x.dtype))
            else:
                self._allocated.append(self._bytes)
                self._bytes += -(-x.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._views: list[_Source] = []  # and descriptors
        buffers = len(recorder.buffers)
        self._steps = [x if isinstance(x, Operation) else self._launch(buffers, *x) for x in recorder.steps]
        self._current_stream, self._is_hooked = launcher.current_stream, launcher.is_hooked

    def _launch(self, buffers: int, compiled: Any, sources: Sequence[_Source | None], *others: Any) -> _Launch:
        places = []
        for source in sources:
            if source is None:
                places.append(-1)
            elif source == _Source(source.buffer):
                places.append(source.buffer)
            else:
                places.append(buffers + len(self._views))
                self._views.append(source)
        return _Launch(compiled, _selector(places), *others)

    def __call__(self, tensors: list[Any]) -> Any:
        """Allocate and launch on the current stream. Args: the arguments that are tensors."""
        device = tensors[0].device
        pointers: list[Any] = [x.data_ptr() for x in tensors]
        shared = torch.empty(self._bytes, dtype=torch.uint8, device=device)
        start = shared.data_ptr()
        for allocation in self._allocated:
            if isinstance(allocation, int):
                tensors.append(None)
                pointers.append(start + allocation)
            else:
                x = torch.empty(allocation[0], dtype=allocation[1], device=device)
                tensors.append(x)
                pointers.append(x.data_ptr())
        pointers += [source.find(tensors, pointers) for source in self._views]
        pointers.append(None)
        stream = self._current_stream(device.index)
        watched, hooked = is_watched(), self._is_hooked()
        for step in self._steps:
            if isinstance(step, Operation):
                step.run(tensors)
                continue
            if watched:
                record_run(step.record)
            step.run(pointers, stream, hooked)
        return self._type(tensors[number] for number in self._result)


def _selector(places: list[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """Return a function that picks the elements at these places of a list. `itemgetter` of one place picks no tuple."""
    return itemgetter(*places) if len(places) > 1 else lambda pointers: tuple(pointers[i] for i in places)


class _Entry:
    """The calls of a body with equal dtypes, sizes and traits. program: False if the body cannot be repeated."""

    has_run = False
    program: Program | Literal[False] | None = None


@functools.lru_cache(maxsize=1024)
def _entry(body: Body, *key: Hashable) -> _Entry:
    return _Entry()


def clear() -> None:
    """Forget all recordings."""
    _entry.cache_clear()


def replayed(body: Body) -> Body:
    """Decorate the body of an operator, whose first argument is a tensor, so that calls on a GPU repeat a recording.

    The body gets contiguous tensors that start at multiples of 16 bytes (`ready`). Its float32 products may depend on
    whether torch allows TF32 only if the first argument is float32.
    """

    @functools.wraps(body)
    def call(*arguments: Any) -> Any:
        inputs: list[Any] = []
        tensors: list[Tensor] = []
        key: list[Hashable] = []
        for x in arguments:
            if isinstance(x, Tensor):
                x = ready(x)
                tensors.append(x)
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
            return entry.program(tensors)

    return call


def _runs_on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _record(body: Body, arguments: Sequence[Any]) -> Program | Literal[False]:
    """Run a body on meta tensors. Returns: False if it cannot be repeated."""
    inputs = [torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x for x in arguments]
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    recorder = Recorder(tensors)
    tracing = precompile.tracing
    tracing.device, tracing.recorder = arguments[0].device, recorder
    try:
        with recorder:
            result = body(*inputs)
        return Program(recorder, len(tensors), result)
    except Exception:  # every call runs the body, which raises its own errors
        _log.debug("%s is not repeated", body, exc_info=True)
        return False
    finally:
        tracing.device = tracing.recorder = None
