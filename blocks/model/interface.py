"""What the modules of a model, its spec and generation know of each other, so that no two files import each other."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from deltazoo.backends.io.errors import InputError, cut
from deltazoo.backends.update.base import Backend
from deltazoo.blocks.model.layer import Layer, LayerSpec, LayerState
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.parts.norms import RMSNorm


class ModelSpec(Protocol):
    """The part of `StackSpec` that a model reads."""

    @property
    def width(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def norm_offset(self) -> float: ...
    @property
    def tied(self) -> bool: ...
    @property
    def embedding_scale(self) -> float: ...
    @property
    def logit_scale(self) -> float: ...
    @property
    def logit_cap(self) -> float | None: ...
    def expand(self) -> Sequence[LayerSpec]: ...
    def layer_names(self) -> Sequence[str]: ...
    def build_layers(self, backend: str | Backend | None) -> Sequence[Layer]: ...


class StackState(NamedTuple):
    """The states of all layers. The functions of `deltazoo.mixers.core.state` work on it."""

    layers: tuple[LayerState, ...]


class LayerStack(Protocol):
    """The part of `Stack` that is compiled."""

    @property
    def layers(self) -> Sequence[Layer]: ...
    @property
    def norm(self) -> RMSNorm: ...


class TokenModel(Protocol):
    """The part of `LanguageModel` that decodes."""

    @property
    def spec(self) -> ModelSpec: ...
    @property
    def stack(self) -> LayerStack: ...
    @property
    def device(self) -> torch.device: ...
    def __call__(self, tokens_BT: Tensor, state: StackState | None) -> tuple[Tensor, StackState | None]: ...
    def features(
        self, tokens_BT: Tensor, state: StackState | None, context: Context | None
    ) -> tuple[Tensor, StackState | None]: ...
    def logits(self, x_BTD: Tensor) -> Tensor: ...
    def init_state(self, batch: int, capacity: int | None) -> StackState: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...
    def buffers(self) -> Iterator[Tensor]: ...
    def modules(self) -> Iterator[nn.Module]: ...


def check_model(model: object) -> None:
    """Raise InputError unless `model` is a LanguageModel, also one that torch.compile wraps."""
    if not isinstance(model, nn.Module) or not hasattr(model, "checkpoint_layers"):
        raise InputError(f"model must be a LanguageModel, which deltazoo.load returns, got {cut(model)}")
