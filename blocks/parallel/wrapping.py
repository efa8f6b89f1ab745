"""A module under DDP or FSDP2, as the settings choose."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from deltazoo.blocks.parallel.config import ParallelConfig
from deltazoo.blocks.parallel.ranks import Ranks

_GATHERED = 0.1  # share of a GPU's memory that the weights of all layers may take between their passes


def wrap(objective: nn.Module, layers: list[nn.Module], ranks: Ranks, config: ParallelConfig, dtype: Any) -> nn.Module:
    """Return the module whose calls and gradients all processes share; one process returns it unchanged.

    Args: layers: the parts that FSDP2 gathers one after the other; dtype: in which FSDP2 computes, None: as it is.
    """
    if ranks.size == 1:
        return objective
    if config.mode == "ddp":
        return DistributedDataParallel(objective, gradient_as_bucket_view=True)
    assert ranks.mesh is not None
    mesh = _shard_mesh(ranks, config)
    policy = MixedPrecisionPolicy() if dtype is None else MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32)
    frees = not _fit_gathered(objective, dtype)
    for layer in dict.fromkeys(layers):
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=frees)
    fully_shard(objective, mesh=mesh, mp_policy=policy)
    return objective


def _fit_gathered(objective: nn.Module, dtype: torch.dtype | None) -> bool:
    """Whether weights stay gathered from forward to backward, which saves half of the gathers."""
    parameters = list(objective.parameters())
    device = parameters[0].device
    if device.type != "cuda":
        return False
    size = sum(x.numel() * (dtype or x.dtype).itemsize for x in parameters)
    return size <= _GATHERED * torch.cuda.get_device_properties(device).total_memory


def _shard_mesh(ranks: Ranks, config: ParallelConfig) -> DeviceMesh:
    """Return the mesh of FSDP2: all processes, or replicas x shards."""
    assert ranks.mesh is not None
    kind, shard = ranks.mesh.device_type, config.shard or ranks.size
    if shard == ranks.size:
        return init_device_mesh(kind, (ranks.size,), mesh_dim_names=("shard",))
    return init_device_mesh(kind, (ranks.size // shard, shard), mesh_dim_names=("replicate", "shard"))


@contextmanager
def gradients_synchronized(module: nn.Module, synchronize: bool) -> Iterator[None]:
    """Let a backward in the block add to the gradients of this process only, unless `synchronize`."""
    if isinstance(module, DistributedDataParallel) and not synchronize:
        with module.no_sync():
            yield
        return
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(synchronize)
    yield
