"""Warps and pipeline stages of the kernels beside the update: those of a launch table, else those of the launch.

The kernels of the update and of its decode step have tables of their own (table.py). A kernel's class is its name, the
dtypes of its tensors and its compile-time traits, on which its compiled code depends.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from deltazoo.backends.triton import problem as problems
from deltazoo.backends.triton.runtime.records import OperatorKey
from deltazoo.backends.triton.runtime.table import operator_records_of
from deltazoo.backends.triton.support import Options

_PACKAGE = "deltazoo.backends.triton."
# Portable Triton kernels whose code holds for any number of warps and stages.
FAMILIES = (
    "attention", "conv", "fast_weights", "gemv", "glu", "least_squares", "levels", "loss", "momentum", "norm", "rotary",
    "shared_keys",
)  # fmt: skip

_forced: dict[OperatorKey, Options] = {}
_seen: list[dict[OperatorKey, Options]] = []  # innermost `launches_seen` last


def options_of(
    kernel: Any, constants: Sequence[Any], layouts: Sequence[Any], options: Options, device: int | None
) -> Options:
    """Return the options of a launch, which is given with its own.

    Args: constants, layouts: of the launch, as `launcher` lists them. device: the index; None or negative: no GPU.
    """
    spec = None if device is None or device < 0 else problems.device_spec(device)
    records = {} if spec is None else operator_records_of(spec.name, spec.triton)
    if not (records or _forced or _seen) or not is_tunable(kernel):
        return options
    key = _key(kernel, tuple(constants), tuple(layouts))
    for seen in _seen:
        seen.setdefault(key, options)
    if key in _forced:
        return _forced[key]
    record = records.get(key)
    return options if record is None else options._replace(warps=record.warps, stages=record.stages)


def is_tunable(kernel: Any) -> bool:
    """Whether a kernel's warps and stages can be chosen freely."""
    module: str = kernel.fn.__module__
    return module.startswith(_PACKAGE) and module.removeprefix(_PACKAGE).partition(".")[0] in FAMILIES


@contextmanager
def launches_seen() -> Iterator[dict[OperatorKey, Options]]:
    """Collect the classes of the tunable launches inside the block, with the options of their launches."""
    seen: dict[OperatorKey, Options] = {}
    _seen.append(seen)
    try:
        yield seen
    finally:
        _seen[:] = [other for other in _seen if other is not seen]


@contextmanager
def forced(key: OperatorKey, options: Options) -> Iterator[None]:
    """Launch a class of kernels with these options inside the block."""
    _forced[key] = options
    try:
        yield
    finally:
        del _forced[key]


@functools.lru_cache(maxsize=4096)
def _key(kernel: Any, constants: tuple[Any, ...], layouts: tuple[Any, ...]) -> OperatorKey:
    names = [str(x[0]).removeprefix("torch.") if x else "none" for x in _pairs(layouts)]
    return OperatorKey(
        kernel=kernel.__name__, dtypes=",".join(dict.fromkeys(names)), traits=" ".join(map(_trait, constants))
    )


def _pairs(layouts: tuple[Any, ...]) -> Iterator[tuple[Any, ...] | None]:
    """Yield the dtype of each tensor in a tuple: `launcher` lists it before the alignment of the tensor."""
    for x in layouts:
        if x is None or isinstance(x, tuple):
            yield x
        elif not isinstance(x, bool):
            yield (x,)


def _trait(constant: Any) -> str:
    if hasattr(constant, "_asdict"):
        return " ".join(f"{name}={value}" for name, value in constant._asdict().items())
    return str(constant)
