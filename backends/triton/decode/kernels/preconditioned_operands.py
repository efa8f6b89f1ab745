"""Operands of one token of a preconditioned delta rule, and the second moment of its keys.

    A <- exp(-exp(A_log) softplus(decay + dt_bias)) A + sigmoid(beta) k^2
    written key = k bound^(-r / (1 + |r|)),    r = log(A + eps) - center

The decay and beta of A are apart from those of the update. decode_kernel then computes the update, and
finish_step_kernel the norm and the gate. H key heads, HV value heads, K key width, V value width
"""

from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.decode.kernels.step_parts import l2_normalize, log_decay_of, softplus
from deltazoo.backends.triton.device.overlap import prefetch_line, start_next, wait_for_previous


class MomentTraits(NamedTuple):
    """Compile-time properties of the second moment.

    Args:
        DECAY, BETA: elements from row to row of its decay and beta.
        LOG_BOUND: log(bound). EPS: of the logarithm of A.
    """

    DECAY: int
    BETA: int
    LOG_BOUND: float
    EPS: float


@triton.jit
def preconditioned_operands_kernel(
    x, beta, decay, A_log, dt_bias, moment_decay, moment_beta, moment_A_log, moment_dt_bias, center, moments,
    q, k, e, v, log_decay, write, traits: tl.constexpr, moment: tl.constexpr,
):  # fmt: skip
    """Compute the operands of one value head of a row, and q, k, e and A if it is the first of its key head.

    Grid: row, value head. Reads x, beta, decay, A_log and dt_bias as fused_step_kernel does, without taps; of A
    moment_decay and moment_beta [B, H], each with a row stride, and moment_A_log, moment_dt_bias and center [H].
    Updates moments [B, H, K] float32 in place. Writes q, k, e [B, H, K], where k is the written key and e the erase
    key; v [B, HV, V]; log_decay [B, HV] or [B, HV, K] and write [B, HV] float32.
    """
    H: tl.constexpr = traits.H
    HV: tl.constexpr = traits.HV
    K: tl.constexpr = traits.K
    V: tl.constexpr = traits.V
    if traits.OVERLAP:
        start_next()
    head = tl.program_id(0)
    row = tl.cast(head // HV, tl.int64)
    hv = head % HV
    h = hv // (HV // H)
    ks = tl.arange(0, traits.BK)
    vs = tl.arange(0, traits.PV)
    in_v = vs < V
    in_k = (ks < K) & (hv % (HV // H) == 0)
    at = (row * H + h) * K + ks
    if traits.OVERLAP:
        prefetch_line(moments + (row * H + h) * K + tl.minimum(ks, K - 1))
        wait_for_previous()
    x += row * traits.X_STRIDE
    query = tl.load(x + h * K + ks, mask=in_k, other=0.0).to(tl.float32)
    key = tl.load(x + (H + h) * K + ks, mask=in_k, other=0.0).to(tl.float32)
    value = tl.load(x + 2 * H * K + hv * V + vs, mask=in_v, other=0.0).to(tl.float32)
    A = tl.load(moments + at, mask=in_k, other=0.0)
    raw = tl.load(moment_decay + row * moment.DECAY + h).to(tl.float32) + tl.load(moment_dt_bias + h).to(tl.float32)
    rate = tl.exp(tl.load(moment_A_log + h).to(tl.float32))
    strength = tl.sigmoid(tl.load(moment_beta + row * moment.BETA + h).to(tl.float32))
    middle = tl.load(center + h).to(tl.float32)
    log_factor, _ = log_decay_of(decay + row * traits.DECAY_STRIDE, A_log, dt_bias, hv, ks, ks < K, traits)
    if traits.DECAY_CHANNELS:
        tl.store(log_decay + (row * HV + hv) * K + ks, log_factor, mask=ks < K)
    else:
        tl.store(log_decay + head, log_factor)
    tl.store(write + head, tl.sigmoid(tl.load(beta + row * traits.BETA_STRIDE + hv).to(tl.float32)))
    if traits.SILU_V:
        value *= tl.sigmoid(value)
    tl.store(v + (row * HV + hv) * V + vs, value.to(v.dtype.element_ty), mask=in_v)
    if traits.SILU_Q:
        query *= tl.sigmoid(query)
    query = l2_normalize(query, traits.NORM_Q, traits.NORM_QK_EPS)
    tl.store(q + at, query.to(q.dtype.element_ty), mask=in_k)
    if traits.SILU_K:
        key *= tl.sigmoid(key)
    key = l2_normalize(key, traits.NORM_K, traits.NORM_QK_EPS)
    A = tl.exp(-rate * softplus(raw)) * A + strength * key * key
    tl.store(moments + at, A, mask=in_k)
    r = tl.log(A + moment.EPS) - middle
    tl.store(e + at, key.to(e.dtype.element_ty), mask=in_k)
    key *= tl.exp(-moment.LOG_BOUND * r / (1.0 + tl.abs(r)))
    tl.store(k + at, key.to(k.dtype.element_ty), mask=in_k)
