"""RWKV-6: the data-dependent token shift, and the projections after it.

B batch, T time, D width, H heads, K key width, V value width
"""

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
from einops import rearrange
from torch import Tensor, nn

from deltazoo.backends.ops.rwkv_step import MAX_RANK, RWKV6Maps, RWKV6Shift, RWKVState, rwkv6_token_
from deltazoo.backends.torch_ext.plain_module import is_plain
from deltazoo.backends.update.base import UpdateInputs
from deltazoo.mixers.core.decode_maps import apply_to_each, reads_weight
from deltazoo.mixers.core.initialization import fills_values
from deltazoo.mixers.core.mixer import Context, Place
from deltazoo.mixers.core.part import HasFlops, HeadShape, OperandResult, Stateful
from deltazoo.mixers.core.token_step import TokenCall, TokenOutput, TokenStep
from deltazoo.mixers.core.update import Update
from deltazoo.mixers.parts.convolution import TokenShift
from deltazoo.mixers.parts.gates.output_gates import PrecomputedGate
from deltazoo.mixers.parts.low_rank import LowRank, Ranks
from deltazoo.mixers.parts.norms import HeadNorm
from deltazoo.mixers.parts.rwkv.token_weights import common_weights
from deltazoo.mixers.parts.skips import Bonus


class RWKV6Projection(nn.Module, Stateful, TokenStep, HasFlops):
    """r, k, v, g and w of x_i = x_t + (x_(t-1) - x_t) (mu_i + lowrank_i(x_t + (x_(t-1) - x_t) mu_x)).

    log_decay = -exp(w_0 + tanh(x_w A) B). Returns the intermediate "gate", g.

    State: the token shift's, [B, 1, D].
    Initialisation, as in the published code: mu_i and w_0 by channel and layer; the first matrix of each low-rank map
        is 0, the second uniform in +-0.01.
    Source: RWKV-5/6 2404.05892, section 4.2 (data-dependent token shift, decay).
    """

    splits: ClassVar[bool] = True
    keeps_inputs: ClassVar[bool] = True

    no_weight_decay: ClassVar[tuple[str, ...]] = ("mix",)

    def __init__(self, shape: HeadShape, place: Place, ranks: Ranks) -> None:
        super().__init__()
        D, self.shape, self.place = shape.width, shape, place
        keys, values = shape.heads * shape.key_width, shape.value_heads * shape.value_width
        self.shift = TokenShift()
        self.mix_x = nn.Parameter(torch.empty(D))
        self.mix = nn.Parameter(torch.empty(5, D))  # w, k, v, r, g
        self.mix_down = nn.Linear(D, 5 * ranks.mix, bias=False)
        self.mix_up = nn.Parameter(torch.empty(5, ranks.mix, D))
        self.decay = LowRank(D, ranks.decay, keys, "tanh", partial(_initial_decay, keys, place), 1e-2)
        self.to_r, self.to_k = (nn.Linear(D, keys, bias=False) for _ in range(2))
        self.to_v, self.to_g = (nn.Linear(D, values, bias=False) for _ in range(2))
        self.reset_parameters()

    @fills_values
    def reset_parameters(self) -> None:
        """Set the mixing weights; overrides torch's initialisation of `mix_down`."""
        layer, depth = self.place
        share, ratio = layer / max(1, depth - 1), 1 - layer / depth
        channel = torch.arange(self.shape.width) / self.shape.width
        self.mix_x.copy_(1 - channel**ratio)
        w = k = 1 - channel**ratio
        r = g = 1 - channel ** (ratio / 2)
        self.mix.copy_(torch.stack([w, k, 1 - (channel**ratio + 0.3 * share), r, g]))
        nn.init.zeros_(self.mix_down.weight)
        nn.init.uniform_(self.mix_up, -1e-2, 1e-2)

    def flops(self) -> int:
        return 2 * self.mix_up.numel()

    def init_state(self, batch: int, like: Tensor) -> Tensor:
        return self.shift.init_state(batch, self.shape.width, like)

    def forward(self, x: Tensor, state: Tensor | None, context: Context) -> OperandResult:
        previous, new_state = self.shift(x, state, context)
        delta = previous - x
        inner = torch.unflatten(self.mix_down(x + delta * self.mix_x.to(x.dtype)).tanh(), -1, (5, -1))
        low_rank = torch.einsum("btir,ird->ibtd", inner, self.mix_up.to(inner.dtype))
        x_w, x_k, x_v, x_r, x_g = (x + delta * (m.to(x.dtype) + d) for m, d in zip(self.mix, low_rank, strict=True))
        decay = self.decay.down if type(self.decay) is LowRank and is_plain(self.decay) else self.decay
        maps = (decay, self.to_r, self.to_k, self.to_v, self.to_g)
        w, r, k, v, g = apply_to_each(maps, (x_w, x_r, x_k, x_v, x_g), state)
        w = w if decay is self.decay else self.decay.rest(w)
        log_decay = rearrange(-w.exp(), "b t (h k) -> b t h k", h=self.shape.heads)
        q, k = (rearrange(y, "b t (h k) -> b t h k", h=self.shape.heads) for y in (r, k))
        v = rearrange(v, "b t (h v) -> b t h v", h=self.shape.value_heads)
        return UpdateInputs(q, k, v, log_decay=log_decay), new_state, {"gate": g}

    def decode_token_(self, call: TokenCall) -> TokenOutput | None:
        if not call.has_parts(RWKV6Projection, Update, Bonus, HeadNorm, PrecomputedGate):
            return None
        weights = common_weights(call, self.shift, self.decay, "silu")
        maps = (self.mix_down, self.to_k, self.to_v, self.to_r, self.to_g)
        if weights is None or not all(reads_weight(linear, call.x) for linear in maps):
            return None
        if self.mix_up.shape[1] > MAX_RANK:
            return None
        shift = RWKV6Shift(self.mix_x, self.mix, self.mix_down.weight, self.mix_up)
        weights_of_inputs = RWKV6Maps(
            self.decay.down.weight, self.to_k.weight, self.to_v.weight, self.to_r.weight, self.to_g.weight
        )
        states = RWKVState(call.states["project"], call.states["update"])
        return TokenOutput(rwkv6_token_(call.x, call.norm, shift, weights_of_inputs, weights, states))


def initial_bonus(shape: HeadShape, place: Place) -> Callable[[], Tensor]:
    """Return a function that computes RWKV-6's initial u, [H, K].

    u = l / (L - 1) (1 - i / (H K - 1)) + 0.1 ((i + 1) mod 3 - 1) for channel i of H K in layer l of L.
    """
    return partial(_initial_bonus, shape.heads, shape.key_width, place)


def _initial_bonus(heads: int, key_width: int, place: Place) -> Tensor:
    channel = torch.arange(heads * key_width)
    share = place.layer / max(1, place.depth - 1)
    slope = share * (1 - channel / max(1, len(channel) - 1))
    return (slope + 0.1 * ((channel + 1) % 3 - 1)).view(heads, key_width)


def _initial_decay(keys: int, place: Place) -> Tensor:
    share = place.layer / max(1, place.depth - 1)
    return -6 + 5 * (torch.arange(keys) / max(1, keys - 1)) ** (0.7 + 1.3 * share)
