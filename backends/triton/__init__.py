"""The triton backend: chunked kernels for NVIDIA GPUs, forward, backward and decode."""

from deltazoo.backends.triton.backend import TritonBackend
from deltazoo.backends.triton.config import Launch, LaunchConfig

__all__ = ["Launch", "LaunchConfig", "TritonBackend"]
