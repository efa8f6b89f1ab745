"""Functions and modules with the names, signatures and defaults of flash-linear-attention 0.6.0, on our operators.

    import deltazoo.fla as fla
    o, state = fla.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True)

Layouts are [B, T, H, K], states [N, HV, K, V] (with `state_v_first` [N, HV, V, K]), and decays natural logarithms. The
names chunk_*, fused_chunk_* and fused_recurrent_* of one recurrence compute the same: the backend chooses the kernels.
Arguments that only choose a kernel or its memory (`chunk_size`, `chunk_indices`, `cu_seqlens_cpu`, `safe_gate`,
`disable_recompute`, `max_num_seqs`) have no effect. What is not served raises UnsupportedError with the argument.

B batch, T time, C channels, W taps, H key heads, HV value heads, K key width, V value width, N sequences,
n householders
Source: https://github.com/fla-org/flash-linear-attention, 0.6.0: signatures and the naive functions of fla.ops.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltazoo.backends.io.errors import ShapeError, UnsupportedError
from deltazoo.backends.ops.rms_norm import GateActivation, rms_norm
from deltazoo.backends.ops.short_conv import ConvInputs, ConvPart
from deltazoo.backends.update.base import UpdateInputs, state_dtype
from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.integrations.operators import (
    Sequences,
    convolve,
    convolve_step_,
    has_silu,
    l2_normalize,
    last_inputs,
    norm_and_gate,
    run_update,
)

Result = tuple[Tensor, Tensor | None]

_DELTA = UpdateSpec(beta="head")
_GATED_DELTA = UpdateSpec(decay="head", beta="head")
_KDA = UpdateSpec(decay="channel", beta="head")
_GDN2 = UpdateSpec(decay="channel", beta="channel")
_COMBA = UpdateSpec(decay="head", beta="head", erase_key="own", erase_from="previous")
_LINEAR = UpdateSpec(transition="additive")
_RETENTION = UpdateSpec(decay="fixed", transition="additive")
_SIMPLE_GLA = UpdateSpec(decay="head", transition="additive")
_GLA = UpdateSpec(decay="channel", transition="additive")
_RWKV6 = UpdateSpec(decay="channel", transition="additive", read="before")
_DPLR = UpdateSpec(decay="channel", transition="dplr")
_IPLR = UpdateSpec(transition="dplr")
_PRODUCTS: dict[tuple[str, int], UpdateSpec] = {
    (decay, n): UpdateSpec(decay=decay, beta="head", householders=n) for decay in ("none", "head") for n in range(1, 5)
}

_WITHOUT_EFFECT = frozenset(
    ("chunk_indices", "chunk_size", "cu_seqlens_cpu", "disable_recompute", "max_num_seqs", "safe_gate", "backend")
)


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, chunk_indices: Tensor | None = None,
    cp_context: Any = None, **kwargs: Any,
) -> Result:  # fmt: skip
    """Compute S_t = exp(g_t) (I - beta_t k_t k_t^T) S_(t-1) + beta_t k_t v_t^T and o_t = scale S_t^T q_t.

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V]; g, beta: [B, T, HV].
        use_gate_in_kernel, A_log, dt_bias: keywords; g is then the input of -exp(A_log) softplus(g + dt_bias).
    Returns: o [B, T, HV, V] in the dtype of v, and the final state or None.
    """
    name, kwargs = "chunk_gated_delta_rule", dict(kwargs)
    _refuse(name, cp_context=cp_context)
    g = _head_gate(g, kwargs.pop("use_gate_in_kernel", False), kwargs.pop("A_log", None), kwargs.pop("dt_bias", None))
    _ignore(name, kwargs)
    beta = _strength(beta, v, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    inputs = _normalized(UpdateInputs(q=q, k=k, v=v, log_decay=g, beta=beta), use_qk_l2norm_in_kernel)
    return _run(_GATED_DELTA, inputs, Sequences(initial_state, cu_seqlens, state_v_first), scale, output_final_state)


def fused_recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, gk: Tensor | None = None, gv: Tensor | None = None,
    beta: Tensor | None = None, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None, dt_bias: Tensor | None = None, use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None, **kwargs: Any,
) -> Result:  # fmt: skip
    """Compute the gated delta rule with decays per head (g) and key channel (gk [B, T, HV, K]); see its chunk form."""
    name = "fused_recurrent_gated_delta_rule"
    _refuse(name, gv=gv)
    _ignore(name, kwargs)
    if g is not None:
        g = _head_gate(g, use_gate_in_kernel, A_log, dt_bias)
    spec, decay = _decay(g, gk, _DELTA, _GATED_DELTA, _KDA)
    beta = _strength(beta, v, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    inputs = _normalized(UpdateInputs(q=q, k=k, v=v, log_decay=decay, beta=beta), use_qk_l2norm_in_kernel)
    return _run(spec, inputs, Sequences(initial_state, cu_seqlens, state_v_first), scale, output_final_state)


def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    safe_gate: bool = False, lower_bound: float | None = None, disable_recompute: bool = False,
    return_intermediate_states: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, cp_context: Any = None, use_graph: bool = False,
    max_num_seqs: int | None = None, **kwargs: Any,
) -> Result:  # fmt: skip
    """Compute Kimi Delta Attention: the gated delta rule with a decay per key channel, g [B, T, HV, K].

    Args:
        use_gate_in_kernel: g is the input of the gate, -exp(A_log) softplus(g + dt_bias), or with `lower_bound`
            lower_bound sigmoid(exp(A_log) (g + dt_bias)). A_log [HV] and dt_bias [HV K] are keywords.
    """
    name, kwargs = "chunk_kda", dict(kwargs)
    _refuse(name, cp_context=cp_context, return_intermediate_states=return_intermediate_states, use_graph=use_graph)
    A_log, dt_bias = kwargs.pop("A_log", None), kwargs.pop("dt_bias", None)
    _ignore(name, kwargs)
    if use_gate_in_kernel:
        g = _channel_gate(name, g, A_log, dt_bias, lower_bound)
    beta = _strength(beta, v, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    inputs = _normalized(UpdateInputs(q=q, k=k, v=v, log_decay=g, beta=beta), use_qk_l2norm_in_kernel)
    return _run(_KDA, inputs, Sequences(initial_state, cu_seqlens, state_v_first), scale, output_final_state)


def fused_recurrent_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, lower_bound: float | None = None,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None, **kwargs: Any,
) -> Result:  # fmt: skip
    """Compute Kimi Delta Attention; see `chunk_kda`."""
    return chunk_kda(
        q, k, v, g, beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound, state_v_first=state_v_first, cu_seqlens=cu_seqlens, A_log=A_log, dt_bias=dt_bias,
        **kwargs,
    )  # fmt: skip


def chunk_gdn2(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False, lower_bound: float | None = None, disable_recompute: bool = False,
    return_intermediate_states: bool = False, state_v_first: bool = False, cp_context: Any = None, **kwargs: Any,
) -> Result:  # fmt: skip
    """Compute Gated DeltaNet-2. Args: g, b: decays, erase strengths [B, T, HV, K]; w: write strengths [B, T, HV, V]."""
    name, kwargs = "chunk_gdn2", dict(kwargs)
    _refuse(name, cp_context=cp_context, return_intermediate_states=return_intermediate_states)
    A_log, dt_bias = kwargs.pop("A_log", None), kwargs.pop("dt_bias", None)
    _ignore(name, kwargs)
    if use_gate_in_kernel:
        g = _channel_gate(name, g, A_log, dt_bias, lower_bound)
    inputs = _normalized(UpdateInputs(q=q, k=k, v=v, log_decay=g, erase=b, write=w), use_qk_l2norm_in_kernel)
    return _run(_GDN2, inputs, Sequences(initial_state, cu_seqlens, state_v_first), scale, output_final_state)


def fused_recurrent_gdn2(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    lower_bound: float | None = None, state_v_first: bool = False, cu_seqlens: Tensor | None = None, **kwargs: Any,
) -> Result:  # fmt: skip
    """Compute Gated DeltaNet-2; see `chunk_gdn2`."""
    return chunk_gdn2(
        q, k, v, g, b, w, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_gate_in_kernel=use_gate_in_kernel, cu_seqlens=cu_seqlens,
        lower_bound=lower_bound, state_v_first=state_v_first, A_log=A_log, dt_bias=dt_bias, **kwargs,
    )  # fmt: skip


def chunk_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, **kwargs: Any,
) -> Result:  # fmt: skip
    """Compute the delta rule without a decay. Args: beta: [B, T, H]."""
    _ignore("chunk_delta_rule", kwargs)
    inputs = _normalized(UpdateInputs(q=q, k=k, v=v, beta=_strength(beta, v)), use_qk_l2norm_in_kernel)
    return _run(_DELTA, inputs, Sequences(initial_state, cu_seqlens), scale, output_final_state)


def fused_recurrent_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None = None, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """Compute the delta rule without a decay; beta None means 1."""
    inputs = _normalized(UpdateInputs(q=q, k=k, v=v, beta=_strength(beta, v)), use_qk_l2norm_in_kernel)
    return _run(_DELTA, inputs, Sequences(initial_state, cu_seqlens), scale, output_final_state)


def chunk_gated_delta_product(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, num_householder: int, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, cp_context: Any = None,
) -> Result:  # fmt: skip
    """Compute Gated DeltaProduct: n delta steps per token. Args: k, v, beta: [B, T n, ...], token by token."""
    _refuse("chunk_gated_delta_product", cp_context=cp_context)
    n, T = num_householder, q.shape[1]
    if k.shape[1] != T * n:
        raise ShapeError(f"k must have T num_householder = {T * n} steps, got {k.shape[1]}")
    if n > 1:
        k, v, beta = (x.unflatten(1, (T, n)) for x in (k, v, beta))
    if ("head", n) not in _PRODUCTS:
        raise UnsupportedError(f"chunk_gated_delta_product: num_householder must be 1 to 4, got {n}")
    spec = _PRODUCTS["none" if g is None else "head", n]
    inputs = _normalized(UpdateInputs(q=q, k=k, v=v, log_decay=g, beta=beta), use_qk_l2norm_in_kernel)
    return _run(spec, inputs, Sequences(initial_state, cu_seqlens), scale, output_final_state)


def chunk_comba(
    q: Tensor, k: Tensor, v: Tensor, p: Tensor | None, g: Tensor, beta: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
) -> Result:  # fmt: skip
    """Compute Comba: S_t = (exp(g_t) - beta_t k_t p_t^T) S_(t-1) + beta_t k_t v_t^T; p None means k."""
    inputs = UpdateInputs(q=q, k=k, v=v, log_decay=g, beta=_strength(beta, v), erase_key=k if p is None else p)
    if use_qk_l2norm_in_kernel:
        assert inputs.erase_key is not None
        inputs = _normalized(inputs, True)._replace(erase_key=l2_normalize(inputs.erase_key))
    return _run(_COMBA, inputs, Sequences(initial_state, cu_seqlens), scale, output_final_state)


def fused_recurrent_comba(
    q: Tensor, k: Tensor, p: Tensor | None, v: Tensor, g: Tensor, beta: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """Compute Comba; see `chunk_comba`, whose p and v have the other order."""
    return chunk_comba(
        q, k, v, p, g, beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens,
    )  # fmt: skip


def chunk_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> Result:  # fmt: skip
    """Compute gated linear attention: S_t = Diag(exp(g_t)) S_(t-1) + k_t v_t^T. Args: g: [B, T, H, K]."""
    inputs = UpdateInputs(q=q, k=k, v=v, log_decay=g)
    return _run(_GLA, inputs, Sequences(initial_state, cu_seqlens, state_v_first), scale, output_final_state)


def fused_recurrent_gla(
    q: Tensor, k: Tensor, v: Tensor, gk: Tensor | None = None, gv: Tensor | None = None, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, reverse: bool = False,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None, **kwargs: Any,
) -> Result:  # fmt: skip
    """Compute gated linear attention; gk None means no decay."""
    name = "fused_recurrent_gla"
    _refuse(name, gv=gv, reverse=reverse)
    _ignore(name, kwargs)
    inputs = UpdateInputs(q=q, k=k, v=v, log_decay=gk)
    spec = _LINEAR if gk is None else _GLA
    return _run(spec, inputs, Sequences(initial_state, cu_seqlens, state_v_first), scale, output_final_state)


def chunk_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, **kwargs: Any,
) -> Result:  # fmt: skip
    """Compute linear attention with a decay per head. Args: g: [B, T, H]; g_gamma: [H], constant in time."""
    _ignore("chunk_simple_gla", kwargs)
    decay, spec = g, _SIMPLE_GLA
    if g_gamma is not None:
        decay, spec = (g_gamma, _RETENTION) if g is None else (g + g_gamma, _SIMPLE_GLA)
    inputs = UpdateInputs(q=q, k=k, v=v, log_decay=decay)
    spec = _LINEAR if decay is None else spec
    return _run(spec, inputs, Sequences(initial_state, cu_seqlens, state_v_first), scale, output_final_state)


def fused_chunk_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """Compute linear attention with a decay per head; see `chunk_simple_gla`."""
    return chunk_simple_gla(q, k, v, g, g_gamma, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


def fused_recurrent_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    reverse: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None, **kwargs: Any,
) -> Result:  # fmt: skip
    """Compute linear attention with a decay per head; see `chunk_simple_gla`."""
    name = "fused_recurrent_simple_gla"
    _refuse(name, reverse=reverse)
    _ignore(name, kwargs)
    return chunk_simple_gla(
        q, k, v, g, g_gamma, scale, initial_state, output_final_state, state_v_first, cu_seqlens=cu_seqlens
    )


def chunk_retention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None, **kwargs: Any,
) -> Result:  # fmt: skip
    """Compute retention: head h decays by 1 - 2^(-5 - h)."""
    _ignore("chunk_retention", kwargs)
    decay = (1 - 2.0 ** (-5.0 - torch.arange(q.shape[2], dtype=torch.float, device=q.device))).log()
    return chunk_simple_gla(q, k, v, None, decay, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


def fused_chunk_retention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """Compute retention; see `chunk_retention`."""
    return chunk_retention(q, k, v, scale, initial_state, output_final_state, cu_seqlens)


def fused_recurrent_retention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, reverse: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, **kwargs: Any,
) -> Result:  # fmt: skip
    """Compute retention; see `chunk_retention`."""
    name = "fused_recurrent_retention"
    _refuse(name, reverse=reverse, state_v_first=state_v_first)
    _ignore(name, kwargs)
    return chunk_retention(q, k, v, scale, initial_state, output_final_state, cu_seqlens)


def chunk_lightning_attn(
    q: Tensor, k: Tensor, v: Tensor, layer_idx: int, num_layers: int, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> Result:  # fmt: skip
    """Compute lightning attention: head h of layer l decays by exp(-8 h / H (1 - l / num_layers))."""
    _ignore("chunk_lightning_attn", kwargs)
    H = q.shape[2]
    decay = -(8 / H * (1 - layer_idx / num_layers)) * torch.arange(H, dtype=torch.float, device=q.device)
    return chunk_simple_gla(q, k, v, None, decay, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


def fused_recurrent_lightning_attn(
    q: Tensor, k: Tensor, v: Tensor, layer_idx: int, num_layers: int, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """Compute lightning attention; see `chunk_lightning_attn`."""
    _refuse("fused_recurrent_lightning_attn", reverse=reverse)
    return chunk_lightning_attn(
        q, k, v, layer_idx, num_layers, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens
    )


def chunk_linear_attn(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, normalize: bool = True, cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """Compute linear attention. Only normalize=False is served."""
    _refuse("linear attention", normalize=normalize)
    inputs = UpdateInputs(q=q, k=k, v=v)
    return _run(_LINEAR, inputs, Sequences(initial_state, cu_seqlens), scale, output_final_state)


def fused_chunk_linear_attn(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, normalize: bool = True, cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """Compute linear attention; see `chunk_linear_attn`."""
    return chunk_linear_attn(q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens)


def fused_recurrent_linear_attn(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, reverse: bool = False, normalize: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """Compute linear attention; see `chunk_linear_attn`."""
    _refuse("fused_recurrent_linear_attn", reverse=reverse)
    return chunk_linear_attn(q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens)


def chunk_dplr_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, gk: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, safe_gate: bool = False, chunk_size: int | None = None,
    disable_recompute: bool = False, cp_context: Any = None, lower_bound: float | None = None, **kwargs: Any,
) -> Result:  # fmt: skip
    """Compute S_t = (Diag(exp(gk_t)) + b_t a_t^T) S_(t-1) + k_t v_t^T. Args: a, b, gk: [B, T, H, K]."""
    _refuse("chunk_dplr_delta_rule", cp_context=cp_context)
    _ignore("chunk_dplr_delta_rule", kwargs)
    inputs = UpdateInputs(q=q, k=k, v=v, log_decay=gk, a=a, b=b)
    return _run(_DPLR, inputs, Sequences(initial_state, cu_seqlens), scale, output_final_state)


def fused_recurrent_dplr_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, gk: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """Compute the delta rule with a diagonal-plus-low-rank transition; see `chunk_dplr_delta_rule`."""
    _refuse("fused_recurrent_dplr_delta_rule", reverse=reverse)
    return chunk_dplr_delta_rule(q, k, v, a, b, gk, scale, initial_state, output_final_state, cu_seqlens)


def chunk_iplr_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, **kwargs: Any,
) -> Result:  # fmt: skip
    """Compute S_t = (I + b_t a_t^T) S_(t-1) + k_t v_t^T."""
    _ignore("chunk_iplr_delta_rule", kwargs)
    inputs = UpdateInputs(q=q, k=k, v=v, a=a, b=b)
    return _run(_IPLR, inputs, Sequences(initial_state, cu_seqlens), scale, output_final_state)


def fused_recurrent_iplr_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """Compute the delta rule with an identity-plus-low-rank transition; see `chunk_iplr_delta_rule`."""
    return chunk_iplr_delta_rule(q, k, v, a, b, scale, initial_state, output_final_state, cu_seqlens)


def chunk_rwkv7(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, scale: float | None = 1.0,
    initial_state: Tensor | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, safe_gate: bool = False, chunk_size: int | None = None,
    disable_recompute: bool = False, cp_context: Any = None, lower_bound: float | None = None,
) -> Result:  # fmt: skip
    """Compute RWKV-7: `chunk_dplr_delta_rule` with log decays w and scale 1."""
    _refuse("chunk_rwkv7", cp_context=cp_context)
    return chunk_dplr_delta_rule(r, k, v, a, b, w, scale, initial_state, output_final_state, cu_seqlens)


def fused_recurrent_rwkv7(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = True, cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """Compute RWKV-7; see `chunk_rwkv7`. Scale None means K ** -0.5."""
    return chunk_dplr_delta_rule(r, k, v, a, b, w, scale, initial_state, output_final_state, cu_seqlens)


def fused_mul_recurrent_rwkv7(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, kk: Tensor, a: Tensor, scale: float | None = 1.0,
    initial_state: Tensor | None = None, output_final_state: bool = False, reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """Compute RWKV-7 with the transition vectors -kk and kk a."""
    _refuse("fused_mul_recurrent_rwkv7", reverse=reverse)
    return chunk_dplr_delta_rule(r, k, v, -kk, kk * a, w, scale, initial_state, output_final_state, cu_seqlens)


def chunk_rwkv6(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, **kwargs: Any,
) -> Result:  # fmt: skip
    """Compute RWKV-6: o_t = scale (S_(t-1) + Diag(u) k_t v_t^T)^T r_t. Args: w: log decays [B, T, H, K]; u [H, K]."""
    _ignore("chunk_rwkv6", kwargs)
    inputs = UpdateInputs(q=r, k=k, v=v, log_decay=w)
    o, state = _run(_RWKV6, inputs, Sequences(initial_state, cu_seqlens), scale, output_final_state)
    dtype = state_dtype(r.dtype)
    bonus = (r.to(dtype) * u.to(dtype) * k.to(dtype)).sum(-1, keepdim=True) * v.to(dtype)
    return (o + bonus * (r.shape[-1] ** -0.5 if scale is None else scale)).to(v.dtype), state


def fused_recurrent_rwkv6(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """Compute RWKV-6; see `chunk_rwkv6`."""
    _refuse("fused_recurrent_rwkv6", reverse=reverse)
    return chunk_rwkv6(r, k, v, w, u, scale, initial_state, output_final_state, cu_seqlens)


def causal_conv1d(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, residual: Tensor | None = None,
    initial_state: Tensor | None = None, output_final_state: bool | None = False, activation: str | None = None,
    backend: str | None = "triton", cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None, cp_context: Any = None, **kwargs: Any,
) -> Result:  # fmt: skip
    """Compute the short causal convolution of each channel, then the activation, then add the residual.

    Args: x, residual: [B, T, C]; weight: [C, W]; bias: [C]; initial_state: [N, C, W], the last W inputs, oldest first.
    Returns: y [B, T, C], and the last W inputs of each sequence or None.
    """
    name = "causal_conv1d"
    _refuse(name, cp_context=cp_context, seq_idx=kwargs.pop("seq_idx", None))
    _ignore(name, kwargs)
    if weight is None:
        raise UnsupportedError("causal_conv1d: weight=None is not served; pass ones")
    W = weight.shape[1]
    history = None if initial_state is None else initial_state.transpose(1, 2)
    parts = (ConvPart(x.shape[2], has_silu(activation, name)),)
    past = None if history is None else history[:, 1:].contiguous()
    (y,) = convolve(ConvInputs(x, weight, bias, past, cu_seqlens), parts)
    y = y if residual is None else y + residual
    return y, last_inputs(x, history, W, cu_seqlens) if output_final_state else None


def causal_conv1d_update(
    x: Tensor, cache: Tensor, residual: Tensor | None = None, weight: Tensor | None = None, bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Convolve one token per sequence and append it to the cache [N, C, W] in place.

    Args: x: [N, C], [N, 1, C] or [1, N, C].
    Returns: y like x, and the cache.
    """
    if weight is None:
        raise UnsupportedError("causal_conv1d_update: weight=None is not served; pass ones")
    y = convolve_step_(x.reshape(cache.shape[:2]), cache, weight, bias, has_silu(activation, "causal_conv1d_update"))
    y = y.view(x.shape)
    return y if residual is None else y + residual, cache


def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """Return x / sqrt(sum x^2 + eps) over the last dimension."""
    return l2_normalize(x if output_dtype is None else x.to(output_dtype), eps)


def rms_norm_gated(
    x: Tensor, g: Tensor, weight: Tensor | None, bias: Tensor | None, activation: str = "swish",
    residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False, eps: float = 1e-6,
) -> Tensor:  # fmt: skip
    """Return weight x / sqrt(mean(x^2) + eps) phi(g), over the last dimension."""
    _refuse("rms_norm_gated", bias=bias, residual=residual, prenorm=prenorm)
    return norm_and_gate(x, g, weight, eps, _gate(activation))


class FusedRMSNormGated(nn.Module):
    """y = weight x / sqrt(mean(x^2) + eps) phi(g) over the last dimension, with phi "swish" or "sigmoid".

    Initialisation: weight 1.
    """

    def __init__(
        self, hidden_size: int, elementwise_affine: bool = True, eps: float = 1e-5, activation: str = "swish",
        device: torch.device | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.hidden_size, self.eps, self.activation = hidden_size, eps, activation
        self.gate = _gate(activation)
        weight = torch.ones(hidden_size, device=device, dtype=dtype) if elementwise_affine else None
        self.weight = None if weight is None else nn.Parameter(weight)

    def forward(
        self, x: Tensor, g: Tensor, residual: Tensor | None = None, prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Tensor:  # fmt: skip
        _refuse("FusedRMSNormGated", residual=residual, prenorm=prenorm)
        return norm_and_gate(x, g, self.weight, self.eps, self.gate)


class RMSNorm(nn.Module):
    """y = weight x / sqrt(mean(x^2) + eps) over the last dimension. Initialisation: weight 1."""

    def __init__(
        self, hidden_size: int, elementwise_affine: bool = True, bias: bool = False, eps: float = 1e-5,
        device: torch.device | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        _refuse("RMSNorm", bias=bias)
        self.hidden_size, self.eps = hidden_size, eps
        weight = torch.ones(hidden_size, device=device, dtype=dtype) if elementwise_affine else None
        self.weight = None if weight is None else nn.Parameter(weight)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False
    ) -> Tensor:
        _refuse("RMSNorm", residual=residual, prenorm=prenorm)
        return rms_norm(x, self.weight, self.eps)


class ShortConvolution(nn.Conv1d):
    """Short causal convolution of each channel with a cache [N, C, W]; weight [C, 1, W] as in nn.Conv1d.

    One token per sequence without gradients updates the cache in place, as in flash-linear-attention.
    """

    def __init__(
        self, hidden_size: int, kernel_size: int, bias: bool = False, activation: str | None = "silu",
        backend: str | None = "triton", device: torch.device | None = None, dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            hidden_size, hidden_size, kernel_size, padding=kernel_size - 1, groups=hidden_size, bias=bias,
            device=device, dtype=dtype,
        )  # fmt: skip
        kwargs.pop("use_fast_conv1d", None)
        _ignore("ShortConvolution", kwargs)
        has_silu(activation, "ShortConvolution")
        self.hidden_size, self.activation = hidden_size, activation

    def forward(  # type: ignore[override]  # the signature of the package
        self, x: Tensor, residual: Tensor | None = None, mask: Tensor | None = None, cache: Tensor | None = None,
        output_final_state: bool = False, cu_seqlens: Tensor | None = None, chunk_indices: Tensor | None = None,
        **kwargs: Any,
    ) -> Result:  # fmt: skip
        """Args: x: [B, T, C]; mask: [B, T]. Returns: y [B, T, C], and the new cache or None."""
        if mask is not None and cu_seqlens is not None:
            raise UnsupportedError("ShortConvolution: mask and cu_seqlens cannot be given together")
        x = x if mask is None else x * mask.unsqueeze(-1)
        weight = self.weight.squeeze(1)
        if cache is not None and cu_seqlens is None and x.shape[1] == 1 and not torch.is_grad_enabled():
            y, cache = causal_conv1d_update(x, cache, residual, weight, self.bias, self.activation)
            return y, cache if output_final_state else None
        return causal_conv1d(
            x, weight, self.bias, residual, cache, output_final_state, self.activation, cu_seqlens=cu_seqlens, **kwargs
        )

    @property
    def state_size(self) -> int:
        """Numbers of the cache per sequence."""
        return self.hidden_size * self.kernel_size[0]


chunk_gdn, fused_recurrent_gdn = chunk_gated_delta_rule, fused_recurrent_gated_delta_rule


def _run(spec: UpdateSpec, inputs: UpdateInputs, sequences: Sequences, scale: float | None, final: bool) -> Result:
    o, state = run_update(spec, inputs, sequences, scale)
    return o, state if final else None


def _normalized(inputs: UpdateInputs, unit: bool) -> UpdateInputs:
    return inputs._replace(q=l2_normalize(inputs.q), k=l2_normalize(inputs.k)) if unit else inputs


def _strength(beta: Tensor | None, v: Tensor, logits: bool = False, doubled: bool = False) -> Tensor:
    """beta; of logits its sigmoid, doubled for negative eigenvalues; None means 1."""
    if doubled and not logits:
        raise UnsupportedError("allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True")
    if beta is None:
        return v.new_ones(v.shape[:-1])
    if not logits:
        return beta
    strength = beta.to(state_dtype(beta.dtype)).sigmoid()
    return 2 * strength if doubled else strength


def _decay(
    head: Tensor | None, channel: Tensor | None, none: UpdateSpec, by_head: UpdateSpec, by_channel: UpdateSpec
) -> tuple[UpdateSpec, Tensor | None]:
    """The spec for the decays that are given, and their sum."""
    if channel is not None:
        return by_channel, channel if head is None else channel + head.unsqueeze(-1)
    return (none, None) if head is None else (by_head, head)


def _head_gate(g: Tensor, raw: bool, A_log: Tensor | None, dt_bias: Tensor | None) -> Tensor:
    """The log decay per head; of the gate's input -exp(A_log) softplus(g + dt_bias)."""
    if not raw:
        return g
    if A_log is None:
        raise UnsupportedError("use_gate_in_kernel=True needs A_log")
    dtype = state_dtype(g.dtype)
    g = g.to(dtype) if dt_bias is None else g.to(dtype) + dt_bias.to(dtype)
    return -A_log.to(dtype).exp() * F.softplus(g)


def _channel_gate(
    name: str, g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None
) -> Tensor:
    """The log decay per channel of the gate's input [B, T, HV, K], bounded below if there is a bound."""
    if A_log is None and lower_bound is None:
        raise UnsupportedError(f"{name}: use_gate_in_kernel=True needs A_log or lower_bound")
    dtype = state_dtype(g.dtype)
    rate = None if A_log is None else A_log.to(dtype).exp().reshape(-1, 1)
    g = g.to(dtype) if dt_bias is None else g.to(dtype) + dt_bias.to(dtype).view(g.shape[-2:])
    if lower_bound is not None:
        return lower_bound * (g if rate is None else rate * g).sigmoid()
    assert rate is not None
    return -rate * F.softplus(g)


def _gate(activation: str) -> GateActivation:
    if activation in ("silu", "swish"):
        return "silu"
    if activation == "sigmoid":
        return "sigmoid"
    raise UnsupportedError(f"activation of a gate must be 'swish', 'silu' or 'sigmoid', got {activation!r}")


def _refuse(name: str, **arguments: object) -> None:
    """Raise UnsupportedError if one of the arguments that are not served is given."""
    for argument, value in arguments.items():
        if value is not None and value is not False:
            shown = "a value" if isinstance(value, Tensor) else repr(value)
            raise UnsupportedError(f"deltazoo.fla: {name} does not serve {argument}, got {shown}")


def _ignore(name: str, arguments: dict[str, Any]) -> None:
    """Raise UnsupportedError for keywords other than those without an effect."""
    for argument, value in arguments.items():
        if argument not in _WITHOUT_EFFECT and value is not None and value is not False:
            raise UnsupportedError(f"deltazoo.fla: {name} does not serve {argument}, got {value!r}")


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise AttributeError(f"deltazoo.fla does not serve {name!r} of flash-linear-attention")
