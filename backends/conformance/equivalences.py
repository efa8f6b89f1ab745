"""Other ways to compute one update with a backend, which must all give the same results.

B batch, T time, H key heads, HV value heads, K key width, V value width, N packed sequences
"""

import types
from abc import ABC, abstractmethod
from itertools import pairwise

import torch

from deltazoo.backends.update.base import Backend, UpdateInputs, UpdateMeta, UpdateOutput, slice_tokens, state_dtype
from deltazoo.backends.update.dispatch import bind
from deltazoo.backends.update.spec import UpdateSpec


class Equivalent(Backend, ABC):
    """A backend that computes the update by calls of another backend."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.name = inner.name

    def unsupported(self, spec: UpdateSpec, meta: UpdateMeta) -> list[str]:
        return self.inner.unsupported(spec, meta)

    @abstractmethod
    def forward(self, spec: UpdateSpec, inputs: UpdateInputs) -> UpdateOutput: ...


class InPieces(Equivalent):
    """Split the sequence into four pieces, two if T <= 2, each from the final state of the one before; not for packs.

    Of one token the first piece takes it and the second is empty: an empty first piece would pass on a state of zeros,
    and then d_log_decay is zero up to rounding, which no relative error measures.
    """

    def forward(self, spec: UpdateSpec, inputs: UpdateInputs) -> UpdateOutput:
        T = inputs.q.shape[1]
        state, outputs = inputs.state, []
        for start, stop in pairwise((0, T // 3, T // 2, T // 2 + 1, T) if T > 2 else (0, (T + 1) // 2, T)):
            o, state = bind(spec, self.inner)(slice_tokens(inputs, start, stop)._replace(state=state))
            outputs.append(o)
        assert state is not None
        return UpdateOutput(torch.cat(outputs, 1), state)


class TokenByToken(Equivalent):
    """Decode with `step_`, with the state of each row in a slot of a larger pool; no gradients, not for packs.

    wrote_to_other_slots: whether a slot that belongs to no row was written to.
    """

    wrote_to_other_slots = False

    def forward(self, spec: UpdateSpec, inputs: UpdateInputs) -> UpdateOutput:
        B, T, _, K = inputs.q.shape
        HV, V = inputs.v.shape[-2:]
        pool = inputs.q.new_full((2 * B + 1, HV, K, V), float("nan"), dtype=state_dtype(inputs.q.dtype))
        slots = torch.arange(2 * B - 1, -1, -2, device=inputs.q.device)  # odd slots in descending order
        pool[slots] = 0 if inputs.state is None else inputs.state
        bound, outputs = bind(spec, self.inner), []
        for t in range(T):
            token = slice_tokens(inputs, t, t + 1)._replace(state=None)
            if t % 2:  # every other token without slots
                states = pool[slots]
                outputs.append(bound.step_(token, states))
                pool[slots] = states
            else:
                outputs.append(bound.step_(token, pool, slots))
        self.wrote_to_other_slots = not bool(pool[::2].isnan().all())
        o = torch.cat(outputs, 1) if outputs else inputs.v.new_zeros(B, 0, HV, V)
        return UpdateOutput(o, pool[slots])


class RepeatedHeads(Equivalent):
    """Repeat the heads of q and k in memory, one key head for each value head."""

    def forward(self, spec: UpdateSpec, inputs: UpdateInputs) -> UpdateOutput:
        groups = inputs.v.shape[-2] // inputs.q.shape[2]
        repeated = {
            name: tensor.repeat_interleave(groups, dim=-2)
            for name, tensor in inputs._asdict().items()
            if tensor is not None and name in ("q", "k", "erase_key")
        }
        return bind(spec, self.inner)(inputs._replace(**repeated))


class SequenceBySequence(Equivalent):
    """Compute each sequence of a pack in a separate call."""

    def forward(self, spec: UpdateSpec, inputs: UpdateInputs) -> UpdateOutput:
        assert inputs.cu_seqlens is not None
        bounds: list[int] = inputs.cu_seqlens.tolist()
        outputs = []
        for n, (start, stop) in enumerate(pairwise(bounds)):
            state = None if inputs.state is None else inputs.state[n : n + 1]
            sequence = slice_tokens(inputs, start, stop)._replace(state=state, cu_seqlens=None)
            outputs.append(bind(spec, self.inner)(sequence))
        return UpdateOutput(torch.cat([out.o for out in outputs], 1), torch.cat([out.state for out in outputs]))


class Traced(Equivalent):
    """Trace the update as one graph, and run it with eager kernels."""

    def forward(self, spec: UpdateSpec, inputs: UpdateInputs) -> UpdateOutput:
        bound = bind(spec, self.inner)

        def call(inputs: UpdateInputs) -> UpdateOutput:
            return bound(inputs)

        # torch.compile counts recompilations per code object; a copy of the code object starts at zero.
        copy = types.FunctionType(call.__code__.replace(), call.__globals__, "call", None, call.__closure__)
        return torch.compile(copy, backend="aot_eager", fullgraph=True)(inputs)
