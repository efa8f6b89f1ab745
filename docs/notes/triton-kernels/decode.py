"""One token a row: the state is read, stepped and written in place, once.

K key width, V value width, H key heads, HV value heads; states [slots, HV, K, V] float32
"""

import torch
import triton
import triton.language as tl


@triton.jit
def decode_kernel(
    q, k, e, v, log_decay, b, w, states, slots, o, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DECAY: tl.constexpr, DELTA: tl.constexpr, OWN: tl.constexpr, ERASE: tl.constexpr, WRITE: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """One program a (row, value head, V tile)."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    row = pid // (HV * NV)
    hv = pid // NV % HV
    h = hv // (HV // H)
    ks = tl.arange(0, BK)
    vs = (pid % NV) * BV + tl.arange(0, BV)
    in_k = ks < K
    in_v = vs < V
    slot = tl.cast(row, tl.int64)
    if SLOTS:
        slot = tl.load(slots + row)
    at = states + (slot * HV + hv) * K * V + ks[:, None] * V + vs[None, :]
    here = in_k[:, None] & in_v[None, :]
    S = tl.load(at, mask=here, other=0.0)
    key = (tl.cast(row, tl.int64) * H + h) * K
    val = tl.cast(row, tl.int64) * HV + hv
    q_k = tl.load(q + key + ks, mask=in_k, other=0.0).to(tl.float32)
    k_k = tl.load(k + key + ks, mask=in_k, other=0.0).to(tl.float32)
    u = tl.load(v + val * V + vs, mask=in_v, other=0.0).to(tl.float32)
    if DECAY == "head":
        S *= tl.exp(tl.load(log_decay + val))
    if DECAY == "fixed":
        S *= tl.exp(tl.load(log_decay + hv))
    if WRITE:
        u *= tl.load(w + val)
    if DELTA:
        e_k = k_k
        if OWN:
            e_k = tl.load(e + key + ks, mask=in_k, other=0.0).to(tl.float32)
        if ERASE:
            e_k *= tl.load(b + val)
        u -= tl.sum(S * e_k[:, None], 0)
    S += k_k[:, None] * u[None, :]
    tl.store(at, S, mask=here)
    tl.store(o + val * V + vs, (tl.sum(S * q_k[:, None], 0) * scale).to(o.dtype.element_ty), mask=in_v)


def decode(q, k, v, log_decay, b, w, e, states, slots=None, *, delta=True, scale=None, config=None):
    """q, k, e [B, 1, H, K]; v [B, 1, HV, V]; steps `states` in place; returns o [B, 1, HV, V]."""
    B, _, H, K = q.shape
    HV, V = v.shape[2:]
    config = config or {"BV": 32, "warps": 4}
    BV = min(config["BV"], triton.next_power_of_2(V))
    o = torch.empty_like(v)
    decay = "none" if log_decay is None else "fixed" if log_decay.dim() == 1 else "head"
    decode_kernel[(B * HV * triton.cdiv(V, BV),)](
        q, k, e, v, log_decay, b, w, states, slots, o, K**-0.5 if scale is None else scale,
        H, HV, K, V, triton.next_power_of_2(K), BV, decay, delta, e is not None, b is not None, w is not None,
        slots is not None, num_warps=config["warps"], num_stages=1,
    )  # fmt: skip
    return o
