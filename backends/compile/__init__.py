"""The compile backend: the chunk-parallel update in plain torch, written for torch.compile."""

from deltazoo.backends.compile.backend import CompileBackend

__all__ = ["CompileBackend"]
