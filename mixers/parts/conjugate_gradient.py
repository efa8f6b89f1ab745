"""The query of a least-squares memory: conjugate gradients on the covariance of the keys, for all tokens at once.

B batch, T time, D width, H heads, K key width
"""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from deltazoo.backends.base import UpdateInputs, state_dtype, without_autocast
from deltazoo.backends.dispatch import BoundUpdate
from deltazoo.backends.spec import UpdateSpec
from deltazoo.backends.torch_ext.autograd import differentiable_once
from deltazoo.mixers.core.delta_mixer import Update, mask_padding
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import HasFlops, HeadShape, OperandPart, Stateful
from deltazoo.mixers.core.state import write_back
from deltazoo.mixers.parts.decays import softplus

COVARIANCE = UpdateSpec(decay="head", transition="additive", beta="head", scale=1.0)


class ConjugateGradientSolve(OperandPart, Stateful, HasFlops):
    """q_t <- (H_t + Diag(lambda))^-1 q_t, H_t = a_t H_(t-1) + beta_t k_t k_t^T, by a fixed number of steps.

    A product with H_t, for all t at once, is a read of the update whose values are the keys. The gradient is that of
    the solution: a second solve, of the same system, and one product.

    Args: steps: of conjugate gradients; K of them are exact. bound: least lambda.
    Initialisation: lambda = bound + softplus(.) = 1 in every channel.
    State: H, [B, H, K, K].
    Source: MesaNet 2506.05233; lambda, its bound and 30 steps as in its published code.
    """

    no_weight_decay: ClassVar[tuple[str, ...]] = ("log_lambda",)

    def __init__(self, shape: HeadShape, steps: int, bound: float) -> None:
        super().__init__()
        self.steps, self.bound = steps, bound
        start = math.log(math.expm1(1.0 - bound))
        self.log_lambda = nn.Parameter(torch.full((shape.heads, shape.key_width), start))
        self.update = Update(COVARIANCE, shape._replace(value_width=shape.key_width))

    def init_state(self, batch: int, like: Tensor) -> Tensor:
        return self.update.init_state(batch, like)

    def flops(self) -> int:
        """Of the steps: a product with H each."""
        return self.steps * 2 * self.log_lambda.shape[0] * self.log_lambda.shape[1] ** 2

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        dtype = state_dtype(inputs.q.dtype)
        shift = self.bound + softplus(self.log_lambda.to(dtype))
        held = mask_padding(inputs, context.mask) if context.mask is not None else inputs
        q, k = inputs.q.to(dtype), held.k.to(dtype)
        beta = None if inputs.beta is None else inputs.beta.to(dtype)
        system = UpdateInputs(q, k, k, log_decay=held.log_decay, beta=beta, state=state, cu_seqlens=context.cu_seqlens)
        with without_autocast(x):
            with torch.no_grad():
                solution = _solved(self.update.bound, system, shift, q, self.steps)
            # zero but for rounding: its gradients, through a solve, are those of the solution
            read = self.update.bound(system._replace(q=solution))
            rest = q - read.o - shift * solution
            fixed = [None if y is None else y.detach() for y in system]
            exact = solution + _Refine.apply(self.update.bound, self.steps, shift.detach(), rest, *fixed)
        after = None if state is None else write_back(state, read.state)
        return inputs._replace(q=exact.to(inputs.q.dtype)), after

    def extra_repr(self) -> str:
        return f"steps={self.steps}, bound={self.bound:g}"


class _Refine(torch.autograd.Function):
    """0, with the gradient of A^-1 rest: a solve with the symmetric A."""

    @staticmethod
    def forward(bound: BoundUpdate, steps: int, shift: Tensor, rest: Tensor, *system: Tensor | None) -> Tensor:
        return torch.zeros_like(rest)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        bound, steps, shift, _, *system = inputs
        ctx.bound, ctx.steps = bound, steps
        ctx.save_for_backward(shift, *system)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        shift, *system = ctx.saved_tensors
        with without_autocast(grad):
            solved = _solved(ctx.bound, UpdateInputs(*system), shift, grad, ctx.steps)
        return None, None, None, solved, *[None] * len(system)


def _solved(bound: BoundUpdate, system: UpdateInputs, shift: Tensor, right: Tensor, steps: int) -> Tensor:
    """x of (H_t + Diag(shift)) x_t = right_t for every t, by conjugate gradients from 0; all [B, T, H, K]."""
    x, residual = torch.zeros_like(right), right
    direction, size = residual, residual.square().sum(-1, keepdim=True)
    for _ in range(steps):
        image = bound(system._replace(q=direction)).o + shift * direction
        length = (direction * image).sum(-1, keepdim=True)
        alpha = torch.where(length > 0, size / length.clamp(min=torch.finfo(length.dtype).tiny), 0.0)
        x = x + alpha * direction
        residual = residual - alpha * image
        new = residual.square().sum(-1, keepdim=True)
        ratio = torch.where(size > 0, new / size.clamp(min=torch.finfo(size.dtype).tiny), 0.0)
        direction, size = residual + ratio * direction, new
    return x
