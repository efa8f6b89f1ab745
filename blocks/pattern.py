"""The pattern language: text to the values of `deltazoo.mixers.core.patterns`, and those laid out over a depth.

    pattern = layer "@" "[" int {"," int} "]" "else" pattern            these layers, from 0; -1 is the last
            | "spread" "(" layer "," (int | number "%") ")" "else" pattern          so many, evenly spread
            | layer
    layer   = chain {"|" chain}                 side by side in one layer, outputs summed
    chain   = product {"+" product}             one after the other
    product = factor {"*" factor}               one of two is a count: 3*gdn, (gdn + swa)*2
    factor  = int | name [ "(" field "=" value {"," field "=" value} ")" ] | "(" layer ")"
    value   = number | true | false | null | word | "string" | "[" value {"," value} "]"

The operators bind as Python's do: `*`, then `+`, then `|`. A pattern is repeated to the depth, and the last period
may be cut. What stands before `else` replaces layers of what stands behind it, which keep their places.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from deltazoo.backends.errors import PatternError
from deltazoo.mixers.core.patterns import At, Chain, Name, Parallel, Repeat, Spread, Term

NAME = r"[A-Za-z_][\w.:-]*"
RESERVED = ("else", "spread")
_TOKEN = re.compile(
    rf"""(?:(?P<number>-?\d+(\.\d+)?([eE][+-]?\d+)?)
      | (?P<name>{NAME})
      | (?P<string>"([^"\\]|\\.)*")
      | (?P<sign>[-+*|@()\[\],=%]))\s*""",
    re.VERBOSE,
)
_WORDS = {"true": True, "false": False, "null": None}


def parse(text: str) -> Term:
    """Read a pattern: `parse("3*gdn + swa") == 3 * Name("gdn") + Name("swa")`.

    Raises: PatternError: shows the place with a caret and says what was expected.
    """
    reader = _Reader(text)
    found = reader.pattern()
    reader.expect("end", "'+', '*', '|' or the end")
    return found


def expand(pattern: Term, depth: int) -> list[tuple[Term, ...]]:
    """Lay a pattern out: for each of `depth` layers the terms that stand side by side in it.

    Raises: PatternError: a layer that `@` names, or a count of `spread`, lies outside the depth.
    """
    if not isinstance(pattern, At | Spread):
        forever = itertools.chain.from_iterable(_period(pattern) for _ in itertools.repeat(None))
        return list(itertools.islice(forever, depth))
    layers = expand(pattern.over, depth)
    for place in _places(pattern, depth):
        layers[place] = _sides(pattern.part)
    return layers


def with_names(pattern: Term, name: Callable[[Term], Name]) -> Term:
    """Replace the layers of a pattern made in Python by names."""
    match pattern:
        case Name():
            return pattern
        case Chain(parts) | Parallel(parts):
            return type(pattern)(tuple(with_names(part, name) for part in parts))
        case Repeat(count, part):
            return Repeat(count, with_names(part, name))
        case At(part, layers, over):
            return At(with_names(part, name), layers, with_names(over, name))
        case Spread(part, amount, over):
            return Spread(with_names(part, name), amount, with_names(over, name))
    return name(pattern)


def names(pattern: Term) -> Iterator[Name]:
    """Yield every name in a pattern."""
    match pattern:
        case Name():
            yield pattern
        case Chain(parts) | Parallel(parts):
            for part in parts:
                yield from names(part)
        case Repeat(_, part):
            yield from names(part)
        case At(part, _, over) | Spread(part, _, over):
            yield from names(part)
            yield from names(over)


def pattern_error(sentence: str, text: str, position: int) -> PatternError:
    """Say what is wrong in a pattern, with a caret under the place."""
    return PatternError(f"{sentence}\n    {_flat(text)}\n    {' ' * position}^")


def _places(pattern: At | Spread, depth: int) -> list[int]:
    if isinstance(pattern, At):
        for place in pattern.layers:
            if not -depth <= place < depth:
                raise PatternError(f"'{pattern}': layer {place} lies outside a depth of {depth} (0 to {depth - 1})")
        return list(pattern.layers)
    count = max(1, round(pattern.amount * depth)) if isinstance(pattern.amount, float) else pattern.amount
    if count > depth:
        raise PatternError(f"'{pattern}': {count} layers do not fit in a depth of {depth}")
    return [(2 * i + 1) * depth // (2 * count) for i in range(count)]


def _period(term: Term) -> Iterator[tuple[Term, ...]]:
    if isinstance(term, Chain):
        for part in term.parts:
            yield from _period(part)
    elif isinstance(term, Repeat):
        for _ in range(term.count):
            yield from _period(term.part)
    else:
        yield _sides(term)


def _sides(term: Term) -> tuple[Term, ...]:
    return term.parts if isinstance(term, Parallel) else (term,)


def _flat(text: str) -> str:
    return re.sub(r"\s", " ", text)


class _Token(NamedTuple):
    kind: str  # number, name, string, end, or the sign itself
    text: str
    position: int


class _Reader:
    """Read a pattern from left to right, one method a rule of the grammar."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = list(self._tokens())
        self.next = 0

    def pattern(self) -> Term:
        start = self.token
        if start.kind == "name" and start.text == "spread" and self.tokens[self.next + 1].kind == "(":
            self.next += 2
            part = self.layer()
            self.expect(",", "',' and how many")
            amount = self.amount()
            self.expect(")", "')'")
            return self.built(start, Spread, part, amount, self.otherwise())
        part = self.layer()
        at = self.token
        if at.kind != "@":
            return part
        self.next += 1
        self.expect("[", "'[' and layers, as attn@[2, 7]")
        layers = [self.integer("a layer, as attn@[2, 7]")]
        while self.accept(","):
            layers.append(self.integer("a layer, as attn@[2, 7]"))
        self.expect("]", "',' or ']'")
        return self.built(at, At, part, layers, self.otherwise())

    def otherwise(self) -> Term:
        if self.token.text != "else":
            raise self.wrong("'else' and the pattern of the other layers")
        self.next += 1
        return self.pattern()

    def layer(self) -> Term:
        found = self.chain()
        while (sign := self.token).kind == "|":
            self.next += 1
            found = self.built(sign, Term.__or__, found, self.chain())
        return found

    def chain(self) -> Term:
        found = self.product()
        while (sign := self.token).kind == "+":
            self.next += 1
            found = self.built(sign, Term.__add__, found, self.product())
        return found

    def product(self) -> Term:
        found = self.factor()
        while (sign := self.token).kind == "*":
            self.next += 1
            other = self.factor()
            if isinstance(found, Term) and isinstance(other, Term):
                raise pattern_error("'*' takes a count and a layer, got two layers", self.text, sign.position)
            if isinstance(found, int) and isinstance(other, int):
                found *= other
            else:
                count, part = (found, other) if isinstance(found, int) else (other, found)
                found = self.built(sign, Repeat, count, part)
        if isinstance(found, int):
            raise self.wrong(f"'*' and a layer after the count {found}")
        return found

    def factor(self) -> Term | int:
        token = self.token
        if token.kind == "number":
            return self.integer("a count without a fraction")
        if self.accept("("):
            found = self.layer()
            self.expect(")", "')', '+', '*' or '|'")
            return found
        if token.kind != "name" or token.text == "else":
            raise self.wrong("a layer's name, a count or '('")
        self.next += 1
        fields: list[tuple[str, Any]] = []
        if self.accept("("):
            while not self.accept(")"):
                if fields:
                    self.expect(",", "',' or ')'")
                name = self.expect("name", "a field, as gdn(heads=6)").text
                if name in dict(fields):
                    self.next -= 1
                    raise self.wrong(f"a field that {token.text} does not have yet")
                self.expect("=", "'=' and a value")
                fields.append((name, self.value()))
        return Name(token.text, tuple(fields), token.position)

    def value(self) -> Any:
        token = self.token
        self.next += 1
        if token.kind == "number":
            return int(token.text) if re.fullmatch(r"-?\d+", token.text) else float(token.text)
        if token.kind == "string":
            try:
                return json.loads(token.text)
            except ValueError:
                self.next -= 1
                raise self.wrong("a string as in JSON") from None
        if token.kind == "name":
            return _WORDS.get(token.text, token.text)
        if token.kind == "[":
            items: list[Any] = []
            while not self.accept("]"):
                if items:
                    self.expect(",", "',' or ']'")
                items.append(self.value())
            return tuple(items)
        self.next -= 1
        raise self.wrong("a number, true, false, null, a word, a \"string\" or '['")

    def amount(self) -> int | float:
        percent = self.tokens[self.next + 1].kind == "%"
        if self.token.kind != "number" or not percent:
            return self.integer("a count, or a share as 8%")
        self.next += 2
        return float(self.tokens[self.next - 2].text) / 100

    def integer(self, what: str) -> int:
        token = self.token
        if not re.fullmatch(r"-?\d+", token.text):
            raise self.wrong(what)
        self.next += 1
        return int(token.text)

    def accept(self, kind: str) -> bool:
        found = self.token.kind == kind
        self.next += found
        return found

    def expect(self, kind: str, what: str) -> _Token:
        token = self.token
        if token.kind != kind:
            raise self.wrong(what)
        self.next += kind != "end"
        return token

    def built(self, token: _Token, make: Any, *parts: Any) -> Term:
        """Compose, and give the algebra's own error the place in the text."""
        try:
            return make(*parts)
        except PatternError as error:
            raise pattern_error(str(error), self.text, token.position) from None

    def wrong(self, expected: str) -> PatternError:
        token = self.token
        got = "the end" if token.kind == "end" else repr(token.text)
        return pattern_error(f"pattern: expected {expected}, got {got}", self.text, token.position)

    @property
    def token(self) -> _Token:
        return self.tokens[self.next]

    def _tokens(self) -> Iterator[_Token]:
        position = len(self.text) - len(self.text.lstrip())
        while position < len(self.text):
            match = _TOKEN.match(self.text, position)
            if match is None:
                raise pattern_error(f"pattern: cannot read {self.text[position]!r}", self.text, position)
            kind = str(match.lastgroup)
            yield _Token(match[kind] if kind == "sign" else kind, match[kind], position)
            position = match.end()
        yield _Token("end", "", len(self.text))
