"""Whether a kernel may load its weights before the preceding kernel has ended (device/overlap.py)."""

import torch
from torch import Tensor

from deltazoo.backends.triton.operands import is_ready


def loads_early(*weights: Tensor | None) -> int:
    """Return 1 if a kernel may load the weights before the preceding kernel has ended, else 0.

    In a CUDA graph only kernels of the graph precede, which write no weights but those that `ready` copies.
    """
    given = [weight for weight in weights if weight is not None]
    is_captured = given[0].is_cuda and torch.cuda.is_current_stream_capturing()
    return int(is_captured and all(is_ready(weight) for weight in given))
