"""Fused linear cross entropy: the loss and its gradients chunk by chunk, without the logits of all tokens.

N tokens, C tokens per chunk, R rows of a block, D width, L vocabulary
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.io.errors import DeviceError, DtypeError, ShapeError, ValueRangeError
from deltazoo.backends.torch_ext.autograd import differentiable_once
from deltazoo.backends.torch_ext.custom_op import cache_forward_signature, differentiate_exported, operator
from deltazoo.backends.torch_ext.wide_product import add_product_
from deltazoo.backends.triton.loss import op as kernel
from deltazoo.backends.update.base import state_dtype, without_autocast
from deltazoo.backends.update.watch import runs_by_kernel

IGNORE_INDEX = -100
Reduction = Literal["mean", "sum", "none"]

_CHUNK_BYTES = 2**27  # of logits; 2,048 tokens for a vocabulary of 32,000 in 16 bits
_CHUNK_MULTIPLE = 256  # tokens
_LARGE_CHUNK = 4096  # tokens; fewer leave the matrix products too little work per byte of the weights
_BLOCK = {"cpu": 2**18}  # logits of a softmax, small enough to stay in the L2 cache
_SLOW_VOCABULARY = 8  # on a GPU, matrix products are slow if L is not a multiple of it
_PADDED_MULTIPLE = 64


def cap_logits(logits: Tensor, cap: float | None) -> Tensor:
    """Return c tanh(logits / c) with c = cap; the logits if there is no cap. Source: Gemma 2, arXiv 2408.00118."""
    return logits if cap is None else cap * (logits / cap).tanh()


def chunk_tokens(vocabulary: int, width: int, dtype: torch.dtype) -> int:
    """Return the default number of tokens per chunk, a multiple of 256.

    It is the larger of two numbers: the tokens whose logits have 128 MiB; and 4,096, or fewer if their logits would
    have more bytes than the float32 gradient of the weights.
    """
    small = _CHUNK_BYTES // (dtype.itemsize * vocabulary)
    large = min(_LARGE_CHUNK, 4 * width // dtype.itemsize)
    return max(1, max(small, large) // _CHUNK_MULTIPLE) * _CHUNK_MULTIPLE


def padded_vocabulary(vocabulary: int, device: torch.device) -> int:
    """Return the number of columns of the logits: L on a CPU or if it is a multiple of 8, else the next multiple of 64.

    With 50,257 columns the loss and its gradients took 135 ms, with 50,304 32 ms (32,768 tokens of width 2048, H100).
    """
    if device.type == "cpu" or vocabulary % _SLOW_VOCABULARY == 0:
        return vocabulary
    return -(-vocabulary // _PADDED_MULTIPLE) * _PADDED_MULTIPLE


def linear_cross_entropy(
    x_ND: Tensor,
    weight_LD: Tensor,
    targets_N: Tensor,
    reduction: Reduction = "mean",
    ignore_index: int = IGNORE_INDEX,
    z_loss: float | None = None,
    cap: float | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Compute the negative log-likelihood of the targets under softmax(z), z = x W^T or c tanh(x W^T / c).

        loss_n = lse_n - z_{n target_n} + z_loss lse_n^2,   lse_n = log sum_l exp(z_nl)

    and 0 for an ignored target. The logits of only one chunk of tokens are in memory at a time, in the dtype of x. With
    reduction "mean" and "sum" the forward also computes the gradients, and the backward only scales them, so that the
    logits are computed once. With "none" the backward recomputes the logits. lse and the losses are in float32, and the
    gradient of the weights is accumulated in float32.

    Args:
        x_ND: [N, D], features.
        weight_LD: [L, D], weights of the head, with the dtype of x_ND; under autocast both are cast.
        targets_N: [N] int64 in [0, L), or ignore_index. Any other value gives a loss of NaN.
        reduction: "mean" over the targets that are not ignored, "sum", or "none": one loss per token.
        z_loss: coefficient, > 0; None: no z loss.
        cap: c > 0; None: the logits are not capped.
        chunk: tokens per chunk; None: `chunk_tokens`.
    Returns: a scalar, or [N] with "none"; float32 (float64 for float64 inputs). The mean is 0 if every target is
        ignored.
    Raises: ShapeError, DtypeError, DeviceError, ValueRangeError.
    Source: z loss: PaLM, arXiv 2204.02311, section 5.
    """
    device = x_ND.device.type
    autocast = device != "meta" and torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else x_ND.dtype
    _check(x_ND, weight_LD, targets_N, autocast)
    _check_options(reduction, z_loss, cap, chunk)
    L, D = weight_LD.shape
    options = _Options(dtype, ignore_index, z_loss, cap, chunk or chunk_tokens(L, D, dtype))
    count = (targets_N != ignore_index).sum().clamp(min=1) if reduction == "mean" else 1
    d_x, d_weight = (torch.is_grad_enabled() and t.requires_grad for t in (x_ND, weight_LD))
    if reduction != "none" and (d_x or d_weight):
        # Empty slices connect the result to both tensors for `differentiable_once`, without keeping x in memory.
        links = x_ND[:0].clone(), weight_LD[:0].clone()
        total: Tensor = _SummedLoss.apply(x_ND, weight_LD, targets_N, *links, *options, d_x, d_weight)[0]
        return total / count
    losses_N: Tensor = _Losses.apply(x_ND, weight_LD, targets_N, *options)
    return losses_N if reduction == "none" else losses_N.sum() / count


class _Options(NamedTuple):
    """The arguments of the operator that are not tensors. dtype: of the logits."""

    dtype: torch.dtype
    ignore_index: int
    z_loss: float | None
    cap: float | None
    chunk: int


def _check(x: Tensor, weight: Tensor, targets: Tensor, autocast: bool) -> None:
    if x.dim() != 2:
        raise ShapeError(f"x must have shape [N, D], got {list(x.shape)}")
    if weight.dim() != 2 or weight.shape[1] != x.shape[1] or weight.shape[0] < 1:
        raise ShapeError(f"weight must have shape [L, {x.shape[1]}] with L >= 1, got {list(weight.shape)}")
    if targets.shape != x.shape[:1]:
        raise ShapeError(f"targets must have shape [{x.shape[0]}], got {list(targets.shape)}")
    if targets.dtype != torch.int64:
        raise DtypeError(f"targets must be int64, got {targets.dtype}")
    if not x.is_floating_point() or not (autocast or weight.dtype == x.dtype):
        raise DtypeError(f"x and weight must have the same float dtype, got {x.dtype} and {weight.dtype}")
    for name, tensor in (("weight", weight), ("targets", targets)):
        if tensor.device != x.device:
            raise DeviceError(f"{name} must be on {x.device}, where x is, got {tensor.device}")


def _check_options(reduction: str, z_loss: float | None, cap: float | None, chunk: int | None) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueRangeError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    if z_loss is not None and z_loss <= 0:
        raise ValueRangeError(f"z_loss must be above 0, got {z_loss}")
    if cap is not None and cap <= 0:
        raise ValueRangeError(f"cap must be above 0, got {cap}")
    if chunk is not None and chunk < 1:
        raise ValueRangeError(f"chunk must be at least 1, got {chunk}")


class _Rows(NamedTuple):
    """The logits of consecutive tokens, their targets, and the factors of their gradients; None: 1."""

    logits_RL: Tensor
    targets_R: Tensor
    scale_R: Tensor | None


class _Call(NamedTuple):
    """The arguments of the operator.

    Args: scale: factors of the losses in the gradients [N], None: 1; d_x, d_weight: which gradients are computed.
    """

    x: Tensor
    weight: Tensor
    targets: Tensor
    scale: Tensor | None
    options: _Options
    d_x: bool
    d_weight: bool


def _call(arguments: Sequence[Any]) -> _Call:
    """Return the flat arguments of the operator by name."""
    x, weight, targets, scale, *options, d_x, d_weight = arguments
    return _Call(x, weight, targets, scale, _Options(*options), d_x, d_weight)


def _linear_cross_entropy(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses [N] and the gradients of sum_n scale_n loss_n with respect to x and the weights.

    The gradient of x has the dtype of the logits, that of the weights is in float32. Without d_x or d_weight the
    gradient is empty.
    """
    x, weight, targets, scale, options, d_x, d_weight = _call(arguments)
    dtype, chunk = options.dtype, options.chunk
    C, L = min(chunk, x.shape[0]), weight.shape[0]
    with torch.no_grad(), without_autocast(x):
        weight = weight.to(dtype)
        if (padding := padded_vocabulary(L, x.device) - L) > 0:
            # The logits of the padding are 0. No loss reads or overwrites them, so they also are their own gradients.
            weight = torch.nn.functional.pad(weight, (0, 0, 0, padding))
        losses_N, grad_x_ND, grad_weight_LD = _results(x, weight, dtype, d_x, d_weight)
        grad_weight_LD.zero_()
        buffer_CL = x.new_empty((C, weight.shape[0]), dtype=dtype)
        for start in range(0, x.shape[0], chunk):
            tokens = slice(start, start + chunk)
            x_CD = x[tokens].to(dtype)
            logits_CL = torch.mm(x_CD, weight.T, out=buffer_CL[: x_CD.shape[0]])
            rows = _Rows(logits_CL[:, :L], targets[tokens], None if scale is None else scale[tokens])
            _losses_(rows, options, losses_N[tokens], d_x or d_weight)
            if d_x:
                torch.mm(logits_CL, weight, out=grad_x_ND[tokens])
            if d_weight:
                add_product_(grad_weight_LD, logits_CL.T, x_CD)
    return losses_N, grad_x_ND, grad_weight_LD[:L]


def _losses_(rows: _Rows, options: _Options, losses_R: Tensor, gradients: bool) -> None:
    """Store the losses. With `gradients` overwrite the logits x W^T by their gradients."""
    if runs_by_kernel("cross entropy", kernel.refusals(rows.logits_RL)):
        kernel.losses_(*rows, losses_R, gradients, options.ignore_index, options.z_loss, options.cap)
        return
    for block, out_R in _blocks(rows, losses_R):
        _block_losses_(block, options, out_R, gradients)


def _blocks(rows: _Rows, losses_R: Tensor) -> Iterator[tuple[_Rows, Tensor]]:
    """Split rows and losses into blocks of about `_BLOCK` logits."""
    R, L = rows.logits_RL.shape
    size = max(1, _BLOCK.get(losses_R.device.type, 2**24) // L)
    for start in range(0, R, size):
        block = slice(start, start + size)
        scale_R = None if rows.scale_R is None else rows.scale_R[block]
        yield _Rows(rows.logits_RL[block], rows.targets_R[block], scale_R), losses_R[block]


def _block_losses_(rows: _Rows, options: _Options, losses_R: Tensor, gradients: bool) -> None:
    logits_RL, targets_R, scale_R = rows
    ignored_R1 = targets_R[:, None] == options.ignore_index
    invalid_R1 = ((targets_R < 0) | (targets_R >= logits_RL.shape[1]))[:, None]
    target_R1 = targets_R[:, None].masked_fill(invalid_R1, 0)
    z_RL = logits_RL
    if logits_RL.device.type == "cpu" or options.cap is not None:  # a softmax of 16-bit values is slow on a CPU
        z_RL = cap_logits(logits_RL.to(losses_R.dtype), options.cap)
    target_z_R1 = z_RL.gather(1, target_R1).to(losses_R.dtype)
    if gradients:
        p_RL = z_RL.softmax(1, dtype=losses_R.dtype)
        # The largest p is 1 / sum exp(z - max z), so this needs no second pass of exponentials.
        lse_R1 = z_RL.amax(1, keepdim=True) - p_RL.amax(1, keepdim=True).log()
    else:
        lse_R1 = target_z_R1 - z_RL.log_softmax(1, dtype=losses_R.dtype).gather(1, target_R1)
    loss_R1 = lse_R1 - target_z_R1
    if options.z_loss is not None:
        loss_R1 += options.z_loss * lse_R1.square()
    loss_R1 = loss_R1.masked_fill(invalid_R1, torch.nan).masked_fill(ignored_R1, 0)
    losses_R.copy_(loss_R1[:, 0])
    if not gradients:
        return
    scale_R1 = torch.ones_like(lse_R1) if scale_R is None else scale_R[:, None]
    scale_R1 = scale_R1.masked_fill(ignored_R1, 0)
    factor_R1 = scale_R1 if options.z_loss is None else scale_R1 * (1 + 2 * options.z_loss * lse_R1)
    # p - 1 of the target is computed before p is rounded to 16 bits, because it cancels for p near 1
    d_target_R1 = p_RL.gather(1, target_R1) * factor_R1 - scale_R1
    if options.cap is not None:
        slope = lambda z: 1 - (z / options.cap).square()  # noqa: E731, the derivative of the cap: 1 - tanh^2
        p_RL *= slope(z_RL)
        d_target_R1 *= slope(target_z_R1)
    torch.mul(p_RL, factor_R1, out=logits_RL)
    logits_RL.scatter_(1, target_R1, d_target_R1.to(logits_RL.dtype))


def _results(x: Tensor, weight: Tensor, dtype: torch.dtype, d_x: bool, d_weight: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the losses and the gradients."""
    wide = state_dtype(dtype)
    return (
        x.new_empty(x.shape[:1], dtype=wide),
        x.new_empty(x.shape if d_x else (0,), dtype=dtype),
        x.new_empty(weight.shape if d_weight else (0,), dtype=wide),
    )


def _fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = _call(arguments)
    return _results(call.x, call.weight, call.options.dtype, call.d_x, call.d_weight)


# A custom operator, because a traced loop over the chunks would specialise the graph to one N.
_op = operator(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor targets, Tensor? scale, ScalarType dtype, int ignore_index, "
    "float? z_loss, float? cap, int chunk, bool d_x, bool d_weight) -> (Tensor, Tensor, Tensor)",
    _linear_cross_entropy,
    _fake,
)


@cache_forward_signature
class _SummedLoss(torch.autograd.Function):
    """The sum of the losses; the forward computes its gradients, the backward scales them."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, targets: Tensor, x_link: Tensor, weight_link: Tensor, *options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        losses_N, d_x, d_weight = _op(x, weight, targets, None, *options)
        return losses_N.sum(), d_x, d_weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        x, weight, _, x_link, weight_link, *_ = inputs
        _, d_x, d_weight = output
        ctx.mark_non_differentiable(d_x, d_weight)
        ctx.set_materialize_grads(False)
        ctx.dtypes = x.dtype, weight.dtype
        ctx.save_for_backward(x_link, weight_link, d_x, d_weight)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor, *_: None) -> tuple[Any, ...]:
        _, _, *gradients = ctx.saved_tensors
        return *_scaled(gradients, grad, ctx.dtypes, ctx.needs_input_grad), *(None for _ in ctx.needs_input_grad[2:])


@cache_forward_signature
class _Losses(torch.autograd.Function):
    """The loss of each token. The backward recomputes the logits: the weight of each token is not known before."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, targets: Tensor, *options: Any) -> Tensor:
        losses_N: Tensor = _op(x, weight, targets, None, *options, False, False)[0]
        return losses_N

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, targets, *ctx.options = inputs
        ctx.save_for_backward(x, weight, targets)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Any, ...]:
        x, weight, targets = ctx.saved_tensors
        needed = ctx.needs_input_grad
        # The largest factor is scaled to 1, because the gradients of a small loss would underflow in float16.
        tiny = grad_N.new_full((1,), torch.finfo(grad_N.dtype).tiny)
        largest = torch.cat([grad_N.abs(), tiny]).amax()
        _, *gradients = _op(x, weight, targets, grad_N / largest, *ctx.options, *needed[:2])
        return *_scaled(gradients, largest, (x.dtype, weight.dtype), needed), *(None for _ in needed[2:])


def _differentiable_losses(
    x: Tensor, weight: Tensor, targets: Tensor, scale: None, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses of the operator, by `_Losses`, without the gradients that an exported program does not read."""
    losses_N: Tensor = _Losses.apply(x, weight, targets, *options[:-2])
    return losses_N, x.new_empty(0), x.new_empty(0)


differentiate_exported("linear_cross_entropy", _differentiable_losses)


def _scaled(
    gradients: Iterable[Tensor], factor: Tensor, dtypes: Iterable[torch.dtype], needed: Iterable[bool]
) -> Iterator[Tensor | None]:
    """Multiply the gradients by a factor in float32, and round once."""
    for gradient, dtype, is_needed in zip(gradients, dtypes, needed, strict=False):
        out = gradient.new_empty(gradient.shape, dtype=dtype)
        # [1], because a factor without dimensions would be rounded to the dtype of the gradient first
        yield torch.mul(gradient, factor.reshape(1), out=out) if is_needed else None
