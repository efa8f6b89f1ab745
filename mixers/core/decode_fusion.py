"""Fusion of a mixer's parts with the update into one decode step.

The parts that a config builds declare whether they fuse (`Fusible`). `plan_fusion` decides once, when the mixer is
built, which of them a decode step contains; the backend decides whether it computes that step.

B batch, D width
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from deltazoo.backends.ops.decode_step import FusedDecodeInputs, FusedDecodeStep
from deltazoo.backends.ops.gemv import Convolution, Norm
from deltazoo.backends.ops.rms_norm import rms_norm
from deltazoo.backends.torch_ext.devices import device_type
from deltazoo.backends.torch_ext.plain_module import is_plain
from deltazoo.backends.triton.decode.fused import reads_convolved
from deltazoo.backends.update.base import Draft
from deltazoo.backends.update.dispatch import BoundUpdate
from deltazoo.mixers.core.decode_maps import apply_maps, convolves
from deltazoo.mixers.core.part import Fusible, StatelessOutputPart


class FusedDrafts(NamedTuple):
    """Result of drafted tokens: o [B, T, HV, V], the inputs of the convolution [B, T, C], and the update's draft."""

    o: Tensor
    qkv: Tensor
    draft: Draft


class ReadStep(NamedTuple):
    """A step with its operands, and the products of other maps by name."""

    step: FusedDecodeStep
    inputs: FusedDecodeInputs
    products: dict[str, Tensor]


class DecodeFusion(NamedTuple):
    """Decode step with the parts inside it, by name, and the output parts that run after it, in order."""

    step: FusedDecodeStep
    fused_parts: dict[str, Fusible]
    remaining: list[StatelessOutputPart]

    def read_drafts(
        self, bound: BoundUpdate, x_BTD: Tensor, history: Tensor | None, states: Tensor, norm: Norm | None
    ) -> FusedDrafts | None:
        """Read drafted tokens without a change of the states. Return None if the backend does not fuse them.

        Args: x_BTD: input of the mixer, before `norm` if it is given; history: state of the convolution.
        """
        has_skip = any("skip" in part.fused_parameters(x_BTD) for part in self.fused_parts.values())
        if has_skip or not bound.can_fuse_verify(self.step, device_type(x_BTD), linear_output_dtype(x_BTD)):
            return None
        inputs = self.inputs(x_BTD, history, norm)
        o, draft = bound.fused_verify_(self.step, inputs, states)
        if self.remaining and norm is not None:
            x_BTD = rms_norm(x_BTD, norm.weight, norm.eps)
        for part in self.remaining:
            o = part.transform(o, x_BTD)
        return FusedDrafts(o, inputs.qkv, draft)

    def decode_(
        self, bound: BoundUpdate, x_B1D: Tensor, history: Tensor | None, states: Tensor, norm: Norm | None
    ) -> Tensor:
        """Decode one token per row; history and states change in place. Returns: o [B, 1, HV, V].

        The kernel of the products computes the convolution as well, where that is faster.
        """
        operands, maps = self._parameters_and_maps(x_B1D, history)
        is_faster = reads_convolved(self.step, x_B1D.shape[0])
        convolution = self._convolution(x_B1D, operands, maps) if is_faster else None
        step, inputs, _ = self._read(x_B1D, operands, maps, norm, convolution, {})
        return bound.fused_decode_step_(step, inputs, states)

    def read_convolved(
        self, x_B1D: Tensor, history: Tensor | None, norm: Norm | None, others: Mapping[str, nn.Module]
    ) -> ReadStep | None:
        """Compute the operands of the step, and the convolution of q, k and v by the kernel of the products.

        Args: others: more maps of the mixer's input, by a name that no operand has.
        Returns: None, with the history as it was, if that kernel does not compute the convolution.
        """
        operands, maps = self._parameters_and_maps(x_B1D, history)
        convolution = self._convolution(x_B1D, operands, maps)
        if history is not None and convolution is None:
            return None
        return self._read(x_B1D, operands, maps, norm, convolution, others)

    def _convolution(
        self, x_B1D: Tensor, operands: Mapping[str, Tensor], maps: Mapping[str, nn.Module]
    ) -> Convolution | None:
        """Return the convolution that the kernel of the products can compute; None: there is none, or it cannot."""
        parts = self.step.parts
        if "history" not in operands or any(part.silu != parts[0].silu for part in parts):
            return None
        convolution = Convolution(operands["history"], operands["weight"], operands.get("bias"), parts[0].silu)
        return convolution if convolves(x_B1D, maps["qkv"], convolution) else None

    def _read(
        self, x_B1D: Tensor, operands: Mapping[str, Tensor], maps: Mapping[str, nn.Module], norm: Norm | None,
        convolution: Convolution | None, others: Mapping[str, nn.Module],
    ) -> ReadStep:  # fmt: skip
        """Compute the products, and the convolution if it is given, which the step then does not compute."""
        step = self.step
        if convolution is not None:
            operands = {name: x for name, x in operands.items() if name not in ("history", "weight", "bias")}
            step = step._replace(taps=0, parts=tuple(part._replace(silu=False) for part in step.parts))
        products = apply_maps(x_B1D, {**maps, **others}, norm, convolution)
        inputs = FusedDecodeInputs(**operands, **{name: products[name] for name in maps})
        return ReadStep(step, inputs, {name: products[name] for name in others})

    def inputs(self, x_B1D: Tensor, history: Tensor | None, norm: Norm | None = None) -> FusedDecodeInputs:
        """Compute the operands of the step.

        Args: x_B1D: input of the mixer, before `norm` if it is given; history: state of the convolution.
        """
        operands, maps = self._parameters_and_maps(x_B1D, history)
        return FusedDecodeInputs(**operands, **apply_maps(x_B1D, maps, norm))

    def _parameters_and_maps(
        self, x_B1D: Tensor, history: Tensor | None
    ) -> tuple[dict[str, Tensor], dict[str, nn.Module]]:
        """Return the operands that do not depend on the token, and the maps that compute the others, qkv first."""
        operands = {} if history is None else {"history": history}
        maps: dict[str, nn.Module] = {}
        for part in self.fused_parts.values():
            operands |= part.fused_parameters(x_B1D)
            maps |= part.fused_maps()
        return operands, maps


class FusionPlan(NamedTuple):
    """Names of the parts in a decode step and after it.

    classes: class of every part of the mixer, by name, at the time of the plan.
    """

    fused: tuple[str, ...]
    remaining: tuple[str, ...]
    classes: dict[str, type[nn.Module]]

    def apply(self, step: FusedDecodeStep, parts: Mapping[str, nn.Module]) -> DecodeFusion | None:
        """Build the decode step from the parts of the mixer.

        Returns: None if a part was replaced or added since the plan, or is not plain: the mixer then calls its parts
            one by one, so that every replacement and hook takes effect.
        """
        if tuple(parts) != tuple(self.classes):
            return None
        for name, part in parts.items():
            if type(part) is not self.classes[name] or not is_plain(part):
                return None
        fused_parts: dict[str, Fusible] = {}
        for name in self.fused:
            part = parts[name]
            assert isinstance(part, Fusible)
            extended = part.fuse_into(step)
            if extended is None:
                return None
            step, fused_parts[name] = extended, part
        remaining = [parts[name] for name in self.remaining]
        return DecodeFusion(step, fused_parts, [part for part in remaining if isinstance(part, StatelessOutputPart)])


def plan_fusion(
    step: FusedDecodeStep, parts: Mapping[str, nn.Module], outputs: Mapping[str, nn.Module]
) -> FusionPlan | None:
    """Plan a decode step that contains the projection, all operand parts and as many output parts as possible.

    Args:
        step: the step without parts.
        parts: all parts in order, the update and `outputs` included.
    Returns: None if a part before the update does not fuse, or an output part after the step needs the operands.
    """
    fused: dict[str, type[nn.Module]] = {}
    for name, part in parts.items():
        if name == "update":
            continue
        extended = _extend(step, part) if type(part) not in fused.values() else None  # a step holds one part per class
        if extended is None:
            break
        step, fused[name] = extended, type(part)
    remaining = [name for name in outputs if name not in fused]
    if len(fused) + len(remaining) < len(parts) - 1 or not all(_runs_alone(outputs[name]) for name in remaining):
        return None
    return FusionPlan(tuple(fused), tuple(remaining), {name: type(part) for name, part in parts.items()})


def _extend(step: FusedDecodeStep, part: nn.Module) -> FusedDecodeStep | None:
    """Add a part to a step if its own class declares how."""
    return part.fuse_into(step) if isinstance(part, Fusible) and "fuse_into" in vars(type(part)) else None


def _runs_alone(part: nn.Module) -> bool:
    return isinstance(part, StatelessOutputPart) and type(part).forward is StatelessOutputPart.forward


def linear_output_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of a linear map of x. Autocast leaves float64 alone and does not apply to the meta device."""
    device = x.device.type
    if x.is_meta or x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)
