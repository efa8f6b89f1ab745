"""Rotary position embedding: rotates pairs of channels of q and k by angles proportional to the position.

B batch, T time, H heads, K key width, R half the rotated channels
"""

import torch
from torch import Tensor

from deltazoo.backends.base import UpdateInputs, state_dtype
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import OperandPart, Stateful
from deltazoo.mixers.core.sequences import positions, token_counts
from deltazoo.mixers.core.state import write_back


class Rotary(OperandPart, Stateful):
    """q_t, k_t <- R_t q_t, R_t k_t, so that q_t^T k_s depends on the positions through t - s only.

    Together with a decay this is xPos.

    State: the number of tokens that each sequence has processed, [B] int64.
    Source: RoPE 2104.09864; as the xPos of RetNet, 2307.08621, section 2.1.
    """

    def __init__(self, theta: float = 10000.0) -> None:
        super().__init__()
        self.theta = theta

    def init_state(self, batch: int, like: Tensor) -> Tensor:
        return like.new_zeros(batch, dtype=torch.int64)

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        position_BT = positions(x, state, context)
        angle = angles(position_BT, inputs.q.shape[-1] // 2, self.theta, state_dtype(inputs.q.dtype))
        new_state = None if state is None else write_back(state, state + token_counts(x, context))
        return inputs._replace(q=apply_rotary(inputs.q, angle), k=apply_rotary(inputs.k, angle)), new_state

    def extra_repr(self) -> str:
        return f"theta={self.theta:g}"


def angles(position_BT: Tensor, half: int, theta: float, dtype: torch.dtype) -> Tensor:
    """Return position * theta^(-i / half) for channel pair i, [B, T, R]."""
    pair_R = torch.arange(half, device=position_BT.device, dtype=dtype)
    return position_BT[..., None] * theta ** (-pair_R / half)


def apply_rotary(x: Tensor, angle: Tensor) -> Tensor:
    """Rotate the pair of channels i and i + R for i < R; channels from 2 R on are unchanged.

    Args: x: [B, T, ..., K] with K >= 2 R; angle: [B, T, R] from `angles`, or [B, T, ..., R] like x.
    """
    half = angle.shape[-1]
    if angle.dim() < x.dim():
        angle = angle.view(*angle.shape[:2], *[1] * (x.dim() - 3), half)
    cos, sin = angle.cos(), angle.sin()
    wide = x.to(angle.dtype)
    left, right, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return torch.cat([left * cos - right * sin, right * cos + left * sin, rest], -1).to(x.dtype)
