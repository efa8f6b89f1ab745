"""The conformance kit finds wrong mixers: states of packs, shapes, dtypes and strengths."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from small_configs import small
from torch import Tensor, nn

from deltazoo.backends.io.errors import ValueRangeError
from deltazoo.backends.update.base import Backend, UpdateInputs
from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers import DeltaRuleConfig, MixerConfig
from deltazoo.mixers.core import conformance
from deltazoo.mixers.core.mixer import FIRST_PLACE, Context, Cost, Mixer, Place, State
from deltazoo.mixers.core.part import HeadShape, LinearPart, Parts
from deltazoo.mixers.deltanet import DeltaNet


class Changed(MixerConfig):
    """A mixer without a convolution, whose call `change` replaces."""

    name: ClassVar[str] = "changed"
    source: ClassVar[str] = "none"
    change: Callable[..., Any]

    def build(self, width: int, place: Place = FIRST_PLACE, backend: str | Backend | None = None) -> Mixer:
        return ChangedMixer(small("gla", conv_width=0).build(width, place, backend), self.change)

    def cost(self, width: int) -> Cost:
        return Cost(0, 0, 0, 0)


class ChangedMixer(Mixer):
    def __init__(self, inner: Mixer, change: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.change = inner, change

    def init_state(self, batch: int, capacity: int | None = None) -> State:
        return dict(self.inner.init_state(batch, capacity))

    def forward(self, x: Tensor, state: State | None = None, context: Context | None = None) -> Any:
        return self.change(self.inner, x, state, context or Context())


def unchanged(inner: Mixer, x: Tensor, state: State, context: Context) -> Any:
    return inner(x, state, context)


def forgets_in_packs(inner: Mixer, x: Tensor, state: State, context: Context) -> Any:
    is_pack = state is not None and context.cu_seqlens is not None
    return inner(x, {name: torch.zeros_like(S) for name, S in state.items()} if is_pack else state, context)


def keeps_the_state_of_packs(inner: Mixer, x: Tensor, state: State, context: Context) -> Any:
    before = None if state is None else {name: S.clone() for name, S in state.items()}
    y, new, _ = inner(x, state, context)
    return y, new if context.cu_seqlens is None else before


def returns_one_channel(inner: Mixer, x: Tensor, state: State, context: Context) -> Any:
    y, new, _ = inner(x, state, context)
    return y.mean(-1, keepdim=True), new


def returns_float64(inner: Mixer, x: Tensor, state: State, context: Context) -> Any:
    y, new, _ = inner(x, state, context)
    return y.double(), new


def moves_rows_of_the_state(inner: Mixer, x: Tensor, state: State, context: Context) -> Any:
    y, new, _ = inner(x, state, context)
    return y, None if new is None else {name: S.transpose(0, 1) for name, S in new.items()}


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (unchanged, {"packed", "packed pieces", "shapes", "operands"}),
        (forgets_in_packs, {"packed", "shapes"}),
        (keeps_the_state_of_packs, {"packed", "shapes"}),
        (returns_one_channel, {"packed", "packed pieces"}),
        (returns_float64, {"packed", "packed pieces"}),
        (moves_rows_of_the_state, {"packed"}),
    ],
)
def test_kit_detects_wrong_states_of_packs_and_shapes(change: Callable[..., Any], names: set[str]) -> None:
    found = {name for name in ("packed", "packed pieces", "shapes") if not is_right(change, name)}
    assert found == {"packed", "packed pieces", "shapes"} - names


def is_right(change: Callable[..., Any], name: str) -> bool:
    try:
        return conformance.error(Changed(change=change), name) <= conformance.PROPERTIES[name][1]
    except ValueError:  # the inner mixer refuses the state
        return False


class FiveBeta(LinearPart):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.proj = nn.Linear(shape.width, shape.value_heads)

    def prepare(self, raw: Tensor, inputs: UpdateInputs) -> UpdateInputs:
        return inputs._replace(beta=5 * raw)


class LargeBeta(DeltaRuleConfig):
    """DeltaNet with strengths outside [0, 1]."""

    name: ClassVar[str] = "large_beta"
    source: ClassVar[str] = "none"

    def spec(self) -> UpdateSpec:
        return self.delta_rule_spec("none")

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        return Parts(self.qkv_projection(shape), {"beta": FiveBeta(shape)})


def test_kit_detects_strengths_outside_the_interval_of_the_spec() -> None:
    with pytest.raises(ValueRangeError, match=r"beta must be in \[0, 1\]"):
        conformance.error(LargeBeta(heads=2), "operands")
    assert conformance.error(DeltaNet(heads=2), "operands") == 0
