"""Backends x shapes: forward, forward and backward, decode."""

from typing import Any

import pytest
import torch

from deltazoo.backends.conformance.cases import Case
from deltazoo.backends.conformance.compare import meta_of
from deltazoo.backends.measure.shapes import CPU, GPU, Shape
from deltazoo.backends.measure.workload import DIRECTIONS, Direction, Workload
from deltazoo.backends.update import registry
from deltazoo.backends.update.dispatch import bind
from deltazoo.backends.update.registry import resolve
from deltazoo.backends.update.spec import UpdateSpec

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SPECS = {
    "gated_delta": UpdateSpec(decay="head", beta="head"),
    "delta": UpdateSpec(beta="head"),
    "mamba2": UpdateSpec(decay="head", transition="additive"),
    "kda": UpdateSpec(decay="channel", beta="head"),
}
SHAPES = GPU if DEVICE.type == "cuda" else (Shape("cpu_short", B=1, T=256, H=8, HV=8, K=64, V=64), CPU[0])
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("backend", registry.names(registry.BACKENDS))
def test_update(timed: Any, backend: str, spec: str, shape: Shape, direction: Direction) -> None:
    if backend == "reference" and (shape.T > 512 or DEVICE.type == "cuda"):
        pytest.skip("the reference takes seconds a call here")
    reasons = resolve(backend).unsupported(SPECS[spec], meta_of(shape, DTYPE, DEVICE, direction == "backward"))
    if reasons:
        pytest.skip(" ".join(reasons))
    work = Workload(Case(SPECS[spec], shape, DTYPE), direction, DEVICE)
    timed(work.call(bind(SPECS[spec], backend)))
