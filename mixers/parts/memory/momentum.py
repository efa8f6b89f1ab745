"""The delta rule with momentum: two coupled states, computed in chunks by matrix products.

B rows, T time, C tokens of a chunk, G chunk slots, N sequences, H heads, K key width, V value width
"""

from typing import NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.ops.momentum import momentum_scan, momentum_step_
from deltazoo.backends.ops.momentum_chunks import CHUNK, MomentumOperands, MomentumToken
from deltazoo.backends.torch_ext.gather import gather_rows
from deltazoo.backends.update.base import state_dtype
from deltazoo.backends.update.varlen import sequence_index
from deltazoo.mixers.core.mixer import Context


class MomentumInputs(NamedTuple):
    """Operands of `momentum_delta_rule`.

    q, k: [B, T, H, K]; v: [B, T, H, V]; log_alpha, log_mu <= 0, beta, eta: [B, T, H], float32 (float64 in float64).
    """

    q: Tensor
    k: Tensor
    log_alpha: Tensor
    log_mu: Tensor
    beta: Tensor
    eta: Tensor
    v: Tensor


def momentum_delta_rule(
    inputs: MomentumInputs, state: list[Tensor] | None, context: Context
) -> tuple[Tensor, list[Tensor]]:
    """Compute o_t = S_t^T q_t with

        N_t = mu_t N_(t-1) + eta_t k_t (v_t - alpha_t S_(t-1)^T k_t)^T
        S_t = alpha_t S_(t-1) + beta_t N_t

    Args: state: S and N, [N, H, K, V] each; None: 0. Padded tokens change neither. A single token without gradients
        updates them in place.
    Returns: o [B, T, H, V] in the dtype of v; the new S and N.
    """
    if context.mask is not None:
        gates = {name: getattr(inputs, name) for name in ("log_alpha", "log_mu", "beta", "eta")}
        inputs = inputs._replace(**{name: x.where(context.mask[..., None], 0.0) for name, x in gates.items()})
    T = inputs.q.shape[1]
    if state is not None and T == 1 and context.cu_seqlens is None and not torch.is_grad_enabled():
        q, k, log_alpha, log_mu, beta, eta, v = (x[:, 0] for x in inputs)
        o = momentum_step_(MomentumToken(q, k, v, log_alpha.exp(), log_mu.exp(), beta, eta, *state))
        return o[:, None], state
    slots, starts, places = _slots(inputs, context.cu_seqlens)
    joined = None if state is None else torch.stack(state, 2)
    dtype = state_dtype(slots.q.dtype)
    log_alpha, log_mu, beta, eta = (y.to(dtype) for y in (slots.log_alpha, slots.log_mu, slots.beta, slots.eta))
    x = MomentumOperands(slots.q, slots.k, slots.v, log_alpha, log_mu, beta, eta, joined, starts)
    o_GCHV, new = momentum_scan(x, rows=inputs.q.shape[0])
    o = o_GCHV.flatten(0, 1)
    if places is not None:
        o = gather_rows(o, places.slot, places.token, True)
    return o.reshape(inputs.v.shape), list(new.unbind(2))


class _Places(NamedTuple):
    """The place of each token in the slots, [B T], or G C; the token of each place, [G C], or B T. The last: none."""

    slot: Tensor
    token: Tensor


def _slots(inputs: MomentumInputs, cu_seqlens: Tensor | None) -> tuple[MomentumInputs, Tensor, _Places | None]:
    """Divide sequences into slots of C tokens, padded with 0, which no state sees: [B, T, ...] -> [G, C, ...].

    Returns: the operands; the first slot of each sequence, and G; the places of the tokens, None if they are in order.
    """
    (B, T), device = inputs.q.shape[:2], inputs.q.device
    time = torch.arange(T, device=device)
    if cu_seqlens is None:
        count = (T + CHUNK - 1) // CHUNK
        G, starts = B * count, torch.arange(B + 1, device=device, dtype=torch.int32) * count
        if T % CHUNK == 0:
            return MomentumInputs(*(x.reshape(G, CHUNK, *x.shape[2:]) for x in inputs)), starts, None
        slot = (torch.arange(B, device=device)[:, None] * count * CHUNK + time).flatten()
    else:
        N = cu_seqlens.shape[0] - 1
        G, number, bounds = T // CHUNK + N, torch.arange(N + 1, device=device), cu_seqlens.long()
        starts = torch.where(number < N, bounds // CHUNK + number, G)
        sequence = sequence_index(cu_seqlens, T)
        slot = torch.where(sequence < N, starts[sequence] * CHUNK + time - bounds[sequence], G * CHUNK)
        starts = starts.to(torch.int32)
    # Indirect: the addresses of padded and divided rows of symbolic length take Inductor minutes to simplify.
    token = slot.new_full((G * CHUNK + 1,), B * T).scatter(0, slot, torch.arange(B * T, device=device))[:-1]
    rows = (gather_rows(x.flatten(0, 1), token, slot, True) for x in inputs)
    return MomentumInputs(*(torch.unflatten(x, 0, (G, CHUNK)) for x in rows)), starts, _Places(slot, token)
