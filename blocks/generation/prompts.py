"""Replay the prefill of prompt shapes that recur in a CUDA graph: eagerly the host takes longer than the device.

On an H100 the eager prefill of 2,048 tokens with 1.3 billion parameters keeps the host busy for 40 ms.

B batch, T prompt length
"""

import functools
import logging
from collections.abc import Callable

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.cuda_graph import Call, capture

_MOST_GRAPHS = 4
_MOST_TOKENS = 8192  # of a batch: with more the device takes longer than the host, and the graph much memory
_log = logging.getLogger("deltazoo")


class PromptGraphs:
    """The CUDA graphs of the last prompt shapes that a decoder has read at least twice.

    The first prompt of a shape is read eagerly, the second one is captured. A model whose prefill cannot be captured,
    for example because it synchronises, reads all prompts eagerly.
    """

    def __init__(self) -> None:
        self.bytes = 0  # of device memory
        self._graphs: dict[object, tuple[Tensor, Call]] = {}
        self._read_once: set[object] = set()
        self._capturable = True
        self._pool = torch.cuda.graph_pool_handle()

    def read(self, read: Callable[[Tensor], None], tokens_BT: Tensor) -> None:
        """Do what `read` does, which reads tokens of this shape into tensors that keep their addresses."""
        key = tokens_BT.shape, tokens_BT.dtype, tokens_BT.device
        if key in self._read_once and key not in self._graphs and tokens_BT.numel() <= _MOST_TOKENS:
            self._capture(key, read, tokens_BT)
        if key not in self._graphs:
            read(tokens_BT)
            self._read_once.add(key)
            return
        buffer_BT, replay = self._graphs[key] = self._graphs.pop(key)  # now the last one
        buffer_BT.copy_(tokens_BT)
        replay()

    def _capture(self, key: object, read: Callable[[Tensor], None], tokens_BT: Tensor) -> None:
        if not self._capturable:
            return
        while len(self._graphs) >= _MOST_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        buffer_BT, before = tokens_BT.clone(), torch.cuda.memory_reserved(tokens_BT.device)
        try:
            replay = capture(functools.partial(read, buffer_BT), tokens_BT.device, self._pool)
        except RuntimeError as error:
            _log.info("the prefill of this model is not captured: %s", error)
            self._capturable = False
            return
        self._graphs[key] = buffer_BT, replay
        self.bytes += max(torch.cuda.memory_reserved(tokens_BT.device) - before, 0)
