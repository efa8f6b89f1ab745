"""A recurrence that no spec can say, token by token, as one operator: its backward runs a stretch of tokens again.

For states that follow the gradient of a loss (TTT, Titans). To the compiler it is one node whatever T; the backward
keeps the states at the start of every `STRETCH` tokens. B rows, T time
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.autograd import differentiable_once
from deltazoo.backends.torch_ext.custom_op import cache_forward_signature, operator
from deltazoo.backends.varlen import sequence_index
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.sequences import token_counts

STRETCH = 16

# state [B, ..] each, the token's operands [B, ..] each, parameters -> the state after, and what the token reads [B, ..]
Step = Callable[[list[Tensor], list[Tensor], list[Tensor]], tuple[list[Tensor], Tensor]]


class TokenScan:
    """Run `step` over time. Register one at module level for each recurrence; the name is the operator's.

    `step` gets the state, the token's operands and the parameters; its last operand is like the output of a token.
    """

    def __init__(self, name: str, step: Step) -> None:
        self.step = step
        schema = "Tensor[] state, Tensor[] operands, Tensor[] parameters, Tensor real"
        self._forward_op = operator(
            f"{name}({schema}, bool keep) -> Tensor[]", _without_autocast(self._forward), _forward_fake
        )
        backward_op = operator(
            f"{name}_backward(Tensor[] grads, Tensor[] firsts, {schema}) -> Tensor[]",
            _without_autocast(self._backward),
            _backward_fake,
        )
        self._function = _function(self._forward_op, backward_op)

    def __call__(
        self, state: list[Tensor], operands: list[Tensor], parameters: list[Tensor], context: Context
    ) -> tuple[Tensor, list[Tensor]]:
        """Run over operands [B, T, ..]; padded tokens leave the state as it is. A pack takes N x T slots.

        Returns: what was read [B, T, ..], and the states after, in order.
        """
        if context.cu_seqlens is not None:
            return self._on_pack(state, operands, parameters, context)
        B, T = operands[0].shape[:2]
        real = operands[0].new_ones(B, T, dtype=torch.bool) if context.mask is None else context.mask
        if not torch.is_grad_enabled():
            out = self._forward_op(state, operands, parameters, real, False)
        else:
            out = self._function.apply(len(state), len(operands), real, *state, *operands, *parameters)
        return out[0], list(out[1 : 1 + len(state)])

    def _on_pack(
        self, state: list[Tensor], operands: list[Tensor], parameters: list[Tensor], context: Context
    ) -> tuple[Tensor, list[Tensor]]:
        """Each sequence of a pack as a row of its own."""
        bounds = context.cu_seqlens
        assert bounds is not None
        T, N = operands[0].shape[1], bounds.shape[0] - 1
        which_T = sequence_index(bounds, T)
        time_T = torch.arange(T, device=which_T.device)
        slot_T = which_T * T + time_T - bounds.long()[which_T]
        rows = [x.new_zeros(N * T, *x.shape[2:]).index_copy(0, slot_T, x[0]).unflatten(0, (N, T)) for x in operands]
        mask = time_T < token_counts(operands[0], context)[:, None]
        o, after = self(state, rows, parameters, Context(mask=mask))
        return o.flatten(0, 1)[slot_T][None], after

    def _forward(
        self, state: list[Tensor], operands: list[Tensor], parameters: list[Tensor], real: Tensor, keep: bool
    ) -> list[Tensor]:
        """Returns what was read, the states after, and the states at the start of each stretch [L, B, ..]."""
        T = real.shape[1]
        firsts: list[list[Tensor]] = []
        outputs = []
        for t in range(T):
            if keep and t % STRETCH == 0:
                firsts.append(state)
            state, o = self._token(state, [x[:, t] for x in operands], parameters, real[:, t])
            outputs.append(o)
        o = torch.stack(outputs, 1) if outputs else operands[-1].clone()
        kept = [torch.stack(column) for column in zip(*firsts, strict=True)] if firsts else []
        if not firsts:
            kept = [s.new_empty(0, *s.shape) for s in state]
        return [o, *(s.clone() for s in state), *kept]

    def _backward(
        self, grads: list[Tensor], firsts: list[Tensor], state: list[Tensor], operands: list[Tensor],
        parameters: list[Tensor], real: Tensor,
    ) -> list[Tensor]:  # fmt: skip
        """Walk back stretch by stretch; each is run again with gradients on."""
        T = real.shape[1]
        d_o, d_state = grads[0], list(grads[1:])
        d_operands = [torch.zeros_like(x) for x in operands]
        d_parameters = [torch.zeros_like(x) for x in parameters]
        for n in reversed(range((T + STRETCH - 1) // STRETCH)):
            span = slice(n * STRETCH, min(T, (n + 1) * STRETCH))
            with torch.enable_grad():
                start = [s[n].detach().requires_grad_() for s in firsts]
                xs = [x[:, span].detach().requires_grad_() for x in operands]
                ps = [p.detach().requires_grad_() for p in parameters]
                held, reads = start, []
                for t in range(xs[0].shape[1]):
                    held, o = self._token(held, [x[:, t] for x in xs], ps, real[:, span][:, t])
                    reads.append(o)
                ends = [torch.stack(reads, 1), *held]
                leaves = [*start, *xs, *ps]
                wanted = [(e, d) for e, d in zip(ends, [d_o[:, span], *d_state], strict=True) if e.requires_grad]
            partial = torch.autograd.grad([e for e, _ in wanted], leaves, [d for _, d in wanted], allow_unused=True)
            found = [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(partial, leaves, strict=True)]
            d_state = list(found[: len(start)])
            for whole, part in zip(d_operands, found[len(start) : len(start) + len(xs)], strict=True):
                whole[:, span] = part
            for total, part in zip(d_parameters, found[len(start) + len(xs) :], strict=True):
                total += part
        return [*(d.clone() for d in d_state), *d_operands, *d_parameters]

    def _token(
        self, state: list[Tensor], operands: list[Tensor], parameters: list[Tensor], real_B: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        after, o = self.step(state, operands, parameters)
        keep = [torch.where(real_B.view(-1, *[1] * (s.dim() - 1)), new, s) for new, s in zip(after, state, strict=True)]
        return keep, o


def _without_autocast(function: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    def run(first: list[Tensor], *rest: Any) -> list[Tensor]:
        with torch.autocast(first[0].device.type, enabled=False):
            return function(first, *rest)

    return run


def _forward_fake(
    state: list[Tensor], operands: list[Tensor], parameters: list[Tensor], real: Tensor, keep: bool
) -> list[Tensor]:
    stretches = (real.shape[1] + STRETCH - 1) // STRETCH if keep else 0
    kept = [s.new_empty(stretches, *s.shape) for s in state]
    return [operands[-1].new_empty(operands[-1].shape), *(s.new_empty(s.shape) for s in state), *kept]


def _backward_fake(
    grads: list[Tensor], firsts: list[Tensor], state: list[Tensor], operands: list[Tensor], parameters: list[Tensor],
    real: Tensor,
) -> list[Tensor]:  # fmt: skip
    return [x.new_empty(x.shape) for x in (*state, *operands, *parameters)]


def _function(
    forward_op: Callable[..., list[Tensor]], backward_op: Callable[..., list[Tensor]]
) -> type[torch.autograd.Function]:
    @cache_forward_signature
    class Looped(torch.autograd.Function):
        @staticmethod
        def forward(states: int, operands: int, real: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            state, xs, ps = _split(tensors, states, operands)
            return tuple(forward_op(state, xs, ps, real, True))

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
            states, operands, real, *tensors = inputs
            ctx.states, ctx.operands = states, operands
            firsts = output[1 + states :]
            ctx.mark_non_differentiable(*firsts)
            ctx.save_for_backward(real, *firsts, *tensors)

        @staticmethod
        @differentiable_once
        def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
            real, *rest = ctx.saved_tensors
            firsts, tensors = rest[: ctx.states], rest[ctx.states :]
            state, xs, ps = _split(tensors, ctx.states, ctx.operands)
            wanted = [grad.contiguous() for grad in grads[: 1 + ctx.states]]
            return None, None, None, *backward_op(wanted, firsts, state, xs, ps, real)

    return Looped


def _split(tensors: Any, states: int, operands: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    return list(tensors[:states]), list(tensors[states : states + operands]), list(tensors[states + operands :])
