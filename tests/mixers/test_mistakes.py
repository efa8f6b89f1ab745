"""A mistake in a mixer that a user adds raises an error with the name of the class, the rule and the value given."""

import warnings
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from deltazoo.backends.io.errors import ConfigError, PluginError
from deltazoo.backends.update.base import Backend, UpdateInputs
from deltazoo.mixers import DeltaRuleConfig, MixerConfig
from deltazoo.mixers.core.mixer import FIRST_PLACE, Context, Cost, Mixer, Place, State
from deltazoo.mixers.core.part import HeadShape, OperandPart, Parts, Stateful
from deltazoo.mixers.families.filter import FilterConfig, FilterMixer


class OnlyY(Mixer):
    def init_state(self, batch: int, capacity: int | None = None) -> State:
        return None

    def forward(self, x: Tensor, state: State | None = None, context: Context | None = None) -> Any:
        return x


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_forward_without_a_state_is_refused(rows: int) -> None:
    with pytest.raises(PluginError, match=r"OnlyY\.forward must return \(y, state\) .*, got Tensor"):
        OnlyY()(torch.ones(rows, 2, 16))


class Mistaken(DeltaRuleConfig):
    """DeltaNet with one more part."""

    name: ClassVar[str] = "mistaken"
    source: ClassVar[str] = "none"
    part: Any = None
    output: Any = None
    own: Any = None

    def spec(self) -> Any:
        return {"decay": "none"} if self.own == "spec" else self.delta_rule_spec("none")

    def parts(self, shape: HeadShape, place: Place) -> Any:
        operands = {**self.beta(shape), **({} if self.part is None else {"own": self.part(shape)})}
        outputs = {} if self.output is None else {"own": self.output(shape)}
        if self.own == "operands":
            return Parts(self.qkv_projection(shape), list(operands.values()))  # type: ignore[arg-type]
        parts = Parts(self.qkv_projection(shape), operands, outputs)
        return (parts.projection, parts.operands) if self.own == "parts" else parts


class WithoutState(OperandPart):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()

    def forward(self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context) -> Any:
        return inputs


class Taken(WithoutState):
    def forward(self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context) -> Any:
        return inputs.q, inputs.k, {"v": inputs.v}


class Columns(WithoutState, Stateful):
    def init_state(self, batch: int, like: Tensor) -> Tensor:
        return like.new_zeros(16, batch)


class Pairs(WithoutState, Stateful):
    def init_state(self, batch: int, like: Tensor) -> Any:
        return (like.new_zeros(batch, 16),)


def linear(shape: HeadShape) -> nn.Module:
    return nn.Linear(shape.width, shape.width)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"part": WithoutState}, r"WithoutState\.forward must return \(result, state\), got UpdateInputs"),
        ({"part": Taken}, r"Taken\.forward must return \(UpdateInputs, state\), got \(Tensor, \.\.\.\)"),
        ({"part": Columns}, r"Columns\.init_state must return \[0, \.\.\.\], got \[16, 0\]"),
        ({"part": Pairs}, r"Pairs\.init_state must return \[0, \.\.\.\], got tuple"),
        ({"part": linear}, r"Parts\.operands must be a dict of OperandPart by name, got .*'own': 'Linear'"),
        ({"output": linear}, r"Parts\.outputs must be a dict of OutputPart by name, got .*'own': 'Linear'"),
        ({"own": "operands"}, r"Parts\.operands must be a dict of OperandPart by name, got \["),
        ({"own": "parts"}, r"Mistaken\.parts must return Parts, got tuple"),
        ({"own": "spec"}, r"Mistaken\.spec must return an UpdateSpec, got dict"),
    ],
)
def test_a_mistake_in_the_parts_of_a_mixer_names_the_rule(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((PluginError, ConfigError), match=message):
        Mistaken(heads=2, conv_width=0, **fields).build(16, backend="reference")(torch.ones(2, 3, 16))


class Forgets(FilterConfig):
    name: ClassVar[str] = "forgets"
    source: ClassVar[str] = "none"
    module: Any = None

    def build(self, width: int, place: Place = FIRST_PLACE, backend: str | Backend | None = None) -> Any:
        return ForgetsMixer(width, self.module) if self.module != "none" else None


class ForgetsMixer(FilterMixer):
    def __init__(self, width: int, module: Any) -> None:
        super().__init__(width)
        if module is not None:
            self.filters["own"] = module
        self.out = nn.Linear(width, width)

    def initial_state(self, batch: int, capacity: int | None, like: Tensor) -> dict[str, Tensor]:
        return {"h": like.new_zeros(batch, 1), **super().initial_state(batch, capacity, like)}

    def mix(self, x: Tensor, state: dict[str, Tensor] | None, new: dict[str, Tensor], context: Context) -> Tensor:
        y: Tensor = self.out(x)
        return y


def test_a_mistake_in_a_filter_mixer_names_the_rule() -> None:
    mixer = Forgets().build(4)
    with pytest.raises(PluginError, match=r"ForgetsMixer\.mix must write each new state to `new`, got none of \['h'\]"):
        mixer(torch.ones(2, 3, 4), mixer.init_state(2))
    with pytest.raises(PluginError, match=r"must be ShortConv, DiagonalSSM or CachingFilter, got Linear"):
        Forgets(module=nn.Linear(4, 4)).build(4).init_state(2)
    with pytest.raises(PluginError, match=r"Forgets\.build must return a Mixer, got NoneType"):
        Forgets(module="none").build(4)


class Nameless(Forgets):
    name: ClassVar[Any] = None


class Numbered(Forgets):
    name: ClassVar[Any] = 3


class Sourceless(MixerConfig):
    name: ClassVar[str] = "sourceless"

    def build(self, width: int, place: Place = FIRST_PLACE, backend: str | Backend | None = None) -> Any:
        return None

    def cost(self, width: int) -> Cost:
        return Cost(0, 0, 0, 0)


with warnings.catch_warnings(action="ignore"):  # pydantic's, that the field shadows an attribute

    class Field(Sourceless):
        source: ClassVar[str] = "none"
        purpose: str = "a field"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Nameless, "Nameless: a mixer needs the class attribute `name: .*`, got none"),
        (Numbered, "Numbered: a mixer needs the class attribute `name: .*`, got 3"),
        (Sourceless, "Sourceless: a mixer needs the class attribute `source: .*`, got none"),
        (Field, "Field: a mixer needs the class attribute `purpose: .*`, got a field"),
    ],
)
def test_a_config_needs_a_name_and_a_source(config: type[MixerConfig], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config()
