"""One decoded token of a Gated DeltaNet layer of transformers, by one kernel between its projections if there is one.

B batch, C channels, W taps, H key heads, HV value heads, K key width, V value width
"""

from typing import Any

import torch
from torch import Tensor, nn

from deltazoo.backends.ops.decode_step import FusedDecodeInputs, FusedDecodeStep
from deltazoo.backends.ops.short_conv import ConvPart
from deltazoo.backends.update.base import state_dtype
from deltazoo.integrations.operators import bound_update
from deltazoo.integrations.transformers.functions import GATED_DELTA

_SIZES = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")


def decode_token(layer: Any, x: Tensor, cache: Any, state: Tensor) -> Tensor | None:
    """Decode one token per row, and update the layer's states in the cache in place.

    Served are layers with the projections of Qwen3.5 or Qwen3-Next, on devices whose backend has a fused step.

    Args: x: [B, 1, D]; state: the recurrent state in the cache.
    Returns: the layer's output [B, 1, D]; None: the layer must compute the token.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or x.shape[1] != 1 or not _has_known_parts(layer):
        return None
    cached = cache.layers[layer.layer_idx]
    dtype = layer.out_proj.weight.dtype
    if getattr(cached, "record_past", False) or x.dtype != dtype or state.dtype != state_dtype(dtype):
        return None
    bound, step = bound_update(GATED_DELTA), _step(layer)
    if not bound.may_fuse_decode(x.device.type) or not bound.can_fuse_decode(step, x.device.type, dtype):
        return None
    qkv, gate, beta, decay = _project(layer, x)
    past = cached.conv_states[0]
    past[..., 0] = past[..., 1]  # the cache has one input more than the convolution reads
    inputs = FusedDecodeInputs(
        qkv=qkv, weight=layer.conv1d.weight.squeeze(1), bias=layer.conv1d.bias, history=past[..., 1:].transpose(1, 2),
        beta=beta, decay=decay, A_log=layer.A_log, dt_bias=layer.dt_bias, norm_weight=layer.norm.weight, gate=gate,
    )  # fmt: skip
    return layer.out_proj(bound.fused_decode_step_(step, inputs, state).flatten(2))


def _has_known_parts(layer: nn.Module) -> bool:
    parts = dict(layer.named_children())
    flat, mixed = ({"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"}, {"in_proj_qkvz", "in_proj_ba"})
    known = {"conv1d", "norm", "out_proj"}
    if set(parts) - known not in (flat, mixed) or not known <= set(parts) or not all(hasattr(layer, n) for n in _SIZES):
        return False
    return not any("_hf_hook" in vars(parts[name]) for name in ("conv1d", "norm"))  # their weights may be elsewhere


def _step(layer: Any) -> FusedDecodeStep:
    H, HV, K, V = (getattr(layer, name) for name in _SIZES)
    return FusedDecodeStep(
        GATED_DELTA, H, HV, K, V, (ConvPart(H * K, True, K), ConvPart(H * K, True, K), ConvPart(HV * V, True)),
        taps=layer.conv1d.weight.shape[-1], norm="rms", eps=layer.norm.variance_epsilon,
        gate="sigmoid" if layer.norm.activation == "sigmoid" else "silu",
    )  # fmt: skip


def _project(layer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The operands of the step before its convolution: q, k and v, the gate, beta and the decay, [B, 1, ...] each."""
    if hasattr(layer, "in_proj_qkv"):
        return layer.in_proj_qkv(x), layer.in_proj_z(x), layer.in_proj_b(x), layer.in_proj_a(x)
    q, k, v, z, b, a = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(x), layer.in_proj_ba(x))
    return torch.cat([y.flatten(2) for y in (q, k, v)], -1), z.flatten(2), b, a
