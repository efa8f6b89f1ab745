"""The processes of a run: torchrun starts one per GPU, and they share one process group."""

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from deltazoo.backends.io.errors import ConfigError, DeltazooError, first_line
from deltazoo.blocks.parallel.config import ParallelConfig
from deltazoo.blocks.parallel.launch import LOST_CONNECTION, launched_here

T = TypeVar("T")

_GRACE = 120.0  # seconds by which a collective outlasts the timeout, so that `Watchdog` names the process first


class Ranks:
    """The processes of a run; the default is this process alone.

    Attributes:
        rank, size: of this process, and their number. Rank 0 writes files and prints.
        mesh: "data" x "context"; None: one process.
        control, writers: gloo groups for objects, and for the thread that writes checkpoints.
    """

    def __init__(self, rank: int = 0, size: int = 1, mesh: DeviceMesh | None = None) -> None:
        self.rank, self.size, self.mesh = rank, size, mesh
        self.control: Any = None
        self.writers: Any = None

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    @property
    def data_ranks(self) -> int:
        """Number of processes, or groups of context parallelism, with rows of their own."""
        return 1 if self.mesh is None else self.mesh["data"].size()

    @property
    def data_rank(self) -> int:
        """Index of this process's rows."""
        return 0 if self.mesh is None else int(self.mesh["data"].get_local_rank())

    def sum_(self, x: Tensor) -> Tensor:
        """Sum a tensor over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, in order; they are pickled."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def first(self, call: Callable[[], T]) -> T:
        """Call a function on rank 0, and return its result on all. Raises: ConfigError: of rank 0, on all."""
        if self.size == 1:
            return call()
        outcome: list[Any] = [None, None]
        if self.is_first:
            try:
                outcome[0] = call()
            except ConfigError as error:
                outcome[1] = str(error)
        dist.broadcast_object_list(outcome, src=0, group=self.control)
        if outcome[1] is not None:
            raise ConfigError(outcome[1])
        result: T = outcome[0]
        return result

    def agree(self, problem: str | None) -> None:
        """Raise ConfigError on all processes if one has a problem; the sentence names it."""
        found = [(rank, each) for rank, each in enumerate(self.gather(problem)) if each]
        if found:
            rank, sentence = found[0]
            everywhere = len({each for _, each in found}) == 1 and len(found) == self.size
            raise ConfigError(sentence if everywhere or self.size == 1 else f"rank {rank}: {sentence}")


def expected_ranks() -> int:
    """Return the number of processes that torchrun started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_device(device: str) -> str:
    """Return the device of this process: "cuda" is the GPU with the process's number on its host."""
    local = os.environ.get("LOCAL_RANK")
    return f"cuda:{local}" if device == "cuda" and local is not None and expected_ranks() > 1 else device


@contextmanager
def joined(device: torch.device, config: ParallelConfig) -> Iterator[Ranks]:
    """Join the processes that torchrun started, or use the process group that exists, for the block.

    Raises: ConfigError: the number of processes does not fit `context` or `shard`.
    """
    size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else expected_ranks()
    problem = check_sizes(size, config)
    if problem:
        raise ConfigError(problem)
    if size == 1:
        yield Ranks()
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    mine = not dist.is_initialized()
    timeout = timedelta(seconds=config.timeout + _GRACE)
    if mine:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timeout, device_id=device if device.type == "cuda" else None)
    shape = (size // config.context, config.context)
    ranks = Ranks(dist.get_rank(), size, init_device_mesh(device.type, shape, mesh_dim_names=("data", "context")))
    ranks.control = dist.new_group(backend="gloo", timeout=timeout)
    ranks.writers = dist.new_group(backend="gloo", timeout=timeout)
    yield ranks
    if mine:  # after an error other processes may never reach this line: the process ends without
        dist.barrier(ranks.control)
        dist.destroy_process_group()


def check_sizes(size: int, config: ParallelConfig) -> str | None:
    """Return why so many processes do not fit the settings, or None."""
    if size % config.context:
        return f"parallel.context must divide the number of processes, {size}, got {config.context}"
    if config.shard is not None and config.mode == "fsdp" and (size % config.shard or config.shard % config.context):
        return (
            f"parallel.shard must divide the number of processes, {size}, and be a multiple of parallel.context, "
            f"{config.context}, got {config.shard}"
        )
    return None


class _ReportedOnce:
    """A context in which an error of one process is printed by that process, and one of all processes by rank 0.

    Other processes end silently, with the same exit code. An error that follows from the end of another process, such
    as a lost connection, is printed only if no launcher of ours describes that end.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or expected_ranks() == 1 or isinstance(error, KeyboardInterrupt):
            return
        sys.stdout.flush()
        if isinstance(error, DeltazooError):
            if self._is_reporter(str(error)):
                sys.stderr.write(f"deltazoo: {error}\n")
        elif _is_lost_connection(error):
            if not launched_here() and self._is_reporter("lost connection"):
                rank, reason = os.environ.get("RANK"), first_line(error)
                sys.stderr.write(f"deltazoo: rank {rank} lost the connection to another process: {reason}\n")
            sys.stderr.flush()
            os._exit(LOST_CONNECTION)
        else:
            traceback.print_exception(error)
        sys.stderr.flush()
        os._exit(2)  # a normal end would wait for collectives that other processes never join

    def end(self, code: int) -> None:
        """End one of several processes at once: threads of gloo have aborted in the end of the interpreter."""
        if expected_ranks() > 1:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def is_first(self) -> bool:
        """Whether this process prints."""
        return os.environ.get("RANK", "0") == "0" or expected_ranks() == 1

    def _is_reporter(self, sentence: str) -> bool:
        if not dist.is_initialized():
            return self.is_first()
        with contextlib.suppress(Exception):  # the store's process may be gone
            return bool(dist.distributed_c10d._get_default_store().add(f"deltazoo/error/{sentence}", 1) == 1)
        return True


reported_once = _ReportedOnce()
_LOST = ("onnection closed by peer", "onnection reset by peer", "Broken pipe", "Timed out waiting", "NCCL", "heartbeat")


def _is_lost_connection(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or any(text in str(error) for text in _LOST)
