"""Run code as on a GPU that need not be there: kernels are recorded by `watch`, and not launched.

On meta tensors every operator runs its own body, which chooses and prepares the launches, so that the record equals
that of a run on the device. Nothing is computed; values are never read.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from deltazoo.backends.torch_ext.devices import DeviceSpec, simulated_device
from deltazoo.backends.triton.runtime.precompile import tracing
from deltazoo.backends.update.watch import RunRecord, record_run


class _Listing:
    """Receives the launches in place of the GPU."""

    @staticmethod
    def launch(compiled: Any, tensors: Sequence[Any], values: tuple[Any, ...], record: RunRecord) -> None:
        record_run(record)


@contextmanager
def simulated_launches(device: DeviceSpec) -> Iterator[None]:
    """Record in this thread the launches of operators on meta tensors, as those on `device`."""
    before = tracing.device, tracing.recorder
    tracing.device, tracing.recorder = torch.device("cuda", 0), _Listing
    try:
        with simulated_device(device):
            yield
    finally:
        tracing.device, tracing.recorder = before
