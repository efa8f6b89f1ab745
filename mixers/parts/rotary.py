"""Rotary position embedding: rotates pairs of channels of q and k by angles proportional to the position.

B batch, T time, H heads, K key width, R half the rotated channels
"""

import math
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.custom_op import operator
from deltazoo.backends.update.base import UpdateInputs, state_dtype
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import OperandPart, Stateful
from deltazoo.mixers.core.sequences import positions, token_counts
from deltazoo.mixers.core.state import write_back
from deltazoo.mixers.parts.rope_scaling import RopeScaling, ScaledFrequencies


class Rotation(NamedTuple):
    """Cosine and sine of the angles of the channel pairs, [B, T, R] or [B, T, ..., R] each."""

    cos: Tensor
    sin: Tensor


class Rotary(OperandPart, Stateful):
    """q_t, k_t <- R_t q_t, R_t k_t, so that q_t^T k_s depends on the positions through t - s only.

    Together with a decay this is xPos.

    State: the number of tokens that each sequence has processed, [B] int64.
    Source: RoPE 2104.09864; as the xPos of RetNet, 2307.08621, section 2.1.
    """

    splits: ClassVar[bool] = True

    def __init__(self, theta: float = 10000.0) -> None:
        super().__init__()
        self.theta = theta

    def init_state(self, batch: int, like: Tensor) -> Tensor:
        return like.new_zeros(batch, dtype=torch.int64)

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        position_BT = positions(x, state, context)
        rotation = rotation_at(position_BT, inputs.q.shape[-1] // 2, self.theta, state_dtype(inputs.q.dtype))
        new_state = None if state is None else write_back(state, state + token_counts(x, context))
        return inputs._replace(q=apply_rotary(inputs.q, rotation), k=apply_rotary(inputs.k, rotation)), new_state

    def extra_repr(self) -> str:
        return f"theta={self.theta:g}"


def rotation_at(
    position_BT: Tensor, half: int, theta: float, dtype: torch.dtype, scaling: RopeScaling | None = None
) -> Rotation:
    """Return the rotation of each position by the angle position * theta^(-i / half) for channel pair i, R = half.

    For several tokens it is an operator, which Inductor does not fuse: it would compute cosine and sine again in every
    kernel, forward and backward, for every head.
    """
    compute = _rotation if position_BT.shape[1] == 1 else _rotation_op
    scaled = [] if scaling is None else [*scaling.frequencies(theta, half)]
    return Rotation(*compute(position_BT, half, theta, scaled, dtype))


def apply_rotary(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the pair of channels i and i + R for i < R; channels from 2 R on are unchanged.

    Args: x: [B, T, ..., K] with K >= 2 R; rotation: [B, T, R] from `rotation_at`, or [B, T, ..., R] like x.
    """
    cos, sin = rotation
    half = cos.shape[-1]
    if cos.dim() < x.dim():
        cos, sin = (y.view(*y.shape[:2], *[1] * (x.dim() - 3), half) for y in rotation)
    wide = x.to(cos.dtype)
    left, right, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return torch.cat([left * cos - right * sin, right * cos + left * sin, rest], -1).to(x.dtype)


def rotation_angle(position_BT: Tensor, frequency: Tensor, dtype: torch.dtype) -> Tensor:
    """Return position * frequency modulo 2 pi, [B, T, *frequency.shape].

    Computed in float64 (float32 on MPS), so that the error does not grow with the position: in float32, the angle at
    position 10^6 is off by about 0.003.
    """
    wide = angle_dtype(frequency.device)
    position = position_BT.to(wide).view(*position_BT.shape, *[1] * frequency.dim())
    angle = position * frequency.to(wide)
    return (angle - (angle / (2 * math.pi)).floor() * (2 * math.pi)).to(dtype)  # remainder() is slow in float64


def angle_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of angles that grow with the position."""
    return torch.float32 if device.type == "mps" else torch.float64


def _rotation(
    position: Tensor, half: int, theta: float, scaled: list[float], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Args: scaled: the fields of `ScaledFrequencies`; [] for none."""
    pair_R = torch.arange(half, device=position.device, dtype=angle_dtype(position.device))
    frequency_R = theta ** (-pair_R / half)
    if not scaled:
        angle = rotation_angle(position, frequency_R, dtype)
        return angle.cos(), angle.sin()
    scaling = ScaledFrequencies(*scaled)
    angle = rotation_angle(position, scaling.apply(frequency_R), dtype)
    return scaling.amplitude * angle.cos(), scaling.amplitude * angle.sin()


def _rotation_shapes(
    position: Tensor, half: int, theta: float, scaled: list[float], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    cos = position.new_empty(*position.shape, half, dtype=dtype)
    return cos, torch.empty_like(cos)


_rotation_op = operator(
    "rotation(Tensor position, int half, float theta, float[] scaled, ScalarType dtype) -> (Tensor, Tensor)",
    _rotation,
    _rotation_shapes,
)
