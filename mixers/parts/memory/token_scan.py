"""A recurrence that no update spec can express, run token by token as one custom operator with gradients.

For states updated by gradient descent (TTT, Titans). The compiler sees one node for any number of tokens.
The forward pass saves the state at the start of each segment of `SEGMENT` tokens, and the backward pass recomputes
each segment from its saved state.

B rows, T time, M segments
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.autograd import differentiable_once
from deltazoo.backends.torch_ext.custom_op import cache_forward_signature, differentiate_exported, operator
from deltazoo.backends.update.base import without_autocast
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.sequences import unpack

SEGMENT = 16

# (state [B, ..] each, the token's operands [B, ..] each, parameters) -> (new state, the token's output [B, ..])
Step = Callable[[list[Tensor], list[Tensor], list[Tensor]], tuple[list[Tensor], Tensor]]


class TokenScan:
    """Scan `step` over time. Create one at module level per recurrence, because it registers an operator.

    Args:
        name: the operator's name.
        step: gets the state, the operands of one token and the parameters. The output of a token must have the shape
            and dtype of its last operand.
    """

    def __init__(self, name: str, step: Step) -> None:
        self.step = step
        schema = "Tensor[] state, Tensor[] operands, Tensor[] parameters, Tensor real"
        self._forward_op = operator(
            f"{name}({schema}, bool keep) -> Tensor[]", _without_autocast(self._forward), _forward_fake
        )
        backward_op = operator(
            f"{name}_backward(Tensor[] grads, Tensor[] starts, {schema}) -> Tensor[]",
            _without_autocast(self._backward),
            _backward_fake,
        )
        function = self._function = _function(self._forward_op, backward_op)

        def differentiable(
            state: list[Tensor], operands: list[Tensor], parameters: list[Tensor], real: Tensor, keep: bool
        ) -> list[Tensor]:
            return list(function.apply(len(state), len(operands), real, *state, *operands, *parameters))

        differentiate_exported(name, differentiable)

    def __call__(
        self, state: list[Tensor], operands: list[Tensor], parameters: list[Tensor], context: Context
    ) -> tuple[Tensor, list[Tensor]]:
        """Scan over operands [B, T, ..]; padded tokens leave the state unchanged.

        Packed sequences are unpacked to N rows of T tokens, which takes N times the memory.

        Returns: the outputs [B, T, ..]; the new state.
        """
        if context.cu_seqlens is not None:
            return self._packed(state, operands, parameters, context)
        B, T = operands[0].shape[:2]
        real = operands[0].new_ones(B, T, dtype=torch.bool) if context.mask is None else context.mask
        if not torch.is_grad_enabled():
            out = self._forward_op(state, operands, parameters, real, False)
        else:
            out = self._function.apply(len(state), len(operands), real, *state, *operands, *parameters)
        return out[0], list(out[1 : 1 + len(state)])

    def _packed(
        self, state: list[Tensor], operands: list[Tensor], parameters: list[Tensor], context: Context
    ) -> tuple[Tensor, list[Tensor]]:
        """Scan with each packed sequence in a separate row."""
        assert context.cu_seqlens is not None
        rows, mask, index_T = unpack(operands, context.cu_seqlens)
        o, new_state = self(state, rows, parameters, Context(mask=mask))
        return o.flatten(0, 1)[index_T][None], new_state

    def _forward(
        self, state: list[Tensor], operands: list[Tensor], parameters: list[Tensor], real: Tensor, keep: bool
    ) -> list[Tensor]:
        """Return the outputs, the new state, and (if `keep`) the states at the start of each segment, [M, B, ..]."""
        T = real.shape[1]
        starts = [s.new_zeros(_saved_states(T, keep), *s.shape) for s in state]
        outputs = []
        for t in range(T):
            if keep and t % SEGMENT == 0:
                for rows, s in zip(starts, state, strict=True):
                    rows[t // SEGMENT] = s
            state, o = self._token(state, [x[:, t] for x in operands], parameters, real[:, t])
            outputs.append(o)
        o = torch.stack(outputs, 1) if outputs else operands[-1].clone()
        return [o, *(s.clone() for s in state), *starts]

    def _backward(
        self, grads: list[Tensor], starts: list[Tensor], state: list[Tensor], operands: list[Tensor],
        parameters: list[Tensor], real: Tensor,
    ) -> list[Tensor]:  # fmt: skip
        """Process the segments from last to first; recompute each with gradients enabled and differentiate it."""
        T = real.shape[1]
        d_o, d_state = grads[0], list(grads[1:])
        d_operands = [torch.zeros_like(x) for x in operands]
        d_parameters = [torch.zeros_like(x) for x in parameters]
        for m in reversed(range((T + SEGMENT - 1) // SEGMENT)):
            span = slice(m * SEGMENT, min(T, (m + 1) * SEGMENT))
            with torch.enable_grad():
                start = [s[m].detach().requires_grad_() for s in starts]
                xs = [x[:, span].detach().requires_grad_() for x in operands]
                ps = [p.detach().requires_grad_() for p in parameters]
                current, outputs = start, []
                for t in range(xs[0].shape[1]):
                    current, o = self._token(current, [x[:, t] for x in xs], ps, real[:, span][:, t])
                    outputs.append(o)
                results = [torch.stack(outputs, 1), *current]
            leaves = [*start, *xs, *ps]
            pairs = [(y, d) for y, d in zip(results, [d_o[:, span], *d_state], strict=True) if y.requires_grad]
            partial = torch.autograd.grad([y for y, _ in pairs], leaves, [d for _, d in pairs], allow_unused=True)
            d_leaves = [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(partial, leaves, strict=True)]
            d_state, d_xs, d_ps = _split(d_leaves, len(start), len(xs))
            for whole, part in zip(d_operands, d_xs, strict=True):
                whole[:, span] = part
            for total, part in zip(d_parameters, d_ps, strict=True):
                total += part
        return [*(d.clone() for d in d_state), *d_operands, *d_parameters]

    def _token(
        self, state: list[Tensor], operands: list[Tensor], parameters: list[Tensor], real_B: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        stepped, o = self.step(state, operands, parameters)
        new_state = [
            torch.where(real_B.view(-1, *[1] * (old.dim() - 1)), new, old)
            for new, old in zip(stepped, state, strict=True)
        ]
        return new_state, o


def _without_autocast(function: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    def run(first: list[Tensor], *rest: Any) -> list[Tensor]:
        with without_autocast(first[0]):
            return function(first, *rest)

    return run


def _saved_states(T: int, keep: bool) -> int:
    """Return M, a number that holds every segment's first state and is never 1, for which a graph is specialised."""
    return T // SEGMENT + 2 if keep else 0


def _forward_fake(
    state: list[Tensor], operands: list[Tensor], parameters: list[Tensor], real: Tensor, keep: bool
) -> list[Tensor]:
    starts = [s.new_empty(_saved_states(real.shape[1], keep), *s.shape) for s in state]
    return [operands[-1].new_empty(operands[-1].shape), *(s.new_empty(s.shape) for s in state), *starts]


def _backward_fake(
    grads: list[Tensor], starts: list[Tensor], state: list[Tensor], operands: list[Tensor], parameters: list[Tensor],
    real: Tensor,
) -> list[Tensor]:  # fmt: skip
    return [x.new_empty(x.shape) for x in (*state, *operands, *parameters)]


def _function(
    forward_op: Callable[..., list[Tensor]], backward_op: Callable[..., list[Tensor]]
) -> type[torch.autograd.Function]:
    @cache_forward_signature
    class TokenScanFunction(torch.autograd.Function):
        @staticmethod
        def forward(states: int, operands: int, real: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            state, xs, ps = _split(tensors, states, operands)
            return tuple(forward_op(state, xs, ps, real, True))

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
            states, operands, real, *tensors = inputs
            ctx.states, ctx.operands = states, operands
            starts = output[1 + states :]
            ctx.mark_non_differentiable(*starts)
            ctx.save_for_backward(real, *starts, *tensors)

        @staticmethod
        @differentiable_once
        def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
            real, *rest = ctx.saved_tensors
            starts, tensors = rest[: ctx.states], rest[ctx.states :]
            state, xs, ps = _split(tensors, ctx.states, ctx.operands)
            d_outputs = [grad.contiguous() for grad in grads[: 1 + ctx.states]]
            return None, None, None, *backward_op(d_outputs, starts, state, xs, ps, real)

    return TokenScanFunction


def _split(tensors: Any, states: int, operands: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Split into the tensors of the state, of the operands and of the parameters."""
    return list(tensors[:states]), list(tensors[states : states + operands]), list(tensors[states + operands :])
