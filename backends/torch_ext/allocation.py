"""Recognise the errors of torch and Python for sizes that cannot be allocated."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from deltazoo.backends.io.errors import ConfigError

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_OVERFLOWS = (
    "Storage size calculation overflowed",
    "Overflow when unpacking long",
    "integer multiplication overflow",
    "int too large to convert",
    "invalid buffer size",
)


def allocation_problem(error: BaseException) -> str | None:
    """Return a sentence if the error says that a tensor does not fit in memory, or None for any other error."""
    if isinstance(error, torch.OutOfMemoryError):
        return " ".join(str(error).split(". ")[:2]).rstrip(".")  # "CUDA out of memory. Tried to allocate 20.00 GiB"
    if isinstance(error, MemoryError):
        return "not enough memory"
    if isinstance(error, RuntimeError | TypeError | OverflowError):
        refused = re.search(r"memory: you tried to allocate (\d+) bytes", str(error))
        if refused:
            return f"not enough memory: a tensor needs {format_bytes(int(refused[1]))}"
        if any(phrase in str(error) for phrase in _OVERFLOWS):
            return "not enough memory: the size of a tensor exceeds 64 bits"
    return None


@contextmanager
def sizes_in_memory_errors(**sizes: object) -> Iterator[None]:
    """Raise ConfigError, which names the sizes above 0 to lower, if a tensor in the block does not fit in memory."""
    try:
        yield
    except (RuntimeError, TypeError, MemoryError, OverflowError) as error:
        problem = allocation_problem(error)
        if problem is None:
            raise
        given = ", ".join(f"{name}={size}" for name, size in sizes.items() if size != 0)
        raise ConfigError(f"{problem}; lower one of {given}") from error


def format_bytes(count: int) -> str:
    """Format a number of bytes with a binary unit."""
    power = min(max(count.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    return f"{count / 1024**power:,.1f} {_UNITS[power]}"


def physical_memory() -> int | None:
    """Return the bytes of main memory, or None where the system does not report them."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return None
