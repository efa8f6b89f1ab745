"""Base classes of mixers with log-linear attention: the parts of a mixer around a `LogLinearUpdate`.

B batch, T time, D width, HV value heads, V value width
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from einops import rearrange
from pydantic import Field
from torch import Tensor, nn

from deltazoo.backends.update.base import Backend
from deltazoo.backends.update.check import check_integer
from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.activations import activation_like
from deltazoo.mixers.core.calls import call_part
from deltazoo.mixers.core.decode_maps import apply_output
from deltazoo.mixers.core.mixer import FIRST_PLACE, Context, Mixer, MixerOutput, Place
from deltazoo.mixers.core.named_tensors import NamedTensors
from deltazoo.mixers.core.part import HasBackend, HeadShape, OutputArguments, Parts, Stateful, run_part
from deltazoo.mixers.core.sequences import (
    check_dtypes,
    check_names,
    check_shapes,
    check_state,
    left_align,
    undo_left_align,
)
from deltazoo.mixers.families.filter import FilterConfig
from deltazoo.mixers.families.update import update_flops
from deltazoo.mixers.parts.memory.log_linear import LogLinearUpdate
from deltazoo.mixers.parts.memory.log_linear_chunks import MAX_LEVELS


class LogLinearConfig(FilterConfig, ABC):
    """Config of a mixer with log-linear attention. A subclass defines the recurrence, the sizes and the parts."""

    levels: int = Field(
        default=15,
        ge=2,
        le=MAX_LEVELS,
        description="L, levels of the tree: 1 + log2 of the longest sequence; the last level holds all older tokens",
    )
    value_heads: int | None = Field(default=None, ge=1, description="value heads, a multiple of heads")
    conv_width: int = Field(default=4, ge=0, description="taps of the short convolution of q, k and v; 0: none")
    norm_eps: float = Field(default=1e-5, gt=0, description="epsilon of the output norm")

    @abstractmethod
    def level_spec(self) -> UpdateSpec:
        """Return the recurrence that the state of every level follows."""

    @abstractmethod
    def shape(self, width: int) -> HeadShape:
        """Return the sizes of the heads at this width."""

    @abstractmethod
    def parts(self, shape: HeadShape) -> Parts:
        """Create the parts around the update; only the projection may have a state."""

    def equation(self) -> str:
        recurrence = str(self.level_spec()).partition(";")[0]
        return f"o_t = sum_l lambda_t^(l) (S_t^(l))^T q_t;  {recurrence}, with S_t = sum_l S_t^(l)"

    def build(self, width: int, place: Place = FIRST_PLACE, backend: str | Backend | None = None) -> "LogLinearMixer":
        check_integer("width", width)
        shape = self.shape(width).validated()
        parts = self.parts(shape)  # before the update: `init_weights` draws in this order
        update = LogLinearUpdate(shape, self.level_spec(), self.levels)
        return LogLinearMixer(shape, parts, update, backend, self.name)

    def recurrence_flops(self, width: int) -> int:
        return self.levels * update_flops(self.level_spec(), self.shape(width))


class LogLinearMixer(Mixer):
    """y = W_o outputs(update(operands(project(x)))).

    Args: backend: of the short convolution; `LogLinearUpdate` computes the update. name: the mixer's, for its state.
    State: "project", the convolution's; "levels" of `LogLinearUpdate` as "NAME.levels", and its "seen".
    """

    def __init__(
        self, shape: HeadShape, parts: Parts, update: LogLinearUpdate, backend: str | Backend | None, name: str
    ) -> None:
        super().__init__()
        self.levels_key = f"{name}.levels"
        self.width = shape.width
        self.project = parts.projection
        self.operands = nn.ModuleDict(parts.operands)
        self.outputs = nn.ModuleDict(parts.outputs)
        self.update = update
        self.out = nn.Linear(shape.value_heads * shape.value_width, shape.width, bias=False)
        for module in self.modules():
            if isinstance(module, HasBackend):
                module.rebind(backend, activation_like(self.out, self))

    def split_refusal(self) -> None:
        return None

    def init_state(self, batch: int, capacity: int | None = None) -> NamedTensors:
        """Return the state before the first token. Its size does not depend on `capacity`."""
        check_integer("batch", batch, 0)
        return NamedTensors(self._initial_state(batch, activation_like(self.out, self)))

    def _initial_state(self, batch: int, like: Tensor) -> dict[str, Tensor]:
        history = self.project.init_state(batch, like) if isinstance(self.project, Stateful) else None
        initial = self.update.init_state(batch, like)
        return ({} if history is None else {"project": history}) | self._with_name(initial)

    def _with_name(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename a tensor of the update, so that the states of other mixers do not fit."""
        return {self.levels_key: state["levels"], "seen": state["seen"]}

    def forward(
        self, x: Tensor, state: Mapping[str, Tensor] | None = None, context: Context | None = None
    ) -> MixerOutput:
        x_BTD, context, order = left_align(x, self.width, context, getattr(self.out, "weight", None))
        if state is not None:
            expected = self._initial_state(0, x_BTD)
            check_names(state, expected)
            check_shapes(state, {name: tensor.shape[1:] for name, tensor in expected.items()})
            check_dtypes(state, {name: tensor.dtype for name, tensor in expected.items()}, x_BTD)
            check_state({name: tensor.shape[0] for name, tensor in state.items()}, x_BTD, context)
        old_history = None if state is None else state.get("project")
        inputs, history, context = run_part(self.project, x_BTD, old_history, context=context)
        projected = inputs
        for part in self.operands.values():
            inputs, _, context = run_part(part, x_BTD, inputs, None, context=context)
        old = None if state is None else {"levels": state[self.levels_key], "seen": state["seen"]}
        o, new = call_part(self.update, x_BTD, inputs, old, context)
        for part in self.outputs.values():
            o, _ = call_part(part, o, OutputArguments(x_BTD, projected, inputs), None, context)
        y_BTD = undo_left_align(apply_output(rearrange(o, "b t h v -> b t (h v)"), self.out), order)
        if new is None:
            return MixerOutput(y_BTD)
        tensors = ({} if history is None else {"project": history}) | self._with_name(new)
        return MixerOutput(y_BTD, NamedTensors(tensors))
