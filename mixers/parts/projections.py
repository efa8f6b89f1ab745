"""Projections of a mixer's input to q, k and v, or to one value per channel.

B batch, T time, D width, H key heads, HV value heads, K key width, V value width, n householders, C channels
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from einops import rearrange
from torch import Tensor, nn

from deltazoo.backends.ops.decode_step import FusedDecodeStep
from deltazoo.backends.ops.gemv import Convolution
from deltazoo.backends.ops.short_conv import ConvPart, apply_silu_and_norm
from deltazoo.backends.torch_ext.plain_module import is_plain
from deltazoo.backends.update.base import UpdateInputs
from deltazoo.mixers.core.decode_maps import convolves
from deltazoo.mixers.core.grouped import Groupable, Rows
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import Fusible, HeadShape, MapsInput, OperandPart, Stateful, init_normal
from deltazoo.mixers.parts.convolution import ConvBias, ShortConv

# A subset of q, k and v
Streams = Literal["", "q", "k", "v", "qk", "qkv"]


class QKVProjection(Groupable, Fusible, Stateful, MapsInput):
    """q, k, v = W x by one linear map, then optionally a short convolution, SiLU and an L2 norm of each head.

    Activation and norm are computed together with the convolution (`backends.ops.short_conv`). Other activations of
    q and k are in `feature_maps.FeatureMap`, other norms in `norms.UnitNorm`.

    Args:
        conv_width: taps of the convolution; 0: none.
        silu: the streams with a SiLU.
        unit: the streams whose heads are divided by their L2 norm, after the SiLU.
        conv_bias: bias of the convolution, as for `ShortConv`.
        keys: False leaves k to a later part (HGRN-2); until then q takes its place.
        conv_of: the streams that are convolved; "qk" leaves out v (MesaNet).
        query_heads: heads of q; None: those of k.
    State: the convolution's, [B, conv_width - 1, channels]; none without a convolution.
    """

    splits: ClassVar[bool] = True
    keeps_inputs: ClassVar[bool] = True

    def __init__(
        self,
        shape: HeadShape,
        conv_width: int = 0,
        silu: Streams = "",
        unit: Streams = "",
        conv_bias: ConvBias = False,
        keys: bool = True,
        conv_of: Literal["qkv", "qk"] = "qkv",
        query_heads: int | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.keys, self.query_heads = shape, keys, query_heads or shape.heads
        n, size = shape.householders, shape.heads * shape.key_width
        channels = {
            "q": self.query_heads * shape.key_width,
            "k": n * size if keys else 0,
            "v": n * shape.value_heads * shape.value_width,
        }
        widths = {"q": shape.key_width, "k": shape.key_width, "v": shape.value_width}
        parts = [ConvPart(channels[x], x in silu, widths[x] if x in unit else 0) for x in "qkv"]
        self.to_qkv = nn.Linear(shape.width, sum(channels.values()), bias=False)
        count = len(conv_of) if conv_width else 0
        convolved, self.unconvolved = parts[:count], parts[count:]
        self.conv = None
        if conv_width:
            self.conv = ShortConv(sum(part.channels for part in convolved), conv_width, conv_bias, convolved)

    def init_state(self, batch: int, like: Tensor) -> Tensor | None:
        return None if self.conv is None else self.conv.init_state(batch, like)

    def input_map(self) -> nn.Module:
        return self.to_qkv

    def forward(self, x: Tensor, state: Tensor | None, context: Context) -> tuple[UpdateInputs, Tensor | None]:
        """Project x [B, T, D]; k and v get an axis n after T if there are several Householder steps."""
        qkv_BTC = context.apply(self.to_qkv, x)
        convolved: tuple[Tensor, ...] = ()
        if self.conv is not None:
            channels = self.conv.weight.shape[0]
            convolved, state = self.conv(qkv_BTC[..., :channels], state, context)
            qkv_BTC = qkv_BTC[..., channels:]
        return self._split_heads(convolved, qkv_BTC), state

    def forward_grouped(
        self, parts: Sequence["QKVProjection"], rows: Rows, x: Tensor, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        qkv_1AC = rows.linear(x, [part.to_qkv for part in parts])
        convolved: tuple[Tensor, ...] = ()
        if self.conv is not None:
            channels = self.conv.weight.shape[0]
            convs = [part.conv for part in parts if part.conv is not None]
            convolved, state = self.conv.forward_grouped(convs, rows, qkv_1AC[..., :channels], state, context)
            qkv_1AC = qkv_1AC[..., channels:]
        return self._split_heads(convolved, qkv_1AC), state

    def _split_heads(self, convolved: tuple[Tensor, ...], unconvolved_BTC: Tensor) -> UpdateInputs:
        """Return the operands from the convolved streams and the channels of the others."""
        q, k, v = (*convolved, *apply_silu_and_norm(unconvolved_BTC, self.unconvolved))
        return split_heads(q, k if self.keys else q, v, self.shape, self.query_heads)

    def fuse_into(self, step: FusedDecodeStep) -> FusedDecodeStep | None:
        if not self.keys or self.query_heads != self.shape.heads:
            return None
        if self.conv is None:
            return step._replace(parts=tuple(self.unconvolved))
        if self.unconvolved or type(self.conv) is not ShortConv or not is_plain(self.conv):
            return None
        return step._replace(parts=self.conv.parts, taps=self.conv.weight.shape[1])

    def is_one_map(self) -> bool:
        """Whether q, k and v of one key each are the product of the map, and heads of q those of k."""
        if self.conv is not None or not self.keys or self.shape.householders > 1:
            return False
        return self.query_heads == self.shape.heads and not any(part.silu or part.unit for part in self.unconvolved)

    def fused_maps(self) -> dict[str, nn.Module]:
        return {"qkv": self.to_qkv}

    def fused_parameters(self, x: Tensor) -> dict[str, Tensor]:
        if self.conv is None:
            return {}
        bias = {} if self.conv.bias is None else {"bias": self.conv.bias}
        return {"weight": self.conv.weight, **bias}


def split_heads(
    q_BTC: Tensor, k_BTC: Tensor, v_BTC: Tensor, shape: HeadShape, query_heads: int | None = None
) -> UpdateInputs:
    """Return q, k and v by head; k and v get an axis n after T if there are several Householder steps."""
    _, H, HV, _, _, n = shape
    q = rearrange(q_BTC, "b t (h k) -> b t h k", h=query_heads or H)
    if n == 1:
        k, v = rearrange(k_BTC, "b t (h k) -> b t h k", h=H), rearrange(v_BTC, "b t (h v) -> b t h v", h=HV)
    else:
        k = rearrange(k_BTC, "b t (n h k) -> b t n h k", n=n, h=H)
        v = rearrange(v_BTC, "b t (n h v) -> b t n h v", n=n, h=HV)
    return UpdateInputs(q, k, v)


class ShareKeyValues(OperandPart):
    """Repeat k, v and log_decay of each key-value head for the query heads that share it, which are consecutive."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.heads = shape.heads

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        groups = self.heads // inputs.k.shape[2]
        shared = {"k": inputs.k, "v": inputs.v, "log_decay": inputs.log_decay}
        repeated = {name: y.repeat_interleave(groups, 2) for name, y in shared.items() if y is not None}
        return inputs._replace(**repeated), None


class ChannelProjection(nn.Module, Stateful, MapsInput):
    """v = conv(W x) for C channels, [B, T, C, 1], with an optional SiLU; q = k = 1.

    Args:
        conv_width: taps of the convolution; 0: none.
        silu: whether a SiLU follows.
        std: standard deviation of the initial W, whose bias is then 0; None: torch's initialisation of a linear map.
        bias: whether W has a bias.
        conv_std: standard deviation of the initial weight of the convolution; None: that of `ShortConv`.
        conv_bias: bias of the convolution, as for `ShortConv`.
    State: the convolution's, [B, conv_width - 1, C]; none without a convolution.
    """

    splits: ClassVar[bool] = True
    keeps_inputs: ClassVar[bool] = True

    def __init__(
        self,
        shape: HeadShape,
        conv_width: int,
        silu: bool,
        std: float | None = None,
        bias: bool = False,
        conv_std: float | None = None,
        conv_bias: ConvBias = True,
    ) -> None:
        super().__init__()
        self.shape, self.std = shape, std
        channels = shape.value_heads * shape.value_width
        self.parts = [ConvPart(channels, silu)]
        self.to_v = nn.Linear(shape.width, channels, bias=bias)
        self.conv = ShortConv(channels, conv_width, conv_bias, self.parts, std=conv_std) if conv_width else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Override torch's initialisation of the linear map if there is a `std`."""
        if self.std is not None:
            init_normal(self.to_v, self.std)

    def init_state(self, batch: int, like: Tensor) -> Tensor | None:
        return None if self.conv is None else self.conv.init_state(batch, like)

    def input_map(self) -> nn.Module:
        return self.to_v

    def forward(self, x: Tensor, state: Tensor | None, context: Context) -> tuple[UpdateInputs, Tensor | None]:
        v, state = self.convolve(context.apply(self.to_v, x), state, context)
        one = v.new_ones(*v.shape[:2], self.shape.heads, self.shape.key_width)
        return UpdateInputs(one, one, torch.unflatten(v, -1, (self.shape.value_heads, -1))), state

    def convolution(self, x_B1D: Tensor, history: Tensor | None) -> Convolution | None:
        """Return the convolution that the kernel of the map computes in a decode step; None: it computes none."""
        if self.conv is None or history is None or not self.convolves_plainly():
            return None
        convolution = Convolution(history, self.conv.weight, self.conv.bias, self.parts[0].silu)
        return convolution if convolves(x_B1D, self.to_v, convolution) else None

    def convolves_plainly(self) -> bool:
        """Whether there is no convolution, or a call of its module computes only that."""
        return self.conv is None or (type(self.conv) is ShortConv and is_plain(self.conv))

    def convolve(self, product: Tensor, state: Tensor | None, context: Context) -> tuple[Tensor, Tensor | None]:
        """Return the values [B, T, C] from the product of the map, and the new state."""
        if self.conv is None:
            return apply_silu_and_norm(product, self.parts)[0], state
        (v,), state = self.conv(product, state, context)
        return v, state
