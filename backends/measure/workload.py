"""What a benchmark times: the operands of a case, one call of a backend on them, and how far it is from float64.

B batch, T time, H key heads, HV value heads, K key width, V value width
"""

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from deltazoo.backends.base import UpdateInputs, UpdateMeta, UpdateOutput
from deltazoo.backends.conformance.cases import Case, draw
from deltazoo.backends.conformance.compare import draw_cotangents, relative_error
from deltazoo.backends.dispatch import BoundUpdate
from deltazoo.backends.reference import ReferenceBackend

Direction = Literal["forward", "backward", "decode"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)

_SEGMENT = 256  # tokens of the float64 reference whose graph is held at once


class Workload:
    """One case in one direction: "forward", without gradients; "backward", after a forward; "decode", one token.

    In "decode" every sequence of the case is a row.
    """

    def __init__(self, case: Case, direction: Direction, device: torch.device) -> None:
        if direction == "decode":
            case = case._replace(shape=case.shape._replace(B=case.shape.sequences, T=1, lengths=()))
        self.case, self.direction = case, direction
        self.inputs = draw(case, device)
        self.cotangents = draw_cotangents(case, self.inputs)
        self.meta = UpdateMeta.of(self.inputs)._replace(grad=direction == "backward")

    def call(self, bound: BoundUpdate) -> Callable[[], dict[str, Tensor]]:
        """A function that does the work once, and returns what it computed: o and state, or d_q, d_k, ..."""
        if self.direction == "backward":
            return lambda: _gradients(bound, self.inputs, self.cotangents)
        if self.direction == "forward":
            return lambda: _outputs(bound, self.inputs)
        assert self.inputs.state is not None
        token, states = self.inputs._replace(state=None), self.inputs.state.clone()
        return lambda: _decoded(bound, token, states)

    def exact(self) -> dict[str, Tensor]:
        """The same from the reference in float64, for the first sequence's first key head and its value heads."""
        operands = {name: x for name, x in self.inputs._asdict().items() if x is not None and name != "cu_seqlens"}
        inputs = UpdateInputs(**{name: self._head(name, x).double() for name, x in operands.items()})
        if self.direction != "backward":
            return _outputs(self._reference, inputs)
        d_o, d_state = self.cotangents
        return _gradients(
            self._reference, inputs, (self._head("o", d_o).double(), self._head("state", d_state).double())
        )

    def error(self, got: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
        """The largest relative RMS error of what `call` computed, where `exact` is; NaN where one is not finite.

        The gradient of an operand that all sequences share is left out where there are several.
        """
        errors = [
            relative_error(self._head(name.removeprefix("d_"), got[name]), want, want)
            for name, want in exact.items()
            if not (self._shared(name.removeprefix("d_")) and self.case.shape.sequences > 1)
        ]
        return float(torch.tensor(errors).max())

    def _reference(self, inputs: UpdateInputs) -> UpdateOutput:
        """The reference over segments of time, so that the graph of one alone is held."""
        reference, state, outputs = ReferenceBackend(), inputs.state, []
        for start in range(0, inputs.q.shape[1], _SEGMENT):
            part = inputs._replace(
                **{
                    name: x[:, start : start + _SEGMENT]
                    for name, x in inputs._asdict().items()
                    if x is not None and name != "state" and not self._shared(name)
                }
            )
            out = checkpoint(reference.forward, self.case.spec, part._replace(state=state), use_reentrant=False)
            state = out.state
            outputs.append(out.o)
        assert state is not None
        return UpdateOutput(torch.cat(outputs, 1), state)

    def _head(self, name: str, x: Tensor) -> Tensor:
        """The part of an operand, an output or a gradient that is the first sequence's and the first key head's."""
        shape = self.case.shape
        heads = 1 if name in ("q", "k", "erase_key") else shape.HV // shape.H
        if self._shared(name):
            return x[:heads]
        if name == "state":
            return x[:1, :heads]
        scalar = name in ("beta", "step") or (name == "log_decay" and self.case.spec.decay == "head")
        length = shape.lengths[0] if shape.lengths else shape.T
        return x[:1, :length].narrow(-1 if scalar else -2, 0, heads)

    def _shared(self, name: str) -> bool:
        """Whether all sequences and tokens share the operand."""
        return name == "rate" or (name == "log_decay" and self.case.spec.decay == "fixed")


def _outputs(bound: Callable[[UpdateInputs], UpdateOutput], inputs: UpdateInputs) -> dict[str, Tensor]:
    with torch.no_grad():
        return dict(bound(inputs)._asdict())


def _decoded(bound: BoundUpdate, token: UpdateInputs, states: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        return {"o": bound.step_(token, states), "state": states}


def _gradients(
    bound: Callable[[UpdateInputs], UpdateOutput], inputs: UpdateInputs, cotangents: tuple[Tensor, Tensor]
) -> dict[str, Tensor]:
    operands = {name: x for name, x in inputs._asdict().items() if x is not None and x.is_floating_point()}
    leaves = {name: x.detach().requires_grad_() for name, x in operands.items()}
    out = bound(inputs._replace(**leaves))
    grads = torch.autograd.grad(list(out), list(leaves.values()), list(cotangents), materialize_grads=True)
    return {f"d_{name}": grad for name, grad in zip(leaves, grads, strict=True)}
