"""The order of layers as a value: terms that repeat, follow, stand side by side or are laid over one another.

    3 * GatedDeltaNet(heads=6) + SlidingWindow(window=2048)     three layers, then one
    GatedDeltaNet() | SlidingWindow()                           side by side in one layer
    At(Attention(), [2, 7], over=GatedDeltaNet())               layers 2 and 7, the rest gated_deltanet
    Spread(Attention(), 0.08, over=Mamba2())                    8 % of the layers, evenly spread

`deltazoo.blocks.pattern` reads the same values from text and lays them out over a depth.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from deltazoo.backends.errors import PatternError


class Term:
    """What may stand in a pattern: a mixer config, a layer spec, a name, or a composition of them.

    A term that is none of the compositions below is one layer.
    """

    def __add__(self, other: "Term") -> "Chain":
        return Chain((*_parts(self), *_parts(other))) if isinstance(other, Term) else NotImplemented

    def __mul__(self, count: int) -> "Repeat":
        return Repeat(count, self) if isinstance(count, int) else NotImplemented

    def __rmul__(self, count: int) -> "Repeat":
        return self * count

    def __or__(self, other: "Term") -> "Parallel":
        if not isinstance(other, Term):
            return NotImplemented
        return Parallel((*_sides(self), *_sides(other)))


@dataclass(frozen=True)
class Name(Term):
    """A layer by name, perhaps with some fields changed; only text has names.

    position: where the name stands in the text, for errors; two names are equal wherever they stand.
    """

    name: str
    fields: tuple[tuple[str, Any], ...] = ()
    position: int = field(default=0, compare=False, repr=False)

    def __str__(self) -> str:
        changed = ", ".join(f"{key}={_value(value)}" for key, value in self.fields)
        return f"{self.name}({changed})" if changed else self.name


@dataclass(frozen=True)
class Chain(Term):
    """Layers one after the other: `a + b`."""

    parts: tuple[Term, ...]

    def __post_init__(self) -> None:
        _inside("+", self.parts)

    def __str__(self) -> str:
        return " + ".join(_bracketed(part) for part in self.parts)


@dataclass(frozen=True)
class Repeat(Term):
    """The same layers several times: `3 * a`."""

    count: int
    part: Term

    def __post_init__(self) -> None:
        _inside("*", (self.part,))
        if isinstance(self.count, bool) or self.count < 1:
            raise PatternError(f"a repeat count must be an integer of at least 1, got {self.count}")

    def __str__(self) -> str:
        nested = isinstance(self.part, Chain | Repeat)
        return f"{self.count}*({self.part})" if nested else f"{self.count}*{_bracketed(self.part)}"


@dataclass(frozen=True)
class Parallel(Term):
    """Mixers side by side in one layer, their outputs summed: `a | b`."""

    parts: tuple[Term, ...]

    def __post_init__(self) -> None:
        for part in self.parts:
            _one_layer("|", part)

    def __str__(self) -> str:
        return " | ".join(map(_shown, self.parts))


@dataclass(frozen=True)
class At(Term):
    """One layer's kind at given places of the whole stack, over a pattern for the rest: `a@[2, 7] else b`.

    Args: layers: places from 0; negative ones count from the end, as Python's indices do.
    """

    part: Term
    layers: Sequence[int]
    over: Term

    def __post_init__(self) -> None:
        _one_layer("@", self.part)
        if not self.layers or any(isinstance(place, bool) or not isinstance(place, int) for place in self.layers):
            raise PatternError(f"'@' needs a list of layers, as attn@[2, 7], got {self.layers!r}")
        object.__setattr__(self, "layers", tuple(self.layers))

    def __str__(self) -> str:
        return f"{_bracketed(self.part)}@{list(self.layers)} else {_shown(self.over)}"


@dataclass(frozen=True)
class Spread(Term):
    """One layer's kind evenly spread over the whole stack, over a pattern for the rest: `spread(a, 3) else b`.

    Of n in a depth of d the i-th stands at layer floor((2 i + 1) d / (2 n)): in the middle of its share.

    Args: amount: how many layers (an int), or a share of the depth (a float below 1), rounded, at least one.
    """

    part: Term
    amount: int | float
    over: Term

    def __post_init__(self) -> None:
        _one_layer("spread", self.part)
        whole = isinstance(self.amount, int) and not isinstance(self.amount, bool) and self.amount >= 1
        if not whole and not (isinstance(self.amount, float) and 0 < self.amount < 1):
            raise PatternError(f"spread needs a count of at least 1 or a share between 0 and 1, got {self.amount!r}")

    def __str__(self) -> str:
        amount = f"{100 * self.amount:g}%" if isinstance(self.amount, float) else self.amount
        return f"spread({_shown(self.part)}, {amount}) else {_shown(self.over)}"


def _parts(term: Term) -> tuple[Term, ...]:
    return term.parts if isinstance(term, Chain) else (term,)


def _sides(term: Term) -> tuple[Term, ...]:
    return term.parts if isinstance(term, Parallel) else (term,)


def _inside(operator: str, parts: tuple[Term, ...]) -> None:
    for part in parts:
        if isinstance(part, At | Spread):
            raise PatternError(
                f"`@` and `spread` place layers of the whole stack: {operator!r} cannot take '{_shown(part)}'"
            )


def _one_layer(operator: str, part: Term) -> None:
    if isinstance(part, Chain | Repeat | At | Spread):
        raise PatternError(
            f"{operator!r} takes single layers, got '{_shown(part)}'; parentheses say what belongs together"
        )


def _bracketed(part: Term) -> str:
    return f"({part})" if isinstance(part, Parallel) else _shown(part)


def _shown(part: Term) -> str:
    return str(part) if isinstance(part, Name | Chain | Repeat | Parallel | At | Spread) else repr(part)


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w.-]*", value) and value not in ("true", "false", "null"):
        return value
    return json.dumps(value)
