"""A backend: every token is an affine map of the state, and the maps are composed pairwise, log2(T) times."""

import torch

from deltazoo import Backend, UpdateInputs, UpdateMeta, UpdateOutput, UpdateSpec
from deltazoo.backends.base import state_dtype
from deltazoo.backends.lowering import log_decay, strengths


class PrefixBackend(Backend):
    """S_t = A_t S_(t-1) + W_t with A_t = (I - k_t (b_t * e_t)^T) D_t and W_t = k_t (w_t * v_t)^T; memory T K^2."""

    name = "prefix"

    def unsupported(self, spec: UpdateSpec, meta: UpdateMeta) -> list[str]:
        rules = {
            f"prefix takes one step a token, got householders={spec.householders}.": spec.householders > 1,
            "prefix erases from the decayed state, got erase_from='previous'.": spec.erase_from == "previous",
            "prefix takes no packed sequences: give each a row.": meta.packed,
        }
        return [reason for reason, holds in rules.items() if holds]

    def forward(self, spec: UpdateSpec, inputs: UpdateInputs) -> UpdateOutput:
        (B, T, H, K), (HV, V) = inputs.q.shape, inputs.v.shape[2:]
        dtype = state_dtype(inputs.q.dtype)
        q, k, v, e = (None if x is None else x.to(dtype) for x in (*inputs[:3], inputs.erase_key))
        q, k, e = (None if x is None else x.repeat_interleave(HV // H, 2) for x in (q, k, k if e is None else e))
        scalars = (*strengths(spec, inputs), log_decay(spec, inputs))
        erase, write, decay = (x if x is None or x.dim() == 4 else x[..., None] for x in scalars)
        A = torch.eye(K, dtype=dtype, device=k.device).expand(B, T, HV, K, K)
        if spec.transition == "delta":
            A = A - k[..., None] * (e if erase is None else erase * e)[..., None, :]
        if decay is not None:
            A = A * decay[..., None, :].exp()
        W = k[..., None] * (v if write is None else write * v)[..., None, :]
        step = 1
        while step < T:  # A, W are of the last `step` tokens: join each with that of the `step` before
            W = torch.cat([W[:, :step], A[:, step:] @ W[:, :-step] + W[:, step:]], 1)
            A = torch.cat([A[:, :step], A[:, step:] @ A[:, :-step]], 1)
            step *= 2
        first = W.new_zeros(B, HV, K, V) if inputs.state is None else inputs.state
        S = torch.cat([first[:, None], A @ first[:, None] + W], 1)
        seen = S[:, :-1] if spec.read == "before" else S[:, 1:]
        o = (K**-0.5 if spec.scale is None else spec.scale) * (q[..., None, :] @ seen).squeeze(-2)
        return UpdateOutput(o.to(inputs.v.dtype), S[:, -1])
