"""What `deltazoo doctor` finds: the environment, who computes what on which device, and what is broken."""

from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from deltazoo.backends import registry
from deltazoo.backends.base import UpdateMeta
from deltazoo.backends.devices import devices
from deltazoo.backends.explain import explain
from deltazoo.backends.measure.environment import Environment, environment
from deltazoo.backends.spec import UpdateSpec
from deltazoo.blocks.inspect.catalog import catalog

_GATED = UpdateSpec(decay="head", beta="head")
_WIDTH = 128


class Found(BaseModel):
    """One backend on one device: "chosen", or the reasons why not, for the gated delta rule in training."""

    device: str
    dtype: str
    backend: str
    verdict: str


class Checkup(BaseModel):
    """problems: sentences, each with what to do; [] where all is well."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    environment: Environment
    devices: list[str]
    backends: list[Found]
    problems: list[str]


def checkup() -> Checkup:
    """Look at versions, compiler, devices, backends and plug-ins."""
    seen = devices()
    return Checkup(environment=environment(seen[-1]), devices=seen, backends=_verdicts(seen), problems=_problems())


def _verdicts(seen: list[str]) -> list[Found]:
    found = []
    for kind in dict.fromkeys(device.partition(":")[0] for device in seen):
        for dtype in (torch.float32, torch.bfloat16):
            meta = UpdateMeta(kind, dtype, 8, 8, _WIDTH, _WIDTH, grad=True)
            for verdict in explain(_GATED, meta).verdicts:
                said = "chosen" if verdict.chosen else " ".join(verdict.reasons)
                name = str(dtype).removeprefix("torch.")
                found.append(Found(device=kind, dtype=name, backend=verdict.backend, verdict=said))
    return found


def _problems() -> list[str]:
    problems = []
    if environment().compiler is None:
        problems.append("No C++ compiler: torch.compile cannot run on the CPU. Install g++ or clang++ (Windows: cl).")
    for group in (registry.BACKENDS, registry.MIXERS):
        for name in registry.duplicates(group):
            problems.append(f"{group}: {name!r} is claimed by more than one package. Uninstall all but one.")
    installed = catalog()
    entries: list[Any] = [*installed.backends, *installed.mixers]
    for entry in entries:
        if entry.problem is not None:
            problems.append(f"{entry.name} of {entry.owner} cannot be used: {entry.problem}")
    return problems
