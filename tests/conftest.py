"""Number of pytest-xdist worker processes, and the tests that cannot run here, which are not collected."""

import gc
import os
from collections.abc import Iterable

import pytest
import torch

GPU_MEMORY_PER_WORKER = 5 * 2**30  # bytes: the CUDA context, the tensors of a test, and torch's cached blocks


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """For `-n auto`: one worker per core, on a GPU limited by its memory."""
    if not torch.cuda.is_available():
        return None
    _, memory = torch.cuda.mem_get_info()
    return max(1, min(os.cpu_count() or 1, memory // GPU_MEMORY_PER_WORKER))


def pytest_collection_finish() -> None:
    """Leave the tests and the imported modules out of later collections, which would pass over all of them."""
    gc.collect()
    gc.freeze()


GPU = ("GPU", "CUDA")  # in the reason of a skip
ELSEWHERE = (*GPU, "TRITON_INTERPRET", "interpreter")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", metavar="I/N", help="run shard I of N of the tests that need a GPU, and no others")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what needs a GPU, Triton's interpreter or its compiler where there is none; with --gpu all others."""
    shard = config.getoption("--gpu")
    if shard is None:
        kept = [item for item in items if not runs_elsewhere(item)]
    else:
        index, _, shards = shard.partition("/")
        kept = [item for item in items if needs_gpu(item)][int(index) - 1 :: int(shards)]
    chosen = {*kept}
    if elsewhere := [item for item in items if item not in chosen]:
        config.hook.pytest_deselected(items=elsewhere)
        items[:] = kept


def needs_gpu(item: pytest.Item) -> bool:
    return item.get_closest_marker("cuda") is not None or any(
        mentions(mark, GPU) for mark in item.iter_markers("skipif")
    )


def runs_elsewhere(item: pytest.Item) -> bool:
    if item.get_closest_marker("cuda") is not None:
        return not torch.cuda.is_available()
    return any(mark.args and mark.args[0] and mentions(mark, ELSEWHERE) for mark in item.iter_markers("skipif"))


def mentions(mark: pytest.Mark, words: Iterable[str]) -> bool:
    return any(word in mark.kwargs.get("reason", "") for word in words)
