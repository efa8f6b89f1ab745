"""Reversible rules between the tensors of a model and those of another library's folder.

Both sides of a rule are tensors made of named pieces, which are blocks of rows. The pieces are the same on both sides;
a side says which of its tensors holds which pieces, in which order. Reading and writing therefore are one operation,
take the tensors of one side apart and put those of the other together, and neither loses a byte.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.io.errors import ConfigError


class Packed(NamedTuple):
    """How a tensor consists of pieces.

    Args:
        pieces: names, separated by spaces, in the order of their rows. The rows of "a~b" alternate: one of a, one of b
            (rotary embeddings of adjacent channels).
        groups: the rows are interleaved: a block with 1 / groups of the rows of each piece, `groups` times
            (Qwen3-Next: one block per key head).
        stack: the first dimension, of this size, counts blocks of rows, such as experts; 0: there is none.
        axes: dimensions of size 1 that the tensor has in addition: (1,) in the weights of `nn.Conv1d`.
        transposed: the two dimensions are exchanged: its columns are the rows.
    """

    pieces: str
    groups: int = 1
    stack: int = 0
    axes: tuple[int, ...] = ()
    transposed: bool = False

    def split(self, tensor: Tensor, sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """Return the rows of each piece: views of the tensor if `groups` is 1."""
        rows, runs = self._rows(tensor), [run.split("~") for run in self.pieces.split()]
        if len(runs) == 1:
            blocks: Sequence[Tensor] = [rows]
        else:
            counts = [sum(sizes[name] for name in run) // self.groups for run in runs]
            split = torch.unflatten(rows, 0, (self.groups, -1)).split(counts, dim=1)
            blocks = [block.flatten(0, 1) for block in split]
        pieces: dict[str, Tensor] = {}
        for run, block in zip(runs, blocks, strict=True):
            pieces |= {name: block[i :: len(run)] for i, name in enumerate(run)}
        return pieces

    def join(self, pieces: Mapping[str, Tensor]) -> Tensor:
        """Return the tensor that consists of these pieces, contiguous."""
        runs = [[pieces[name] for name in run.split("~")] for run in self.pieces.split()]
        parts = [run[0] if len(run) == 1 else torch.stack(run, 1).flatten(0, 1) for run in runs]
        rows = parts[0]
        if len(parts) > 1:
            rows = torch.cat([torch.unflatten(part, 0, (self.groups, -1)) for part in parts], dim=1).flatten(0, 1)
        if self.transposed:
            rows = rows.T
        if self.stack:
            rows = torch.unflatten(rows, 0, (self.stack, -1))
        for axis in self.axes:
            rows = rows.unsqueeze(axis)
        return rows.contiguous()

    @property
    def is_ordered(self) -> bool:
        """Whether the tensor's memory holds the pieces one after the other."""
        is_interleaved = self.groups > 1 and len(self.pieces.split()) > 1
        return not is_interleaved and "~" not in self.pieces and not self.transposed

    def _rows(self, tensor: Tensor) -> Tensor:
        if self.transposed:
            return tensor.T
        if self.stack:
            return tensor.flatten(0, 1)
        return tensor.squeeze(self.axes) if self.axes else tensor


class Rule(NamedTuple):
    """A set of tensors of ours, and the set of tensors of theirs with the same pieces.

    Args:
        ours, theirs: the tensors by name. Ours are not interleaved.
        sizes: rows of each piece; may be empty if no tensor has more than one piece.
        precise: `from_pretrained(dtype=...)` leaves these tensors in the dtype of the folder (A_log, dt_bias).
        other_sizes: rows of the pieces in folders that another program cut at other rows; they are read, not written.
        other_theirs: `theirs` of folders with other tensors, such as one of all experts.
    """

    ours: Mapping[str, Packed]
    theirs: Mapping[str, Packed]
    sizes: Mapping[str, int] = {}
    precise: bool = False
    other_sizes: Mapping[str, int] | None = None
    other_theirs: Mapping[str, Packed] | None = None

    def fitting(self, rows: Mapping[str, int]) -> "Rule":
        """Return the rule with the tensors and sizes that a folder has.

        Args: rows: the first dimension of their tensors, by name.
        """
        if self.other_theirs is not None and self.other_theirs.keys() <= rows.keys():
            return self._replace(theirs=self.other_theirs)
        other = self.other_sizes
        if other is None or any(rows.get(name) != other[packed.pieces] for name, packed in self.theirs.items()):
            return self
        return self._replace(sizes=other)

    def under(self, ours: str, theirs: str) -> "Rule":
        """Return the rule with prefixes before the names."""
        other = self.other_theirs
        return self._replace(
            ours={ours + name: packed for name, packed in self.ours.items()},
            theirs={theirs + name: packed for name, packed in self.theirs.items()},
            other_theirs=None if other is None else {theirs + name: packed for name, packed in other.items()},
        )

    def write(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return their tensors from ours. On the meta device this gives the names, shapes and dtypes."""
        pieces: dict[str, Tensor] = {}
        for name, packed in self.ours.items():
            pieces |= packed.split(tensors[name], self.sizes)
        return {name: packed.join(pieces) for name, packed in self.theirs.items()}

    def targets(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the views of our tensors into which the pieces are copied."""
        views: dict[str, Tensor] = {}
        for name, packed in self.ours.items():
            if not packed.is_ordered or packed.groups != 1:
                raise ConfigError(f"a tensor of the model must hold its pieces in order, got {packed} for {name}")
            views |= packed.split(tensors[name], self.sizes)
        return views


Side = str | Mapping[str, str | Packed]


def rule(ours: Side, theirs: Side, sizes: Mapping[str, int] | None = None, precise: bool = False) -> Rule:
    """Create a rule. ours="x" is short for ours={"x": "all"}, and {"x": "q k"} for {"x": Packed("q k")}.

    rule("head.weight", "lm_head.weight")
    rule({"to_qkv.weight": "q k v"}, {"q_proj.weight": "q", "k_proj.weight": "k", "v_proj.weight": "v"}, sizes)
    """
    return Rule(_side(ours), _side(theirs), sizes or {}, precise)


def renamed(names: Mapping[str, str], precise: bool = False) -> list[Rule]:
    """Return a rule for each pair of names, ours and theirs."""
    return [rule(ours, theirs, precise=precise) for ours, theirs in names.items()]


def under(ours: str, theirs: str, rules: Iterable[Rule]) -> list[Rule]:
    """Return the rules with prefixes before the names of both sides."""
    return [each.under(ours, theirs) for each in rules]


def _side(side: Side) -> dict[str, Packed]:
    if isinstance(side, str):
        return {side: Packed("all")}
    return {name: Packed(packed) if isinstance(packed, str) else packed for name, packed in side.items()}
