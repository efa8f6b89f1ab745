"""Update of a few tokens in plain PyTorch, for decoding: token by token, without chunks.

    S_t = D_t S_{t-1} + sum_i key_ti x_ti^T        with one key per householder, or two for dplr

B batch, T tokens, H key heads, HV value heads, G value heads per key head, K key width, V value width, n micro-steps
"""

import torch
from einops import rearrange
from torch import Tensor

from deltazoo.backends.update.base import UpdateInputs, UpdateOutput, slice_tokens, state_dtype
from deltazoo.backends.update.lowering import log_decay, strengths
from deltazoo.backends.update.spec import UpdateSpec


def token_update(spec: UpdateSpec, inputs: UpdateInputs) -> UpdateOutput:
    """Compute the update of one token per row (T = 1); differentiable."""
    return _update_token(spec, inputs)[0]


def drafted_update(spec: UpdateSpec, inputs: UpdateInputs) -> tuple[UpdateOutput, Tensor]:
    """Compute the update of T >= 1 tokens per row.

    Returns: o and the final state; the written values x [B, T, m, HV, V] in `state_dtype`, m = `spec.micro_steps`.
    """
    outputs, values = [], []
    for t in range(inputs.q.shape[1]):
        out, written = _update_token(spec, slice_tokens(inputs, t, t + 1))
        inputs = inputs._replace(state=out.state)
        outputs.append(out.o)
        values.append(torch.stack(written, 1).flatten(2, 3))
    return UpdateOutput(torch.cat(outputs, 1), out.state), torch.stack(values, 1)


def accepted_update(spec: UpdateSpec, inputs: UpdateInputs, values: Tensor, state: Tensor, accepted: Tensor) -> Tensor:
    """Return the state after the first m tokens of each row, with m = `accepted` [B].

        S_m = D_m ... D_1 S_0 + sum_{t <= m} D_m ... D_{t+1} sum_i key_ti x_ti^T

    The products of decays are exponentials of sums of log decays, which are <= 0. Zeros replace rejected tokens.

    Args: values: of `drafted_update`. state: [B, HV, K, V].
    """
    T, HV, dtype = inputs.q.shape[1], inputs.v.shape[-2], state.dtype
    is_rejected = torch.arange(T, device=accepted.device) >= accepted[:, None]

    def accept(x: Tensor) -> Tensor:
        return x.masked_fill(is_rejected[(..., *[None] * (x.dim() - 2))], 0)

    k = inputs.k if spec.householders > 1 else inputs.k.unsqueeze(2)  # [B, T, n, H, K]
    keys = k.to(dtype).repeat_interleave(HV // k.shape[3], 3)
    if spec.transition == "dplr":
        assert inputs.b is not None
        keys = torch.cat((inputs.b.to(dtype).unsqueeze(2), keys), 2)
    keys, values = accept(keys), accept(values)
    decay = log_decay(spec, inputs)
    if decay is not None:
        decay = accept(decay.to(dtype))
        decay = decay if decay.dim() == 4 else decay.unsqueeze(-1)  # [B, T, HV, K or 1]
        # suffix sums from the end, because a difference of two sums would cancel
        after = decay.flip(1).cumsum(1).flip(1)
        state = state * after[:, 0].exp().unsqueeze(-1)
        keys = keys * torch.cat((after[:, 1:], torch.zeros_like(after[:, :1])), 1).exp().unsqueeze(2)
    return state + torch.einsum("btnhk,btnhv->bhkv", keys, values)


def _update_token(spec: UpdateSpec, inputs: UpdateInputs) -> tuple[UpdateOutput, list[Tensor]]:
    """Return the update of one token per row, and its n written values [B, H, G, V]."""
    dtype = state_dtype(inputs.q.dtype)
    B, _, H, K = inputs.q.shape
    HV, V = inputs.v.shape[-2:]
    G, n = HV // H, spec.householders
    erase, write = strengths(spec, inputs)
    decay = log_decay(spec, inputs)

    def micro_steps(x: Tensor) -> tuple[Tensor, ...]:
        """[B, 1, (n,) ...] -> n tensors [B, ...]."""
        return x.to(dtype)[:, 0].unbind(1) if n > 1 else (x.to(dtype)[:, 0],)

    def keys(x: Tensor) -> list[Tensor]:
        """[B, 1, (n,) H, K] -> n tensors [B, H, 1, K]."""
        return [key.unsqueeze(2) for key in micro_steps(x)]

    def by_group(x: Tensor) -> Tensor:
        """[B, HV, ...] -> [B, H, G, ...]."""
        return torch.unflatten(x, 1, (H, G))

    S = inputs.q.new_zeros(B, H, G, K, V, dtype=dtype) if inputs.state is None else by_group(inputs.state)
    initial_state = S
    k, v = keys(inputs.k), [by_group(x) for x in micro_steps(inputs.v)]
    e = k if inputs.erase_key is None else keys(inputs.erase_key)
    erases = [None] * n if erase is None else [by_group(x) for x in micro_steps(erase)]
    writes = [None] * n if write is None else [by_group(x) for x in micro_steps(write)]
    written: list[Tensor] = []
    for m in range(n):
        previous = S
        if decay is not None and m == 0:
            d = by_group(decay.to(dtype)[:, 0]).exp()
            S = S * (d.unsqueeze(-1) if d.dim() == 4 else d[..., None, None])
        value = v[m] if writes[m] is None else v[m] * _broadcast(writes[m], v[m])
        if spec.transition == "dplr":
            assert inputs.a is not None and inputs.b is not None
            a, b = (by_group(x.to(dtype)[:, 0]) for x in (inputs.a, inputs.b))
            written.append(_read(previous, a))
            S = S + b.unsqueeze(-1) * written[-1].unsqueeze(-2)
        elif spec.transition == "delta":
            key = e[m] if erases[m] is None else e[m] * _broadcast(erases[m], v[m])
            value = value - _read(previous if spec.erase_from == "previous" else S, key)
        written.append(value)
        S = S + k[m].unsqueeze(-1) * value.unsqueeze(-2)
    q = spec.scale_of(K) * inputs.q.to(dtype)[:, 0].unsqueeze(2)
    o = _read(initial_state if spec.read == "before" else S, q)
    out = UpdateOutput(rearrange(o, "b h g v -> b 1 (h g) v").to(inputs.v.dtype), S.flatten(1, 2))
    return out, written


def _broadcast(strength: Tensor | None, value: Tensor) -> Tensor:
    """Return a strength per head or per channel, broadcastable to [B, H, G, width]."""
    assert strength is not None
    return strength if strength.dim() == value.dim() else strength.unsqueeze(-1)


def _read(S: Tensor, key: Tensor) -> Tensor:
    """S^T key: [B, H, G, K, V] and [B, H, G or 1, K] -> [B, H, G, V]."""
    return torch.einsum("bhgkv,bhgk->bhgv", S, key.expand(*S.shape[:3], -1))
