"""Which parts of a mixer a decode kernel may take with the update.

B batch, D width
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from deltazoo.backends.decode_step import FusedDecodeInputs, FusedDecodeStep
from deltazoo.mixers.core.part import Fusible, FusibleLinearPart, StatelessOutputPart, is_unmodified, together


class Fusion(NamedTuple):
    """A decode step with a mixer's projection, all its operand parts and the first of its output parts inside, by name.

    The output parts `after` it follow one by one, and look at nothing that stays inside.
    """

    step: FusedDecodeStep
    inside: dict[str, Fusible]
    after: list[StatelessOutputPart]

    def inputs(self, x_B1D: Tensor, history: Tensor | None) -> FusedDecodeInputs:
        """What the step takes; narrow maps by one product. Args: x: the mixer's input; history: the convolution's."""
        given = {} if history is None else {"history": history}
        narrow = {name: part for name, part in self.inside.items() if isinstance(part, FusibleLinearPart)}
        raw = together(x_B1D, {name: part.proj for name, part in narrow.items()})
        for name, part in self.inside.items():
            given |= narrow[name].fused_of(raw[name]) if name in raw else part.fused_inputs(x_B1D)
        return FusedDecodeInputs(**given)


def fusion(step: FusedDecodeStep, before: Mapping[str, nn.Module], outputs: Mapping[str, nn.Module]) -> Fusion | None:
    """Fuse parts, as they are, with a step that has none yet. Whether it is taken so a backend says.

    None where one of those before the update does not fuse, or one after the step looks at what stays inside, or does
    more than its class says.
    """
    inside: dict[str, Fusible] = {}
    for name, part in (*before.items(), *outputs.items()):
        more = part.fuse_into(step) if isinstance(part, Fusible) and _may(part, inside.values()) else None
        if more is None or not isinstance(part, Fusible):
            break
        step, inside[name] = more, part
    left = [part for name, part in outputs.items() if name not in inside]
    after = [part for part in left if isinstance(part, StatelessOutputPart) and part.plain and is_unmodified(part)]
    if len(inside) < len(before) or len(after) < len(left):
        return None
    return Fusion(step, inside, after)


def _may(part: Fusible, inside: Iterable[Fusible]) -> bool:
    """Whether a part computes what it says, and none of its kind is there, for the step has one place for each."""
    return part.says and is_unmodified(part) and type(part) not in [type(other) for other in inside]


def mapped_dtype(x: Tensor) -> torch.dtype:
    """Of what a linear map makes of x: autocast leaves float64 alone, and the meta device knows none."""
    kind = x.device.type
    if x.is_meta or x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)
