"""The only dispatch: from a spec and perhaps a backend's name to the code that runs."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from deltazoo.backends import lookup, registry
from deltazoo.backends.base import Backend, UpdateInputs, UpdateMeta, UpdateOutput, without_autocast
from deltazoo.backends.check import check, check_fused_decode, check_step
from deltazoo.backends.decode_step import FusedDecodeInputs, FusedDecodeStep
from deltazoo.backends.errors import DuplicateNameError, OperandError, PluginError, UnknownNameError, UnsupportedError
from deltazoo.backends.registry import candidates_of, look_up, resolve
from deltazoo.backends.short_conv import ConvInputs, ConvMeta, ConvPart, check_conv, short_conv
from deltazoo.backends.spec import UpdateSpec
from deltazoo.backends.watch import RunRecord, is_watched, record_run

_log = logging.getLogger("deltazoo")

# What `use_backend` set, innermost last. A plain list: torch.compile cannot trace a ContextVar.
_override: list[tuple["str | Backend"]] = []  # a tuple each, which its block knows again
# The refusals that were logged: each once in a process, for a model binds its spec in every layer.
_told: set[tuple[str, str, UpdateSpec, str]] = set()


class _Bound:
    """What was asked for, and the candidates for each type of device; "" stands for every other."""

    def __init__(self, candidates: dict[str, tuple[Backend, ...]], asked: "str | Backend | None"):
        self.asked = asked
        self._candidates = candidates

    def candidates(self, device: str) -> tuple[Backend, ...]:
        """The backends that are tried on a type of device, in order."""
        return self._candidates.get(device, self._candidates[""])

    def _order(self) -> dict[str, list[str]]:
        return {device or "other": [b.name for b in backends] for device, backends in self._candidates.items()}


class BoundUpdate(_Bound):
    """An update with its backends resolved: call it inside torch.compile, build it outside.

    It holds candidates for every device, so a model built on the CPU finds its kernels once it is on a GPU.
    Get one from `bind`.
    """

    def __init__(self, spec: UpdateSpec, candidates: dict[str, tuple[Backend, ...]], asked: "str | Backend | None"):
        super().__init__(candidates, asked)
        self.spec = spec

    def __call__(self, inputs: UpdateInputs) -> UpdateOutput:
        """Compute the update, in the same dtypes under autocast. Returns o [B, T, HV, V], and the state [B, HV, K, V].

        Raises: InputError or a subclass; UnsupportedError with every candidate's reasons.
        """
        check(self.spec, inputs)
        chosen = self.backend_for(UpdateMeta.of(inputs))
        _seen(chosen.name, "update")
        with without_autocast(inputs.q):
            return chosen.forward(self.spec, inputs)

    def step_(self, inputs: UpdateInputs, states: Tensor, slots: Tensor | None = None) -> Tensor:
        """Decode one token a row, updating `states` [S, HV, K, V] in place; returns o [B, 1, HV, V].

        Args: inputs: T = 1, no state; slots: [B] int64, the row of `states` for each batch row.
        """
        check(self.spec, inputs)
        check_step(self.spec, inputs, states, slots)
        meta = UpdateMeta.of(inputs)._replace(grad=False)
        chosen = self.backend_for(meta)
        _seen(chosen.name, "step")
        with without_autocast(inputs.q):
            return chosen.step_(self.spec, inputs, states, slots)

    def may_fuse(self, device: str) -> bool:
        """Whether a backend for such a device takes any step of a mixer in one."""
        return any(
            type(backend).fused_decode_step_ is not Backend.fused_decode_step_ for backend in self.candidates(device)
        )

    def fuses(self, step: FusedDecodeStep, device: str, dtype: torch.dtype) -> bool:
        """Whether the backend that steps such tensors takes this step of a mixer in one. Args: dtype: of `qkv`."""
        return not self._stepper(step, device, dtype)[1]

    def fused_decode_step_(
        self, step: FusedDecodeStep, inputs: FusedDecodeInputs, states: Tensor, slots: Tensor | None = None
    ) -> Tensor:
        """Take one token a row from a mixer's projections to what its output map takes, where `fuses` says so.

        `inputs.history` and `states` [S, HV, K, V] are updated in place. Returns o [B, 1, HV, V] in the dtype of qkv.

        Args: slots: [B] int64, the row of `states` and of the history for each batch row.
        Raises: InputError or a subclass; UnsupportedError.
        """
        if step.spec is not self.spec and step.spec != self.spec:
            raise OperandError(f"step.spec must be the one that was bound, {self.spec!r}, got {step.spec!r}")
        check_fused_decode(step, inputs, states, slots)
        chosen, reasons = self._stepper(step, inputs.qkv.device.type, inputs.qkv.dtype)
        if reasons:
            raise UnsupportedError(f"backend {chosen.name!r} does not take this step in one: {' '.join(reasons)}")
        _seen(chosen.name, "fused step")
        return chosen.fused_decode_step_(step, inputs, states, slots)

    def _stepper(self, step: FusedDecodeStep, device: str, dtype: torch.dtype) -> tuple[Backend, list[str]]:
        chosen = self.backend_for(UpdateMeta(device, dtype, step.H, step.HV, step.K, step.V))
        return chosen, chosen.fused_decode_unsupported(step, dtype)

    def for_spec(self, spec: UpdateSpec) -> "BoundUpdate":
        """The same choice for another form of the spec, which may never be run: what refuses it is said when it is."""
        return BoundUpdate(spec, self._candidates, self.asked)

    def backend_for(self, meta: UpdateMeta) -> Backend:
        """The backend that runs on such tensors: the first candidate for the device that can.

        From eager code a candidate that must be passed over is logged, where `bind` could not know.
        """
        for backend in self.candidates(meta.device):
            reasons = backend.unsupported(self.spec, meta)
            if not reasons:
                return backend
            if self.asked is None and not torch.compiler.is_compiling():
                _tell(backend, meta.device, self.spec, reasons)
        raise UnsupportedError(_refusals(self, meta))

    def __reduce__(self) -> tuple[object, ...]:
        return _bound, (self.spec, self.asked)  # a copy made inside `use_backend` stays what it was

    def __repr__(self) -> str:
        return f"BoundUpdate({self.spec!r}, {self._order()})"


class BoundConv(_Bound):
    """A short convolution with its backends resolved: call it inside torch.compile, build it outside.

    The first candidate for the device that has a kernel computes it, else plain torch. Get one from `bind_conv`.
    """

    def __init__(
        self, parts: tuple[ConvPart, ...], candidates: dict[str, tuple[Backend, ...]], asked: "str | Backend | None"
    ):
        super().__init__(candidates, asked)
        self.parts = parts

    def __call__(self, inputs: ConvInputs) -> tuple[Tensor, ...]:
        """Convolve; returns [B, T, channels] for each part. Raises: ShapeError."""
        check_conv(inputs, self.parts)
        chosen = self.backend_for(inputs.x.device.type, inputs.x.dtype, inputs.weight.shape[1])
        _seen("torch" if chosen is None else chosen.name, "short conv")
        return short_conv(inputs, self.parts) if chosen is None else chosen.short_conv(inputs, self.parts)

    def backend_for(self, device: str, dtype: torch.dtype, taps: int) -> Backend | None:
        """The backend whose kernel runs on such tensors; None: plain torch does."""
        meta = ConvMeta(device, dtype, taps, self.parts)
        for backend in self.candidates(device):
            if not backend.short_conv_unsupported(meta):
                return backend
        return None

    def __reduce__(self) -> tuple[object, ...]:
        return _bound_conv, (self.parts, self.asked)  # as of `BoundUpdate`

    def __repr__(self) -> str:
        return f"BoundConv({list(self.parts)}, {self._order()})"


def _seen(backend: str, what: str) -> None:
    if not torch.compiler.is_compiling() and is_watched():
        record_run(RunRecord(backend, what))


def bind_conv(parts: Sequence[ConvPart], backend: str | Backend | None = None) -> BoundConv:
    """Resolve the backends of a short convolution once, outside the compiled region.

    Args: backend: as for `bind`; one without a kernel for it leaves the convolution to plain torch.
    Raises: UnknownNameError, DuplicateNameError, PluginError.
    """
    return _bound_conv(tuple(parts), _asked(backend))


def bind(spec: UpdateSpec, backend: str | Backend | None = None, meta: UpdateMeta | None = None) -> BoundUpdate:
    """Resolve names and plug-ins once, outside the compiled region.

    A preferred backend that must be passed over is logged with its reasons, once in a process.

    Args:
        backend: a name, "module:Class" or an object: that backend or an error. None: what `use_backend` says,
            else the ordered default of the device the tensors will be on.
        meta: if known, the tensors to come: a named backend that cannot is an error now. If not, what is logged is
            what stands against the spec on this machine's devices, whatever the tensors.
    Raises: UnknownNameError, DuplicateNameError, PluginError, UnsupportedError.
    """
    bound = _bound(spec, _asked(backend))
    if bound.requested is None:
        here = [device or "cpu" for device in lookup.DEFAULT_ORDER if _is_here(device)]
        for metas in [[meta]] if meta is not None else map(_unlike, here):
            _tell_refusals(bound, metas)
    elif meta is not None:
        bound.backend_for(meta)
    return bound


def update(spec: UpdateSpec, inputs: UpdateInputs, backend: str | Backend | None = None) -> UpdateOutput:
    """Compute the update of a spec.

    Args:
        inputs: the operands that `spec.operands` names.
        backend: as for `bind`. Inside torch.compile names are looked up when it is traced: what cannot be found is
            an error of torch's around ours, and a candidate that is passed over is not logged: `bind` outside says it.
    Returns: o [B, T, HV, V] in the dtype of v, and state [B, HV, K, V] in float32 (float64 for float64 inputs);
        an empty sequence returns its initial state.
    Raises: InputError or a subclass; UnknownNameError; UnsupportedError.
    """
    return _bound(spec, _asked(backend))(inputs)


@contextmanager
def use_backend(backend: str | Backend) -> Iterator[None]:
    """Let `update`, and whatever is built inside the block, use this backend unless told another.

    The choice is the process's, not the thread's; it does not change what was bound before.
    """
    look_up(backend) if isinstance(backend, str) else resolve(backend)
    asked = (backend,)
    _override.append(asked)
    try:
        yield
    finally:  # not the last one's: another thread's block may have begun since
        del _override[next(i for i, other in enumerate(_override) if other is asked)]


class Verdict(NamedTuple):
    """What `explain` says of one backend. reasons: [] when it can."""

    backend: str
    chosen: bool
    reasons: list[str]


class Explanation(NamedTuple):
    """Every installed backend in the order they would be tried, and why each is chosen or not."""

    verdicts: list[Verdict]

    @property
    def chosen(self) -> str | None:
        return next((verdict.backend for verdict in self.verdicts if verdict.chosen), None)

    def __str__(self) -> str:
        return "\n".join(
            f"{verdict.backend}: {'chosen' if verdict.chosen else ' '.join(verdict.reasons)}"
            for verdict in self.verdicts
        )


def explain(spec: UpdateSpec, meta: UpdateMeta, backend: str | Backend | None = None) -> Explanation:
    """Say which backend would run, and for every other one why not.

    Args: meta: the tensors to come, as UpdateMeta("cuda", torch.bfloat16, H=8, HV=8, K=128, V=128).
    """
    asked = _asked(backend)
    if asked is None:
        order = list(lookup.DEFAULT_ORDER.get(meta.device, lookup.DEFAULT_ORDER[""]))
    else:
        order = [asked if isinstance(asked, str) else asked.name]
    installed = registry.names(registry.BACKENDS)
    listed = [name for name in order if name in installed or asked is not None]
    verdicts: list[Verdict] = []
    chosen = False
    for name in [*listed, *(name for name in installed if name not in listed)]:
        found = asked if isinstance(asked, Backend) and name == asked.name else name
        reasons = _reasons(found, spec, meta)
        wins = not reasons and not chosen and name in listed
        chosen = chosen or wins
        if not wins and not reasons:
            by = "asked for by name" if name == "reference" or asked is not None or name not in order else "tried"
            reasons = [f"can, and runs when {by}." if by != "tried" else "can; an earlier one was chosen."]
        verdicts.append(Verdict(name, wins, reasons))
    return Explanation(verdicts)


def _asked(backend: str | Backend | None) -> str | Backend | None:
    return backend if backend is not None else (_override[-1][0] if _override else None)


def _bound(spec: UpdateSpec, asked: str | Backend | None) -> BoundUpdate:
    return BoundUpdate(spec, candidates_of(asked), asked)


def _bound_conv(parts: tuple[ConvPart, ...], asked: str | Backend | None) -> BoundConv:
    return BoundConv(parts, candidates_of(asked), asked)


def _is_here(device: str) -> bool:
    """Whether this machine has such a device: elsewhere nothing runs that could fall back."""
    return not device or bool(torch.get_device_module(device).is_available())


def _unlike(device: str) -> list[UpdateMeta]:
    """Tensors on a type of device, unlike one another in all else: what a backend says of each is said of the spec."""
    return [
        UpdateMeta(device, torch.float32, H=1, HV=1, K=64, V=64),
        UpdateMeta(device, torch.bfloat16, H=2, HV=4, K=128, V=256, packed=True, grad=True, decay_channels=True),
        UpdateMeta(device, torch.float16, H=4, HV=4, K=256, V=128, grad=True, decay_channels=True),
        UpdateMeta(device, torch.float64, H=3, HV=9, K=16, V=512, packed=True),
    ]


def _tell_refusals(bound: BoundUpdate, metas: Sequence[UpdateMeta]) -> None:
    """Log the candidates that refuse all these tensors of one device for the same reasons, up to the first that takes
    some."""
    device = metas[0].device
    for candidate in bound.candidates(device):
        first, *others = (candidate.unsupported(bound.spec, meta) for meta in metas)
        reasons = [reason for reason in first if all(reason in other for other in others)]
        if not reasons:
            return
        _tell(candidate, device, bound.spec, reasons)


def _tell(backend: Backend, device: str, spec: UpdateSpec, reasons: Sequence[str]) -> None:
    said = (backend.name, device, spec, " ".join(reasons))
    if said not in _told:
        _told.add(said)
        _log.warning("backend %r passed over on %r for %s: %s", *said)


def _reasons(backend: str | Backend, spec: UpdateSpec, meta: UpdateMeta) -> list[str]:
    """Why a backend cannot; a plug-in that is broken is no reason to record_run nothing of the others."""
    try:
        return resolve(backend).unsupported(spec, meta)
    except (PluginError, DuplicateNameError) as error:
        return [str(error)]
    except UnknownNameError:
        raise
    except Exception as error:
        return [f"it cannot say whether it can: {type(error).__name__}: {error}"]


_AXES = tuple(UpdateSpec.model_fields)


def _refusals(bound: BoundUpdate, meta: UpdateMeta) -> str:
    candidates = bound.candidates(meta.device)
    # field by field, for torch.compile may come here and cannot trace pydantic's repr
    spec = ", ".join(f"{name}={getattr(bound.spec, name)!r}" for name in _AXES)
    lines = [f"  {backend.name}: {' '.join(backend.unsupported(bound.spec, meta))}" for backend in candidates]
    return "\n".join([f"no backend takes UpdateSpec({spec}) on {meta}:", *lines])
