"""Chunk-parallel backend in plain PyTorch, written for torch.compile."""

from deltazoo.backends.compile.backend import CompileBackend

__all__ = ["CompileBackend"]
