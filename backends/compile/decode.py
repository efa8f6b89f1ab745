"""Update of one token in plain PyTorch, for decoding.

B batch, T = 1, H key heads, HV value heads, G value heads per key head, K key width, V value width
"""

import torch
from einops import rearrange
from torch import Tensor

from deltazoo.backends.base import UpdateInputs, UpdateOutput, state_dtype
from deltazoo.backends.lowering import log_decay, strengths
from deltazoo.backends.spec import UpdateSpec


def token_update(spec: UpdateSpec, inputs: UpdateInputs) -> UpdateOutput:
    """Compute the update of one token per row (T = 1); differentiable."""
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
        return x.unflatten(1, (H, G))

    S = inputs.q.new_zeros(B, H, G, K, V, dtype=dtype) if inputs.state is None else by_group(inputs.state)
    initial_state = S
    k, v = keys(inputs.k), [by_group(x) for x in micro_steps(inputs.v)]
    e = k if inputs.erase_key is None else keys(inputs.erase_key)
    erases = [None] * n if erase is None else [by_group(x) for x in micro_steps(erase)]
    writes = [None] * n if write is None else [by_group(x) for x in micro_steps(write)]
    for m in range(n):
        previous = S
        if decay is not None and m == 0:
            d = by_group(decay.to(dtype)[:, 0]).exp()
            S = S * (d.unsqueeze(-1) if d.dim() == 4 else d[..., None, None])
        value = v[m] if writes[m] is None else v[m] * _broadcast(writes[m], v[m])
        if spec.transition == "dplr":
            assert inputs.a is not None and inputs.b is not None
            a, b = (by_group(x.to(dtype)[:, 0]) for x in (inputs.a, inputs.b))
            S = S + b.unsqueeze(-1) * _read(previous, a).unsqueeze(-2)
        elif spec.transition == "delta":
            key = e[m] if erases[m] is None else e[m] * _broadcast(erases[m], v[m])
            value = value - _read(previous if spec.erase_from == "previous" else S, key)
        S = S + k[m].unsqueeze(-1) * value.unsqueeze(-2)
    q = spec.scale_of(K) * inputs.q.to(dtype)[:, 0].unsqueeze(2)
    o = _read(initial_state if spec.read == "before" else S, q)
    return UpdateOutput(rearrange(o, "b h g v -> b 1 (h g) v").to(inputs.v.dtype), S.flatten(1, 2))


def _broadcast(strength: Tensor | None, value: Tensor) -> Tensor:
    """A strength per head or per channel, broadcastable to [B, H, G, width]."""
    assert strength is not None
    return strength if strength.dim() == value.dim() else strength.unsqueeze(-1)


def _read(S: Tensor, key: Tensor) -> Tensor:
    """S^T key: [B, H, G, K, V] and [B, H, G or 1, K] -> [B, H, G, V]."""
    return torch.einsum("bhgkv,bhgk->bhgv", S, key.expand(*S.shape[:3], -1))
