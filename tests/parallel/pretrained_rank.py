"""A folder read into a model that FSDP2 shards over two ranks, on each rank."""

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import deltazoo
from deltazoo.blocks.model.stack import LanguageModel


def shard(model: LanguageModel) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.stack.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def run_pretrained_rank(rank: int, folder: str) -> None:
    """Save the logits, the whole weights, and the bytes that this rank keeps of them."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    model = deltazoo.from_pretrained(Path(folder) / "weights", dtype=torch.float32, backend="reference", shard=shard)
    kept = sum(x.to_local().untyped_storage().nbytes() for x in model.parameters() if isinstance(x, DTensor))
    weights = {name: x.full_tensor() for name, x in model.state_dict().items()}
    logits = model(torch.arange(9).view(1, 9))[0]
    logits.square().mean().backward()
    gradient = model.embedding.weight.grad.full_tensor()
    if rank == 0:
        torch.save((logits.detach(), weights, gradient, kept), f"{folder}/result.pt")
    dist.barrier()
    os._exit(0)  # a normal exit has hung on threads of gloo
