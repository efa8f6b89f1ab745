"""The diagnosis that `deltazoo doctor` prints: environment, backends of each device, and problems."""

import torch
from pydantic import BaseModel, ConfigDict

from deltazoo.backends.measure.environment import Environment, environment
from deltazoo.backends.torch_ext.devices import devices
from deltazoo.backends.update.base import UpdateMeta
from deltazoo.backends.update.explain import explain
from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.blocks.inspect.plugins import plugin_problems

_GATED_DELTA_RULE = UpdateSpec(decay="head", beta="head")
_HEADS, _HEAD_WIDTH = 8, 128


class BackendStatus(BaseModel):
    """One backend on one device, for training with the gated delta rule.

    Args: chosen: whether it computes the update; reasons: why it is not chosen.
    """

    device: str
    dtype: str
    backend: str
    chosen: bool
    reasons: list[str]


class Diagnosis(BaseModel):
    """The state of this installation.

    Args: problems: a sentence each, with the remedy; [] if there are none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    environment: Environment
    devices: list[str]
    backends: list[BackendStatus]
    problems: list[str]


def diagnose() -> Diagnosis:
    """Inspect versions, the C++ compiler, devices, backends and plug-ins."""
    names = devices()
    return Diagnosis(
        environment=environment(names[-1]), devices=names, backends=_backend_statuses(names), problems=_problems()
    )


def _backend_statuses(device_names: list[str]) -> list[BackendStatus]:
    statuses = []
    for device in dict.fromkeys(name.partition(":")[0] for name in device_names):
        for dtype in (torch.float32, torch.bfloat16):
            meta = UpdateMeta(device, dtype, _HEADS, _HEADS, _HEAD_WIDTH, _HEAD_WIDTH, grad=True)
            dtype_name = str(dtype).removeprefix("torch.")
            for row in explain(_GATED_DELTA_RULE, meta).verdicts:
                statuses.append(BackendStatus(device=device, dtype=dtype_name, **row._asdict()))
    return statuses


def _problems() -> list[str]:
    problems = []
    if environment().compiler is None:
        problems.append("No C++ compiler: torch.compile cannot run on the CPU. Install g++ or clang++ (Windows: cl).")
    return problems + plugin_problems()
