"""MesaNet's query: a linear system with the key covariance, solved for every token by conjugate gradients.

B batch, T time, D width, H heads, K key width
"""

import math
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from deltazoo.backends.context_parallel.exchange import connected, states_of_documents
from deltazoo.backends.context_parallel.update import carried_states
from deltazoo.backends.io.errors import UnsupportedError
from deltazoo.backends.torch_ext.autograd import differentiable_once
from deltazoo.backends.torch_ext.custom_op import differentiate_exported, operator
from deltazoo.backends.torch_ext.modes import is_exporting
from deltazoo.backends.update.base import UpdateInputs, state_dtype, without_autocast
from deltazoo.backends.update.dispatch import BoundUpdate
from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.delta_mixer import Update, mask_padding
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import HasFlops, HeadShape, OperandPart, Stateful
from deltazoo.mixers.core.state import write_back
from deltazoo.mixers.parts.gates.decays import softplus

COVARIANCE = UpdateSpec(decay="head", transition="additive", beta="head", scale=1.0)


class ConjugateGradientSolve(OperandPart, Stateful, HasFlops):
    """q_t <- (H_t + Diag(lambda))^-1 q_t with H_t = a_t H_(t-1) + beta_t k_t k_t^T, by a fixed number of iterations.

    The product of H_t with a vector, for all t at once, is the output of an update whose values are the keys. The
    gradient is that of the exact solution (implicit differentiation): a second solve of the same system, and one
    product.

    Args:
        steps: conjugate gradient iterations; K of them give the exact solution.
        bound: lower bound of lambda.
    Initialisation: lambda = bound + softplus(log_lambda) = 1 in every channel.
    State: H, [B, H, K, K].
    Source: MesaNet 2506.05233; lambda, its bound and 30 iterations as in its published code.
    """

    splits: ClassVar[bool] = True

    no_weight_decay: ClassVar[tuple[str, ...]] = ("log_lambda",)

    def __init__(self, shape: HeadShape, steps: int, bound: float) -> None:
        super().__init__()
        self.steps, self.bound = steps, bound
        self.log_lambda = nn.Parameter(torch.empty(shape.heads, shape.key_width))
        self.update = Update(COVARIANCE, shape._replace(value_width=shape.key_width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.log_lambda, math.log(math.expm1(1.0 - self.bound)))

    def init_state(self, batch: int, like: Tensor) -> Tensor:
        return self.update.init_state(batch, like)

    def flops(self) -> int:
        """Count one product with H per iteration."""
        return self.steps * 2 * self.log_lambda.shape[0] * self.log_lambda.shape[1] ** 2

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        dtype = state_dtype(inputs.q.dtype)
        shift = self.bound + softplus(self.log_lambda.to(dtype))
        masked = mask_padding(inputs, context.mask) if context.mask is not None else inputs
        q, k = inputs.q.to(dtype), masked.k.to(dtype)
        beta = None if inputs.beta is None else inputs.beta.to(dtype)
        system = UpdateInputs(
            q, k, k, log_decay=masked.log_decay, beta=beta, state=state, cu_seqlens=context.cu_seqlens
        )
        plan = context.parallel
        with without_autocast(x):
            if plan is not None:
                system = system._replace(state=carried_states(self.update.bound, system, plan))
            with torch.no_grad():
                solution = _conjugate_gradients(self.update.bound, system, shift, q, self.steps)
            # The residual is zero up to rounding. Solving with its gradient gives the gradient of the exact solution.
            product = self.update.bound(system._replace(q=solution))
            residual = q - product.o - shift * solution
            if plan is not None:
                residual = connected(residual, system.state)
            constants = [None if operand is None else operand.detach() for operand in system]
            if is_exporting():
                correction = _zero_op(residual)
            else:
                correction = _SolveBackward.apply(self.update.bound, self.steps, shift.detach(), residual, *constants)
        after = product.state if plan is None or state is None else states_of_documents(product.state, plan)
        new_state = None if state is None else write_back(state, after)
        return inputs._replace(q=(solution + correction).to(inputs.q.dtype)), new_state

    def extra_repr(self) -> str:
        return f"steps={self.steps}, bound={self.bound:g}"


class _SolveBackward(torch.autograd.Function):
    """Return 0, with the gradient of A^-1 residual: a solve with the symmetric matrix A."""

    @staticmethod
    def forward(bound: BoundUpdate, steps: int, shift: Tensor, residual: Tensor, *system: Tensor | None) -> Tensor:
        return torch.zeros_like(residual)

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
            solution = _conjugate_gradients(ctx.bound, UpdateInputs(*system), shift, grad, ctx.steps)
        return None, None, None, solution, *[None] * len(system)


_zero_op = operator("solution_of_zero(Tensor residual) -> Tensor", torch.zeros_like, torch.empty_like)


def _refuse_gradients(residual: Tensor) -> NoReturn:
    raise UnsupportedError(
        "an exported program has no gradients of the solution of MesaNet's linear system: call it under torch.no_grad()"
    )


differentiate_exported("solution_of_zero", _refuse_gradients)


def _conjugate_gradients(bound: BoundUpdate, system: UpdateInputs, shift: Tensor, b: Tensor, steps: int) -> Tensor:
    """Solve (H_t + Diag(shift)) x_t = b_t for every t, starting from x = 0; b and x are [B, T, H, K]."""
    x, residual = torch.zeros_like(b), b
    direction, norm = residual, residual.square().sum(-1, keepdim=True)
    for _ in range(steps):
        product = bound(system._replace(q=direction)).o + shift * direction
        curvature = (direction * product).sum(-1, keepdim=True)
        # After exact convergence numerator and denominator are both 0: the step is then 0, not NaN.
        alpha = torch.where(curvature > 0, norm / curvature.clamp(min=torch.finfo(curvature.dtype).tiny), 0.0)
        x = x + alpha * direction
        residual = residual - alpha * product
        new_norm = residual.square().sum(-1, keepdim=True)
        ratio = torch.where(norm > 0, new_norm / norm.clamp(min=torch.finfo(norm.dtype).tiny), 0.0)
        direction, norm = residual + ratio * direction, new_norm
    return x
