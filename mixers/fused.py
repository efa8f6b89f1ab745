"""Which parts of a mixer a decode kernel may take with the update.

B batch, D width
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from deltazoo.backends.fused_step import FusedInputs, FusedStep
from deltazoo.mixers.parts import Fusible, FusibleNarrow, Shaping, hooked, together


class Fusion(NamedTuple):
    """A decode step with the projection, all operand parts and the first output parts of a mixer inside.

    The output parts `after` it follow one by one, and look at nothing that stays inside.
    """

    step: FusedStep
    inside: tuple[Fusible, ...]
    after: tuple[Shaping, ...]

    def inputs(self, x_B1D: Tensor, history: Tensor | None) -> FusedInputs:
        """What the step takes; narrow maps by one product. Args: x: the mixer's input; history: the convolution's."""
        raw = together(x_B1D, {str(i): p.proj for i, p in enumerate(self.inside) if isinstance(p, FusibleNarrow)})
        given = {} if history is None else {"history": history}
        for i, part in enumerate(self.inside):
            if isinstance(part, FusibleNarrow) and str(i) in raw:
                given |= part.fused_of(raw[str(i)])
            else:
                given |= part.fused_inputs(x_B1D)
        return FusedInputs(**given)


def fusion(step: FusedStep, before: Sequence[nn.Module], outputs: Sequence[nn.Module]) -> Fusion | None:
    """Fuse parts, as they are, with a step that has none yet. Whether it is taken so a backend says.

    None where one of those before the update does not fuse, or one after the step looks at what stays inside. A part
    with a hook stays outside, and is called.
    """
    inside: list[Fusible] = []
    for part in (*before, *outputs):
        once = type(part) not in [type(other) for other in inside]
        more = part.fused(step) if isinstance(part, Fusible) and part.says and once and not hooked(part) else None
        if more is None or not isinstance(part, Fusible):
            break
        step = more
        inside.append(part)
    left = outputs[max(len(inside) - len(before), 0) :]
    after = [part for part in left if isinstance(part, Shaping) and not hooked(part)]
    if len(inside) < len(before) or len(after) < len(left):
        return None
    return Fusion(step, tuple(inside), tuple(after))


def mapped_dtype(x: Tensor) -> torch.dtype:
    """Of what a linear map makes of x; the meta device knows no autocast."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if not x.is_meta and torch.is_autocast_enabled(kind) else x.dtype
