"""MesaNet's query: a linear system with the key covariance, solved for every token by conjugate gradients.

B batch, T time, D width, H heads, K key width
"""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from deltazoo.backends.context_parallel.exchange import connected, states_of_documents
from deltazoo.backends.context_parallel.update import carried_states
from deltazoo.backends.ops.least_squares import LeastSquares, solve, solve_residual, solve_step_
from deltazoo.backends.update.base import UpdateInputs, state_dtype, without_autocast
from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import HasFlops, HeadShape, OperandPart, Stateful
from deltazoo.mixers.core.sequences import mask_padding
from deltazoo.mixers.core.state import write_back
from deltazoo.mixers.core.update import Update
from deltazoo.mixers.parts.gates.decays import softplus

COVARIANCE = UpdateSpec(decay="head", transition="additive", beta="head", scale=1.0)


class ConjugateGradientSolve(OperandPart, Stateful, HasFlops):
    """q_t <- (H_t + Diag(lambda))^-1 q_t with H_t = a_t H_(t-1) + beta_t k_t k_t^T, by at most `steps` iterations.

    The gradient is that of the exact solution (implicit differentiation): a second solve of the same system, and one
    product with H_t, which is the output of an update whose values are the keys.

    Args:
        steps: conjugate gradient iterations; K of them give the exact solution. They end earlier at residuals below
            the rounding of a product.
        bound: lower bound of lambda.
    Initialisation: lambda = bound + softplus(log_lambda) = 1 in every channel.
    State: H, [B, H, K, K].
    Source: MesaNet 2506.05233; lambda, its bound and 30 iterations as in its published code.
    """

    no_weight_decay: ClassVar[tuple[str, ...]] = ("log_lambda",)
    splits: ClassVar[bool] = True

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
        masked = mask_padding(inputs, context.mask) if context.mask is not None else inputs
        q, k, log_decay, beta = masked.q, masked.k, masked.log_decay, masked.beta
        dtype = state_dtype(q.dtype)
        shift = self.bound + softplus(self.log_lambda.to(dtype))
        log_decay = torch.zeros_like(q[..., 0], dtype=dtype) if log_decay is None else log_decay
        beta = torch.ones_like(log_decay) if beta is None else beta
        if state is not None and q.shape[1] == 1 and context.cu_seqlens is None and not torch.is_grad_enabled():
            return inputs._replace(q=solve_step_(LeastSquares(k, log_decay, beta, shift, state), q, self.steps)), state
        system = UpdateInputs(q, k, k, log_decay=log_decay, beta=beta, state=state, cu_seqlens=context.cu_seqlens)
        plan = context.parallel
        with without_autocast(x):
            if plan is not None:
                system = system._replace(state=carried_states(self.update.bound, system, plan))
            systems = LeastSquares(k, log_decay, beta, shift, system.state, system.cu_seqlens)
            solution = solve(systems, q, self.steps)
            if state is None and not torch.is_grad_enabled():
                return inputs._replace(q=solution.to(q.dtype)), None
            # The residual is zero up to rounding. Its solution has the gradient of the exact solution.
            product = self.update.bound(system._replace(q=solution))
            residual = q - product.o - shift * solution
            if plan is not None:
                residual = connected(residual, system.state)
            correction = solve_residual(systems, residual, self.steps)
        after = product.state if plan is None or state is None else states_of_documents(product.state, plan)
        new_state = None if state is None else write_back(state, after)
        return inputs._replace(q=(solution + correction).to(q.dtype)), new_state

    def extra_repr(self) -> str:
        return f"steps={self.steps}, bound={self.bound:g}"
