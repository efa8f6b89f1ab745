"""Begin what a first compiled call on a GPU needs: the context of the GPU, the compiler's modules, and their digests.

Uses internals of torch 2.11 to 2.13: the functions that compute the keys of Inductor's caches, and keep them.
"""

import importlib
import threading
from contextlib import suppress
from typing import Any

import torch


def start_compiler(device: torch.device) -> None:
    """Import torch.compile's modules while a thread creates the context of a GPU, and computes the digests.

    Before torch's modules are imported, the thread reads Triton's library of 440 MB for its digest, which Triton keeps.
    The thread outlasts the call. It imports nothing of torch, because imports in two threads may see modules half done.
    """
    if device.type != "cuda":
        return
    imported = threading.Event()
    cache: Any = None
    with suppress(ImportError):
        cache = importlib.import_module("triton.runtime.cache")

    def work() -> None:
        with suppress(Exception):  # the caller's first use of the GPU or of the compiler raises the error again
            torch.zeros(1, device=device)
            cache.triton_key()
            imported.wait()
            codecache.torch_key()
            triton.triton_hash_with_backend()

    thread = threading.Thread(target=work, name="deltazoo compiler start")
    thread.start()
    try:
        importlib.import_module("torch._inductor.compile_fx")
        codecache = importlib.import_module("torch._inductor.codecache")
        triton = importlib.import_module("torch.utils._triton")
        importlib.import_module("torch._inductor.runtime.triton_compat")
    finally:
        imported.set()
