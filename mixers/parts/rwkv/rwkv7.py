"""RWKV-7: projections after the token shift, and the operands of its generalised delta rule.

B batch, T time, D width, H heads, K key width, V value width
"""

import math
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.ops.rwkv_step import RWKV7Maps, RWKVState, rwkv7_token_
from deltazoo.backends.update.base import UpdateInputs
from deltazoo.mixers.core.decode_maps import reads_weight
from deltazoo.mixers.core.initialization import fills_values
from deltazoo.mixers.core.mixer import Context, Place
from deltazoo.mixers.core.part import HeadShape, OperandResult, Stateful
from deltazoo.mixers.core.token_step import TokenCall, TokenOutput, TokenStep
from deltazoo.mixers.core.update import Update
from deltazoo.mixers.parts.convolution import TokenShift
from deltazoo.mixers.parts.gates.output_gates import PrecomputedGate
from deltazoo.mixers.parts.low_rank import LowRank, Ranks
from deltazoo.mixers.parts.norms import HeadNorm
from deltazoo.mixers.parts.rwkv.token_weights import common_weights, reads_low_rank
from deltazoo.mixers.parts.skips import Bonus

FIRST_VALUE = "rwkv7 first value"  # key of `context.values`
# Maximum of |weight| sqrt(D) at initialisation
RECEPTANCE_BOUND, KEY_BOUND, VALUE_BOUND = 0.5, 0.05, 0.5


class RWKV7Projection(nn.Module, Stateful, TokenStep):
    """r, w, k, v, eta and g of x_i = x_t + (x_(t-1) - x_t) mu_i, and the operands of `dplr` from them.

    log_decay = -exp(-1/2) sigmoid(lowrank(x_w)), eta = sigmoid(lowrank(x_a)), kappa = unit(k * xi),
    k <- k (1 + (eta - 1) alpha), a = -kappa, b = kappa * eta. Later layers interpolate v towards that of the first
    RWKV-7 layer with weight sigmoid(lowrank(x_v)). The first RWKV-7 layer of a stack should be layer 0, because only
    layer 0 is built without the weights of that interpolation.

    Returns the intermediate "gate"; the first layer also its values v, for `context.values` of later layers.

    State: the token shift's, [B, 1, D].
    Initialisation, as in the published code: by channel and layer; the maps to r and v are uniform in +-0.5 / sqrt(D),
        the map to k in +-0.05 / sqrt(D).
    Source: RWKV-7 2503.14456, section 4.
    """

    splits: ClassVar[bool] = True
    keeps_inputs: ClassVar[bool] = True

    no_weight_decay: ClassVar[tuple[str, ...]] = ("mix",)

    def __init__(self, shape: HeadShape, place: Place, ranks: Ranks) -> None:
        super().__init__()
        D, self.shape, self.place = shape.width, shape, place
        keys, values = shape.heads * shape.key_width, shape.value_heads * shape.value_width
        self.mix = nn.Parameter(torch.empty(6, D))  # r, w, k, v, a, g
        self.shift = TokenShift()
        self.decay = LowRank(D, ranks.decay, keys, "tanh", partial(_initial_decay, keys, shape.key_width, place))
        self.rate = LowRank(D, ranks.rate, keys, initial_bias=partial(_initial_rate, keys, shape.key_width))
        self.gate = LowRank(D, ranks.gate, values, "sigmoid")
        self.value = None
        if place.layer:
            self.value = LowRank(D, ranks.value, values, initial_bias=partial(_initial_value_mix, values))
        self.xi = nn.Parameter(torch.empty(keys))
        self.alpha = nn.Parameter(torch.empty(keys))
        self.to_r, self.to_k = (nn.Linear(D, keys, bias=False) for _ in range(2))
        self.to_v = nn.Linear(D, values, bias=False)
        self.reset_parameters()

    @fills_values
    def reset_parameters(self) -> None:
        """Set mix, xi and alpha, and override torch's initialisation of the maps to r, k and v."""
        D, ratio = self.shape.width, 1 - self.place.layer / self.place.depth
        powers = torch.tensor([0.2, 0.9, 0.7, 0.7, 0.9, 0.2])[:, None]
        self.mix.copy_(1 - (torch.arange(D) / D) ** (powers * ratio))
        self.xi.copy_(0.71 - 0.1 * (_ramp(self.xi.shape[0]) - 0.5))
        self.alpha.fill_(1.02)
        for linear, bound in ((self.to_r, RECEPTANCE_BOUND), (self.to_k, KEY_BOUND), (self.to_v, VALUE_BOUND)):
            nn.init.uniform_(linear.weight, -bound * D**-0.5, bound * D**-0.5)

    def init_state(self, batch: int, like: Tensor) -> Tensor:
        return self.shift.init_state(batch, self.shape.width, like)

    def forward(self, x: Tensor, state: Tensor | None, context: Context) -> OperandResult:
        previous, new_state = self.shift(x, state, context)
        x_r, x_w, x_k, x_v, x_a, x_g = (x + (previous - x) * mix.to(x.dtype) for mix in self.mix)
        r, k, v = self.to_r(x_r), self.to_k(x_k), self.to_v(x_v)
        log_decay = -math.exp(-0.5) * self.decay(x_w).sigmoid()
        eta = self.rate(x_a).sigmoid()
        kappa = F.normalize(self._heads((k * self.xi).to(eta.dtype)), dim=-1)
        k = k * (1 + (eta - 1) * self.alpha)
        intermediates = {"gate": self.gate(x_g)}
        if context.values is not None:
            if FIRST_VALUE in context.values:
                v = self._interpolate_values(v, x_v, context.value(FIRST_VALUE))
            else:
                intermediates[FIRST_VALUE] = v
        v = rearrange(v, "b t (h v) -> b t h v", h=self.shape.value_heads)
        q, k = self._heads(r), self._heads(k).to(r.dtype)
        b = (kappa * self._heads(eta)).to(r.dtype)
        inputs = UpdateInputs(q, k, v.to(r.dtype), log_decay=self._heads(log_decay), a=-kappa.to(r.dtype), b=b)
        return inputs, new_state, intermediates

    def decode_token_(self, call: TokenCall) -> TokenOutput | None:
        x_B1D, context = call.x, call.context
        if not call.has_parts(RWKV7Projection, Update, HeadNorm, Bonus, PrecomputedGate):
            return None
        weights = common_weights(call, self.shift, self.decay, "none")
        if weights is None or not all(reads_weight(linear, x_B1D) for linear in (self.to_r, self.to_k, self.to_v)):
            return None
        value = self.value
        parts = [self.rate, self.gate] if value is None else [self.rate, self.gate, value]
        if not all(reads_low_rank(part, x_B1D) for part in parts) or self.rate.bias is None:
            return None
        first = None if context.values is None else context.values.get(FIRST_VALUE)
        if first is not None and (first.shape[-1] != self.to_v.out_features or first.dtype != x_B1D.dtype):
            return None
        weights = weights._replace(
            rate=self.rate.up.weight, rate_bias=self.rate.bias, gate=self.gate.up.weight, xi=self.xi, alpha=self.alpha,
            value=None if value is None else value.up.weight, value_bias=None if value is None else value.bias,
        )  # fmt: skip
        maps = RWKV7Maps(
            self.to_r.weight, self.to_k.weight, self.to_v.weight, self.decay.down.weight, self.rate.down.weight,
            self.gate.down.weight, None if value is None else value.down.weight,
        )  # fmt: skip
        states = RWKVState(call.states["project"], call.states["update"])
        o, v = rwkv7_token_(x_B1D, call.norm, self.mix, maps, weights, states, first)
        return TokenOutput(o, None, {FIRST_VALUE: v} if context.values is not None and first is None else None)

    def _interpolate_values(self, v: Tensor, x_v: Tensor, first: Tensor) -> Tensor:
        """Interpolate the values of a later layer towards those of the first one."""
        if self.value is None:
            return v
        if first.shape[-1] != v.shape[-1]:
            raise ConfigError(
                "heads x value_width must be the same in all RWKV-7 layers, because their values are mixed: the first "
                f"one has {first.shape[-1]}, got {v.shape[-1]} in layer {self.place.layer}"
            )
        return v + (first - v) * self.value(x_v).sigmoid()

    def _heads(self, x: Tensor) -> Tensor:
        return rearrange(x, "b t (h k) -> b t h k", h=self.shape.heads)


def _ramp(size: int) -> Tensor:
    """Return `size` numbers from 0 to 1, evenly spaced."""
    return torch.arange(size) / max(1, size - 1)


def _zigzag(keys: int, key_width: int) -> Tensor:
    """Return x |x| for x from -1 to 1, evenly spaced over the channels of each head."""
    centred = (torch.arange(keys) % key_width) * 2 / max(1, key_width - 1) - 1
    return centred * centred.abs()


def _initial_decay(keys: int, key_width: int, place: Place) -> Tensor:
    share = place.layer / max(1, place.depth - 1)
    return -6 + 6 * _ramp(keys) ** (1 + share**0.3) + 0.5 + 2.5 * _zigzag(keys, key_width)


def _initial_rate(keys: int, key_width: int) -> Tensor:
    return -0.19 + 0.3 * _zigzag(keys, key_width) + 0.4 * (_ramp(keys) - 0.5)


def _initial_value_mix(values: int) -> Tensor:
    return 0.73 - 0.4 * (_ramp(values) - 0.5)
