"""Side outputs: what a module returns besides its output, for later modules and for the loss.

They are return values. FSDP2 and activation checkpointing copy the arguments of a module, so a container in the
arguments loses what a module adds to it.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.io.errors import InputError
from deltazoo.mixers.core.losses import AuxiliaryLoss


class LostGradientError(InputError):
    """A module runs in a reentrant checkpoint, which records gradients of some of its arguments or results only."""

    def __init__(self, tensors: str) -> None:
        super().__init__(
            f"{tensors} would get no gradients: torch.utils.checkpoint with use_reentrant=True records tensors that a "
            "module takes and returns directly, not those in tuples or dicts; pass use_reentrant=False, or call "
            "model.checkpoint_layers()"
        )


class Side(NamedTuple):
    """Side outputs of one module; create them with `side_outputs`.

    values: tensors for later modules, by name (RWKV-7's first values).
    losses: auxiliary losses.
    recorded: whether autograd recorded gradients while the module ran.
    """

    values: Mapping[str, Tensor]
    losses: tuple[AuxiliaryLoss, ...]
    recorded: bool


def side_outputs(values: Mapping[str, Tensor] | None = None, losses: Iterable[AuxiliaryLoss] = ()) -> Side | None:
    """Return the side outputs of the module that runs, None if there are none."""
    values, losses = dict(values or {}), tuple(losses)
    return Side(values, losses, torch.is_grad_enabled()) if values or losses else None


def join_sides(sides: Iterable[Side | None]) -> Side | None:
    """Return the side outputs of several modules as those of their caller. Of values with equal names the last stays.

    Raises: LostGradientError: a module ran without gradients in a caller with gradients, as in a reentrant checkpoint.
    """
    values: dict[str, Tensor] = {}
    losses: list[AuxiliaryLoss] = []
    for side in sides:
        if side is None:
            continue
        if torch.is_grad_enabled() and not side.recorded:
            names = dict.fromkeys([*side.values, *(loss.name for loss in side.losses)])
            raise LostGradientError(f"the side outputs {', '.join(names)}")
        values |= side.values
        losses += side.losses
    return side_outputs(values, losses)
