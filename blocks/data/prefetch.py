"""Batches that a thread prepares while the device computes."""

import queue
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from deltazoo.backends.update.check import check_integer
from deltazoo.blocks.data.loader import Batch, Loader


class Prefetch:
    """Iterate over a loader's batches, of which a thread prepares the next ones. `close` ends the thread.

    Args:
        depth: number of prepared batches.
        pin: copy batches to page-locked memory, from which `tensor.to(device, non_blocking=True)` does not wait.
    """

    def __init__(self, loader: Loader, depth: int = 2, pin: bool = False) -> None:
        check_integer("depth", depth)
        self._state = loader.state()
        self._pin = pin
        self._ready: queue.Queue[tuple[Batch, dict[str, Any]] | BaseException] = queue.Queue(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._prepare, args=(loader,), name="prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        """Return itself."""
        return self

    def __next__(self) -> Batch:
        """Return the next batch. Raises: StopIteration, and what the loader raised in the thread."""
        if self._closed.is_set():
            raise StopIteration
        item = self._ready.get()
        if isinstance(item, BaseException):
            self.close()
            raise item
        batch, self._state = item
        return batch

    def state(self) -> dict[str, Any]:
        """Return the state of the loader after the last batch that was returned, not the last prepared one."""
        return self._state

    def close(self) -> None:
        """End the thread; the loader is then some batches ahead of `state()`."""
        self._closed.set()
        with suppress(queue.Empty):
            while True:
                self._ready.get_nowait()
        self._thread.join()

    def _prepare(self, loader: Loader) -> None:
        item: tuple[Batch, dict[str, Any]] | BaseException
        while not self._closed.is_set():
            try:
                batch = next(loader)
                if self._pin:
                    batch = Batch(
                        batch.tokens.pin_memory(),
                        batch.targets.pin_memory(),
                        batch.cu_seqlens.pin_memory(),
                        batch.counted,
                    )
                item = batch, loader.state()
            except BaseException as error:  # raised again where the batch is wanted
                item = error
            self._ready.put(item)
            if isinstance(item, BaseException):
                return
