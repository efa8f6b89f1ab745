"""The reasons why backends do not compute an update: logged if another one does, and in the error if none does."""

import logging
from collections.abc import Sequence

import torch

from deltazoo.backends.update.base import Backend, UpdateMeta
from deltazoo.backends.update.spec import UpdateSpec

Refusal = tuple[Backend, list[str]]

_log = logging.getLogger("deltazoo")
_logged: set[str] = set()  # each message once per process: every layer of a model binds its spec


def diverse_metas(device: str) -> list[UpdateMeta]:
    """Metas that differ in everything but the device: a reason given for all of them concerns the spec."""
    return [
        UpdateMeta(device, torch.float32, H=1, HV=1, K=64, V=64),
        UpdateMeta(device, torch.bfloat16, H=2, HV=4, K=128, V=256, packed=True, grad=True, decay_channels=True),
        UpdateMeta(device, torch.float16, H=4, HV=4, K=256, V=128, grad=True, decay_channels=True),
        UpdateMeta(device, torch.float64, H=3, HV=9, K=16, V=512, packed=True),
    ]


def log_common_refusals(spec: UpdateSpec, candidates: Sequence[Backend], metas: Sequence[UpdateMeta]) -> None:
    """Log the candidates that refuse all metas (of one device) for a common reason, up to the first that does not."""
    refusals: list[Refusal] = []
    for backend in candidates:
        first, *others = (sentences(backend.unsupported(spec, meta)) for meta in metas)
        common = [reason for reason in first if all(reason in other for other in others)]
        if not common:
            log_refusals(spec, metas[0].device, refusals, backend)
            return
        refusals.append((backend, common))


def sentences(reasons: list[str] | str) -> list[str]:
    """The reasons as a list, also if a plug-in returned one text."""
    return [reasons] if isinstance(reasons, str) else reasons


def log_refusals(spec: UpdateSpec, device: str, refusals: Sequence[Refusal], chosen: Backend) -> None:
    for backend, reasons in refusals:
        message = (
            f"backend {backend.name!r} cannot run this spec on {device}: {' '.join(sentences(reasons)).rstrip('.')}; "
            f"using {chosen.name!r} ({spec!r})"
        )
        if message not in _logged:
            _logged.add(message)
            _log.warning("%s", message)


def no_backend(spec: UpdateSpec, meta: UpdateMeta, refusals: Sequence[Refusal]) -> str:
    fields = ", ".join(f"{name}={value!r}" for name, value in spec.changed_fields().items())
    lines = [f"  {backend.name}: {' '.join(sentences(reasons))}" for backend, reasons in refusals]
    return "\n".join([f"no backend supports UpdateSpec({fields}) on {meta}:", *lines])
