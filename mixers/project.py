"""From the mixer's input to q, k and v.

B batch, T time, D width, H key heads, HV value heads, K key width, V value width, n householders
"""

from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from deltazoo.backends.base import UpdateInputs
from deltazoo.mixers.base import Context
from deltazoo.mixers.conv import ShortConv
from deltazoo.mixers.parts import HeadShape, Stateful


class Project(nn.Module, Stateful):
    """One linear map for q, k and v, then a short convolution and SiLU on v, where asked for.

    The activation of q and k is the feature map's (`features.FeatureMap`).

    Args: conv_width: taps of the convolution, 0 for none; silu: SiLU on v; conv_bias: a bias in the convolution;
        keys: False leaves k to a later part (HGRN-2), which finds q in its place; conv_of: "qk" spares v (MesaNet).
    State: the convolution's, [B, conv_width - 1, channels]; none without one.
    """

    def __init__(
        self,
        shape: HeadShape,
        conv_width: int = 0,
        silu: bool = False,
        conv_bias: bool = False,
        keys: bool = True,
        conv_of: Literal["qkv", "qk"] = "qkv",
    ) -> None:
        super().__init__()
        self.shape, self.silu, self.keys = shape, silu, keys
        n, size = shape.householders, shape.heads * shape.key_width
        self.sizes = [size, n * size if keys else 0, n * shape.value_heads * shape.value_width]
        self.to_qkv = nn.Linear(shape.width, sum(self.sizes), bias=False)
        self.convolved = sum(self.sizes[: len(conv_of)])
        self.conv = ShortConv(self.convolved, conv_width, conv_bias) if conv_width else None

    def init_state(self, batch: int, like: Tensor) -> Tensor | None:
        return None if self.conv is None else self.conv.init_state(batch, like)

    def forward(self, x: Tensor, state: Tensor | None, context: Context) -> tuple[UpdateInputs, Tensor | None]:
        """Project x [B, T, D]; k and v carry the micro-step axis n after T where there are several."""
        qkv_BTC = self.to_qkv(x)
        if self.conv is not None:
            mixed, state = self.conv(qkv_BTC[..., : self.convolved], state, context)
            rest = qkv_BTC[..., self.convolved :]
            qkv_BTC = torch.cat([mixed, rest], -1) if rest.shape[-1] else mixed
        q, k, v = qkv_BTC.split(self.sizes, dim=-1)
        k = k if self.keys else q
        if self.silu:
            v = F.silu(v)
        H, HV = self.shape.heads, self.shape.value_heads
        q_BTHK = rearrange(q, "b t (h k) -> b t h k", h=H)
        if self.shape.householders == 1:
            k, v = rearrange(k, "b t (h k) -> b t h k", h=H), rearrange(v, "b t (h v) -> b t h v", h=HV)
        else:
            n = self.shape.householders
            k = rearrange(k, "b t (n h k) -> b t n h k", n=n, h=H)
            v = rearrange(v, "b t (n h v) -> b t n h v", n=n, h=HV)
        return UpdateInputs(q_BTHK, k, v), state
