"""The triton backend: chunked kernels for NVIDIA GPUs, forward, backward and decode."""

from deltazoo.backends.triton.backend import TritonBackend
from deltazoo.backends.triton.config import Launch, LaunchConfig
from deltazoo.backends.triton.runtime.table import use_table

__all__ = ["Launch", "LaunchConfig", "TritonBackend", "use_table"]
