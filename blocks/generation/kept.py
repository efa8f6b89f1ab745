"""Decoders that are kept for later calls: captured or compiled once per model, batch size and capacity.

A call borrows a decoder and returns it, so that calls at the same time never share one. The decoders of a model are
freed with it, or when the model has changed (see `fingerprint`), or when the kept ones take too much memory.
"""

import atexit
import functools
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.utils._pytree import tree_leaves

from deltazoo.backends.torch_ext.cuda_graph import eager_if_refused
from deltazoo.backends.torch_ext.devices import cxx_compiler
from deltazoo.backends.torch_ext.modes import dispatch_mode_is_active
from deltazoo.blocks.generation.decoder import Decoder
from deltazoo.blocks.generation.fingerprint import Fingerprint, fingerprint, runs_python_code
from deltazoo.blocks.generation.prompts import PromptGraphs
from deltazoo.blocks.model.interface import TokenModel
from deltazoo.mixers.core.state import nbytes

# Tokens per row from which compiling the step takes less time than it saves, by device.
# CPU: compiling the step of `gated-deltanet-h1-small` takes as long as decoding 1,500 tokens eagerly if Inductor's
# cache holds its kernels, and 3,500 otherwise.
# CUDA: never. A captured step of `gated-deltanet-1.3b` takes 1.03 ms with one row and 2.35 with 32, and 1.39 and 3.19
# if its layers are compiled before, which takes 22 s (H200, other work beside it).
COMPILE_FROM = {"cpu": 2048}
KEPT_SHARE = 1 / 8  # of the memory of a CUDA device that kept decoders may take
KEPT_BYTES = 2**30  # on other devices

_log = logging.getLogger("deltazoo")
_clock = itertools.count()
_lock = threading.RLock()  # of `_kept` and its lists


@dataclass(eq=False)
class Kept:
    """A decoder that no call uses, or that one call has borrowed.

    Args:
        fingerprint: of the model it was made for.
        key: batch size, and the shapes of the state of no row.
        bytes: the memory it took when it was made.
        compile_s: seconds that its compilation took, 0 if an earlier call compiled it; None: it is not compiled.
        sizes: batch sizes and capacities that have its key.
        decoded: tokens per row that it has decoded.
        last_use: increases with each use.
        used: on CUDA an event after its last use.
    """

    decoder: Decoder
    fingerprint: Fingerprint
    key: tuple[object, ...]
    bytes: int
    compile_s: float | None = None
    sizes: set[tuple[int, int]] = field(default_factory=set)
    decoded: int = 0
    last_use: int = 0
    used: torch.cuda.Event | None = None

    @property
    def total_bytes(self) -> int:
        """With the graphs of prompts and of drafts, which are captured later."""
        later = [*self.decoder.speculators.values(), *([] if self.decoder.prompts is None else [self.decoder.prompts])]
        return self.bytes + sum(one.bytes for one in later)


_kept: weakref.WeakKeyDictionary[TokenModel, list[Kept]] = weakref.WeakKeyDictionary()


def compiles(model: TokenModel, max_tokens: int, batch: int = 1) -> bool:
    """Whether a call compiles the decoding step, unless the caller decides.

    It does if the tokens per row of this call, and of earlier ones with the same decoder, repay the time; see
    `COMPILE_FROM`. On a CPU it needs a C++ compiler. A step that runs Python code of hooks is never compiled.
    """
    return not runs_python_code(model) and _repays(model, max_tokens, batch)


def _repays(model: TokenModel, max_tokens: int, batch: int) -> bool:
    device, rows = model.device.type, _rounded_batch(batch)
    if device not in COMPILE_FROM or (device == "cpu" and cxx_compiler() is None):
        return False
    earlier = (kept.decoded for kept in _kept.get(model, []) if kept.decoder.batch == rows)
    return max_tokens + max(earlier, default=0) >= COMPILE_FROM[device]


@contextmanager
def borrowed_decoder(
    model: TokenModel, batch: int, capacity: int, max_tokens: int, compile: bool | None = None
) -> Iterator[Kept]:
    """Lend a decoder for prompts of `batch` rows: a kept one, or a new one that is kept afterwards.

    On CUDA its step is captured in a CUDA graph. A step that runs Python code of hooks, or under a dispatch mode, is
    eager, and so is a step on a CPU that is not compiled; such decoders are not kept.

    Args:
        capacity: number of tokens per row, including the prompt.
        max_tokens: limit of new tokens per row.
        compile: compile the step; None: as `compiles` says, or if a kept decoder is compiled.
    """
    kept = _borrow(model, batch, capacity, max_tokens, compile)
    decoder = kept.decoder
    before = decoder.steps
    if kept.used is not None:
        torch.cuda.current_stream(decoder.tokens.device).wait_event(kept.used)
    try:
        yield kept
    finally:
        kept.decoded += decoder.steps - before
        if kept.key:
            _return(model, kept)


def _borrow(model: TokenModel, batch: int, capacity: int, max_tokens: int, compile: bool | None) -> Kept:
    on_cuda, eager = model.device.type == "cuda", dispatch_mode_is_active() or runs_python_code(model)
    compiles_step = compile if compile is not None else not eager and _repays(model, max_tokens, batch)
    unkept = functools.partial(Kept, fingerprint=Fingerprint([], []), key=(), bytes=0)
    if not _kept.get(model) and (eager or not (compiles_step or on_cuda)):
        return unkept(Decoder(model, batch, capacity, compiles_step))
    with _lock:
        kept, now = _kept.setdefault(model, []), fingerprint(model)
        kept[:] = [one for one in kept if one.fingerprint.matches(now)]
        if eager:
            return unkept(Decoder(model, batch, capacity, compiles_step))
        rows, slots = _rounded_batch(batch), _rounded_capacity(capacity)
        key: tuple[object, ...] = next((one.key for one in kept if (rows, slots) in one.sizes), ())
        if not key:
            with torch.no_grad():
                key = rows, *(x.shape for x in tree_leaves(model.init_state(0, slots)))
        usable = [one for one in kept if one.key == key]
        compiled = [one for one in usable if one.compile_s is not None]
        captured = [one for one in usable if one.compile_s is None]
        for one in [*(() if compile is False else compiled), *(() if compiles_step else captured)][:1]:
            kept.remove(one)
            one.decoder.capacity = slots  # of which the state has equal shapes
            one.sizes.add((rows, slots))
            return one
        if not compiles_step and not on_cuda:
            return unkept(Decoder(model, batch, capacity))
        kept[:] = [one for one in kept if one not in captured]  # the new decoder replaces them
    return _make(model, rows, slots, compiles_step, key)


def _make(model: TokenModel, batch: int, capacity: int, compile: bool, key: tuple[object, ...]) -> Kept:
    on_cuda = model.device.type == "cuda"
    if compile:
        _log.info("compiling the decoding step of %d rows", batch)
    _free_at_exit()
    start = time.perf_counter()
    before = torch.cuda.memory_reserved(model.device) if on_cuda else 0
    decoder = Decoder(model, batch, capacity, compile)
    if on_cuda:
        _capture(decoder)
    elif compile:
        decoder.warm_up()
    decoder.refer_weakly()
    taken = torch.cuda.memory_reserved(model.device) - before if on_cuda else 0
    size = max(taken, nbytes(decoder.state) + nbytes(decoder.logits))
    compile_s = time.perf_counter() - start if compile else None
    return Kept(decoder, fingerprint(model), key, size, compile_s, {(batch, capacity)})


@functools.cache
def _free_at_exit() -> None:
    """Free CUDA graphs before the interpreter ends, because later the CUDA context may not exist any more."""
    atexit.register(_kept.clear)


def _capture(decoder: Decoder) -> None:
    """Capture the step, or leave it eager if a module synchronises or does something else that no graph can contain."""
    with eager_if_refused("the decoding step"):
        decoder.capture()
        decoder.prompts = PromptGraphs()


def _return(model: TokenModel, kept: Kept) -> None:
    """Keep a decoder, and free those whose last use is the longest ago if all together take too much memory."""
    device = kept.decoder.tokens.device
    if device.type == "cuda":
        kept.used = torch.cuda.Event()
        kept.used.record(torch.cuda.current_stream(device))
    kept.compile_s = None if kept.compile_s is None else 0.0
    kept.last_use = next(_clock)
    limit = KEPT_BYTES
    if device.type == "cuda":
        limit = int(KEPT_SHARE * torch.cuda.get_device_properties(device).total_memory)
    with _lock:
        _kept.setdefault(model, []).append(kept)
        here = [(one, pool) for pool in _kept.values() for one in pool if one.decoder.tokens.device == device]
        total = sum(one.total_bytes for one, _ in here)
        for one, pool in sorted(here, key=lambda pair: pair[0].last_use):
            if total <= limit:
                break
            pool.remove(one)
            total -= one.total_bytes


def _rounded_batch(batch: int) -> int:
    """Round up to a power of two."""
    return 1 << (batch - 1).bit_length()


def _rounded_capacity(capacity: int) -> int:
    """Round up to a multiple of an eighth of the power of two below, at least of 256: at most 12.5 % above 2,048."""
    step = max(256, 1 << max(capacity.bit_length() - 4, 0))
    return -(-capacity // step) * step
