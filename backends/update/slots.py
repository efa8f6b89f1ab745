"""Slots of a pool of states: which state each row of a decode batch uses.

`slots` [B] int64 names a row of `states` [S, HV, K, V] for each batch row; None means that row i uses state i. -1 means
that the batch row has no state: no state changes and its output is zero. All other slots must be different rows of
`states`. Their values are checked on a CPU outside torch.compile; elsewhere an invalid slot is undefined behaviour.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Step = Callable[[Tensor], tuple[Tensor, Tensor]]


def gather_states(states: Tensor, slots: Tensor | None) -> Tensor:
    """Return the state of each batch row, any state for a row without one; without slots `states` itself."""
    if slots is None or slots.shape[0] == 0:
        return states if slots is None else states[:0]
    return states.index_select(0, slots.clamp(min=0))


def zero_without_state(o: Tensor, slots: Tensor | None) -> Tensor:
    """Return o [B, T, HV, V] with zeros in rows without a state."""
    return o if slots is None else torch.where((slots >= 0)[:, None, None, None], o, 0)


def step_in_slots(step: Step, states: Tensor, slots: Tensor | None) -> Tensor:
    """Apply a step to the states of a batch and store the new ones in place, without a host synchronisation.

    Args: step: states [B, HV, K, V] -> o [B, 1, HV, V] and the new states.
    Returns: o, zero in rows without a state.
    """
    if slots is None:
        o, state = step(states)
        states.copy_(state)
        return o
    if slots.shape[0] == 0:
        return step(states[:0])[0]
    has_state = slots >= 0
    # Row -> itself, or the first row with a state: rows that store to the same slot then store the same values.
    source = torch.where(has_state, torch.arange(slots.shape[0], device=slots.device), has_state.long().argmax())
    index = slots[source].clamp(min=0)
    state = states.index_select(0, index)
    o, new_state = step(state)
    states.index_copy_(0, index, torch.where(has_state.any(), new_state[source], state))
    return zero_without_state(o, slots)
