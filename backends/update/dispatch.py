"""Dispatch: choose the backend that computes an update or a short convolution."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from deltazoo.backends.context_parallel.plan import Links
from deltazoo.backends.io.errors import OperandError, PluginError, UnsupportedError, cut
from deltazoo.backends.ops.decode_step import FusedDecodeInputs, FusedDecodeStep
from deltazoo.backends.ops.short_conv import ConvInputs, ConvMeta, ConvPart, check_conv, short_conv
from deltazoo.backends.torch_ext.autograd import distinct
from deltazoo.backends.torch_ext.devices import device_type
from deltazoo.backends.update import registry
from deltazoo.backends.update.base import Backend, Draft, UpdateInputs, UpdateMeta, UpdateOutput, without_autocast
from deltazoo.backends.update.check import check, check_commit, check_fused_decode, check_step, check_verify
from deltazoo.backends.update.refusals import (
    Refusal,
    diverse_metas,
    log_common_refusals,
    log_refusals,
    no_backend,
    sentences,
)
from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.backends.update.watch import is_watched, record_call

Candidates = dict[str, tuple[Backend, ...]]  # device type -> backends in order of preference; "" is any other device

# Choices of the active `use_backend` blocks, innermost last. A plain list, because torch.compile cannot trace a
# ContextVar. Each choice is a tuple, so that its block can find it again by identity.
_overrides: list[tuple[str | Backend]] = []


class BoundUpdate:
    """An update whose backends are resolved: create it outside torch.compile with `bind`, call it inside.

    It holds the candidates for every device type, so that a model built on the CPU can be moved to a GPU.

    Args:
        spec: the recurrence.
        candidates: device type -> backends to try in order; "" is every other device type.
        requested: the backend that the caller named; None means the default order.
    """

    def __init__(self, spec: UpdateSpec, candidates: Candidates, requested: str | Backend | None):
        self.spec = spec
        self.requested = requested
        self._candidates = candidates

    def __call__(self, inputs: UpdateInputs) -> UpdateOutput:
        """Compute the update, without autocasting. Returns: see `update`.

        Raises: InputError or a subclass; UnsupportedError with the reasons of every candidate; PluginError.
        """
        check(self.spec, inputs)
        if torch.compiler.is_compiling():
            inputs = UpdateInputs._make(distinct(inputs))
        backend = self._recorded("update", UpdateMeta.of(inputs))
        with without_autocast(inputs.q):
            out = backend.forward(self.spec, inputs)
        if not isinstance(out, UpdateOutput):
            raise PluginError(f"{backend.name}.forward must return UpdateOutput, got {cut(out)}")
        return out

    def step_(self, inputs: UpdateInputs, states: Tensor, slots: Tensor | None = None) -> Tensor:
        """Decode one token per row and update `states` [S, HV, K, V] in place. Returns o [B, 1, HV, V].

        Args:
            inputs: T = 1, no state.
            slots: [B] int64, the row of `states` that each batch row uses, -1 for none (`backends.update.slots`);
                None means row i uses state i.
        """
        check(self.spec, inputs)
        check_step(self.spec, inputs, states, slots)
        backend = self._recorded("step", UpdateMeta.of(inputs)._replace(grad=False))
        with without_autocast(inputs.q):
            return backend.step_(self.spec, inputs, states, slots)

    def verify_(self, inputs: UpdateInputs, states: Tensor, slots: Tensor | None = None) -> tuple[Tensor, Draft]:
        """Decode n drafted tokens per row, as n calls of `step_` would, but leave `states` unchanged.

        For speculative decoding: a small model drafts n tokens, one call of the large model computes the outputs for
        all of them, and `commit_` advances each state by the tokens that are accepted. The triton backend reads each
        state once.

            S_0 = states[slot],   S_t = update(S_{t-1}, token t),   o_t = scale S_t^T q_t   for t = 1, ..., n

        Args:
            inputs: the drafted tokens, T = n >= 1; no state, no cu_seqlens.
            states: [S, HV, K, V], only read.
            slots: as for `step_`.
        Returns: o [B, n, HV, V], and a `Draft`, which holds `inputs`; do not change them before `commit_`.
        Raises: InputError or a subclass; UnsupportedError.
        Source: speculative decoding, Leviathan et al. 2211.17192.
        """
        check(self.spec, inputs)
        check_verify(self.spec, inputs, states, slots)
        backend = self._recorded("verify", UpdateMeta.of(inputs)._replace(grad=False))
        with without_autocast(inputs.q):
            return backend.verify_(self.spec, inputs, states, slots)

    def commit_(self, draft: Draft, states: Tensor, slots: Tensor | None, accepted: Tensor) -> None:
        """Advance each state in place by its row's first `accepted` drafted tokens, like that many calls of `step_`.

            states[slot_b] = S_m of row b, with m = accepted[b]

        Without a host synchronisation; the triton backend reads and writes each state once.

        Args:
            draft: of `verify_` on the same states, with the same backend.
            states: [S, HV, K, V], updated in place.
            slots: as for `step_`.
            accepted: [B] int32 on the device of the states; 0 leaves a state as it is, values outside of 0 to n count
                as the nearest of them.
        Raises: InputError or a subclass; UnsupportedError.
        """
        check_commit(self.spec, draft, states, slots, accepted)
        backend = self._recorded("commit", UpdateMeta.of(draft.inputs)._replace(grad=False))
        with without_autocast(states):
            backend.commit_(self.spec, draft, states, slots, accepted)

    def carried(self, inputs: UpdateInputs, links: Links) -> UpdateOutput | None:
        """Compute the update of this rank's segments from earlier ranks' states; None: the backend cannot."""
        check(self.spec, inputs)
        meta = UpdateMeta.of(inputs)
        backend = self.backend_for(meta)
        if backend.carried_unsupported(self.spec, meta):
            return None
        record_call(backend.name, "update")
        with without_autocast(inputs.q):
            return backend.carried(self.spec, inputs, links)

    def may_fuse_decode(self, device: str) -> bool:
        """Return whether any candidate for a device type implements fused decode steps."""
        return any(
            type(backend).fused_decode_step_ is not Backend.fused_decode_step_ for backend in self.candidates(device)
        )

    def has_decode_kernels(self, meta: UpdateMeta) -> bool:
        """Return whether the chosen backend implements fused decode steps, for any spec."""
        return type(self.backend_for(meta)).fused_decode_step_ is not Backend.fused_decode_step_

    def can_fuse_decode(self, step: FusedDecodeStep, device: str, dtype: torch.dtype) -> bool:
        """Return whether the chosen backend computes this decode step in one kernel. Args: dtype: of `qkv`."""
        return not self._fused_decode_backend(step, device, dtype)[1]

    def fused_decode_step_(
        self, step: FusedDecodeStep, inputs: FusedDecodeInputs, states: Tensor, slots: Tensor | None = None
    ) -> Tensor:
        """Decode one token per row from the projections of a mixer to the input of its output projection.

        Only if `can_fuse_decode`. `inputs.history` and `states` [S, HV, K, V] are updated in place.

        Args: slots: as for `step_`; they also select the rows of the history.
        Returns: o [B, 1, HV, V] in the dtype of qkv.
        Raises: InputError or a subclass; UnsupportedError.
        """
        self._check_step(step)
        check_fused_decode(step, inputs, states, slots)
        backend, reasons = self._fused_decode_backend(step, device_type(inputs.qkv), inputs.qkv.dtype)
        if reasons:
            raise UnsupportedError(f"backend {backend.name!r} cannot fuse this decode step: {' '.join(reasons)}")
        record_call(backend.name, "fused step")
        return backend.fused_decode_step_(step, inputs, states, slots)

    def can_fuse_verify(self, step: FusedDecodeStep, device: str, dtype: torch.dtype) -> bool:
        """Return whether the chosen backend computes drafted tokens of this step. Args: dtype: of `qkv`."""
        return not self._fused_decode_backend(step, device, dtype)[0].fused_verify_unsupported(step, dtype)

    def fused_verify_(self, step: FusedDecodeStep, inputs: FusedDecodeInputs, states: Tensor) -> tuple[Tensor, Draft]:
        """Decode drafted tokens from the projections of a mixer to the input of its output projection.

        Only if `can_fuse_verify`. `inputs.history` and `states` [B, HV, K, V] do not change. Returns: as `verify_`.

        Raises: InputError or a subclass; UnsupportedError.
        """
        self._check_step(step)
        check_fused_decode(step, inputs, states, None, tokens=None)
        backend = self._fused_decode_backend(step, device_type(inputs.qkv), inputs.qkv.dtype)[0]
        reasons = backend.fused_verify_unsupported(step, inputs.qkv.dtype)
        if reasons:
            raise UnsupportedError(f"backend {backend.name!r} cannot fuse these drafted tokens: {' '.join(reasons)}")
        record_call(backend.name, "fused verify")
        return backend.fused_verify_(step, inputs, states)

    def for_spec(self, spec: UpdateSpec) -> "BoundUpdate":
        """Bind another spec to the same candidates. A refusal is reported when the result is called."""
        return BoundUpdate(spec, self._candidates, self.requested)

    def candidates(self, device: str) -> tuple[Backend, ...]:
        """Return the backends to try on a device type, in order."""
        return self._candidates.get(device, self._candidates[""])

    def backend_for(self, meta: UpdateMeta) -> Backend:
        """Return the first candidate that supports such tensors, and log the refusals of those before it.

        Under torch.compile nothing is logged.

        Raises: UnsupportedError with the reasons of every candidate.
        """
        refusals: list[Refusal] = []
        for backend in self.candidates(meta.device):
            reasons = backend.unsupported(self.spec, meta)
            if not reasons:
                if refusals and self.requested is None and not torch.compiler.is_compiling():
                    log_refusals(self.spec, meta.device, refusals, backend)
                return backend
            refusals.append((backend, reasons))
        if self.requested is not None:
            ((backend, reasons),) = refusals
            raise UnsupportedError(
                f"backend {backend.name!r} cannot compute this update: {' '.join(sentences(reasons))}"
            )
        raise UnsupportedError(no_backend(self.spec, meta, refusals))

    def _recorded(self, call: str, meta: UpdateMeta) -> Backend:
        """Return the backend for a call, and record it with the reasons against the first candidate."""
        backend, reason = self.backend_for(meta), ""
        preferred = self.candidates(meta.device)[0]
        if preferred is not backend and not torch.compiler.is_compiling() and is_watched():
            reason = " ".join(sentences(preferred.unsupported(self.spec, meta)))
        record_call(backend.name, call, reason)
        return backend

    def _fused_decode_backend(
        self, step: FusedDecodeStep, device: str, dtype: torch.dtype
    ) -> tuple[Backend, list[str]]:
        """The backend for the update of a decode step, and its reasons not to fuse the step."""
        backend = self.backend_for(UpdateMeta(device, dtype, step.H, step.HV, step.K, step.V))
        return backend, backend.fused_decode_unsupported(step, dtype)

    def _check_step(self, step: FusedDecodeStep) -> None:
        if step.spec is not self.spec and step.spec != self.spec:
            raise OperandError(f"step.spec must be the one that was bound, {self.spec!r}, got {step.spec!r}")

    def __reduce__(self) -> tuple[object, ...]:
        # Not `bind`: a copy made inside a `use_backend` block keeps the backend of the original.
        return _bound_update, (self.spec, self.requested)

    def __repr__(self) -> str:
        return f"BoundUpdate({self.spec!r}, {_candidate_names(self._candidates)})"


class BoundConv:
    """A short convolution whose backends are resolved. Create it outside torch.compile with `bind_conv`.

    The first candidate for the device that has a kernel computes it; without one plain torch does.
    """

    def __init__(self, parts: tuple[ConvPart, ...], candidates: Candidates, requested: str | Backend | None):
        self.parts = parts
        self.requested = requested
        self._candidates = candidates

    def __call__(self, inputs: ConvInputs) -> tuple[Tensor, ...]:
        """Compute the convolution. Returns: [B, T, channels] for each part. Raises: InputError or a subclass."""
        check_conv(inputs, self.parts)
        single = inputs.x.shape[1] == 1
        backend, reasons = self._choose(device_type(inputs.x), inputs.x.dtype, inputs.weight.shape[-1], single)
        if backend is None:
            record_call("torch", "short conv", " ".join(reasons))
            return short_conv(inputs, self.parts)
        record_call(backend.name, "short conv")
        return backend.short_conv(inputs, self.parts)

    def step_(self, inputs: ConvInputs) -> tuple[Tensor, ...] | None:
        """Convolve one token per row without gradients, and append it to `inputs.history` in place.

        Returns: None, with the history as it was, if no backend has a kernel for it.
        """
        check_conv(inputs, self.parts)
        backend = self.backend_for(device_type(inputs.x), inputs.x.dtype, inputs.weight.shape[-1])
        streams = None if backend is None else backend.short_conv_step_(inputs, self.parts)
        if streams is not None and backend is not None:
            record_call(backend.name, "short conv step")
        return streams

    def backend_for(self, device: str, dtype: torch.dtype, taps: int) -> Backend | None:
        """Return the backend whose kernel supports such tensors of several tokens; None means plain torch."""
        return self._choose(device, dtype, taps, single=False)[0]

    def _choose(self, device: str, dtype: torch.dtype, taps: int, single: bool) -> tuple[Backend | None, list[str]]:
        """Return the first backend with a kernel, or None and the reasons of the first candidate."""
        meta = ConvMeta(device, dtype, taps, self.parts, single)
        reasons: list[str] = []
        for backend in self._candidates.get(device, self._candidates[""]):
            refused = backend.short_conv_unsupported(meta)
            if not refused:
                return backend, []
            reasons = reasons or refused
        return None, reasons

    def __reduce__(self) -> tuple[object, ...]:
        return _bound_conv, (self.parts, self.requested)

    def __repr__(self) -> str:
        return f"BoundConv({list(self.parts)}, {_candidate_names(self._candidates)})"


def bind(spec: UpdateSpec, backend: str | Backend | None = None, meta: UpdateMeta | None = None) -> BoundUpdate:
    """Resolve backend names and plug-ins once, outside the compiled region.

    If a preferred backend refuses the spec, its reasons are logged, once per process.

    Args:
        backend: a name, "module:Class" or an instance: this backend or an error. None: the choice of the enclosing
            `use_backend` block, else the default order of the device.
        meta: a description of the tensors, if known. Then a named backend that does not support them raises here.
            Without it only those refusals are logged that hold for any tensors on the devices of this machine.
    Raises: UnknownNameError, DuplicateNameError, PluginError, UnsupportedError.
    """
    bound = _bound_update(spec, requested_backend(backend))
    if bound.requested is not None:
        if meta is not None:
            bound.backend_for(meta)
    elif meta is not None:
        log_common_refusals(spec, bound.candidates(meta.device), [meta])
    else:
        for device in registry.DEFAULT_ORDER:
            if not device or torch.get_device_module(device).is_available():
                name = device or "cpu"
                log_common_refusals(spec, bound.candidates(name), diverse_metas(name))
    return bound


def bind_conv(parts: Sequence[ConvPart], backend: str | Backend | None = None) -> BoundConv:
    """Resolve the backends of a short convolution once, outside the compiled region.

    Args: backend: as for `bind`; if it has no kernel for the convolution, plain torch computes it.
    Raises: UnknownNameError, DuplicateNameError, PluginError.
    """
    return _bound_conv(tuple(parts), requested_backend(backend))


def update(spec: UpdateSpec, inputs: UpdateInputs, backend: str | Backend | None = None) -> UpdateOutput:
    """Compute the update of a spec.

    Args:
        inputs: the operands that `spec.operands` lists.
        backend: as for `bind`. Inside torch.compile the name is looked up during tracing. There an unknown name
            raises torch's error around ours, and refusals are not logged; use `bind` outside the graph to see them.
    Returns: o [B, T, HV, V] in the dtype of v, and state [N, HV, K, V] in float32 (float64 for float64 inputs), with
        N = B or the number of packed sequences; an empty sequence returns its initial state.
    Raises: InputError or a subclass; UnknownNameError; UnsupportedError.
    """
    return _bound_update(spec, requested_backend(backend))(inputs)


@contextmanager
def use_backend(backend: str | Backend) -> Iterator[None]:
    """Set the default backend of `update`, and of modules built inside the block.

    The default is global to the process, not local to the thread. Updates that were bound before keep their backends.
    """
    registry.load_requested(backend) if isinstance(backend, str) else registry.resolve(backend)
    override = (backend,)
    _overrides.append(override)
    try:
        yield
    finally:  # not pop(): another thread may have entered its block since
        del _overrides[next(i for i, other in enumerate(_overrides) if other is override)]


def requested_backend(backend: str | Backend | None) -> str | Backend | None:
    """Return the backend passed by the caller, else that of the innermost `use_backend` block, else None."""
    return backend if backend is not None else (_overrides[-1][0] if _overrides else None)


def _bound_update(spec: UpdateSpec, requested: str | Backend | None) -> BoundUpdate:
    if not isinstance(spec, UpdateSpec):
        raise OperandError(f"spec must be a deltazoo.UpdateSpec, got {cut(spec)}")
    return BoundUpdate(spec, registry.candidates_of(requested), requested)


def _bound_conv(parts: tuple[ConvPart, ...], requested: str | Backend | None) -> BoundConv:
    return BoundConv(parts, registry.candidates_of(requested), requested)


def _candidate_names(candidates: Candidates) -> dict[str, list[str]]:
    return {device or "other": [backend.name for backend in backends] for device, backends in candidates.items()}
