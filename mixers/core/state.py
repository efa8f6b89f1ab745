"""Operations on any state: a tree of tensors with the batch in dimension 0."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map, tree_structure

from deltazoo.backends.io.errors import StateError, file_errors
from deltazoo.backends.io.output_path import output_path
from deltazoo.mixers.core.mixer import State


def reorder(state: State, index: Tensor) -> State:
    """Return rows in another order, for beam search. Args: index: [B'] int64; may repeat rows."""
    return _map(lambda x: x.index_select(0, index), state)


def select(state: State, rows: slice | Tensor) -> State:
    """Return a copy of some rows. Args: rows: a slice, indices [B'] int64, or a mask [B] bool."""
    return _map(lambda x: x[rows].clone(), state)


def detach(state: State) -> State:
    """Detach the state from the autograd graph, for truncated backpropagation through time."""
    return _map(Tensor.detach, state)


def snapshot(state: State) -> State:
    """Return a copy of the state, for `rollback_` after rejected speculative tokens."""
    return _map(Tensor.clone, state)


def rollback_(state: State, saved: State) -> State:
    """Copy a snapshot into a state in place. The addresses stay the same, so CUDA graphs stay valid.

    Raises: StateError, if the structures or shapes differ.
    """
    targets, sources = ([x for x in tree_leaves(tree) if isinstance(x, Tensor)] for tree in (state, saved))
    if tree_structure(state) != tree_structure(saved):
        raise StateError("a state can be overwritten only by one of the same kind of model, got another structure")
    if len(sources) != len(targets) or any(a.shape != b.shape for a, b in zip(sources, targets, strict=True)):
        raise StateError("a state can be overwritten only by one with the same tensors, got other tensors or shapes")
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
    return state


def overwrite_(state: State, new: State | None) -> None:
    """Copy the tensors that a step returned as new ones into those of the old state; most mixers update in place."""
    for old, tensor in zip(tree_leaves(state), tree_leaves(new), strict=True):
        if tensor is not old:
            old.copy_(tensor)


def save(state: State, path: str | Path) -> None:
    """Write the tensors of a state to a file, each with its path in the tree."""
    torch.save(_by_path(detach(state)), output_path(path))


def load_(state: State, path: str | Path) -> State:
    """Copy a saved state into `state`, which `init_state` of the same module returned.

    Raises: StateError: the file holds no state, or one with other tensors, shapes or dtypes; ConfigError: it cannot be
        read.
    """
    targets, saved = _by_path(state), None
    with file_errors("read", path), open(path, "rb") as file:
        try:
            saved = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # of the many kinds that damaged files raise
            raise StateError(f"{path} must hold a state that `save` wrote: {error}") from error
    if not isinstance(saved, dict) or list(saved) != list(targets):
        raise StateError(f"{path} must hold the state of the same kind of model, with the tensors {list(targets)}")
    for name, target in targets.items():
        given, dtype = (getattr(x, "dtype", None) for x in (saved[name], target))
        if given != dtype:
            raise StateError(f"{path}: {name} must be {dtype}, the dtype of the state, got {given}")
    rollback_(list(targets.values()), list(saved.values()))
    return state


def write_back(old: Tensor, new: Tensor) -> Tensor:
    """Return the new value of a state tensor. Without gradients overwrite the old one, so that it keeps its address."""
    if new is old:  # it has been updated in place
        return old
    return new.to(old.dtype) if torch.is_grad_enabled() else old.copy_(new)


def nbytes(state: State) -> int:
    """Return the size of a state in bytes."""
    return sum(x.numel() * x.element_size() for x in tree_leaves(state) if isinstance(x, Tensor))


def batch(state: State) -> int:
    """Return the number of rows of a state."""
    return int(next(x for x in tree_leaves(state) if isinstance(x, Tensor)).shape[0])


def _by_path(state: State) -> dict[str, Tensor]:
    """The tensors of a state by their paths, such as ".layers[0][0]['kda.update']"."""
    return {keystr(path): tensor for path, tensor in tree_flatten_with_path(state)[0]}


def _map(function: Callable[[Tensor], Tensor], state: State) -> State:
    return tree_map(lambda x: function(x) if isinstance(x, Tensor) else x, state)
