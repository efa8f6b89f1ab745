"""The calls of a layer that a benchmark times: forward, forward and backward, and decoding a token.

B batch, T time, D width
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deltazoo.backends.measure.workload import Direction
from deltazoo.backends.torch_ext.cuda_graph import Call, capture_and_keep
from deltazoo.blocks.inspect.peer_layers import fla_layer
from deltazoo.mixers.core.mixer import FIRST_PLACE, Mixer, MixerConfig
from deltazoo.mixers.core.state import nbytes, overwrite_

_MORE_TOKENS = 64  # room in the caches for the tokens that decoding adds
_PIECE = 128  # tokens that are read at once before decoding: eager layers of 64 rows would take 16 GiB for 512


class LayerInput(NamedTuple):
    """Sizes of the input x [B, T, D], and where and how a layer runs."""

    batch: int
    length: int
    width: int
    device: torch.device
    dtype: torch.dtype
    seed: int


class LayerCalls(ABC):
    """A layer on a device, as calls without arguments that can be timed."""

    def __init__(self, module: nn.Module, size: LayerInput) -> None:
        self.size, self.module = size, module.to(size.device, size.dtype)
        torch.manual_seed(size.seed)
        self.x = torch.randn(size.batch, size.length, size.width, device=size.device, dtype=size.dtype)
        self.next_x = torch.randn_like(self.x[:, :1])

    def begin(self, direction: Direction) -> Call:
        """Run the first call in a direction, and return the calls after it."""
        if direction == "decode":
            self.module.eval()
            with torch.no_grad():
                return self.decoding()
        self.module.train()
        call = self._training() if direction == "backward" else torch.no_grad()(lambda: self.forward(self.x))
        call()
        return call

    def _training(self) -> Call:
        x = self.x.detach().requires_grad_()
        weight = torch.randn_like(x)

        def call() -> None:
            self.forward(x).backward(weight)
            x.grad = None
            self.module.zero_grad()

        return call

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Return y [B, T, D]."""

    @abstractmethod
    def decoding(self) -> Call:
        """Read x, decode one token, and return a call that decodes another one."""


class OurLayer(LayerCalls):
    """A mixer of deltazoo, compiled as one graph."""

    def __init__(self, mixer: MixerConfig, size: LayerInput) -> None:
        torch.manual_seed(size.seed)
        with size.device:
            built = mixer.build(size.width, FIRST_PLACE)
        super().__init__(built, size)
        self.compiled = torch.compile(self.module, fullgraph=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.compiled(x)[0]
        return y

    def decoding(self) -> Call:
        state = self._state(self.size.length + _MORE_TOKENS)
        for piece in self.x.split(_PIECE, 1):
            self._read(self.module, piece, state)
        step = functools.partial(self._read, self.compiled, self.next_x, state)
        if self.x.device.type == "cuda":
            return torch.no_grad()(capture_and_keep(step, self.x.device, warm_ups=3))
        step()
        return torch.no_grad()(step)

    def decoded_bytes(self) -> int:
        """Weights and caches are read, states without a capacity are read and written."""
        weights = sum(weight.nbytes for weight in self.module.parameters())
        empty, full = (nbytes(self._state(capacity)) for capacity in (1, 1 + self.size.length))
        return weights + 2 * empty + (full - empty)

    def _state(self, capacity: int) -> Any:
        assert isinstance(self.module, Mixer)
        with torch.no_grad():
            return self.module.init_state(self.size.batch, capacity)

    @staticmethod
    def _read(module: Callable[..., Any], x: Tensor, state: Any) -> None:
        """Run the layer and leave the new state in the tensors of the old one."""
        overwrite_(state, module(x, state)[1])


class FlaLayer(LayerCalls):
    """A layer of flash-linear-attention. It runs eagerly, with the cache of its package."""

    def __init__(self, mixer: MixerConfig, size: LayerInput) -> None:
        super().__init__(fla_layer(mixer, size.width), size)

    def forward(self, x: Tensor) -> Tensor:
        output = self.module(x)
        y: Tensor = output[0] if isinstance(output, tuple) else output
        return y

    def decoding(self) -> Call:
        from fla.models.utils import Cache

        cache = Cache()

        def read(x: Tensor) -> None:
            self.module(x, past_key_values=cache, use_cache=True)

        read(self.x)
        read(self.next_x)
        return torch.no_grad()(lambda: read(self.next_x))
