"""A small hybrid model with every kind of state: recurrent, ring buffer of a window, growing cache, parallel mixers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.blocks.spec.stack_spec import LayerSpec, StackSpec
from deltazoo.mixers import Attention, GatedDeltaNet, SlidingWindow

VOCAB = 29


@pytest.fixture
def spec() -> StackSpec:
    parallel = LayerSpec(mixer=(Attention(heads=2), GatedDeltaNet(heads=1)), mlp="none")
    pattern = GatedDeltaNet(heads=2) + SlidingWindow(heads=2, window=4) + parallel
    return StackSpec(width=16, depth=3, vocab=VOCAB, pattern=pattern, mlp={"width": 24})


@pytest.fixture
def build() -> Callable[[StackSpec], LanguageModel]:
    """Build in float64, with weights large enough that every module affects the logits."""

    def build(spec: StackSpec, backend: str = "reference") -> LanguageModel:
        torch.manual_seed(0)
        model = spec.build(backend=backend).double()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 2:
                    parameter.normal_(std=1.0 if "embedding" in name else 0.3)
        return model

    return build


@pytest.fixture
def model(spec: StackSpec, build: Callable[[StackSpec], LanguageModel]) -> LanguageModel:
    return build(spec)


@pytest.fixture
def tokens() -> Callable[..., Tensor]:
    """Draw tokens of a shape."""

    def draw(*shape: int) -> Tensor:
        return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(1))

    return draw
