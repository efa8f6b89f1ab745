"""Parser of the layer patterns: text to the terms of `deltazoo.mixers.core.patterns`, and terms to a list of layers.

    pattern = layer "@" "[" int {"," int} "]" "else" pattern                 at these indices, from 0; -1 is the last
            | "spread" "(" layer "," (int | number "%") ")" "else" pattern   this many layers, evenly spaced
            | layer
    layer   = chain {"|" chain}                 parallel mixers in one layer, outputs summed
    chain   = product {"+" product}             consecutive layers
    product = factor {"*" factor}               one of two factors is a count: 3*kda, (kda + mla)*2
    factor  = int | name [ "(" field "=" value {"," field "=" value} ")" ] | "(" layer ")"
    value   = number | true | false | null | word | "string" | "[" value {"," value} "]"

The operators have Python's precedence: `*`, then `+`, then `|`. A pattern is repeated up to the depth; the last
repetition may be truncated. The layer before `else` replaces layers of the pattern after it, which is expanded to the
full depth first.
"""

import itertools
import json
import re
from collections.abc import Callable, Container, Iterator
from typing import Any, NamedTuple

from deltazoo.backends.io.errors import PatternError
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
_MAX_DIGITS = 9
_EXCERPT = 100  # characters on each side of the caret in an error message
_WORDS = {"true": True, "false": False, "null": None}


def parse(text: str) -> Term:
    """Parse a pattern: `parse("3*kda + mla") == 3 * Name("kda") + Name("mla")`.

    Raises: PatternError: marks the position with a caret and says what was expected.
    """
    try:
        parser = _Parser(text)
        term = parser.pattern()
        parser.expect("end", "'+', '*', '|' or the end")
    except RecursionError:
        raise PatternError("pattern: its parentheses are nested too deeply") from None
    return term


def expand(pattern: Term, depth: int) -> list[tuple[Term, ...]]:
    """Expand a pattern to `depth` layers: for each layer, the terms that are parallel in it.

    Raises: PatternError: a layer of `@` or the count of `spread` exceeds the depth.
    """
    if not isinstance(pattern, At | Spread):
        repeated = itertools.chain.from_iterable(_layers(pattern) for _ in itertools.repeat(None))
        return list(itertools.islice(repeated, depth))
    layers = expand(pattern.over, depth)
    for index in _indices(pattern, depth):
        layers[index] = _parallel(pattern.part)
    return layers


def with_names(pattern: Term, name: Callable[[Term], Name]) -> Term:
    """Replace each layer of a pattern built in Python by the name that `name` returns."""
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


def unreached(pattern: Term, depth: int, places: Container[int] | None = None) -> list[Name]:
    """Return the names of a parsed pattern, with their fields, that are in none of `depth` layers; each once.

    A name may occur several times, so one occurrence that `@` replaces or the depth truncates does not matter.

    Args: places: indices of the layers that count; None: all.
    """
    layers = [terms for i, terms in enumerate(expand(pattern, depth)) if places is None or i in places]
    reached = {name for terms in layers for term in terms for name in names(term)}
    return list(dict.fromkeys(name for name in names(pattern) if name not in reached))


def pattern_error(sentence: str, text: str, position: int) -> PatternError:
    """Return an error that shows the pattern with a caret under the position."""
    start = max(0, position - _EXCERPT) if len(text) > 2 * _EXCERPT else 0
    excerpt = _flat(text)[start : start + 2 * _EXCERPT]
    return PatternError(f"{sentence}\n    {excerpt}\n    {' ' * (position - start)}^")


def _indices(pattern: At | Spread, depth: int) -> list[int]:
    if isinstance(pattern, At):
        for index in pattern.layers:
            if not -depth <= index < depth:
                raise PatternError(f"'{pattern}': layer {index} is outside a depth of {depth} (0 to {depth - 1})")
        return list(pattern.layers)
    count = max(1, round(pattern.amount * depth)) if isinstance(pattern.amount, float) else pattern.amount
    if count > depth:
        raise PatternError(f"'{pattern}': {count} layers do not fit in a depth of {depth}")
    return [(2 * i + 1) * depth // (2 * count) for i in range(count)]


def _layers(term: Term) -> Iterator[tuple[Term, ...]]:
    if isinstance(term, Chain):
        for part in term.parts:
            yield from _layers(part)
    elif isinstance(term, Repeat):
        for _ in range(term.count):
            yield from _layers(term.part)
    else:
        yield _parallel(term)


def _parallel(term: Term) -> tuple[Term, ...]:
    return term.parts if isinstance(term, Parallel) else (term,)


def _flat(text: str) -> str:
    return re.sub(r"\s", " ", text)


class _Token(NamedTuple):
    kind: str  # number, name, string, end, or the operator or bracket itself
    text: str
    position: int


class _Parser:
    """Recursive-descent parser with one method per rule of the grammar."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = list(self._tokens())
        self.next = 0

    def pattern(self) -> Term:
        start = self.token
        if start.kind == "name" and start.text == "spread" and self.tokens[self.next + 1].kind == "(":
            self.next += 2
            part = self.layer()
            self.expect(",", "',' and a count or a percentage")
            amount = self.amount()
            self.expect(")", "')'")
            return self.compose(start, Spread, part, amount, self.else_pattern())
        part = self.layer()
        at = self.token
        if at.kind != "@":
            return part
        self.next += 1
        self.expect("[", "'[' and layers, such as attention@[2, 7]")
        layers = [self.integer("a layer index, such as attention@[2, 7]")]
        while self.accept(","):
            layers.append(self.integer("a layer index, such as attention@[2, 7]"))
        self.expect("]", "',' or ']'")
        return self.compose(at, At, part, layers, self.else_pattern())

    def else_pattern(self) -> Term:
        if self.token.text != "else":
            raise self.unexpected("'else' and the pattern of the other layers")
        self.next += 1
        return self.pattern()

    def layer(self) -> Term:
        term = self.chain()
        while (operator := self.token).kind == "|":
            self.next += 1
            term = self.compose(operator, Term.__or__, term, self.chain())
        return term

    def chain(self) -> Term:
        term = self.product()
        while (operator := self.token).kind == "+":
            self.next += 1
            term = self.compose(operator, Term.__add__, term, self.product())
        return term

    def product(self) -> Term:
        start = self.token
        left = self.factor()
        while (operator := self.token).kind == "*":
            self.next += 1
            after = self.token
            right = self.factor()
            if isinstance(left, Term) and isinstance(right, Term):
                raise pattern_error("'*' takes a count and a layer, got two layers", self.text, operator.position)
            if isinstance(left, int) and isinstance(right, int):
                left *= right
            else:
                count, part = (left, right) if isinstance(left, int) else (right, left)
                left = self.compose(start if isinstance(left, int) else after, Repeat, count, part)
        if isinstance(left, int):
            raise self.unexpected(f"'*' and a layer after the count {left}")
        return left

    def factor(self) -> Term | int:
        token = self.token
        if token.kind == "number":
            return self.integer("an integer count")
        if self.accept("("):
            term = self.layer()
            self.expect(")", "')', '+', '*' or '|'")
            return term
        if token.kind != "name" or token.text == "else":
            raise self.unexpected("a layer's name, a count or '('")
        self.next += 1
        fields: list[tuple[str, Any]] = []
        if self.accept("("):
            while not self.accept(")"):
                if fields:
                    self.expect(",", "',' or ')'")
                name = self.expect("name", "a field, such as kda(heads=6)").text
                if name in dict(fields):
                    self.next -= 1
                    raise self.unexpected(f"a field of {token.text} that is not set yet")
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
                raise self.unexpected("a JSON string") from None
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
        raise self.unexpected("a number, true, false, null, a word, a \"string\" or '['")

    def amount(self) -> int | float:
        percent = self.tokens[self.next + 1].kind == "%"
        if self.token.kind != "number" or not percent:
            return self.integer("a count, or a percentage such as 8%")
        self.next += 2
        return float(self.tokens[self.next - 2].text) / 100

    def integer(self, expected: str) -> int:
        token = self.token
        if not re.fullmatch(r"-?\d+", token.text):
            raise self.unexpected(expected)
        if len(token.text) > _MAX_DIGITS:
            raise pattern_error(f"pattern: a count has at most {_MAX_DIGITS} digits", self.text, token.position)
        self.next += 1
        return int(token.text)

    def accept(self, kind: str) -> bool:
        """Consume a token of this kind if it is next."""
        matches = self.token.kind == kind
        self.next += matches
        return matches

    def expect(self, kind: str, expected: str) -> _Token:
        token = self.token
        if token.kind != kind:
            raise self.unexpected(expected)
        self.next += kind != "end"
        return token

    def compose(self, token: _Token, make: Any, *parts: Any) -> Term:
        """Construct a term, and add the position in the text to its PatternError."""
        try:
            return make(*parts)
        except PatternError as error:
            raise pattern_error(str(error), self.text, token.position) from None

    def unexpected(self, expected: str) -> PatternError:
        token = self.token
        actual = "the end" if token.kind == "end" else repr(token.text)
        return pattern_error(f"pattern: expected {expected}, got {actual}", self.text, token.position)

    @property
    def token(self) -> _Token:
        return self.tokens[self.next]

    def _tokens(self) -> Iterator[_Token]:
        position = len(self.text) - len(self.text.lstrip())
        while position < len(self.text):
            match = _TOKEN.match(self.text, position)
            if match is None:
                hint = "; define a layer with nested fields under layers" if self.text[position] == "{" else ""
                raise pattern_error(f"pattern: cannot read {self.text[position]!r}{hint}", self.text, position)
            kind = str(match.lastgroup)
            yield _Token(match[kind] if kind == "sign" else kind, match[kind], position)
            position = match.end()
        yield _Token("end", "", len(self.text))
