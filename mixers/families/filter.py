"""Base classes of mixers outside of the update: filters along time, caches, fast weights.

B batch, T time, D width
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltazoo.backends.io.errors import PluginError
from deltazoo.backends.ops.conv_history import advance_history_
from deltazoo.backends.ops.gemv import Convolution
from deltazoo.backends.torch_ext.plain_module import is_plain
from deltazoo.backends.update.check import check_integer
from deltazoo.mixers.core.activations import activation_like
from deltazoo.mixers.core.calls import call_part
from deltazoo.mixers.core.decode_maps import apply_maps, convolves, is_step
from deltazoo.mixers.core.mixer import Context, Cost, Mixer, MixerConfig, MixerOutput
from deltazoo.mixers.core.named_tensors import NamedTensors
from deltazoo.mixers.core.sequences import check_dtypes, check_names, check_state, left_align, undo_left_align
from deltazoo.mixers.core.state import nbytes
from deltazoo.mixers.core.token_step import Around, FilterStep
from deltazoo.mixers.core.update import Update
from deltazoo.mixers.families.update import update_flops
from deltazoo.mixers.parts.convolution import ShortConv, is_plain_step
from deltazoo.mixers.parts.ssm.diagonal_ssm import DiagonalSSM


class FilterConfig(MixerConfig, ABC):
    """Config of a mixer made of linear maps, convolutions, updates and other recurrences."""

    def cost(self, width: int) -> Cost:
        with torch.device("meta"):
            mixer = self.build(width, backend="reference")
            bytes_1, bytes_2 = (nbytes(mixer.init_state(1, capacity)) for capacity in (1, 2))
        maps = sum(2 * m.weight.numel() for m in mixer.modules() if isinstance(m, nn.Linear | ShortConv))
        updates = sum(update_flops(m.spec, m.shape) for m in mixer.modules() if isinstance(m, Update))
        cache_bytes = bytes_2 - bytes_1
        flops = maps + updates + self.recurrence_flops(width)
        return Cost(flops, self.flops_context(width), bytes_1 - cache_bytes, cache_bytes)

    def recurrence_flops(self, width: int) -> int:
        """Return the operations per token of a recurrence that is not an `Update`."""
        return 0

    def flops_context(self, width: int) -> int:
        """Return the additional operations per token for each earlier token that the mixer reads."""
        return 0


class CachingFilter(ABC):
    """Filter that keeps every token, so that its state needs a capacity."""

    @abstractmethod
    def init_state(self, batch: int, like: Tensor, capacity: int | None) -> dict[str, Tensor]:
        """Return the state before the first token. Raises: StateError without a capacity."""


class FilterMixer(Mixer, ABC):
    """Mixer made of filters. Its state holds the tensors of all filters: {"filter.tensor": tensor}.

    A subclass whose filters are all convolutions or token shifts has the `commit_form` "cache".

    A subclass must create its filters before its other submodules: `init_weights` draws in the order of registration,
    and `filters` is registered here.
    """

    out: nn.Linear  # the output map, which a subclass creates

    def __init__(self, width: int) -> None:
        check_integer("width", width)
        super().__init__()
        self.width = width
        self.filters = nn.ModuleDict()

    @abstractmethod
    def mix(self, x: Tensor, state: dict[str, Tensor] | None, new: dict[str, Tensor], context: Context) -> Tensor:
        """Mix x [B, T, D], left-aligned, with zeros at padded tokens. Read `state` and write the new state to `new`."""

    def init_state(self, batch: int, capacity: int | None = None) -> NamedTensors:
        """Return the state before the first token."""
        check_integer("batch", batch, 0)
        return NamedTensors(self.initial_state(batch, capacity, activation_like(self.out, self)))

    def initial_state(self, batch: int, capacity: int | None, like: Tensor) -> dict[str, Tensor]:
        """Return the state before the first token, for activations with the device and dtype of `like`."""
        state: dict[str, Tensor] = {}
        for name, module in self.filters.items():
            filter_state = _named(_init_filter_state(module, batch, like, capacity))
            state |= {f"{name}.{key}": tensor for key, tensor in filter_state.items()}
        return state

    def expected_state(self, state: Mapping[str, Any], like: Tensor) -> dict[str, Any]:
        """Return a state without rows, with the names and dtypes that this state must have."""
        return self.initial_state(0, 1, like)

    def apply_around(
        self, name: str, x: Tensor, state: dict[str, Tensor] | None, new: dict[str, Tensor], context: Context,
        around: Around,
    ) -> Tensor:  # fmt: skip
        """Apply a filter with the operations around it; in a decode step by the kernels of a `FilterStep`."""
        module = self.filters[name]
        # a subclass may override `forward` without the step
        if state is not None and isinstance(module, FilterStep) and "step_" in vars(type(module)) and is_plain(module):
            stepped = module.step_(x, _state_of(name, state), context, around)
            if stepped is not None:
                new.update({f"{name}.{key}": tensor for key, tensor in stepped[1].items()})
                return stepped[0]
        y = self.apply_filter(name, x if around.factor is None else x * around.factor, state, new, context)
        y = F.gelu(y) if around.gelu else y
        return y if around.gate is None else around.gate * y

    def apply_convolved(
        self, name: str, linear: nn.Module, x: Tensor, state: dict[str, Tensor] | None, new: dict[str, Tensor],
        context: Context,
    ) -> Tensor:  # fmt: skip
        """Apply a linear map, and a `ShortConv` to all of its outputs; in a decode step by one kernel."""
        module = self.filters[name]
        if is_step(x, state) and type(module) is ShortConv and is_plain(module) and is_plain_step(context):
            assert state is not None and len(module.parts) == 1
            history = state[f"{name}."]
            convolution = Convolution(history, module.weight, module.bias, module.parts[0].silu)
            if module.parts[0].unit == 0 and convolves(x, linear, convolution):
                new[f"{name}."] = history
                return apply_maps(x, {name: linear}, convolution=convolution)[name]
        return self.apply_filter(name, linear(x), state, new, context)

    def apply_filter(
        self, name: str, x: Tensor, state: dict[str, Tensor] | None, new: dict[str, Tensor], context: Context
    ) -> Tensor:
        """Apply one filter with its tensors of `state`, and write its new tensors to `new`."""
        module = self.filters[name]
        if state is None:
            return _run(module, x, None, context)[0]
        filter_state = _state_of(name, state)
        y, new_filter_state = _run(
            module, x, filter_state.get("", filter_state) if isinstance(module, ShortConv) else filter_state, context
        )
        new.update({f"{name}.{key}": tensor for key, tensor in _named(new_filter_state).items()})
        return y

    def commit_(self, draft: Any, state: Mapping[str, Tensor], accepted: Tensor) -> None:
        if self.commit_form == "reread":
            super().commit_(draft, state, accepted)
            return
        with torch.no_grad():
            for name, history in state.items():
                advance_history_(history, draft[name], accepted)

    def forward(
        self, x: Tensor, state: Mapping[str, Tensor] | None = None, context: Context | None = None
    ) -> MixerOutput:
        x_BTD, context, order = left_align(x, self.width, context, getattr(self.out, "weight", None))
        if state is not None:
            expected = self.expected_state(state, x_BTD)
            check_names(state, expected)
            tensors = {name: tensor for name, tensor in expected.items() if isinstance(tensor, Tensor)}
            check_dtypes(state, {name: tensor.dtype for name, tensor in tensors.items()}, x_BTD)
            check_state({name: state[name].shape[0] for name in tensors}, x_BTD, context)
        new: dict[str, Tensor] = {}
        y_BTD = self.mix(x_BTD, None if state is None else dict(state), new, context)
        if state is not None and (missing := [name for name in state if name not in new]):
            raise PluginError(f"{type(self).__name__}.mix must write each new state to `new`, got none of {missing}")
        new_state = None if state is None else NamedTensors({name: new[name] for name in state})
        return MixerOutput(undo_left_align(y_BTD, order), new_state)


def _run(module: nn.Module, x: Tensor, state: Any, context: Context) -> tuple[Tensor, Any]:
    if not isinstance(module, ShortConv):
        return call_part(module, x, state, context)
    (y,), new = call_part(module, x, state, context)  # a filter's convolution returns all channels as one tensor
    return y, new


def _init_filter_state(module: nn.Module, batch: int, like: Tensor, capacity: int | None) -> Any:
    if isinstance(module, CachingFilter):
        return module.init_state(batch, like, capacity)
    if not isinstance(module, ShortConv | DiagonalSSM):
        kind = type(module).__name__
        raise PluginError(f"the modules in `filters` must be ShortConv, DiagonalSSM or CachingFilter, got {kind}")
    return module.init_state(batch, like)


def _state_of(name: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a filter, by their names in it."""
    return {key.removeprefix(f"{name}."): tensor for key, tensor in state.items() if key.startswith(f"{name}.")}


def _named(state: Any) -> dict[str, Tensor]:
    """Return a filter's state by name; a single tensor gets the empty name."""
    return state if isinstance(state, dict) else {"": state}
