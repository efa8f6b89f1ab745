"""Updates of the triton backend whose segments start from the states of other pieces.

One process holds all pieces, so that the exchange is the identity.
"""

import itertools
import os
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from deltazoo.backends.context_parallel.exchange import states_of_documents
from deltazoo.backends.context_parallel.memories import plan_of_memories
from deltazoo.backends.context_parallel.plan import ContextPlan, Cut, make_plan, most_segments
from deltazoo.backends.context_parallel.update import carried_update
from deltazoo.backends.triton.backend import TritonBackend
from deltazoo.backends.triton.chunk import carried
from deltazoo.backends.triton.config import LaunchConfig
from deltazoo.backends.update.base import UpdateInputs
from deltazoo.backends.update.dispatch import bind
from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.backends.update.watch import watch

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


interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")


class Heads(NamedTuple):
    """Numbers of key and value heads, and their widths."""

    H: int = 1
    HV: int = 2
    K: int = 16
    V: int = 16


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    device = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
    dist.init_process_group("gloo" if device == "cpu" else "nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh(device, (1,), mesh_dim_names=("context",))
    dist.destroy_process_group()


@interpreted
@pytest.mark.parametrize(
    ("name", "line", "decay"),
    [
        pytest.param("head decay", PACK, 0.05, marks=pytest.mark.kernel_smoke),
        *((name, PACK, 0.05) for name in SPECS if name != "head decay"),
        ("head decay", ONE_PIECE, 20.0),
        ("dplr", ([0, 40], [40, 0]), 0.05),
        ("head decay", INNER, 0.05),
        ("dplr", FOUR_PIECES, 0.05),
        ("head decay", ([0, 70], [70]), 0.05),
        ("head decay", ([0, 30], [16, 14]), 0.05),  # pieces that are not longer than a segment
    ],
)
def test_pieces_equal_the_reference(
    name: str, line: tuple[list[int], list[int]], decay: float, mesh: DeviceMesh
) -> None:
    heads = Heads(HV=1 if name == "dplr" else 2)
    inputs = draw(SPECS[name], line[0], decay, heads)
    errors = errors_of(SPECS[name], line[0], inputs, TritonBackend(SEGMENTS), plan_of(line, mesh), torch.float32)
    assert max(errors.values()) < (1e-4 if decay < 1 else 3e-4), errors


@interpreted
def test_memories_equal_the_reference(mesh: DeviceMesh) -> None:
    line = [0, 5, 5, 40, 44], [26, 0, 18]
    plan, memories = plan_of(line, mesh), 2
    memory_T = torch.randint(memories, (44,), generator=torch.Generator().manual_seed(0))
    memory_T[5:26], memory_T[40:] = 0, 1  # memory 1 gets no token of the start of a document, memory 0 none of another

    def bounds(edges: list[int]) -> Tensor:
        counts = [(memory_T[a:b] == m).sum() for m in range(memories) for a, b in itertools.pairwise(edges)]
        return torch.stack([torch.tensor(0), *counts]).cumsum(0).to(torch.int32)

    documents = bounds(line[0]).tolist()
    inputs = draw(SPECS["head decay"], documents, 0.05, Heads(HV=1))
    plan = plan_of_memories(plan, bounds(plan.cu_seqlens.tolist()), memories, 44)
    errors = errors_of(SPECS["head decay"], documents, inputs, TritonBackend(SEGMENTS), plan, torch.float32)
    assert max(errors.values()) < 1e-4, errors


@interpreted
def test_windows_of_the_backward_equal_the_reference(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carried, "_SCRATCH", 1)
    line, heads = ([0, 60, 70], [33, 37]), Heads(HV=1)
    inputs = draw(SPECS["head decay"], line[0], 0.05, heads)
    backend = TritonBackend(SEGMENTS.changed(scratch=1))
    errors = errors_of(SPECS["head decay"], line[0], inputs, backend, plan_of(line, mesh), torch.float32)
    assert max(errors.values()) < 1e-4, errors


@pytest.mark.cuda
@pytest.mark.parametrize("decay", [0.02, 20.0])
@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("head decay", Heads(2, 4, 128, 128)),
        ("head decay", Heads(1, 1, 200, 400)),
        ("channel decay", Heads(2, 2, 128, 128)),
        ("dplr", Heads(2, 2, 64, 64)),
        ("additive, read before", Heads(1, 4, 128, 64)),
    ],
)
def test_pieces_equal_the_reference_on_a_gpu(name: str, heads: Heads, decay: float, mesh: DeviceMesh) -> None:
    line = [0, 300, 300, 1900, 1990, 2048], [800, 0, 900, 348]
    inputs = {
        key: x if key in ("log_decay", "state") else x.bfloat16().double()
        for key, x in draw(SPECS[name], line[0], decay, heads).items()
    }
    on_gpu = {key: x.cuda() for key, x in inputs.items()}
    errors = errors_of(SPECS[name], line[0], on_gpu, TritonBackend(), plan_of(line, mesh, "cuda"))
    limits = dict.fromkeys(("o", "final"), 5e-3) | dict.fromkeys(("log_decay", "beta"), 2e-2)
    wrong = {key: error for key, error in errors.items() if not error < limits.get(key, 1e-2) * (1 if decay < 1 else 3)}
    assert not wrong, errors


def plan_of(line: tuple[list[int], list[int]], mesh: DeviceMesh, device: str = "cpu") -> ContextPlan:
    """Return the plan of documents and the sizes of pieces, all of which this process holds."""
    documents, sizes = line
    cut = Cut((0, *itertools.accumulate(sizes)), (0,) * len(sizes))
    return make_plan(documents, cut, 0, 1, mesh.get_group().group_name, most_segments(documents, cut), device)


def errors_of(
    spec: UpdateSpec,
    documents: list[int],
    inputs: dict[str, Tensor],
    backend: TritonBackend,
    plan: ContextPlan,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, float]:
    """Return the relative errors of outputs, final states and gradients."""
    d_o = torch.randn_like(inputs["v"][:, :, 0] if spec.householders > 1 else inputs["v"])
    d_state = torch.randn_like(inputs["state"])
    expected = gradients(spec, inputs, d_o, d_state, documents)
    leaves = {
        key: x.to(torch.float32 if key in ("log_decay", "state") else dtype).requires_grad_()
        for key, x in inputs.items()
    }
    with watch() as runs:
        out = carried_update(bind(spec, backend), UpdateInputs(**leaves), plan)
        state = states_of_documents(out.state, plan)
        grads = torch.autograd.grad((out.o * d_o).sum() + (state * d_state).sum(), list(leaves.values()))
    assert "combine_kernel" in runs.kernels
    actual = {"o": out.o, "final": state, **dict(zip(leaves, grads, strict=True))}
    return {key: float((actual[key].detach() - x).norm() / x.norm().clamp(min=1e-3)) for key, x in expected.items()}


def draw(spec: UpdateSpec, documents: list[int], decay: float, heads: Heads) -> dict[str, Tensor]:
    torch.manual_seed(0)
    inputs = {}
    for name, shape in spec.operands(1, documents[-1], *heads).items():
        x = torch.randn(shape, dtype=torch.float64)
        if name in ("q", "k", "a", "b"):
            x = torch.nn.functional.normalize(x, dim=-1) * {"a": -1.0, "b": 0.5}.get(name, 1.0)
        if name == "log_decay":
            x = -decay * x.exp()
        inputs[name] = x.sigmoid() if name == "beta" else x
    return inputs | {"state": torch.randn(len(documents) - 1, heads.HV, heads.K, heads.V, dtype=torch.float64)}


def gradients(
    spec: UpdateSpec, inputs: dict[str, Tensor], d_o: Tensor, d_state: Tensor, documents: list[int]
) -> dict[str, Tensor]:
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    cu_seqlens = torch.tensor(documents, dtype=torch.int32, device=d_o.device)
    out = bind(spec, "reference")(UpdateInputs(**leaves, cu_seqlens=cu_seqlens))
    grads = torch.autograd.grad((out.o * d_o).sum() + (out.state * d_state).sum(), list(leaves.values()))
    return {"o": out.o.detach(), "final": out.state.detach(), **dict(zip(leaves, grads, strict=True))}
