"""Detours: other ways to compute one update with a backend, which must all give the same numbers.

B batch, T time, H key heads, HV value heads, K key width, V value width, N packed sequences, S slots
"""

import types
from abc import ABC, abstractmethod
from itertools import pairwise

import torch

from deltazoo.backends.base import Backend, UpdateInputs, UpdateMeta, UpdateOutput, state_dtype
from deltazoo.backends.dispatch import bind
from deltazoo.backends.spec import UpdateSpec


class Detour(Backend, ABC):
    """A backend put to work in another way."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.name = inner.name

    def unsupported(self, spec: UpdateSpec, meta: UpdateMeta) -> list[str]:
        return self.inner.unsupported(spec, meta)

    @abstractmethod
    def forward(self, spec: UpdateSpec, inputs: UpdateInputs) -> UpdateOutput: ...


class InSegments(Detour):
    """Four pieces along time, the state passed on; not for packs."""

    def forward(self, spec: UpdateSpec, inputs: UpdateInputs) -> UpdateOutput:
        T = inputs.q.shape[1]
        state, outputs = inputs.state, []
        for start, stop in pairwise((0, T // 3, T // 2, T // 2 + 1, T) if T > 2 else (0, T // 2, T)):
            piece = tokens(inputs, start, stop)._replace(state=state)
            o, state = bind(spec, self.inner)(piece)
            outputs.append(o)
        assert state is not None
        return UpdateOutput(torch.cat(outputs, 1), state)


class OneByOne(Detour):
    """Token by token through `step_`, each row's state in a slot of a larger pool; no gradients, not for packs.

    trespassed: whether a slot of no row was written to.
    """

    trespassed = False

    def forward(self, spec: UpdateSpec, inputs: UpdateInputs) -> UpdateOutput:
        B, T, _, K = inputs.q.shape
        HV, V = inputs.v.shape[-2:]
        pool = inputs.q.new_full((2 * B + 1, HV, K, V), float("nan"), dtype=state_dtype(inputs.q.dtype))
        slots = torch.arange(2 * B - 1, -1, -2, device=inputs.q.device)  # odd slots, backwards
        pool[slots] = 0 if inputs.state is None else inputs.state
        bound, steps = bind(spec, self.inner), []
        for t in range(T):
            token = tokens(inputs, t, t + 1)._replace(state=None)
            if t % 2:  # without slots the states are the rows' own
                states = pool[slots]
                steps.append(bound.step_(token, states))
                pool[slots] = states
            else:
                steps.append(bound.step_(token, pool, slots))
        self.trespassed = not bool(pool[::2].isnan().all())
        o = torch.cat(steps, 1) if steps else inputs.v.new_zeros(B, 0, HV, V)
        return UpdateOutput(o, pool[slots])


class WithRepeatedHeads(Detour):
    """The heads of q and k repeated in memory, so that each value head has a key head of its own."""

    def forward(self, spec: UpdateSpec, inputs: UpdateInputs) -> UpdateOutput:
        groups = inputs.v.shape[-2] // inputs.q.shape[2]
        repeated = {
            name: tensor.repeat_interleave(groups, dim=-2)
            for name, tensor in inputs._asdict().items()
            if tensor is not None and name in ("q", "k", "erase_key")
        }
        return bind(spec, self.inner)(inputs._replace(**repeated))


class SequenceBySequence(Detour):
    """Each sequence of a pack by itself."""

    def forward(self, spec: UpdateSpec, inputs: UpdateInputs) -> UpdateOutput:
        assert inputs.cu_seqlens is not None
        bounds: list[int] = inputs.cu_seqlens.tolist()
        outputs = []
        for n, (start, stop) in enumerate(pairwise(bounds)):
            state = None if inputs.state is None else inputs.state[n : n + 1]
            outputs.append(bind(spec, self.inner)(tokens(inputs, start, stop)._replace(state=state, cu_seqlens=None)))
        return UpdateOutput(torch.cat([out.o for out in outputs], 1), torch.cat([out.state for out in outputs]))


class Traced(Detour):
    """Inside the caller's torch.compile, in one graph; run by eager kernels."""

    def forward(self, spec: UpdateSpec, inputs: UpdateInputs) -> UpdateOutput:
        bound = bind(spec, self.inner)

        def call(inputs: UpdateInputs) -> UpdateOutput:
            return bound(inputs)

        # torch.compile counts recompilations by code object: a copy gives each check a count of its own.
        own = types.FunctionType(call.__code__.replace(), call.__globals__, "call", None, call.__closure__)
        return torch.compile(own, backend="aot_eager", fullgraph=True)(inputs)


def tokens(inputs: UpdateInputs, start: int, stop: int) -> UpdateInputs:
    """The operands of the tokens from start to stop; what is constant in time, the state and the bounds stay."""
    cut = {name: getattr(inputs, name)[:, start:stop] for name in inputs._fields if varies_in_time(inputs, name)}
    return inputs._replace(**cut)


def varies_in_time(inputs: UpdateInputs, name: str) -> bool:
    """Whether an operand is there and has a time axis."""
    tensor = getattr(inputs, name)
    fixed = name in ("state", "cu_seqlens", "rate") or (name == "log_decay" and tensor is not None and tensor.dim() < 3)
    return tensor is not None and not fixed
