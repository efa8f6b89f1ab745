"""Interfaces of the parts that a `DeltaMixer` is built from.

B batch, T time, D width, H key heads, HV value heads, K key width, V value width
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from deltazoo.backends.io.errors import ConfigError, PluginError, cut
from deltazoo.backends.ops.conv_history import advance_history_
from deltazoo.backends.ops.decode_step import FusedDecodeStep
from deltazoo.backends.ops.gemv import Norm
from deltazoo.backends.torch_ext.plain_module import is_plain_linear
from deltazoo.backends.update.base import Backend, UpdateInputs, state_dtype
from deltazoo.mixers.core.calls import call_part
from deltazoo.mixers.core.initialization import fill_normal
from deltazoo.mixers.core.mixer import Context


class HeadShape(NamedTuple):
    """Sizes that all parts of a mixer share."""

    width: int
    heads: int
    value_heads: int
    key_width: int
    value_width: int
    householders: int = 1

    def validated(self) -> "HeadShape":
        """Return the sizes if they are at least 1 and `heads` divides `value_heads`.

        Raises: ConfigError.
        """
        for name, size in self._asdict().items():
            if size < 1:
                raise ConfigError(f"{name} must be at least 1, got {size} (width {self.width}, heads {self.heads})")
        if self.value_heads % self.heads:
            raise ConfigError(f"value_heads must be a multiple of heads = {self.heads}, got {self.value_heads}")
        return self


class OutputArguments(NamedTuple):
    """Inputs of an output part besides the output of the update.

    x: [B, T, D], input of the mixer.
    projected: operands as the projection returned them.
    inputs: operands as the update received them.
    """

    x: Tensor
    projected: UpdateInputs
    inputs: UpdateInputs


# What an operand part and a projection return: the operands, the new state, and optionally tensors for later parts.
OperandResult = tuple[UpdateInputs, Tensor | None] | tuple[UpdateInputs, Tensor | None, Mapping[str, Tensor]]


class OperandPart(nn.Module, ABC):
    """Part that changes or adds operands before the update: a feature map, norm, rotation, decay or beta."""

    @abstractmethod
    def forward(self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context) -> OperandResult:
        """Return the changed operands and the new state (None for a part without a state).

        A third element, a dict of tensors by name, is what later parts of the mixer read as `context.intermediate`.

        Args:
            x: [B, T, D], input of the mixer.
            inputs: operands so far.
            state: tensor from `init_state`, or None.
            context: left-aligned: the real tokens of each row come first.
        """


class MapsInput(ABC):
    """Part that reads the mixer's input x by one linear map. A decode step computes those of all parts together.

    Its `forward` takes the product from `Context.apply`.
    """

    @abstractmethod
    def input_map(self) -> nn.Module:
        """Return the map."""


class LinearPart(OperandPart, MapsInput):
    """Operand part that depends on x only through one linear map, `proj`."""

    proj: nn.Module

    def input_map(self) -> nn.Module:
        return self.proj

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        return self.prepare(context.apply(self.proj, x), inputs), None

    @abstractmethod
    def prepare(self, raw: Tensor, inputs: UpdateInputs) -> UpdateInputs:
        """Return the changed operands. Args: raw: proj(x), [B, T, ...]."""


class OutputPart(nn.Module, ABC):
    """Part that changes the output of the update: a skip connection, norm or gate."""

    @abstractmethod
    def forward(
        self, o: Tensor, arguments: OutputArguments, state: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, T, HV, V] and the new state (None for a part without a state)."""


class StatelessOutputPart(OutputPart):
    """Output part without a state that depends only on the output and the mixer's input.

    Such a part can run after a fused decode step, which does not return the operands.
    """

    def forward(
        self, o: Tensor, arguments: OutputArguments, state: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor | None]:
        if isinstance(self, MappedOutputPart) and context.product is not None:
            return self.transform_by(o, context.product), None
        return self.transform(o, arguments.x), None

    @abstractmethod
    def transform(self, o: Tensor, x: Tensor) -> Tensor:
        """Return the output [B, T, HV, V]. Args: x: [B, T, D], input of the mixer."""

    def transform_with(
        self, following: OutputPart, o: Tensor, x: Tensor, product: Tensor | None = None
    ) -> Tensor | None:
        """Compute this part and the one that follows by one kernel. Return None if there is none for them.

        Args: product: of the map of `following`, as in `Context`.
        """
        return None

    def norm_of_all(self) -> Norm | None:
        """Return the RMS norm of all heads together that this part is, for the output map; None: it is another part."""
        return None


class MappedOutputPart(StatelessOutputPart, MapsInput, ABC):
    """Stateless output part that reads the mixer's input by one linear map."""

    def transform(self, o: Tensor, x: Tensor) -> Tensor:
        return self.transform_by(o, self.input_map()(x))

    @abstractmethod
    def transform_by(self, o: Tensor, product: Tensor) -> Tensor:
        """Return the output [B, T, HV, V]. Args: product: of the map with the mixer's input."""


class Stateful(ABC):
    """Part with a state: one tensor with the batch in dimension 0.

    Class attributes: `splits`, whether it computes tokens that are split over ranks (`Context.parallel`), also by a
    plan without `sizes`; `keeps_inputs`, whether the state is that of a `ShortConv` or `TokenShift`, which return their
    inputs for drafted tokens (`Context.verify`). Other parts read the accepted tokens again.
    """

    splits: ClassVar[bool] = False
    keeps_inputs: ClassVar[bool] = False

    @abstractmethod
    def init_state(self, batch: int, like: Tensor) -> Tensor | None:
        """Return the state before the first token, or None if this instance needs none.

        Args: like: an empty tensor with the device and dtype of the mixer's activations, see `activation_like`.
        """


class Fusible(nn.Module, ABC):
    """Part that a decode kernel can compute together with the update (`deltazoo.backends.ops.decode_step`).

    Only the projection may have a state. The declaration does not extend to subclasses: a subclass may compute
    something else, so it must define `fuse_into` itself to be fused.
    """

    @abstractmethod
    def fuse_into(self, step: FusedDecodeStep) -> FusedDecodeStep | None:
        """Return the step extended by this part, or None if the step cannot express it."""

    def fused_maps(self) -> dict[str, nn.Module]:
        """Return the maps of the mixer's input that compute operands of the fused step, by operand."""
        return {}

    def fused_parameters(self, x: Tensor) -> dict[str, Tensor]:
        """Return this part's other operands of the fused step by name. Args: x: gives the device and dtype."""
        return {}


class HasBackend(ABC):
    """Module computed by a backend, fully or in part."""

    @abstractmethod
    def rebind(self, backend: str | Backend | None, like: Tensor) -> None:
        """Bind the module to a backend, as `deltazoo.bind` does. Args: like: gives the device and dtype of the run."""


class HasFlops(ABC):
    """Part with arithmetic besides linear maps, short convolutions and updates, which are counted elsewhere."""

    @abstractmethod
    def flops(self) -> int:
        """Return the floating-point operations per token of that arithmetic in the forward pass."""


class Routed(ABC):
    """Module that sends each token to some of its parts only, such as a mixture of experts."""

    @property
    @abstractmethod
    def unused_parameters(self) -> int:
        """Number of parameters that a token does not pass through, without those of routed modules inside."""


def active_parameters(module: nn.Module) -> int:
    """Return the number of parameters of a module that each token passes through."""
    unused = sum(part.unused_parameters for part in module.modules() if isinstance(part, Routed))
    return sum(parameter.numel() for parameter in module.parameters()) - unused


class ResizesHeads(ABC):
    """Operand part that changes the key width, value width or number of value heads of the update."""

    @abstractmethod
    def resize_heads(self, shape: HeadShape) -> HeadShape:
        """Return the sizes after this part."""


@dataclass(frozen=True)
class Parts:
    """Parts of one mixer, in the order in which they run.

    projection: x [B, T, D] to q, k and v.
    operands, outputs: parts before and after the update, by name; the names are keys of the state dict.
    skip: map x [B, T, D] -> y [B, T, D] that bypasses the update; None: no bypass.
    output_std: standard deviation of the output map's initial weights, whose bias is then 0; None: torch's default.
    output_bias: whether the output map has a bias.
    shared: names of tensors that parts return, which the mixer returns in `side`, for later layers.
    """

    projection: nn.Module
    operands: Mapping[str, OperandPart] = field(default_factory=dict)
    outputs: Mapping[str, OutputPart] = field(default_factory=dict)
    skip: nn.Module | None = None
    output_std: float | None = None
    output_bias: bool = False
    shared: tuple[str, ...] = ()

    def update_shape(self, shape: HeadShape) -> HeadShape:
        """Return the sizes of the update, after the operand parts that change them."""
        for part in self.operands.values():
            if isinstance(part, ResizesHeads):
                shape = part.resize_heads(shape)
        return shape

    def __post_init__(self) -> None:
        for name, parts, kind in (("operands", self.operands, OperandPart), ("outputs", self.outputs, OutputPart)):
            if not isinstance(parts, Mapping) or not all(isinstance(part, kind) for part in parts.values()):
                got = {key: type(part).__name__ for key, part in parts.items()} if isinstance(parts, Mapping) else parts
                raise ConfigError(f"Parts.{name} must be a dict of {kind.__name__} by name, got {cut(got)}")
        names = ["project", "update", *self.operands, *self.outputs]
        if len(set(names)) < len(names):
            raise ConfigError(f"the parts of a mixer need distinct names, got {names}")


def run_part(part: nn.Module, *arguments: Any, context: Context) -> tuple[UpdateInputs, Tensor | None, Context]:
    """Call a projection or an operand part. Return the operands, the new state, and the context of later parts."""
    inputs, state, *tensors = call_stateful(part, *arguments, context=context)
    if not isinstance(inputs, UpdateInputs):
        first = type(inputs).__name__
        raise PluginError(f"{type(part).__name__}.forward must return (UpdateInputs, state), got ({first}, ...)")
    return inputs, state, context.with_intermediates(tensors[0]) if tensors else context


class PartDraft(NamedTuple):
    """Drafted tokens that a part reads again in `commit_part_`: its arguments before the state, and its context."""

    arguments: tuple[Any, ...]
    context: Context


def call_stateful(part: nn.Module, *arguments: Any, context: Context) -> Any:
    """Call a part with the arguments (..., state, context). With drafted tokens its state does not change.

    What the part returns as the new state is then the draft for `commit_part_`.
    """
    *others, state = arguments
    if not context.verify or state is None or not isinstance(part, Stateful) or part.keeps_inputs:
        return _with_state(part, call_part(part, *arguments, context))
    plain = context._replace(verify=False)
    result, _, *tensors = _with_state(part, call_part(part, *others, state.clone(), plain))
    return result, PartDraft(tuple(others), plain), *tensors


def _with_state(part: nn.Module, results: Any) -> tuple[Any, ...]:
    """Return the results of a part, if they are a tuple: a tensor or UpdateInputs alone would be taken apart."""
    if not isinstance(results, tuple) or isinstance(results, UpdateInputs):  # which is a tuple itself
        kind = type(results).__name__
        raise PluginError(f"{type(part).__name__}.forward must return (result, state), got {kind}")
    return results


def commit_part_(part: nn.Module, draft: Any, state: Tensor, accepted: Tensor) -> None:
    """Advance the state of a part in place by the first `accepted` [B] int32 drafted tokens of each row."""
    if not isinstance(draft, PartDraft):
        advance_history_(state, draft, accepted)
        return
    x = draft.arguments[0]
    mask_BT = torch.arange(x.shape[1], device=x.device) < accepted[:, None]

    def masked(tensor: Tensor) -> Tensor:
        per_token = tensor.dim() > 2 and tensor.shape[:2] == mask_BT.shape
        return (
            torch.where(mask_BT.view(*mask_BT.shape, *[1] * (tensor.dim() - 2)), tensor, 0.0) if per_token else tensor
        )

    arguments, intermediates = tree_map_only(Tensor, masked, (draft.arguments, draft.context.intermediates))
    context = draft.context._replace(mask=mask_BT, intermediates=intermediates)
    new_state = call_part(part, *arguments, state, context)[1]
    if new_state is not state:
        state.copy_(new_state)


def projection(width: int, out: int, rank: int | None = None, bias: bool = False) -> nn.Module:
    """Build a linear map width -> out, or width -> rank -> out with `rank`. Only the last map may have a bias."""
    if rank is None:
        return nn.Linear(width, out, bias=bias)
    return nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, out, bias=bias))


class GateLinear(nn.Linear):
    """W x + b with b added in float32 (float64 for float64 inputs), for gates.

    A sum rounded to bfloat16 has an error of up to 2^-9 |b|, and its exponential that relative error: 3 % for b = -10.
    A subclass of torch's Linear with one other line, so that libraries that replace linear maps find it.
    """

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        y = y.to(state_dtype(y.dtype))
        return y if self.bias is None else y + self.bias.to(y.dtype)


def init_normal(linear: nn.Linear, std: float) -> None:
    """Draw the weight of a linear map from N(0, std^2) and set its bias to 0."""
    fill_normal(linear.weight, std=std)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


def project_jointly(x: Tensor, maps: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Apply the narrow linear maps among `maps` to x [B, T, D] by one product; {} if there are fewer than two.

    A narrow map has at most D / 8 outputs, such as the maps to decay and beta. Separate products read x once each in
    the forward, and each adds a gradient of x's size in the backward: a compiled gated_deltanet layer of width 2048
    takes 8.35 ms with them and 8.18 ms with one product (H200, torch 2.11, four runs). A decode step computes all maps
    of the input together instead (`decode_maps`).
    """
    narrow = {name: layer for name, layer in maps.items() if _is_narrow(layer)}
    if len(narrow) < 2:
        return {}
    weights = [layer.weight for layer in narrow.values()]
    sizes = [weight.shape[0] for weight in weights]
    padding = -sum(sizes) % 8
    y = F.linear(x, F.pad(torch.cat(weights), (0, 0, 0, padding)))
    return dict(zip(narrow, y[..., : sum(sizes)].split(sizes, -1), strict=True))


def _is_narrow(layer: nn.Module) -> TypeGuard[nn.Linear]:
    return is_plain_linear(layer) and layer.bias is None and 8 * layer.out_features <= layer.in_features
