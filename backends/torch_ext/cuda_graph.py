"""A call captured in a CUDA graph."""

from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[], object]


def captured(call: Call, device: torch.device, pool: Any = None, warm_ups: int = 1) -> Call:
    """Capture a call in a CUDA graph of a device, current or not; what comes back replays it.

    Args:
        pool: memory that several graphs share which are never replayed at once, from `torch.cuda.graph_pool_handle`.
        warm_ups: calls before, which compile, and let libraries allocate.
    Raises: what the call raises while it is captured.
    """
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):  # and so on its device
        for _ in range(warm_ups):
            call()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph, pool=pool, stream=side):
        call()
    return graph.replay
