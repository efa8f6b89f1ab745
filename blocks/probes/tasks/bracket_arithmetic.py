"""Modular arithmetic with brackets: the value of an expression so far, within the innermost open bracket.

B sequences, T tokens, D depths of brackets
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Generator, Tensor

from deltazoo.backends.ops.cross_entropy import IGNORE_INDEX
from deltazoo.blocks.probes.task import Batch
from deltazoo.blocks.probes.tasks import draws
from deltazoo.blocks.probes.tasks.modular_arithmetic import SIGNS, ModularArithmetic

_PLUS, _MINUS, _TIMES = range(3)


class BracketArithmetic(ModularArithmetic):
    """Expressions of digits, + - * and brackets up to a depth; a bracket opens or closes with probability `bracket`.

    The answer at a digit or closing bracket is the value, up to there, of the expression in the innermost bracket that
    is open. Operators, opening brackets and digits that begin an expression, which are its value, are not scored.
    """

    name: ClassVar[str] = "bracket_arithmetic"
    about: ClassVar[str] = "simulating a pushdown automaton of limited depth beyond the training length"
    published: ClassVar[str] = (
        "scaled accuracy of Mamba-3's table 5b, 3 layers: Mamba-3 87.75, Mamba-2 0.88, GDN with eigenvalues in [-1, 1] "
        "93.50"
    )
    scaled: ClassVar[str] = (
        "3 layers and batch 256 as for Mamba-3; 39 tokens without a curriculum; brackets up to depth 3, with an answer "
        "at every value in place of one at the end; half of its 10,000 steps, to save time"
    )

    depths: int = Field(default=3, ge=1)
    bracket: float = Field(default=0.3, gt=0, lt=1)

    @property
    def vocab(self) -> int:
        return self.modulus + len(SIGNS) + 2

    def draw(self, batch: int, length: int, generator: Generator) -> Batch:
        opening = self.modulus + len(SIGNS)
        digits_BT = draws.integers(0, self.modulus, (batch, length), generator)
        signs_BT = draws.integers(0, len(SIGNS), (batch, length), generator)
        is_bracket_BT = draws.uniform((batch, length), generator) < self.bracket
        levels_D = draws.arange(self.depths + 1, generator)
        depth_B1 = torch.zeros_like(digits_BT[:, :1])
        sums_BD = products_BD = signs_BD = torch.zeros_like(depth_B1 + levels_D)  # per depth; the first sign is +
        after_value_B1 = torch.zeros_like(is_bracket_BT[:, :1])
        begins_B1 = ~after_value_B1
        tokens, answers = [], []
        for n in range(length):
            digit_B1, sign_B1, is_bracket_B1 = (x[:, n : n + 1] for x in (digits_BT, signs_BT, is_bracket_BT))
            opens_B1 = is_bracket_B1 & ~after_value_B1 & (depth_B1 < self.depths)
            closes_B1 = is_bracket_B1 & after_value_B1 & (depth_B1 > 0)
            inner_B1 = ((sums_BD + products_BD) % self.modulus).gather(1, depth_B1)
            value_B1 = torch.where(closes_B1, inner_B1, digit_B1)
            depth_B1 = depth_B1 + opens_B1.long() - closes_B1.long()
            is_value_B1, is_sign_B1 = closes_B1 | ~(after_value_B1 | opens_B1), after_value_B1 & ~closes_B1
            at_BD = levels_D == depth_B1
            added_BD, multiplied_BD = at_BD & is_value_B1 & (signs_BD != _TIMES), at_BD & is_value_B1
            sums_BD = torch.where(added_BD, sums_BD + products_BD, sums_BD)
            signed_B1 = torch.where(signs_BD == _MINUS, -value_B1, value_B1)
            product_BD = torch.where(signs_BD == _TIMES, products_BD * value_B1, signed_B1) % self.modulus
            products_BD = torch.where(multiplied_BD, product_BD, products_BD)
            signs_BD = torch.where(at_BD & is_sign_B1, sign_B1, signs_BD)
            is_new_BD = at_BD & opens_B1
            sums_BD, products_BD, signs_BD = (x.masked_fill(is_new_BD, 0) for x in (sums_BD, products_BD, signs_BD))
            so_far_B1 = ((sums_BD + products_BD) % self.modulus).gather(1, depth_B1)
            tokens.append(_token(value_B1, self.modulus + sign_B1, is_sign_B1, opens_B1, closes_B1, opening))
            is_scored_B1 = is_value_B1 & (closes_B1 | ~begins_B1)
            answers.append(torch.where(is_scored_B1, so_far_B1, IGNORE_INDEX))
            after_value_B1, begins_B1 = is_value_B1, opens_B1
        places_BT = draws.arange(length, generator).expand(batch, -1)
        return Batch(torch.cat(tokens, dim=1), places_BT, torch.cat(answers, dim=1))

    def solve(self, tokens: Sequence[int]) -> dict[int, int]:
        symbols = [*map(str, range(self.modulus)), *SIGNS, "(", ")"]
        text, starts, answers = [symbols[token] for token in tokens], [0], {}
        for place, symbol in enumerate(text):
            if symbol == "(":
                starts.append(place + 1)
            elif symbol == ")":
                starts.pop()
            if symbol == ")" or (symbol.isdigit() and place > starts[-1]):
                answers[place] = eval("".join(text[starts[-1] : place + 1])) % self.modulus
        return answers


def _token(digit: Tensor, sign: Tensor, is_sign: Tensor, opens: Tensor, closes: Tensor, opening: int) -> Tensor:
    return torch.where(opens, opening, torch.where(closes, opening + 1, torch.where(is_sign, sign, digit)))
