"""Activation checkpointing of a layer: recompute all of it in the backward, or only its cheap operators."""

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
_CHEAP = frozenset({"triton_short_conv", "triton_glu"})  # of the operators of this package


def run_layer(layer: Callable[..., Any], checkpointing: Checkpointing, *arguments: Any) -> Any:
    """Call the layer. With "full" the backward runs it again from its arguments.

    With "selective" the results of matrix products, attention and this package's operators, except short convolutions
    and activations, are saved. The backward computes the rest again: mostly norms, activations and gates, bound by
    memory bandwidth.
    """
    if checkpointing == "none" or not torch.is_grad_enabled():
        return layer(*arguments)
    contexts: dict[str, Any] = {}
    if checkpointing == "selective":
        contexts["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(layer, *arguments, use_reentrant=False, **contexts)


def _policy(context: Any, operator: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
    packet = getattr(operator, "overloadpacket", operator)  # a higher-order operator has none
    if operator.namespace == "deltazoo":
        is_saved = packet.__name__ not in _CHEAP
    else:
        is_saved = packet in _PRODUCTS_AND_ATTENTION or packet is torch.ops.higher_order.flex_attention
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE
