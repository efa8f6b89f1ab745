"""Patterns of layers as values: sequences, repetitions, parallel branches and placements of layers.

    3 * GatedDeltaNet(heads=6) + SlidingWindow(window=2048)     three layers, then one
    GatedDeltaNet() | SlidingWindow()                           parallel branches of one layer
    At(Attention(), [2, 7], over=GatedDeltaNet())               layers 2 and 7; all others are gated_deltanet
    Spread(Attention(), 0.08, over=Mamba2())                    8 % of the layers, evenly spaced

`deltazoo.blocks.spec.pattern` parses patterns from text and expands them to a given depth.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from deltazoo.backends.io.errors import PatternError


class Term:
    """Element of a pattern: a layer (a mixer config, a layer spec or a name) or a composition of terms."""

    def __add__(self, other: "Term") -> "Chain":
        return Chain((*_terms(self), *_terms(other))) if isinstance(other, Term) else NotImplemented

    def __mul__(self, count: int) -> "Repeat":
        return Repeat(count, self) if isinstance(count, int) else NotImplemented

    def __rmul__(self, count: int) -> "Repeat":
        return self * count

    def __or__(self, other: "Term") -> "Parallel":
        if not isinstance(other, Term):
            return NotImplemented
        return Parallel((*_branches(self), *_branches(other)))


@dataclass(frozen=True)
class Name(Term):
    """Layer given by name, optionally with changed fields. Only patterns parsed from text contain names.

    position: index of the name in the text, for error messages; ignored in comparisons.
    """

    name: str
    fields: tuple[tuple[str, Any], ...] = ()
    position: int = field(default=0, compare=False, repr=False)

    def __str__(self) -> str:
        changed = ", ".join(f"{key}={_value(value)}" for key, value in self.fields)
        return f"{self.name}({changed})" if changed else self.name


@dataclass(frozen=True)
class Chain(Term):
    """Consecutive layers: `a + b`."""

    parts: tuple[Term, ...]

    def __post_init__(self) -> None:
        _refuse_placements("+", self.parts)

    def __str__(self) -> str:
        return " + ".join(_parenthesised(part) for part in self.parts)


@dataclass(frozen=True)
class Repeat(Term):
    """Repeated layers: `3 * a`."""

    count: int
    part: Term

    def __post_init__(self) -> None:
        _refuse_placements("*", (self.part,))
        if isinstance(self.count, bool) or self.count < 1:
            raise PatternError(f"a repeat count must be an integer of at least 1, got {self.count}")

    def __str__(self) -> str:
        nested = isinstance(self.part, Chain | Repeat)
        return f"{self.count}*({self.part})" if nested else f"{self.count}*{_parenthesised(self.part)}"


@dataclass(frozen=True)
class Parallel(Term):
    """Mixers as parallel branches of one layer, whose outputs are added: `a | b`."""

    parts: tuple[Term, ...]

    def __post_init__(self) -> None:
        for part in self.parts:
            _require_single_layer("|", part)

    def __str__(self) -> str:
        return " | ".join(map(_to_text, self.parts))


@dataclass(frozen=True)
class At(Term):
    """One layer at given indices of the model, and a pattern for all other layers: `a@[2, 7] else b`.

    Args: layers: indices from 0; negative ones count from the end.
    """

    part: Term
    layers: Sequence[int]
    over: Term

    def __post_init__(self) -> None:
        _require_single_layer("@", self.part)
        if not self.layers or any(isinstance(index, bool) or not isinstance(index, int) for index in self.layers):
            raise PatternError(f"'@' needs a list of layers, such as attention@[2, 7], got {self.layers!r}")
        if len(set(self.layers)) < len(self.layers):
            raise PatternError(f"'@' needs distinct layers, got {list(self.layers)}")
        object.__setattr__(self, "layers", tuple(self.layers))

    def __str__(self) -> str:
        return f"{_parenthesised(self.part)}@{list(self.layers)} else {_to_text(self.over)}"


@dataclass(frozen=True)
class Spread(Term):
    """One layer at evenly spaced indices of the model, and a pattern for all other layers: `spread(a, 3) else b`.

    Of n such layers in a model of depth d, layer i has index floor((2 i + 1) d / (2 n)).

    Args: amount: number of layers (an int), or fraction of the depth (a float below 1), rounded, at least one layer.
    """

    part: Term
    amount: int | float
    over: Term

    def __post_init__(self) -> None:
        _require_single_layer("spread", self.part)
        whole = isinstance(self.amount, int) and not isinstance(self.amount, bool) and self.amount >= 1
        if not whole and not (isinstance(self.amount, float) and 0 < self.amount < 1):
            raise PatternError(f"spread needs a count of at least 1 or a fraction between 0 and 1, got {self.amount!r}")

    def __str__(self) -> str:
        amount = f"{100 * self.amount:g}%" if isinstance(self.amount, float) else self.amount
        return f"spread({_to_text(self.part)}, {amount}) else {_to_text(self.over)}"


def _terms(term: Term) -> tuple[Term, ...]:
    return term.parts if isinstance(term, Chain) else (term,)


def _branches(term: Term) -> tuple[Term, ...]:
    return term.parts if isinstance(term, Parallel) else (term,)


def _refuse_placements(operator: str, parts: tuple[Term, ...]) -> None:
    for part in parts:
        if isinstance(part, At | Spread):
            raise PatternError(
                f"`@` and `spread` place layers of the whole stack: {operator!r} cannot take '{_to_text(part)}'"
            )


def _require_single_layer(operator: str, part: Term) -> None:
    if isinstance(part, Chain | Repeat | At | Spread):
        raise PatternError(f"{operator!r} takes single layers, got '{_to_text(part)}'; use parentheses to group")


def _parenthesised(part: Term) -> str:
    return f"({part})" if isinstance(part, Parallel) else _to_text(part)


def _to_text(part: Term) -> str:
    return str(part) if isinstance(part, Name | Chain | Repeat | Parallel | At | Spread) else repr(part)


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w.-]*", value) and value not in ("true", "false", "null"):
        return value
    return json.dumps(value)
