"""What can be done with any state: a tree of tensors that all have the batch in dimension 0."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from deltazoo.backends.errors import StateError
from deltazoo.mixers.core.mixer import State


def reorder(state: State, index: Tensor) -> State:
    """Take rows in a new order, for beam search; a row may be taken twice. index: [B'] int64."""
    return _map(lambda x: x.index_select(0, index), state)


def select(state: State, rows: slice | Tensor) -> State:
    """Keep some rows: a slice, or indices [B'] int64, or a mask [B] bool."""
    return _map(lambda x: x[rows].clone(), state)


def detach(state: State) -> State:
    """Cut the state from the graph, for truncated backpropagation through time."""
    return _map(Tensor.detach, state)


def snapshot(state: State) -> State:
    """Copy a state, to come back to it after speculative tokens are refused."""
    return _map(Tensor.clone, state)


def rollback_(state: State, kept: State) -> State:
    """Overwrite a state in place with a snapshot of it; addresses stay, so CUDA graphs stay valid."""
    theirs, ours = tree_leaves(kept), tree_leaves(state)
    if len(theirs) != len(ours) or any(a.shape != b.shape for a, b in zip(theirs, ours, strict=True)):
        raise StateError("a state is overwritten by one with the same tensors, got another structure or other sizes")
    with torch.no_grad():
        for to, kept_tensor in zip(ours, theirs, strict=True):
            to.copy_(kept_tensor)
    return state


def save(state: State, path: str | Path) -> None:
    """Write a state's tensors to a file, to go on from it in another process."""
    torch.save([x.detach() for x in tree_leaves(state)], path)


def load_(state: State, path: str | Path) -> State:
    """Overwrite a state in place with a saved one; `state` comes from `init_state` of the same module.

    Raises: StateError: the file holds a state of another structure.
    """
    return rollback_(state, torch.load(path, map_location="cpu", weights_only=True))


def write_back(old: Tensor | None, new: Tensor) -> Tensor | None:
    """Hand a state on: no state in, none out; without gradients the old tensor is overwritten and keeps its address."""
    if old is None:
        return None
    return new.to(old.dtype) if torch.is_grad_enabled() else old.copy_(new)


def nbytes(state: State) -> int:
    """The bytes that a state's tensors take."""
    return sum(x.numel() * x.element_size() for x in tree_leaves(state) if isinstance(x, Tensor))


def batch(state: State) -> int:
    """The number of rows."""
    return int(next(x for x in tree_leaves(state) if isinstance(x, Tensor)).shape[0])


def _map(function: Callable[[Tensor], Tensor], state: State) -> State:
    return tree_map(lambda x: function(x) if isinstance(x, Tensor) else x, state)
