"""The workload of a benchmark: operands of a case, a call of a backend on them, and its error against float64.

B batch, T time, H key heads, HV value heads, K key width, V value width
"""

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from deltazoo.backends.conformance.cases import Case, draw
from deltazoo.backends.conformance.compare import draw_cotangents, relative_error
from deltazoo.backends.update.base import UpdateInputs, UpdateMeta, UpdateOutput
from deltazoo.backends.update.dispatch import BoundUpdate
from deltazoo.backends.update.reference import ReferenceBackend

Direction = Literal["forward", "backward", "decode"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)

_SEGMENT = 256  # tokens per checkpoint of the float64 reference, which bounds its memory


class Workload:
    """One case in one direction.

    Args:
        direction: "forward": without gradients. "backward": forward and backward. "decode": one token in place, where
            every sequence of the case becomes a row.
    """

    def __init__(self, case: Case, direction: Direction, device: torch.device) -> None:
        case = in_direction(case, direction)
        self.case, self.direction = case, direction
        self.inputs = draw(case, device)
        self.cotangents = draw_cotangents(case, self.inputs)
        self.meta = UpdateMeta.of(self.inputs)._replace(grad=direction == "backward")

    def call(self, bound: BoundUpdate) -> Callable[[], dict[str, Tensor]]:
        """Return a function that runs the workload once and returns o and state, or the gradients d_q, d_k, ..."""
        if self.direction == "backward":
            return lambda: _gradients(bound, self.inputs, self.cotangents)
        if self.direction == "forward":
            return lambda: _outputs(bound, self.inputs)
        assert self.inputs.state is not None
        token, states = self.inputs._replace(state=None), self.inputs.state.clone()
        return lambda: _decode(bound, token, states)

    def exact(self) -> dict[str, Tensor]:
        """Return the results of the float64 reference for the first key head of the first sequence."""
        operands = {name: x for name, x in self.inputs._asdict().items() if x is not None and name != "cu_seqlens"}
        inputs = UpdateInputs(**{name: self._first_head(name, x).double() for name, x in operands.items()})
        if self.direction != "backward":
            return _outputs(self._run_reference, inputs)
        d_o, d_state = self.cotangents
        return _gradients(
            self._run_reference,
            inputs,
            (self._first_head("o", d_o).double(), self._first_head("state", d_state).double()),
        )

    def error(self, results: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
        """Return the largest relative RMS error of the results of `call`; NaN if any is not finite.

        With several sequences, the gradient of an operand that they share is excluded: `exact` covers only one.
        """
        errors = [
            relative_error(self._first_head(name.removeprefix("d_"), results[name]), expected, expected)
            for name, expected in exact.items()
            if not (self._shared(name.removeprefix("d_")) and self.case.shape.sequences > 1)
        ]
        return float(torch.tensor(errors).max())

    def _run_reference(self, inputs: UpdateInputs) -> UpdateOutput:
        """Run the reference with a checkpoint per segment, so that autograd stores the graph of one segment only."""
        reference, state, outputs = ReferenceBackend(), inputs.state, []
        for start in range(0, inputs.q.shape[1], _SEGMENT):
            segment = inputs._replace(
                **{
                    name: x[:, start : start + _SEGMENT]
                    for name, x in inputs._asdict().items()
                    if x is not None and name != "state" and not self._shared(name)
                }
            )
            out = checkpoint(reference.forward, self.case.spec, segment._replace(state=state), use_reentrant=False)
            state = out.state
            outputs.append(out.o)
        assert state is not None
        return UpdateOutput(torch.cat(outputs, 1), state)

    def _first_head(self, name: str, x: Tensor) -> Tensor:
        """Slice the first sequence and the first key head, with its value heads, from an operand or a result."""
        shape = self.case.shape
        heads = 1 if name in ("q", "k", "erase_key") else shape.HV // shape.H
        if self._shared(name):
            return x[:heads]
        if name == "state":
            return x[:1, :heads]
        spec = self.case.spec
        scalars = {"beta", "step", *(["log_decay"] if spec.decay == "head" else [])}
        scalars |= {"erase", "write"} if spec.beta == "separate" else set()
        length = shape.lengths[0] if shape.lengths else shape.T
        return x[:1, :length].narrow(-1 if name in scalars else -2, 0, heads)

    def _shared(self, name: str) -> bool:
        """Whether the operand has neither a batch nor a time axis."""
        return name == "rate" or (name == "log_decay" and self.case.spec.decay == "fixed")


def in_direction(case: Case, direction: Direction) -> Case:
    """Return a case as it is timed: for decode one token of each sequence, as a row."""
    if direction != "decode":
        return case
    return case._replace(shape=case.shape._replace(B=case.shape.sequences, T=1, lengths=()))


def _outputs(bound: Callable[[UpdateInputs], UpdateOutput], inputs: UpdateInputs) -> dict[str, Tensor]:
    with torch.no_grad():
        return dict(bound(inputs)._asdict())


def _decode(bound: BoundUpdate, token: UpdateInputs, states: Tensor) -> dict[str, Tensor]:
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
