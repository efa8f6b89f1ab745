"""Backend "compile": the chunk-parallel update in plain PyTorch, compiled by torch.compile."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.compile.chunk_layout import merge_chunks, split_into_chunks
from deltazoo.backends.compile.chunked import chunked_update
from deltazoo.backends.compile.decode import accepted_update, drafted_update, token_update
from deltazoo.backends.io.errors import ConfigError, OperandError, UnsupportedError
from deltazoo.backends.io.progress import notice_if_slow
from deltazoo.backends.torch_ext.compiled_call import compiled_call
from deltazoo.backends.torch_ext.modes import dispatch_mode_is_active, functorch_is_active
from deltazoo.backends.update.base import (
    Backend,
    Draft,
    UpdateInputs,
    UpdateMeta,
    UpdateOutput,
    refuse_forward_mode,
    state_dtype,
)
from deltazoo.backends.update.slots import gather_states, step_in_slots, zero_without_state
from deltazoo.backends.update.spec import UpdateSpec

_Function = Callable[[UpdateInputs, Tensor | None], tuple[Tensor, Tensor]]


class _Key(NamedTuple):
    """Key of a compiled function. It excludes T, and B except for the case B = 1, which torch.compile specialises.

    operands: dtype and requires_grad of each operand, None where it is absent.
    """

    spec: UpdateSpec
    meta: UpdateMeta
    operands: tuple[tuple[torch.dtype, bool] | None, ...]
    is_single_row: bool


class CompileBackend(Backend):
    """Compute the update in chunks: WY representation, blocked triangular inverse, inter-chunk scan.

    Supports every spec, float dtype and device that torch.compile supports; computes in float32 (float64 for float64
    inputs). For 16-bit inputs a GPU computes the products of the scan in tf32, unless the erase lets rounding errors
    grow (several householders, negative eigenvalues, a separate erase key).

    Inside torch.compile it is traced into the caller's graph. From eager code it compiles a graph once per spec,
    device, dtype, heads and widths, and again for packs, for B = 1 and with gradients, and reuses it for other B and T.
    That takes 10 to 30 s on a CPU, and prints a line on stderr, if that is a terminal, after 2 s.
    `CompileBackend(compiled=False)` answers at once, for small or few inputs. A single token is computed without chunks
    and without compiling.

    The backward of a graph compiled from eager code may overwrite saved activations. torch then refuses
    retain_graph=True, unless `torch._functorch.config.donated_buffer` is False.

    Args:
        chunk: tokens per chunk, a power of two from 16 to 512; with householders, least micro-steps. None: 32 on
            the CPU, where the amount of arithmetic dominates, and 64 elsewhere, where the number of launches does.
        compiled: False runs the same code eagerly: slower, but needs no C++ compiler.
    """

    name = "compile"

    def __init__(self, chunk: int | None = None, compiled: bool = True) -> None:
        if chunk not in (None, 16, 32, 64, 128, 256, 512):
            raise ConfigError(f"chunk must be a power of two from 16 to 512, got {chunk}")
        self.chunk = chunk
        self.compiled = compiled
        self._functions: dict[_Key, _Function] = {}

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.chunk, self.compiled)

    def unsupported(self, spec: UpdateSpec, meta: UpdateMeta) -> list[str]:
        return []

    def forward(self, spec: UpdateSpec, inputs: UpdateInputs) -> UpdateOutput:
        refuse_forward_mode(self.name, inputs)
        has_no_sequence = inputs.cu_seqlens is not None and inputs.cu_seqlens.shape[0] == 1
        if inputs.q.shape[0] == 0 or inputs.q.shape[1] == 0 or has_no_sequence:
            return _empty(inputs)
        if not self.compiled or torch.compiler.is_compiling() or inputs.q.is_meta or _must_run_eagerly():
            return self._update(spec, inputs)
        if inputs.q.shape[1] == 1 and inputs.cu_seqlens is None:
            return token_update(spec, inputs)
        return self._compiled_update(spec, inputs)

    def verify_(
        self, spec: UpdateSpec, inputs: UpdateInputs, states: Tensor, slots: Tensor | None
    ) -> tuple[Tensor, Draft]:
        refuse_forward_mode(self.name, (*inputs, states))
        with torch.no_grad():
            out, values = drafted_update(spec, inputs._replace(state=gather_states(states, slots)))
            return zero_without_state(out.o, slots), Draft(inputs, values)

    def commit_(self, spec: UpdateSpec, draft: Draft, states: Tensor, slots: Tensor | None, accepted: Tensor) -> None:
        inputs, values = draft
        if values is None:
            raise OperandError("draft.values is missing: backend 'compile' must have made the draft")
        refuse_forward_mode(self.name, (*inputs, states))
        with torch.no_grad():
            step_in_slots(
                lambda state: (
                    values[:, 0, :1],
                    accepted_update(spec, inputs, values, state, accepted),
                ),
                states,
                slots,
            )

    def _update(self, spec: UpdateSpec, inputs: UpdateInputs) -> UpdateOutput:
        """Compute the update by plain PyTorch: traced by the caller's torch.compile, or eager."""
        T = inputs.q.shape[1]
        if T == 1 and inputs.cu_seqlens is None:
            return token_update(spec, inputs)
        chunks, table = split_into_chunks(spec, inputs, self._chunk_tokens(spec, inputs.q.device.type))
        o, state = chunked_update(spec, chunks, None if table is None else table.sequence)
        return UpdateOutput(merge_chunks(o, T, table), state)

    def _compiled_update(self, spec: UpdateSpec, inputs: UpdateInputs) -> UpdateOutput:
        """Compute the update from eager code: split into chunks eagerly, so that the graph does not depend on T."""
        # At least two chunks, because torch.compile specialises a graph for a size of 1.
        chunks, table = split_into_chunks(spec, inputs, self._chunk_tokens(spec, inputs.q.device.type), min_chunks=2)
        meta = UpdateMeta.of(inputs)
        operands = tuple(None if x is None else (x.dtype, meta.grad and x.requires_grad) for x in inputs)
        key = _Key(spec, meta, operands, inputs.q.shape[0] == 1)
        arguments = _with_dynamic_sizes(chunks, None if table is None else table.sequence)
        if key in self._functions:
            o, state = self._functions[key](*arguments)
        else:
            self._functions[key] = _compile(spec)
            with notice_if_slow(_notice(meta)):
                o, state = self._functions[key](*arguments)
        return UpdateOutput(merge_chunks(o, inputs.q.shape[1], table), state)

    def _chunk_tokens(self, spec: UpdateSpec, device: str) -> int:
        """Return C: the first of 16, 32, ..., 512 tokens with at least `chunk` micro-steps.

        Chosen from literals, because torch.compile would treat an integer attribute as a dynamic size.
        """
        micro_steps = (32 if device == "cpu" else 64) if self.chunk is None else self.chunk
        for tokens in (16, 32, 64, 128, 256):
            if tokens * spec.householders >= micro_steps:
                return tokens
        return 512


def _must_run_eagerly() -> bool:
    """Whether torch.compile cannot run: within a torch.func transform or a dispatch mode."""
    return functorch_is_active() or dispatch_mode_is_active()


def _notice(meta: UpdateMeta) -> str:
    direction = "forward and backward" if meta.grad else "forward"
    return (
        f"deltazoo: torch.compile is compiling the {direction} of an update for {meta.device}, once for each spec, "
        "dtype, heads and widths; deltazoo.backends.CompileBackend(compiled=False) runs without compiling"
    )


def _compile(spec: UpdateSpec) -> _Function:
    """Compile `chunked_update` for one spec."""

    def update(chunks: UpdateInputs, sequence: Tensor | None) -> tuple[Tensor, Tensor]:
        return chunked_update(spec, chunks, sequence)

    compiled = compiled_call(update)

    def call(chunks: UpdateInputs, sequence: Tensor | None) -> tuple[Tensor, Tensor]:
        try:
            return compiled(chunks, sequence)
        except torch._inductor.exc.InductorError as error:
            if not isinstance(error.inner_exception, torch._inductor.exc.InvalidCxxCompiler):
                raise
            raise UnsupportedError(
                "backend 'compile' needs a C++ compiler to run on the CPU from eager code, and torch cannot find one: "
                "install g++ or clang++ (Windows: cl), or use CompileBackend(compiled=False) or 'reference'"
            ) from error

    return call


def _with_dynamic_sizes(chunks: UpdateInputs, sequence: Tensor | None) -> tuple[UpdateInputs, Tensor | None]:
    """Return views of the operands with B, N and the number of sequences marked as dynamic."""

    def dynamic(x: Tensor, *dims: int) -> Tensor:
        view = x.view_as(x)
        for dim in dims:
            if view.shape[dim] > 1:
                torch._dynamo.maybe_mark_dynamic(view, dim)
        return view

    dims = {"rate": (), "state": (0,)}
    views = {name: dynamic(x, *dims.get(name, (0, 1))) for name, x in chunks._asdict().items() if x is not None}
    return chunks._replace(**views), None if sequence is None else dynamic(sequence, 0)


def _empty(inputs: UpdateInputs) -> UpdateOutput:
    """Return zeros and the initial state, without a token to compute.

    o depends on no element of the operands, but on every operand in autograd's graph, so that all gradients are zeros.
    """
    HV, V = inputs.v.shape[-2:]
    B, T, _, K = inputs.q.shape
    sequences = B if inputs.cu_seqlens is None else inputs.cu_seqlens.shape[0] - 1
    dtype = state_dtype(inputs.q.dtype)
    state = inputs.q.new_zeros(sequences, HV, K, V, dtype=dtype) if inputs.state is None else inputs.state.clone()
    zero = sum(x.flatten()[:0].sum() for x in inputs if x is not None and x.is_floating_point())
    return UpdateOutput((inputs.v.new_zeros(B, T, HV, V) + zero).to(inputs.v.dtype), state)
