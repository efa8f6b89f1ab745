"""DDP and FSDP2 give the gradients of one process with the whole batch."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from deltazoo.blocks.spec import StackSpec
from deltazoo.blocks.stack import LanguageModel
from deltazoo.blocks.training.objective import Objective

SPEC = {"width": 16, "depth": 2, "vocab": 29, "pattern": "gated_deltanet(heads=1) + sliding_window(heads=1, window=4)"}
RANKS = 2


def model() -> LanguageModel:
    torch.manual_seed(0)
    return StackSpec.model_validate(SPEC).build(backend="reference")


def batch() -> Tensor:
    return torch.randint(29, (2 * RANKS, 8), generator=torch.Generator().manual_seed(1))


def run_rank(rank: int, strategy: str, folder: str) -> None:
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    objective: torch.nn.Module = Objective(model())
    if strategy == "ddp":
        objective = DistributedDataParallel(objective)
    else:
        mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
        for layer in objective.model.stack.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(objective, mesh=mesh)
    rows = batch()[2 * rank : 2 * rank + 2]
    objective(rows[:, :-1], rows[:, 1:]).backward()
    grads = {}
    for name, parameter in objective.named_parameters():
        grad = parameter.grad
        grads[name.removeprefix("module.")] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    if rank == 0:
        torch.save(grads, f"{folder}/grads.pt")
    dist.barrier()
    os._exit(0)  # a normal exit has hung on threads of gloo


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch was built without gloo")
@pytest.mark.timeout(180)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_give_the_gradients_of_one(strategy: str, tmp_path) -> None:
    mp.spawn(run_rank, (strategy, str(tmp_path)), nprocs=RANKS)
    objective, tokens = Objective(model()), batch()
    objective(tokens[:, :-1], tokens[:, 1:]).backward()
    grads = torch.load(tmp_path / "grads.pt")
    assert grads.keys() == dict(objective.named_parameters()).keys()
    for name, parameter in objective.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)
