"""The triton backend: chunked kernels for NVIDIA GPUs, forward, backward and decode.

The public names are imported on first use, so that the modules of kernels are imported without torch.
"""

from deltazoo import by_name, lazy_exports

_MODULES = by_name(
    {
        "deltazoo.backends.triton.backend": ["TritonBackend"],
        "deltazoo.backends.triton.config": ["Launch", "LaunchConfig"],
        "deltazoo.backends.triton.runtime.table": ["use_table"],
    }
)
__getattr__, __dir__ = lazy_exports(__name__, lambda: _MODULES)
