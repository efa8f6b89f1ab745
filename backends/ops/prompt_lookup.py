"""Drafts by prompt lookup: what followed the last tokens before, and the text after the accepted ones of a pass.

B batch, C tokens of the history, T tokens of a pass: the last drawn one and n drafted ones
"""

from typing import NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.devices import device_type
from deltazoo.backends.triton.decode import lookup_op
from deltazoo.backends.triton.limits import elementwise_refusals
from deltazoo.backends.update.watch import runs_by_kernel

LONGEST_MATCH = 3  # tokens at the end of the text that are looked for
NO_TOKEN = -1  # before the first token of the history
REJECTED = -2  # in place of a token: the draft before it was rejected


class Text(NamedTuple):
    """The text of each row.

    history: [B, C] int64, its last tokens, preceded by `NO_TOKEN`. drawn, left: [B] int64, numbers of new tokens so
    far, and of those that may follow.
    """

    history: Tensor
    drawn: Tensor
    left: Tensor


def lookup(history_BC: Tensor, count: int) -> Tensor:
    """Draft the tokens that followed an earlier occurrence of the last tokens.

    The longest match of up to `LONGEST_MATCH` tokens counts, among equally long ones the last. A match that ends less
    than `count` tokens before the end is taken for a period, which the draft continues. Without a match the draft is
    arbitrary. The shapes are fixed, and nothing synchronises.

    Args:
        history_BC: [B, C] int64, the last tokens of each row, preceded by at least `LONGEST_MATCH` entries of -1.
    Returns: [B, count] int64.
    """
    C = history_BC.shape[1]
    suffix_BG = history_BC[:, -LONGEST_MATCH:].flip(-1)  # the last token first
    ends = torch.arange(LONGEST_MATCH, C, device=history_BC.device)
    window_BEG = history_BC.unfold(1, LONGEST_MATCH, 1)[:, 1:].flip(-1)  # the tokens that end at each of `ends`
    matched_BE = (window_BEG == suffix_BG[:, None]).cumprod(-1).sum(-1)
    score_BE = torch.where(ends < C - 1, matched_BE * C + ends, -1)
    first_B1 = score_BE.argmax(1, keepdim=True) + LONGEST_MATCH + 1
    first_B1 = first_B1.clamp(max=C - 1)  # of one token
    period_B1 = C - first_B1
    offset_BN = torch.arange(count, device=history_BC.device) % period_B1
    return history_BC.gather(1, first_B1 + offset_BN)


def accept(chosen_BT: Tensor, tokens_BT: Tensor) -> Tensor:
    """Return how many tokens of a pass are accepted, [B]: the first one, and the drafts before the first rejected one.

    Lookup drafts a token with probability 1. The rule of rejection sampling then accepts it with its probability p
    under the model, and otherwise samples from p without it. Drawing from p, and comparing, is the same rule. The
    chosen token after the last accepted one is the next token in both cases.

    Args: chosen_BT: the token drawn from the model's distribution after each token of the pass.
    Source: Leviathan 2022, arXiv 2211.17192, section 2.3.
    """
    return 1 + (chosen_BT[:, :-1] == tokens_BT[:, 1:]).cumprod(1).sum(1)


def draft_(read_BT: Tensor, last_B1: Tensor, history_BC: Tensor) -> None:
    """Write the tokens of a pass: the last one of each row, and the drafts of `lookup` after its whole history."""
    if runs_by_kernel("prompt lookup", _refusals(history_BC)):
        lookup_op.draft_(read_BT, last_B1, history_BC)
        return
    read_BT[:, :1] = last_B1
    read_BT[:, 1:] = lookup(history_BC, read_BT.shape[1] - 1)


def append_(chosen: Tensor, checked: Tensor, read: Tensor, last: Tensor, accepted: Tensor, text: Text) -> Tensor:
    """Append the accepted tokens of a pass, at most as many as may follow, and write their number.

    Args:
        chosen: [B, T] int64, the token drawn after each token of the pass.
        checked: the same, with a negative number that no draft equals in place of a wrong one.
        read: [B, T] int64, the tokens of the pass.
        last: [B, 1] int64, the last token of each text, which is written.
        accepted: [B] int32, how many tokens are accepted, which is written.
        text: updated in place.
    Returns: `checked` [B, T], with `REJECTED` after the accepted tokens.
    """
    if runs_by_kernel("accepted drafts", _refusals(chosen)):
        kept: Tensor = lookup_op.append_(chosen, checked, read, last, accepted, *text)
        return kept
    history, T = text.history, chosen.shape[1]
    count_B = torch.minimum(accept(checked, read), text.left)
    accepted.copy_(count_B)
    place_C = torch.arange(history.shape[1], device=history.device)
    history.copy_(torch.cat([history, chosen], 1).gather(1, count_B[:, None] + place_C))
    last.copy_(history[:, -1:])
    text.drawn.add_(count_B)
    text.left.sub_(count_B)
    return torch.where(torch.arange(T, device=count_B.device) < count_B[:, None], checked, REJECTED)


def _refusals(x: Tensor) -> tuple[str, ...]:
    return elementwise_refusals(device_type(x), x.device.index, torch.float32)  # tokens are integers
