"""The history of a convolution after accepted ones of drafted tokens.

B batch, T tokens, C channels, P past inputs
"""

import torch
from torch import Tensor

from deltazoo.backends.triton.conv.history import advance_history_ as kernel_
from deltazoo.backends.triton.conv.op import MAX_TAPS
from deltazoo.backends.triton.limits import kernel_refusals


def advance_history_(history: Tensor, x: Tensor, accepted: Tensor) -> None:
    """Replace the history of each row by its last P inputs, of which the first `accepted` tokens of x are the newest.

        history = [history, x_1, ..., x_accepted] without all but the last P

    Args:
        history: [B, P, C], updated in place. x: [B, T, C].
        accepted: [B] int32, from 0 to T.
    """
    P = history.shape[1]
    if P == 0:
        return
    if P < MAX_TAPS and not kernel_refusals(x):
        kernel_(history, x, accepted)
        return
    inputs = torch.cat([history, x.to(history.dtype)], 1)
    index_BP = accepted[:, None] + torch.arange(P, device=x.device)
    history.copy_(inputs.gather(1, index_BP[..., None].expand(-1, -1, x.shape[2])))
