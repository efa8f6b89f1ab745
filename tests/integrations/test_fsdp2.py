"""FSDP2 with mixed precision on each kind of module, and on every module: as the unwrapped model in bfloat16.

Every mixer has a MoE in its layer, so that an auxiliary loss is part of the loss. Two processes compute all models.
"""

import functools
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from small_configs import OURS, ZOO
from subjects import MLPS, MOE, VOCAB, WIDTH, T, decode
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from deltazoo.blocks.model.layer import Layer
from deltazoo.blocks.model.mlp import Mlp
from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.blocks.spec.stack_spec import StackSpec
from deltazoo.blocks.training.objective import Objective
from deltazoo.mixers.core.conformance import relative_error
from deltazoo.mixers.core.mixer import Mixer
from deltazoo.mixers.core.part import OperandPart, OutputPart
from deltazoo.mixers.core.update import Update
from deltazoo.mixers.parts.norms import RMSNorm

RANKS = 2
CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # they are never called
MODELS = {name: (ZOO[name], MOE | {"balance": 0.1}) for name in OURS}
MODELS |= {f"MLP: {name}": (ZOO["gated_deltanet"], mlp) for name, mlp in MLPS.items()}


def is_part(module: nn.Module) -> bool:
    return isinstance(module, OperandPart | OutputPart | Update)


WRAPPED: dict[str, Callable[[nn.Module], bool]] = {
    "root": lambda module: False,
    "layer": lambda module: isinstance(module, Layer),
    "mixer": lambda module: isinstance(module, Mixer),
    "MLP": lambda module: isinstance(module, Mlp),
    "norm": lambda module: isinstance(module, RMSNorm),
    "part": is_part,
    "every module": lambda module: not isinstance(module, CONTAINERS),
}


class Results(NamedTuple):
    """Loss of the first row; gradients of both rows by name; logits of the first row: one call, and one per token."""

    loss: Tensor
    gradients: dict[str, Tensor]
    logits: Tensor
    decoded: Tensor


def build(name: str) -> LanguageModel:
    mixer, mlp = MODELS[name]
    torch.manual_seed(0)
    return StackSpec(width=WIDTH, depth=2, vocab=VOCAB, pattern=mixer, mlp=mlp).build("reference")


def batch() -> Tensor:
    return torch.randint(VOCAB, (RANKS, T + 1), generator=torch.Generator().manual_seed(1))


def shard(root: nn.Module, is_wrapped: Callable[[nn.Module], bool]) -> nn.Module:
    """Wrap the chosen modules and the root; `cast_forward_inputs` is True by default."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in reversed(list(root.modules())):
        if module is root or (is_wrapped(module) and not isinstance(module, LanguageModel)):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    return root


def run_sharded(name: str, is_wrapped: Callable[[nn.Module], bool], row: Tensor) -> Results:
    objective = shard(Objective(build(name)), is_wrapped)
    loss = objective(row[:, :-1], row[:, 1:])
    loss.backward()
    gradients = {
        name: parameter.grad.full_tensor()
        for name, parameter in objective.model.named_parameters()
        if parameter.grad is not None
    }
    model = shard(build(name), is_wrapped)
    with torch.no_grad():
        return Results(loss.detach(), gradients, model(row[:, :-1])[0], decode(model, row[:, :-1]))


def run_rank(rank: int, folder: str, wrapped: str) -> None:
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS, timeout=timedelta(seconds=120))
    results: dict[str, Any] = {}
    for name in MODELS:
        try:
            results[name] = tuple(run_sharded(name, WRAPPED[wrapped], batch()[rank : rank + 1]))
        except Exception as error:  # all ranks fail alike, so the next case starts in step
            results[name] = f"{type(error).__name__}: {error}"
    if rank == 0:
        torch.save(results, f"{folder}/results.pt")
    dist.barrier()
    os._exit(0)  # a normal exit has hung on threads of gloo


@functools.cache
def expected_results(name: str) -> tuple[Results, Results]:
    """Return the results of the unwrapped model in bfloat16, and in float64 with the same weights."""
    models = build(name), build(name)
    for model in models:
        for parameter in model.parameters():  # FSDP2 does not cast buffers
            parameter.data = parameter.data.bfloat16()
    return run_unwrapped(models[0], batch()), run_unwrapped(models[1].double(), batch())


def run_unwrapped(model: LanguageModel, rows: Tensor) -> Results:
    losses = [model.loss(row[None, :-1], row[None, 1:]) for row in rows]
    (sum(losses) / RANKS).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    with torch.no_grad():
        return Results(losses[0].detach(), gradients, model(rows[:1, :-1])[0], decode(model, rows[:1, :-1]))


def problems(actual: Results, same_dtype: Results, exact: Results) -> Iterator[str]:
    """Yield what is wrong with the results of wrapped modules.

    Their rounding errors may be half larger than those of the unwrapped model: they round their arguments.
    """
    if actual.gradients.keys() != exact.gradients.keys():
        yield f"gradients of {actual.gradients.keys() ^ exact.gradients.keys()}"
        return
    for quantity in ("loss", "gradients", "logits", "decoded"):
        x, same, wide = (flat(getattr(results, quantity)) for results in (actual, same_dtype, exact))
        error, margin = relative_error(x, wide), 1e-3 if quantity == "loss" else 0.01
        limit = 1.5 * relative_error(same, wide) + margin
        if not error <= limit:
            yield f"{quantity}: relative error {error:.1e}, more than {limit:.1e}"


def flat(tensors: Tensor | dict[str, Tensor]) -> Tensor:
    if isinstance(tensors, Tensor):
        return tensors.double()
    return torch.cat([tensors[name].flatten().double() for name in sorted(tensors)])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("wrapped", WRAPPED)
def test_wrapped_modules_compute_what_the_unwrapped_model_does(wrapped: str, tmp_path: Path) -> None:
    mp.spawn(run_rank, (str(tmp_path), wrapped), nprocs=RANKS)
    failures = []
    for name, results in torch.load(tmp_path / "results.pt").items():
        found = [results] if isinstance(results, str) else problems(Results(*results), *expected_results(name))
        failures += [f"{name}: {problem}" for problem in found]
    assert not failures, "\n".join(failures)
