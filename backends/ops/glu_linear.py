"""A gated activation and the linear map that follows it, for training on a GPU: the backward recomputes the activation.

R rows (tokens), D width, F hidden width
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.backends.torch_ext.autograd import plain_gradients
from deltazoo.backends.torch_ext.custom_op import cache_forward_signature, differentiate_exported
from deltazoo.backends.torch_ext.devices import device_type
from deltazoo.backends.triton.glu.op import glu, glu_backward

Activation = Literal["silu", "gelu", "relu2"]


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Return phi(x) in plain torch."""
    if activation == "silu":
        return F.silu(x)
    if activation == "gelu":
        return F.gelu(x, approximate="tanh")
    return F.relu(x).square()


def glu_linear(hidden: Tensor, weight_DF: Tensor, activation: Activation) -> Tensor:
    """Compute y = W (phi(gate) * up) for each row (gate, up) of `hidden`.

    h = phi(gate) * up is computed in float32 and rounded once. It is not saved: the backward computes it again in the
    kernel that computes the gradient of `hidden`. Inductor would save it, and its kernel for the concatenated gradients
    of gate and up reaches two thirds of the memory bandwidth.

    Args:
        hidden: [..., 2 F], without `kernel_refusals`.
        weight_DF: [D, F]; under autocast both are cast to its dtype.
        activation: phi: "silu", "gelu" (tanh approximation), or "relu2", max(x, 0)^2.
    Returns: [..., D], with the dtype of the weight.
    """
    device = device_type(hidden)
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight_DF = hidden.to(dtype), weight_DF.to(dtype)
    y: Tensor = _GluLinear.apply(hidden.flatten(0, -2), weight_DF, activation)
    return torch.unflatten(y, 0, hidden.shape[:-1])


@cache_forward_signature
class _GluLinear(torch.autograd.Function):
    @staticmethod
    def forward(hidden_R2F: Tensor, weight_DF: Tensor, activation: str) -> Tensor:
        return torch.mm(glu(hidden_R2F, activation), weight_DF.t())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
        hidden_R2F, weight_DF, ctx.activation = inputs
        ctx.save_for_backward(hidden_R2F, weight_DF)

    @staticmethod
    def backward(ctx: Any, dy_RD: Tensor) -> tuple[Tensor | None, ...]:
        hidden_R2F, weight_DF = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph: differentiable again

            def plain(hidden_R2F: Tensor, weight_DF: Tensor) -> Tensor:
                return torch.mm(_differentiable_glu(hidden_R2F, ctx.activation), weight_DF.t())

            return (*plain_gradients(plain, (hidden_R2F, weight_DF), dy_RD), None)
        d_hidden_R2F, h_RF = glu_backward(hidden_R2F, torch.mm(dy_RD, weight_DF), ctx.activation)
        return d_hidden_R2F, torch.mm(dy_RD.t(), h_RF) if ctx.needs_input_grad[1] else None, None


def _differentiable_glu(hidden_R2F: Tensor, activation: Activation) -> Tensor:
    gate_RF, up_RF = hidden_R2F.float().chunk(2, 1)
    return (activate(gate_RF, activation) * up_RF).to(hidden_R2F.dtype)


differentiate_exported("triton_glu", _differentiable_glu)
