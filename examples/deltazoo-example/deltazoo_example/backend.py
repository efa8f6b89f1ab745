"""The backend "prefix": a parallel prefix scan over the tokens' affine maps, in log2(T) steps of plain PyTorch.

B batch, T time, H key heads, HV value heads, K key width, V value width
"""

import torch
from torch import Tensor

from deltazoo import Backend, UpdateInputs, UpdateMeta, UpdateOutput, UpdateSpec
from deltazoo.backends import lowering, state_dtype


class PrefixBackend(Backend):
    """S_t = A_t S_(t-1) + W_t, by composing the maps (A, W) of neighbouring tokens. Stores T K (K + V) per head."""

    name = "prefix"

    def unsupported(self, spec: UpdateSpec, meta: UpdateMeta) -> list[str]:
        """Return a sentence for each reason why this backend cannot compute the spec; [] if it can."""
        reasons = []
        if spec.householders > 1:
            reasons.append(f"prefix computes one step per token, got householders={spec.householders}.")
        if spec.erase_from == "previous":
            reasons.append("prefix supports only erase_from='decayed', got erase_from='previous'.")
        if meta.packed:
            reasons.append("prefix does not support packed sequences: pass each sequence as a row.")
        return reasons

    def forward(self, spec: UpdateSpec, inputs: UpdateInputs) -> UpdateOutput:
        """Compute the update. The inputs are checked, and autograd differentiates it."""
        A, W = token_maps(spec, inputs)
        T, K, span = W.shape[1], W.shape[3], 1
        while span < T:  # A, W: composed maps of the last `span` tokens
            W = torch.cat([W[:, :span], A[:, span:] @ W[:, :-span] + W[:, span:]], 1)
            A = torch.cat([A[:, :span], A[:, span:] @ A[:, :-span]], 1)
            span *= 2
        first = W.new_zeros(W.shape[0], 1, *W.shape[2:]) if inputs.state is None else inputs.state[:, None]
        S = torch.cat([first, A @ first + W], 1)  # [B, T + 1, HV, K, V]
        read = S[:, :-1] if spec.read == "before" else S[:, 1:]
        q = per_value_head(inputs.q, inputs)
        o = (K**-0.5 if spec.scale is None else spec.scale) * (q[..., None, :] @ read).squeeze(-2)
        return UpdateOutput(o.to(inputs.v.dtype), S[:, -1])


def token_maps(spec: UpdateSpec, inputs: UpdateInputs) -> tuple[Tensor, Tensor]:
    """Return A = (I - k (erase * e)^T) D, [B, T, HV, K, K], and W = k (write * v)^T, [B, T, HV, K, V]."""
    k, v = per_value_head(inputs.k, inputs), inputs.v.to(state_dtype(inputs.v.dtype))
    scalars = (*lowering.strengths(spec, inputs), lowering.log_decay(spec, inputs))
    # Per head [B, T, HV] or per channel [B, T, HV, K or V]; None: no factor.
    erase, write, decay = (x if x is None or x.dim() == 4 else x[..., None] for x in scalars)
    A = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device).expand(*k.shape, -1)
    if spec.transition == "delta":
        e = k if inputs.erase_key is None else per_value_head(inputs.erase_key, inputs)
        A = A - k[..., None] * (e if erase is None else erase * e)[..., None, :]
    if decay is not None:
        A = A * decay[..., None, :].exp()
    return A, k[..., None] * (v if write is None else write * v)[..., None, :]


def per_value_head(x: Tensor, inputs: UpdateInputs) -> Tensor:
    """Repeat q, k or e [B, T, H, K] for the value heads that share a key head, in the dtype of the state."""
    return x.to(state_dtype(x.dtype)).repeat_interleave(inputs.v.shape[2] // x.shape[2], 2)
