"""Auxiliary losses of routers that send each token to k of E experts or memories.

B batch, T time, E experts, L layers
"""

import torch
from torch import Tensor

from deltazoo.backends.update.varlen import is_in_sequence
from deltazoo.mixers.core.losses import AuxiliaryLoss
from deltazoo.mixers.core.mixer import Context


def load_balance_loss(
    name: str, coefficient: float, p_BTE: Tensor, chosen_BTE: Tensor, context: Context
) -> tuple[AuxiliaryLoss, ...]:
    """Return the loss E sum_e f_e P_e; nothing if its coefficient is 0 or `context.losses` is False.

    Over the tokens of all layers together, f_e is the fraction of tokens that are sent to e and P_e is the mean
    probability of e. The f_e sum to k, so that a uniform router has the loss k. Padded tokens and those after
    the last packed sequence do not count.

    Args: p_BTE: probabilities of the router; chosen_BTE: bool, the k experts of each token.
    Source: Switch 2101.03961, equations 4 to 6, with the sum over k and layers of transformers'
        `load_balancing_loss_func`, which Jamba, Qwen3-Next and MoM (2502.13685) use.
    """
    if not context.losses or coefficient == 0:
        return ()
    fractions = _mean_over_tokens(chosen_BTE.to(p_BTE.dtype), context), _mean_over_tokens(p_BTE, context)
    return (AuxiliaryLoss(name, coefficient, torch.stack(fractions), load_balance),)


def z_loss(name: str, coefficient: float, logits_BTE: Tensor, context: Context) -> tuple[AuxiliaryLoss, ...]:
    """Return the mean square of logsumexp(logits), summed over layers; nothing as for `load_balance_loss`.

    Source: ST-MoE 2202.08906, equation 5.
    """
    if not context.losses or coefficient == 0:
        return ()
    z = _mean_over_tokens(logits_BTE.logsumexp(-1, keepdim=True).square(), context)
    return (AuxiliaryLoss(name, coefficient, z.squeeze(-1)),)


def load_balance(statistics_L2E: Tensor) -> Tensor:
    """Return E sum_e f_e P_e for the fractions and probabilities of all layers, which have equally many tokens."""
    fraction_E, probability_E = statistics_L2E.mean(0)
    return statistics_L2E.shape[-1] * (fraction_E * probability_E).sum()


def real_tokens(T: int, context: Context) -> Tensor | None:
    """Return which tokens are neither padded nor after the last packed sequence, [B, T] bool; None: all."""
    return context.mask if context.cu_seqlens is None else is_in_sequence(context.cu_seqlens, T)[None]


def _mean_over_tokens(x_BTE: Tensor, context: Context) -> Tensor:
    B, T, _ = x_BTE.shape
    real_BT = real_tokens(T, context)
    if real_BT is None:
        return x_BTE.sum((0, 1)) / max(1, B * T)
    return torch.where(real_BT[..., None], x_BTE, 0.0).sum((0, 1)) / real_BT.sum().clamp(min=1)
