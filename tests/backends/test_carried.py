"""Updates of the triton backend whose segments start from the states of other pieces, in the interpreter.

One process holds all pieces of a line, so that the exchange returns what it takes.
"""

import itertools
import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from deltazoo.backends.context_parallel.exchange import states_of_documents
from deltazoo.backends.context_parallel.plan import Cut, make_plan, most_segments
from deltazoo.backends.context_parallel.update import carried_update
from deltazoo.backends.triton.backend import TritonBackend
from deltazoo.backends.triton.config import LaunchConfig
from deltazoo.backends.update.base import UpdateInputs
from deltazoo.backends.update.dispatch import bind
from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.backends.update.watch import watch

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")

SPECS = {
    "head decay": UpdateSpec(decay="head", beta="head"),
    "channel decay": UpdateSpec(decay="channel", beta="head"),
    "dplr": UpdateSpec(decay="channel", transition="dplr"),
    "additive, read before": UpdateSpec(decay="head", transition="additive", read="before"),
    "2 householders, negative eigenvalues": UpdateSpec(
        decay="head", beta="head", householders=2, negative_eigenvalues="both"
    ),
}
SEGMENTS = LaunchConfig(chunk=16, checkpoint_chunks=1, segment_chunks=2)
ONE_PIECE, PACK = ([0, 70], [36, 34]), ([0, 7, 7, 60, 66], [40, 26])
FOUR_PIECES = ([0, 50, 53, 90], [20, 25, 0, 45])
INNER = ([0, 5, 75, 80], [78, 2])  # a document of several segments within a piece


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("context",))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "line", "decay"),
    [
        pytest.param("head decay", PACK, 0.05, marks=pytest.mark.kernel_smoke),
        *((name, PACK, 0.05) for name in SPECS if name != "head decay"),
        ("head decay", ONE_PIECE, 20.0),
        ("dplr", ([0, 40], [40, 0]), 0.05),
        ("head decay", INNER, 0.05),
        ("channel decay", FOUR_PIECES, 0.05),
    ],
)
def test_pieces_equal_the_reference(
    name: str, line: tuple[list[int], list[int]], decay: float, mesh: DeviceMesh
) -> None:
    spec, (documents, sizes) = SPECS[name], line
    T, D = documents[-1], len(documents) - 1
    inputs = draw(spec, T, D, decay)
    d_o = torch.randn(inputs["v"][:, :, 0].shape if spec.householders > 1 else inputs["v"].shape, dtype=torch.float64)
    d_state = torch.randn_like(inputs["state"])
    expected = gradients(spec, inputs, d_o, d_state, documents)
    cut = Cut((0, *itertools.accumulate(sizes)), (0,) * len(sizes))
    group, segments = mesh.get_group().group_name, most_segments(documents, cut)
    plan = make_plan(documents, cut, 0, 1, group, segments, "cpu")
    leaves = {key: x.float().requires_grad_() for key, x in inputs.items()}
    with watch() as runs:
        out = carried_update(bind(spec, TritonBackend(SEGMENTS)), UpdateInputs(**leaves), plan)
        state = states_of_documents(out.state, plan)
        grads = torch.autograd.grad((out.o * d_o).sum() + (state * d_state).sum(), list(leaves.values()))
    assert "combine_kernel" in runs.kernels
    actual = {"o": out.o, "final": state, **dict(zip(leaves, grads, strict=True))}
    limit = 1e-4 if decay < 1 else 3e-4
    errors = {key: float((actual[key].detach() - x).norm() / x.norm().clamp(min=1e-3)) for key, x in expected.items()}
    assert max(errors.values()) < limit, errors


def draw(spec: UpdateSpec, T: int, D: int, decay: float) -> dict[str, Tensor]:
    torch.manual_seed(0)
    inputs = {}
    for name, shape in spec.operands(1, T, 1, 2 if spec.transition != "dplr" else 1, 16, 16).items():
        x = torch.randn(shape, dtype=torch.float64)
        if name in ("q", "k", "a", "b"):
            x = torch.nn.functional.normalize(x, dim=-1) * {"a": -1.0, "b": 0.5}.get(name, 1.0)
        if name == "log_decay":
            x = -decay * x.exp()
        inputs[name] = x.sigmoid() if name == "beta" else x
    heads = inputs["v"].shape[-2]
    return inputs | {"state": torch.randn(D, heads, 16, 16, dtype=torch.float64)}


def gradients(
    spec: UpdateSpec, inputs: dict[str, Tensor], d_o: Tensor, d_state: Tensor, documents: list[int]
) -> dict[str, Tensor]:
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    out = bind(spec, "reference")(UpdateInputs(**leaves, cu_seqlens=torch.tensor(documents, dtype=torch.int32)))
    grads = torch.autograd.grad((out.o * d_o).sum() + (out.state * d_state).sum(), list(leaves.values()))
    return {"o": out.o.detach(), "final": out.state.detach(), **dict(zip(leaves, grads, strict=True))}
