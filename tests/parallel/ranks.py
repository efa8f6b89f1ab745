"""Compare a mixer whose tokens are split over ranks with one process, in float64, on every rank."""

import itertools
import os
import random
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_leaves, tree_map

from deltazoo.blocks.parallel.context import ContextParallel, Layout
from deltazoo.mixers.core.mixer import Context, Mixer, MixerConfig

CAPACITY, PREFIX = 32, 3


class Case(NamedTuple):
    """A batch and how it is split. documents: None: the rows. sizes: None: equal. state: with initial states."""

    name: str
    B: int
    T: int
    layout: Layout = "contiguous"
    documents: tuple[int, ...] | None = None
    sizes: tuple[int, ...] | None = None
    state: bool = False
    segments: int | None = None


def random_case(seed: int, ranks: int) -> Case:
    """Draw documents, some of them empty, and pieces, some of them empty."""
    draw = random.Random(seed)
    layout: Layout = draw.choice(["contiguous", "zigzag"])
    total = draw.randint(9, 26)

    def cuts(count: int) -> list[int]:
        return [0, *sorted(draw.randint(0, total) for _ in range(count - 1)), total]

    documents = cuts(draw.randint(1, 5))
    bounds = cuts(ranks if layout == "contiguous" else 2 * ranks)
    sizes = tuple(b - a for a, b in itertools.pairwise(bounds)) if draw.random() < 0.8 else None
    return Case(
        f"random {seed}", 1, total, layout, tuple(documents), sizes, draw.random() < 0.5, draw.choice([None, 6])
    )


def errors_of(config: MixerConfig, width: int, case: Case, parallel: ContextParallel) -> dict[str, float]:
    """Return the largest relative error of the outputs, final states and gradients on this rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    mixer = config.build(width, backend="reference").double()
    for parameter in mixer.parameters():  # initial weights that are zero would hide errors
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    batch = parallel.plan(case.B, case.T, case.documents, case.sizes, case.segments)
    total = case.B * case.T
    documents = case.documents or tuple(range(0, total + 1, case.T))
    x = torch.randn(case.B, case.T, width, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(case.B, case.T, width, dtype=torch.float64)
    state = _initial_state(mixer, len(documents) - 1, width) if case.state else None
    shares = torch.rand(ranks, dtype=torch.float64)
    shares = shares / shares.sum()

    packed = Context(cu_seqlens=torch.tensor(documents, dtype=torch.int32))
    line = x.flatten(0, 1)[None]
    y, final, _ = mixer(line, _leaf_copy(state), packed)
    expected_y = y.unflatten(1, (case.B, case.T))[0]
    expected_final = [leaf.detach().clone() for leaf in _floats(final)]
    state_weights = [torch.randn_like(leaf) for leaf in expected_final]
    copies = _leaf_copy(state)
    y, final, _ = mixer(line, copies, packed)
    loss = (y.unflatten(1, (case.B, case.T))[0] * weight).sum() + _weighted(final, state_weights)
    expected = _gradients(loss, x, copies, mixer)

    local_x = batch.shard(x.detach()).requires_grad_()
    copies = _leaf_copy(state)
    y, final, _ = mixer(local_x, copies, batch.context)
    loss = (y * batch.shard(weight)).sum() + shares[rank] * _weighted(final, state_weights)
    actual = _gradients(loss, local_x, copies, mixer)
    for name, gradient in actual.items():
        if name != "x":
            dist.all_reduce(gradient)
    errors = {"y": _error(y, batch.shard(expected_y))}
    for i, (a, b) in enumerate(zip(_floats(final), expected_final, strict=True)):
        errors[f"final state {i}"] = _error(a, b)
    for name, gradient in actual.items():
        errors[f"gradient of {name}"] = _error(gradient, batch.shard(expected[name]) if name == "x" else expected[name])
    if case.state:
        with torch.no_grad():  # states are updated in place
            y, final, _ = mixer(local_x, _leaf_copy(state), batch.context)
        errors["y without gradients"] = _error(y, batch.shard(expected_y))
        for i, (a, b) in enumerate(zip(_floats(final), expected_final, strict=True)):
            errors[f"final state {i} without gradients"] = _error(a, b)
    errors["gather"] = _error(batch.gather(y.detach()), expected_y)
    return errors


def _initial_state(mixer: Mixer, documents: int, width: int) -> Any:
    """Return the states after a few tokens of each document."""
    state = mixer.init_state(documents, CAPACITY)
    x = torch.randn(documents, PREFIX, width, dtype=torch.float64)
    with torch.no_grad():
        return mixer(x, state).state


def _leaf_copy(state: Any) -> Any:
    def copy(x: Tensor) -> Tensor:
        return x.detach().clone().requires_grad_() if x.is_floating_point() else x.clone()

    return None if state is None else tree_map(copy, state)


def _leaves(state: Any) -> list[Tensor]:
    return [] if state is None else tree_leaves(state)


def _floats(state: Any) -> list[Tensor]:
    return [leaf.double() for leaf in _leaves(state)]


def _weighted(state: Any, weights: list[Tensor]) -> Tensor:
    return sum(((a * w).sum() for a, w in zip(_floats(state), weights, strict=True)), start=torch.zeros(()).double())


def _gradients(loss: Tensor, x: Tensor, state: Any, mixer: Mixer) -> dict[str, Tensor]:
    leaves = {"x": x, **dict(mixer.named_parameters())}
    leaves |= {f"state {i}": leaf for i, leaf in enumerate(_leaves(state)) if leaf.is_floating_point()}
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    pairs = zip(leaves.items(), found, strict=True)
    return {name: torch.zeros_like(leaf) if grad is None else grad.clone() for (name, leaf), grad in pairs}


def _error(value: Tensor, expected: Tensor) -> float:
    value, expected = value.detach(), expected.detach()
    if value.shape != expected.shape:
        return float("inf")
    return float((value - expected).norm() / expected.norm().clamp(min=1e-6))


def run_cases(
    rank: int, ranks: int, folder: str, configs: Mapping[str, MixerConfig], width: int, cases: list[Case]
) -> None:
    """Save the worst error of each config and case on this rank, or the exception's text."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("context",))
    results: dict[str, dict[str, float]] = {}
    for name, config in configs.items():
        for case in cases:
            results[f"{name}: {case.name}"] = errors_of(
                config, width, case, ContextParallel(mesh, case.layout, gather=True)
            )
    torch.save(results, f"{folder}/{rank}.pt")
    dist.barrier()
    os._exit(0)  # a normal exit has hung on threads of gloo


def worst_errors(
    ranks: int, folder: Path, configs: Mapping[str, MixerConfig], width: int, cases: list[Case]
) -> dict[str, dict[str, float]]:
    """Run the cases on so many processes. Returns: the worst error of each result."""
    mp.spawn(run_cases, (ranks, str(folder), dict(configs), width, cases), nprocs=ranks)
    by_rank = [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]
    return {key: {name: max(r[key][name] for r in by_rank) for name in by_rank[0][key]} for key in by_rank[0]}
