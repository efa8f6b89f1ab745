"""The delta rule with momentum: two coupled states, computed in chunks by matrix products.

B rows, T time, C tokens of a chunk, M chunks, H heads, K key width, V value width
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.sequences import unpack
from deltazoo.mixers.parts.memory.token_scan import TokenScan

CHUNK = 64


class MomentumInputs(NamedTuple):
    """Operands of `momentum_delta_rule`, all float32 or all float64.

    q, k: [B, T, H, K]; v: [B, T, H, V]; log_alpha, log_mu <= 0, beta, eta: [B, T, H].
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

    A chunk is a triangular system and some products of C x C, K x V and C x K matrices; chunks follow one another in
    one operator, which saves every sixteenth state and recomputes the others in the backward pass. Plain PyTorch: on a
    GPU the many small products of each chunk leave it mostly idle.

    Args: state: S and N, [N, H, K, V] each; None: 0. Padded tokens change neither. Packed sequences are unpacked to
        rows of T tokens.
    Returns: o [B, T, H, V]; the new S and N.
    """
    if context.cu_seqlens is not None:
        rows, mask, index_T = unpack(inputs, context.cu_seqlens)
        o, new = momentum_delta_rule(MomentumInputs(*rows), state, Context(mask=mask))
        return o.flatten(0, 1)[index_T][None], new
    if context.mask is not None:
        gates = {name: getattr(inputs, name) for name in ("log_alpha", "log_mu", "beta", "eta")}
        inputs = inputs._replace(**{name: x.where(context.mask[..., None], 0.0) for name, x in gates.items()})
    B, T, H, K = inputs.k.shape
    if state is None:
        state = [inputs.v.new_zeros(B, H, K, inputs.v.shape[-1]) for _ in range(2)]
    size = 1 if T == 1 else CHUNK
    operands = [_in_chunks(x, size) for x in inputs]
    o_BMCHV, new = _SCAN(state, operands, [], Context())
    return o_BMCHV.flatten(1, 2)[:, :T], new


def _in_chunks(x: Tensor, size: int) -> Tensor:
    """Split time into chunks, padded with 0, which no state sees: [B, T, ...] -> [B, M, C, ...]."""
    return torch.unflatten(F.pad(x, (0, 0) * (x.dim() - 2) + (0, -x.shape[1] % size)), 1, (-1, size))


def _chunk(state: list[Tensor], operands: list[Tensor], parameters: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Compute one chunk. Args: operands: those of `MomentumInputs`, [B, C, ...] each.

    With G_ts = sum_(s <= r <= t) alpha_(r+1..t) beta_r mu_(s+1..r), the weight in S_t of the write of token s, the
    errors e solve e_t = v_t - k_t^T (alpha_(1..t) S + b_t N) - sum_(s < t) G'_ts k_t^T k_s eta_s e_s, where b is the
    weight of N, and G' and b leave out r = t.
    """
    S, N = state
    q, k, v = (rearrange(operands[i], "b c h x -> b h c x") for i in (0, 1, 6))
    log_alpha, log_mu, beta, eta = (rearrange(x, "b c h -> b h c") for x in operands[2:6])
    a, m = log_alpha.cumsum(-1), log_mu.cumsum(-1)
    alpha, mu = _products(a), _products(m)
    written = beta[..., None] * torch.cat([mu, m.exp()[..., None]], -1)  # the last column is for N
    G, b = (alpha @ written).split([a.shape[-1], 1], -1)
    earlier_G, earlier_b = (alpha.tril(-1) @ written).split([a.shape[-1], 1], -1)
    kept = a.exp()[..., None]
    system = earlier_G * (k @ k.mT) * eta[..., None, :]
    expected = kept * (k @ S) + earlier_b * (k @ N)
    error = torch.linalg.solve_triangular(system, v - expected, upper=False, unitriangular=True)
    write = eta[..., None] * error
    o = kept * (q @ S) + b * (q @ N) + (G * (q @ k.mT)) @ write
    last_S = kept[..., -1:, :] * S + b[..., -1:, :] * N + k.mT @ (G[..., -1, :, None] * write)
    last_N = m[..., -1, None, None].exp() * N + k.mT @ (mu[..., -1, :, None] * write)
    return [last_S, last_N], rearrange(o, "b h c v -> b c h v")


def _products(total: Tensor) -> Tensor:
    """Return exp(total_t - total_s) for s <= t, and 0 elsewhere."""
    # The diagonal is a constant 1: as a difference it would give total two gradients that cancel up to rounding.
    one = torch.eye(total.shape[-1], dtype=total.dtype, device=total.device)
    difference = total[..., :, None] - total[..., None, :]
    return difference.masked_fill(torch.ones_like(one, dtype=torch.bool).triu(), -torch.inf).exp() + one


_SCAN = TokenScan("momentum_delta_rule", _chunk)
