"""Forget gates of softmax attention: the score of query t and key s gets log f_(s+1) + ... + log f_t.

With G_t = log f_1 + ... + log f_t that sum is G_t - G_s. A softmax over s does not depend on G_t, so that -G_s is
enough. It depends on the key alone: extra channels of k hold it, and the same channels of q are constant. Any kernel
for softmax attention then applies the gates and computes their gradients, without a T x T tensor.

B batch, T time, H heads, G key-value heads, E head width, N sequences
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltazoo.backends.update.base import state_dtype
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.sequences import last_of_each_sequence, segment_cumsum

TERMS = 3  # -G_s as a sum of three numbers with 8 significant bits each: as exact in bfloat16 and TF32 as in float32
QUERY = 16.0  # value of the channels of q, so that float16 overflows only for |G| > 10^6 * scale


class ForgetGate(nn.Module):
    """log f = log sigmoid(W x + b) for each head, [B, T, H], float32 (float64 in float64); 0 at padded tokens.

    Initialisation: W as in torch, b = 0.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.proj.bias)

    def forward(self, x: Tensor, context: Context, product: Tensor | None = None) -> Tensor:
        """Args: product: W x + b, if it is computed already."""
        logits = self.proj(x) if product is None else product
        log_f = F.logsigmoid(logits.to(state_dtype(logits.dtype)))
        return log_f if context.mask is None else torch.where(context.mask[..., None], log_f, 0.0)


def accumulate(log_f_BTH: Tensor, before_NH: Tensor | None, context: Context) -> tuple[Tensor, Tensor | None]:
    """Sum log f over the tokens of each sequence.

    Args: before_NH: the sums of earlier calls; None: 0.
    Returns: G [B, T, H]; the sums after the last token, [N, H], or None without `before_NH`.
    """
    sums_BTH = segment_cumsum(log_f_BTH, before_NH, context).to(log_f_BTH.dtype)
    return sums_BTH, None if before_NH is None else last_of_each_sequence(sums_BTH, before_NH, context)


def in_gate_dtype(*operands: Tensor) -> tuple[Tensor, ...]:
    """Return q, k, v in float32 if gradients are enabled (float64 in float64).

    The gradient of log f_t is the sum of the gradients of -G_s over all later keys, which nearly cancel. With those
    gradients rounded to bfloat16, as the gradients of bfloat16 keys are, the relative error of the sum is 3 % to 10 %
    at 2,048 tokens and grows with the length; in float32 it is below 1e-4.
    """
    return tuple(x.to(state_dtype(x.dtype)) for x in operands) if torch.is_grad_enabled() else operands


def gate_channels(heads: int, key_value_heads: int, head_width: int) -> int:
    """Return the number of extra channels; with them the width is a multiple of 8, which fast kernels require."""
    channels = TERMS * (heads // key_value_heads)
    return channels + -(head_width + channels) % 8


def with_gates(q: Tensor, k: Tensor, sums_BTH: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Append the channels of the gates, so that scale q^T k grows by -G_s.

    The query heads that share a key head have different gates, and thus different channels of that key.

    Args: q: [B, T, H, E]; k: [B, T, G, E]; sums_BTH: from `accumulate`; scale: factor on the scores.
    Returns: q [B, T, H, E + X], k [B, T, G, E + X], with X from `gate_channels`.
    """
    return queries_with_gates(q, k.shape[2]), keys_with_gates(k, sums_BTH, scale)


def queries_with_gates(q: Tensor, key_value_heads: int) -> Tensor:
    """Append the channels of the gates to q alone, as `with_gates` does."""
    H, E = q.shape[2:]
    group = H // key_value_heads
    channels = gate_channels(H, key_value_heads, E)
    head_H = torch.arange(H, device=q.device) % group
    own_HX = (torch.arange(channels, device=q.device) // TERMS == head_H[:, None]).to(q.dtype) * QUERY
    return torch.cat([q, own_HX.expand(*q.shape[:2], -1, -1)], -1)


def keys_with_gates(k: Tensor, sums_BTH: Tensor, scale: float) -> Tensor:
    """Append the channels of the gates to k alone, as `with_gates` does."""
    H, (G, E) = sums_BTH.shape[2], k.shape[2:]
    terms = torch.unflatten(_split(-sums_BTH / (scale * QUERY)), 2, (G, H // G)).flatten(3).to(k.dtype)
    return torch.cat([k, F.pad(terms, (0, gate_channels(H, G, E) - terms.shape[-1]))], -1)


def gate_sums(k: Tensor, width: int, heads: int, scale: float = 1.0) -> Tensor:
    """Return the sums that `with_gates` has stored in keys.

    Args: k: [B, S, G, E + X] with E = width. Returns: [B, S, H], float32 (float64 in float64).
    """
    terms = k[..., width : width + TERMS * (heads // k.shape[2])].to(state_dtype(k.dtype))
    return -scale * QUERY * torch.unflatten(terms, -1, (-1, TERMS)).sum(-1).flatten(2)


def _split(x: Tensor) -> Tensor:
    """Split into three terms along a new last dimension; the first two have the 8 significant bits of bfloat16."""
    high = _leading_bits(x.detach())
    middle = _leading_bits(x.detach() - high)
    return torch.stack([x - high - middle, high, middle], -1)


def _leading_bits(x: Tensor) -> Tensor:
    """Return x truncated to 8 significant bits. Inductor would drop a cast to bfloat16 and back."""
    bits, rest = (torch.int64, 45) if x.dtype == torch.float64 else (torch.int32, 16)
    return (x.view(bits) >> rest << rest).view(x.dtype)
