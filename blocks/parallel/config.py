"""The settings of a run on several processes."""

from typing import Literal

from pydantic import Field

from deltazoo.backends.io.frozen_config import FrozenConfig


class ParallelConfig(FrozenConfig):
    """How the processes that torchrun starts, one per GPU, share a run. Tensor and expert parallelism do not exist.

    Args:
        mode: "ddp": every process has the whole model; "fsdp": FSDP2 shards weights, gradients and the optimizer.
        shard: processes over which "fsdp" shards; each group of this size is a replica (HSDP). None: all.
        context: processes that share the tokens of each sequence, see `ContextParallel`; they are neighbours.
        layout: of context parallelism.
        timeout: seconds after which a process that makes no progress ends the run.
    """

    mode: Literal["ddp", "fsdp"] = "ddp"
    shard: int | None = Field(default=None, ge=1)
    context: int = Field(default=1, ge=1)
    layout: Literal["contiguous", "zigzag"] = "contiguous"
    timeout: float = Field(default=900.0, gt=0)
