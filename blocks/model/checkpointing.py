"""Activation checkpointing of a layer: the backward recomputes all of it, or only its cheap operators."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Checkpointing = Literal["none", "selective", "full"]

_aten = torch.ops.aten
_PRODUCTS_AND_ATTENTION = frozenset(
    getattr(_aten, name)
    for name in (
        "mm", "addmm", "bmm", "baddbmm", "linear", "_grouped_mm", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
    if hasattr(_aten, name)
)  # fmt: skip
_RECOMPUTED = frozenset({"triton_short_conv", "triton_glu", "triton_rms_norm"})  # among the operators of this package


def run_layer(layer: Callable[..., Any], checkpointing: Checkpointing, *arguments: Any) -> Any:
    """Call the layer, and save in a forward with gradients only what `checkpointing` says.

    "none" saves all intermediate results. "full" saves the arguments, and the backward runs the layer again.
    "selective" also saves the results of matrix products, of attention and of the operators of this package except
    short convolutions, activations and norms; the backward recomputes the rest, mostly norms, activations and gates,
    bound by memory bandwidth.
    """
    if checkpointing == "none" or not torch.is_grad_enabled():
        return layer(*arguments)
    contexts: dict[str, Any] = {}
    policy = _policy if checkpointing == "selective" else _recompute_all if torch.compiler.is_compiling() else None
    if policy is not None:
        contexts["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(layer, *arguments, use_reentrant=False, **contexts)


def _recompute_all(context: Any, operator: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
    """Mark every operator. A graph of torch 2.11 without marks saves the results of each torch.autograd.Function."""
    return CheckpointPolicy.MUST_RECOMPUTE


def _policy(context: Any, operator: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
    packet = getattr(operator, "overloadpacket", operator)  # a higher-order operator has none
    if operator.namespace == "deltazoo":
        is_saved = packet.__name__ not in _RECOMPUTED
    else:
        is_saved = operator.namespace == "torch_attn" or packet in _PRODUCTS_AND_ATTENTION
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE
