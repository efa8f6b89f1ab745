"""A hybrid model under FSDP2 on a mesh of two batches, each split over two ranks, and in one process."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.blocks.parallel.context import ContextParallel
from deltazoo.blocks.spec.stack_spec import StackSpec
from deltazoo.blocks.training.objective import Objective

MLP = {"type": "moe", "experts": 3, "width": 8, "shared_width": 8, "balance": 0.1}
PATTERN = "rwkv7(heads=1) + gated_deltanet(heads=1) + sliding_window(heads=1, window=4) + attention(heads=1)"
IGNORED = -100


def build_model() -> LanguageModel:
    """Build the model with the weights of seed 0 in float64."""
    torch.manual_seed(0)
    spec = StackSpec.model_validate({"width": 16, "depth": 4, "vocab": 29, "pattern": PATTERN, "mlp": MLP})
    return spec.build(backend="reference").double()


def batch_of(replica: int) -> tuple[Tensor, Tensor]:
    """Return tokens and targets [2, 11] of a batch; some targets are ignored."""
    rows = torch.randint(29, (2, 12), generator=torch.Generator().manual_seed(replica))
    targets = rows[:, 1:].clone()
    targets[0, :3] = IGNORED
    return rows[:, :-1], targets


def run_fsdp_rank(rank: int, folder: str) -> None:
    """Save the mean loss and the gradients."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=4, timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    objective = Objective(build_model())
    everything = mesh["data", "context"]._flatten("all")
    for layer in objective.model.stack.layers:
        fully_shard(layer, mesh=everything)
    fully_shard(objective, mesh=everything)
    tokens, targets = batch_of(mesh.get_local_rank("data"))
    batch = ContextParallel(mesh["context"], "zigzag").plan(*tokens.shape)
    loss = objective(batch.shard(tokens), batch.shard(targets), batch.context)
    loss.backward()
    gradients = {name: parameter.grad.full_tensor() for name, parameter in objective.named_parameters()}
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if rank == 0:
        torch.save((mean / 4, gradients), f"{folder}/gradients.pt")
    dist.barrier()
    os._exit(0)  # a normal exit has hung on threads of gloo


def expected_gradients() -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean loss of both batches and its gradients in one process."""
    objective = Objective(build_model())
    losses = [objective(*batch_of(replica)) for replica in range(2)]
    mean = torch.stack(losses).mean()
    mean.backward()
    return mean.detach(), {name: parameter.grad for name, parameter in objective.named_parameters()}
