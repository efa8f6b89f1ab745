"""Regularised least squares for every token: x_t = (H_t + Diag(lambda))^-1 b_t, by conjugate gradients.

    H_t = exp(log_decay_t) H_(t-1) + beta_t k_t k_t^T

In plain torch the products of all tokens are computed in chunks: H at the start of each chunk is computed once, and
every step then takes three batched products. GPUs have a kernel that runs all steps.

B batch, T time, N sequences, H heads, K key width, S chunks, C tokens in a chunk
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.backends.compile.intra_chunk import MIN_LOG_DECAY, cumulative_decay, decays_between, exp_as
from deltazoo.backends.torch_ext.autograd import differentiable_once
from deltazoo.backends.torch_ext.custom_op import differentiate_exported, operator
from deltazoo.backends.torch_ext.devices import device_type
from deltazoo.backends.torch_ext.modes import is_exporting
from deltazoo.backends.triton.least_squares import op as kernels
from deltazoo.backends.triton.limits import kernel_refusals
from deltazoo.backends.update.base import state_dtype
from deltazoo.backends.update.watch import runs_by_kernel

_CHUNK = 64


class LeastSquares(NamedTuple):
    """The systems of all tokens.

    Args:
        k: [B, T, H, K].
        log_decay, beta: [B, T, H].
        shift: lambda, [H, K], positive; float32 (float64 with float64 keys).
        state: H before the first token, [N, H, K, K], positive semidefinite, in the dtype of shift. None: 0.
        cu_seqlens: [N + 1] int32, the bounds of packed sequences; then B = 1.
    """

    k: Tensor
    log_decay: Tensor
    beta: Tensor
    shift: Tensor
    state: Tensor | None = None
    cu_seqlens: Tensor | None = None


def solve(systems: LeastSquares, b: Tensor, steps: int) -> Tensor:
    """Solve the system of every token by at most `steps` steps of conjugate gradients, from x = 0, without gradients.

    The iteration stops at residuals below the rounding of its products. Computed in float32 (float64 for float64 keys);
    the kernels multiply 16-bit keys in float16.

    Args: b: [B, T, H, K], right-hand sides.
    Returns: x [B, T, H, K] in the dtype of k; 0 after the last packed sequence.
    """
    run = kernels.solve if _has_kernel(systems.k) else _solve_op
    x: Tensor = run(b.detach(), *_detached(systems), steps)
    return x


def solve_residual(systems: LeastSquares, residual: Tensor, steps: int) -> Tensor:
    """Return the solution for the residual of a solution, which is 0, with the gradient of `residual`; shaped like it.

    A is symmetric, so that the gradient of A^-1 r is the solution for the gradient of the result.
    """
    if not (torch.is_grad_enabled() and residual.requires_grad):
        return torch.zeros_like(residual)
    run = _residual_op if is_exporting() else _SolveResidual.apply
    solution: Tensor = run(residual, *_detached(systems), steps)
    return solution


def solve_step_(systems: LeastSquares, b: Tensor, steps: int) -> Tensor:
    """Add one token per row to `state` in place, and solve its system; T = 1. Returns x [B, 1, H, K]."""
    assert systems.state is not None
    run = kernels.step_ if _has_kernel(systems.k) else _step_op
    x: Tensor = run(b, *systems[:5], steps)
    return x


def _detached(systems: LeastSquares) -> list[Tensor | None]:
    return [None if x is None else x.detach() for x in systems]


def _has_kernel(k: Tensor) -> bool:
    reasons = [f"keys must have at most {kernels.MAX_WIDTH} channels, got {k.shape[-1]}."]
    if k.shape[-1] <= kernels.MAX_WIDTH:
        reasons = kernel_refusals(k) or [*kernels.device_refusals(device_type(k), k.device.index, k.dtype)]
    return runs_by_kernel("least squares", reasons)


def conjugate_gradients(multiply: Callable[[Tensor], Tensor], b: Tensor, steps: int) -> Tensor:
    """Solve A x = b [..., K] for a batch of positive definite matrices, from x = 0; `multiply` computes A times b.

    On a CPU the loop ends at residuals below the rounding of b.
    """
    tiny, tolerance = torch.finfo(b.dtype).tiny, torch.finfo(b.dtype).eps ** 2
    x, residual, direction = torch.zeros_like(b), b, b
    first = square = b.square().sum(-1, keepdim=True)
    for _ in range(steps):
        product = multiply(direction)
        curvature = (direction * product).sum(-1, keepdim=True)
        # After exact convergence numerator and denominator are both 0: the step is then 0, not NaN.
        length = torch.where(curvature > 0, square / curvature.clamp(min=tiny), 0.0)
        x, residual = x + length * direction, residual - length * product
        new_square = residual.square().sum(-1, keepdim=True)
        direction = residual + torch.where(square > 0, new_square / square.clamp(min=tiny), 0.0) * direction
        square = new_square
        if b.device.type == "cpu" and not bool((square > tolerance * first).any()):
            break
    return x


def _solve(
    b: Tensor, k: Tensor, log_decay: Tensor, beta: Tensor, shift: Tensor, state: Tensor | None,
    cu_seqlens: Tensor | None, steps: int,
) -> Tensor:  # fmt: skip
    """Solve in plain torch. The rows of a batch are sequences of a pack."""
    (B, T, H, K), dtype = k.shape, state_dtype(k.dtype)
    bounds = torch.arange(B + 1, device=k.device) * T if cu_seqlens is None else cu_seqlens.long()
    if k.numel() == 0 or len(bounds) == 1:
        return k.new_zeros(k.shape)
    token_SC, sequence_S, is_first_S = _chunks(bounds, B * T)

    def chunked(x: Tensor) -> Tensor:  # [S, H, C, ...], 0 at places without a token
        return F.pad(x.flatten(0, 1).to(dtype).movedim(0, -1), (0, 1)).movedim(-1, 0)[token_SC].transpose(1, 2)

    b, keys, strength = chunked(b), chunked(k), chunked(beta)
    G = cumulative_decay(chunked(log_decay.clamp(min=MIN_LOG_DECAY)), 2)
    weights = decays_between(G, b) * strength[..., None, :]
    from_start = exp_as(G, b)[..., None]
    writes = (keys * weights[..., -1, :, None]).mT @ keys
    decays = from_start[:, :, -1:]
    initial = torch.zeros_like(writes) if state is None else state.to(dtype)[sequence_S]
    matrices, matrix = [], initial[0]
    for s in range(len(sequence_S)):
        matrix = torch.where(is_first_S[s], initial[s], matrix)
        matrices.append(matrix)
        matrix = decays[s] * matrix + writes[s]
    H_0 = torch.stack(matrices)

    def multiply(p: Tensor) -> Tensor:
        scores = (p @ keys.mT) * weights
        return (p @ H_0) * from_start + scores @ keys + shift[:, None] * p

    x = b.new_zeros(B * T + 1, H, K)
    x[token_SC] = conjugate_gradients(multiply, b, steps).transpose(1, 2)
    return x[:-1].view(k.shape).to(k.dtype)


def _chunks(bounds: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Divide sequences into chunks without reading their bounds; sequence n starts at chunk bounds[n] // C + n.

    Returns: the row of each token [S, C], `rows` where there is none; the sequence of each chunk [S]; whether it is its
        first chunk [S].
    """
    N = len(bounds) - 1
    first_N = bounds[:-1] // _CHUNK + torch.arange(N, device=bounds.device)
    chunk_S = torch.arange(rows // _CHUNK + N, device=bounds.device)
    sequence_S = torch.searchsorted(first_N, chunk_S, right=True) - 1
    offset_S = chunk_S - first_N[sequence_S]
    row_SC = (bounds[sequence_S] + _CHUNK * offset_S)[:, None] + torch.arange(_CHUNK, device=bounds.device)
    return torch.where(row_SC < bounds[sequence_S + 1, None], row_SC, rows), sequence_S, offset_S == 0


def _step(
    b: Tensor, k: Tensor, log_decay: Tensor, beta: Tensor, shift: Tensor, states: Tensor, steps: int
) -> Tensor:  # fmt: skip
    key = k[:, 0].to(states.dtype)
    states.mul_(log_decay[:, 0, :, None, None].to(states.dtype).exp())
    states.add_((beta[:, 0, :, None].to(states.dtype) * key)[..., None] * key[..., None, :])

    def multiply(p: Tensor) -> Tensor:
        return (states @ p[..., None])[..., 0] + shift * p

    return conjugate_gradients(multiply, b[:, 0].to(states.dtype), steps)[:, None].to(k.dtype)


def _fake(b: Tensor, k: Tensor, *rest: Any) -> Tensor:
    return k.new_empty(k.shape)


class _SolveResidual(torch.autograd.Function):
    @staticmethod
    def forward(residual: Tensor, *systems_and_steps: Any) -> Tensor:
        return torch.zeros_like(residual)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, *systems, ctx.steps = inputs
        ctx.save_for_backward(*systems)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        systems = LeastSquares(*ctx.saved_tensors)
        return solve(systems, grad, ctx.steps).to(grad.dtype), *[None] * (len(systems) + 1)


_SYSTEMS = "Tensor k, Tensor log_decay, Tensor beta, Tensor shift"
_solve_op = operator(
    f"least_squares(Tensor b, {_SYSTEMS}, Tensor? state, Tensor? cu_seqlens, int steps) -> Tensor", _solve, _fake
)
_step_op = operator(f"least_squares_step_(Tensor b, {_SYSTEMS}, Tensor(a!) states, int steps) -> Tensor", _step, _fake)
_residual_op = operator(
    f"least_squares_residual(Tensor residual, {_SYSTEMS}, Tensor? state, Tensor? cu_seqlens, int steps) -> Tensor",
    lambda residual, *_: torch.zeros_like(residual),
    lambda residual, *_: torch.empty_like(residual),
)
differentiate_exported("least_squares_residual", _SolveResidual.apply)
