"""One token of a selective state space on a GPU, from the convolved values to the output map: Mamba, diagonal Longhorn.

Nothing here records gradients. B rows, C channels, N states per channel, R rank of the step size
"""

from torch import Tensor

from deltazoo.backends.triton.element.selective_op import MAX_STATES as MAX_STATES
from deltazoo.backends.triton.element.selective_op import SelectiveCall as SelectiveCall
from deltazoo.backends.triton.element.selective_op import selective_step


def selective_step_(call: SelectiveCall) -> Tensor:
    """Decode one token per row; `call.states` [B, C, N] float32 change in place. Returns: o [B, C]."""
    o: Tensor = selective_step(*call)
    return o
