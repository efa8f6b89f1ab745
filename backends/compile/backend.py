"""The compile backend: the chunk-parallel update in plain torch, written for torch.compile."""

import types
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.base import (
    Backend,
    UpdateInputs,
    UpdateMeta,
    UpdateOutput,
    refuse_forward_mode,
    state_dtype,
)
from deltazoo.backends.compile.chunked import chunked_update, cut, join
from deltazoo.backends.compile.decode import token_update
from deltazoo.backends.errors import UnsupportedError
from deltazoo.backends.spec import UpdateSpec
from deltazoo.backends.torch_ext.modes import functorch_is_active

_Function = Callable[[UpdateInputs, Tensor | None], tuple[Tensor, Tensor]]


class _Key(NamedTuple):
    """What one compiled function serves; never T, and B only where it is 1. operands: what there is, of which dtype,
    and whether it wants a gradient."""

    spec: UpdateSpec
    meta: UpdateMeta
    operands: tuple[tuple[torch.dtype, bool] | None, ...]
    one_row: bool


class CompileBackend(Backend):
    """Compute the update in chunks: WY form, a blocked triangular inverse, and a scan over chunks.

    Takes every spec, float dtype and device that torch.compile serves; computes in float32 (float64 for float64
    inputs). Inside torch.compile it is traced into the caller's graph; from eager code it compiles itself once
    for each spec, dtype, heads and widths, and not again for another B or T. One token is computed at once.
    The backward of a graph of its own may write over what the forward kept: torch refuses retain_graph=True then,
    unless `torch._functorch.config.donated_buffer` is False.

    Args:
        chunk: tokens a chunk, a power of two from 16 to 512; with householders the fewest tokens whose micro-steps
            are this many. None: 32 on the CPU, where work counts, and 64 elsewhere, where launches do.
        compiled: False runs the same code eagerly, which is slower and needs no compiler.
    """

    name = "compile"

    def __init__(self, chunk: int | None = None, compiled: bool = True) -> None:
        if chunk not in (None, 16, 32, 64, 128, 256, 512):
            raise ValueError(f"chunk must be a power of two from 16 to 512, got {chunk}")
        self.chunk = chunk
        self.compiled = compiled
        self._functions: dict[_Key, _Function] = {}

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.chunk, self.compiled)

    def unsupported(self, spec: UpdateSpec, meta: UpdateMeta) -> list[str]:
        return []

    def forward(self, spec: UpdateSpec, inputs: UpdateInputs) -> UpdateOutput:
        refuse_forward_mode(self.name, inputs)
        if inputs.q.shape[0] == 0 or inputs.q.shape[1] == 0:
            return _empty(inputs)
        if torch.compiler.is_compiling() or not self.compiled or inputs.q.is_meta or functorch_is_active():
            return self._update(spec, inputs)
        if inputs.q.shape[1] == 1 and inputs.cu_seqlens is None:
            return token_update(spec, inputs)
        return self._by_own_graph(spec, inputs)

    def _update(self, spec: UpdateSpec, inputs: UpdateInputs) -> UpdateOutput:
        """The update as plain torch: traced by the caller's torch.compile, or eager."""
        T = inputs.q.shape[1]
        if T == 1 and inputs.cu_seqlens is None:
            return token_update(spec, inputs)
        chunks, table = cut(spec, inputs, self._tokens(spec, inputs.q.device.type))
        o, state = chunked_update(spec, chunks, None if table is None else table.sequence)
        return UpdateOutput(join(o, T, table), state)

    def _by_own_graph(self, spec: UpdateSpec, inputs: UpdateInputs) -> UpdateOutput:
        """The same from eager code: cut the operands, so that the graph sees whole chunks, and compile the rest."""
        # At least two chunks: torch.compile makes a graph of its own for a size of 1.
        chunks, table = cut(spec, inputs, self._tokens(spec, inputs.q.device.type), least=2)
        meta = UpdateMeta.of(inputs)
        operands = tuple(None if x is None else (x.dtype, meta.grad and x.requires_grad) for x in inputs)
        key = _Key(spec, meta, operands, inputs.q.shape[0] == 1)
        if key not in self._functions:
            self._functions[key] = _compiled(spec)
        o, state = self._functions[key](*_with_free_sizes(chunks, None if table is None else table.sequence))
        return UpdateOutput(join(o, inputs.q.shape[1], table), state)

    def _tokens(self, spec: UpdateSpec, device: str) -> int:
        """Tokens a chunk. A comparison with literals, for to torch.compile an attribute would be a size like T."""
        wanted = (32 if device == "cpu" else 64) if self.chunk is None else self.chunk
        for tokens in (16, 32, 64, 128, 256, 512):
            if tokens * spec.householders >= wanted:
                return tokens
        return 512


def _compiled(spec: UpdateSpec) -> _Function:
    def update(chunks: UpdateInputs, sequence: Tensor | None) -> tuple[Tensor, Tensor]:
        return chunked_update(spec, chunks, sequence)

    # torch.compile counts recompilations by code object: a copy gives each function a count of its own.
    def counted_anew() -> _Function:
        own = types.FunctionType(update.__code__.replace(), update.__globals__, "update", None, update.__closure__)
        return torch.compile(own, fullgraph=True)

    compiled = counted_anew()

    def call(chunks: UpdateInputs, sequence: Tensor | None) -> tuple[Tensor, Tensor]:
        nonlocal compiled
        try:
            try:
                return compiled(chunks, sequence)
            except torch._dynamo.exc.FailOnRecompileLimitHit:  # of layouts and of torch's settings
                compiled = counted_anew()
                return compiled(chunks, sequence)
        except torch._inductor.exc.InductorError as error:
            if not isinstance(error.inner_exception, torch._inductor.exc.InvalidCxxCompiler):
                raise
            raise UnsupportedError(
                "backend 'compile' needs a C++ compiler to compile itself on the CPU, and torch found none: "
                "install g++ or clang++ (Windows: cl), or use CompileBackend(compiled=False) or 'reference'"
            ) from error

    return call


def _with_free_sizes(chunks: UpdateInputs, sequence: Tensor | None) -> tuple[UpdateInputs, Tensor | None]:
    """Views of the operands whose B, N and number of sequences torch.compile shall not fix."""

    def free(x: Tensor, *dims: int) -> Tensor:
        view = x.view_as(x)
        for dim in dims:
            if view.shape[dim] > 1:
                torch._dynamo.maybe_mark_dynamic(view, dim)
        return view

    dims = {"rate": (), "state": (0,)}
    views = {name: free(x, *dims.get(name, (0, 1))) for name, x in chunks._asdict().items() if x is not None}
    return chunks._replace(**views), None if sequence is None else free(sequence, 0)


def _empty(inputs: UpdateInputs) -> UpdateOutput:
    """No token, or no row: the initial state comes back. Every operand has its gradient, of zeros."""
    HV, V = inputs.v.shape[-2:]
    B, T, _, K = inputs.q.shape
    rows = B if inputs.cu_seqlens is None else inputs.cu_seqlens.shape[0] - 1
    dtype = state_dtype(inputs.q.dtype)
    state = inputs.q.new_zeros(rows, HV, K, V, dtype=dtype) if inputs.state is None else inputs.state.clone()
    used = sum(x.sum() for x in inputs if x is not None and x.is_floating_point())
    return UpdateOutput((inputs.v.new_zeros(B, T, HV, V) + used).to(inputs.v.dtype), state)
