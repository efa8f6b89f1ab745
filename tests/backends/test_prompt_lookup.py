"""The kernels of prompt lookup give the drafts and the texts of the plain form."""

import pytest
import torch
from torch import Tensor
from triton_cases import DEVICE, needs_triton

from deltazoo.backends.ops import prompt_lookup
from deltazoo.backends.ops.prompt_lookup import LONGEST_MATCH, NO_TOKEN, Text, append_, draft_

ROWS, TOKENS = 7, 4


def draw_texts(slots: int) -> Text:
    """Draw rows of few different tokens, each with another number of tokens and of those that may follow."""
    torch.manual_seed(slots)
    history = torch.randint(0, 3, (ROWS, slots), device=DEVICE)
    lengths = torch.arange(ROWS, device=DEVICE)[:, None] * (slots - LONGEST_MATCH) // (ROWS - 1)
    history[torch.arange(slots, device=DEVICE) < slots - lengths] = NO_TOKEN
    return Text(history, torch.arange(ROWS, device=DEVICE), torch.arange(ROWS, device=DEVICE).flip(0) % 6)


def run_pass(text: Text, chosen: Tensor, checked: Tensor) -> list[Tensor]:
    """Draft and append; return everything that is written."""
    read, last = torch.zeros_like(chosen), text.history[:, -1:].clone()
    accepted = torch.zeros(ROWS, dtype=torch.int32, device=DEVICE)
    draft_(read, last, text.history)
    drafted = read.clone()
    right = torch.arange(chosen.shape[1], device=DEVICE) < torch.arange(ROWS, device=DEVICE)[:, None] % 5
    following = torch.cat([read[:, 1:], chosen[:, :1]], 1)
    chosen, checked = (torch.where(right & (x >= 0), following, x) for x in (chosen, checked))
    kept = append_(chosen, checked, read, last, accepted, text)
    return [drafted, kept, last, accepted, *text]


@needs_triton
@pytest.mark.parametrize("tokens", [1, 2, TOKENS, 6])
@pytest.mark.parametrize("slots", [4, 5, 40, pytest.param(1100, marks=pytest.mark.kernel_smoke), 2060])
def test_kernels_give_the_drafts_and_texts_of_the_plain_form(slots, tokens, monkeypatch):
    texts = draw_texts(slots)
    chosen = torch.randint(0, 3, (ROWS, tokens), device=DEVICE)
    checked = chosen.clone()
    checked[3, -1] = checked[5, 0] = -1
    expected_texts = Text(*(x.clone() for x in texts))
    results = []
    for given, refusals in ((texts, []), (expected_texts, ["it is not asked for."])):
        monkeypatch.setattr(prompt_lookup, "_refusals", lambda _, refusals=refusals: refusals)
        results.append(run_pass(given, chosen, checked))
    result, expected = results
    assert tokens == 1 or len(set(expected[3].tolist())) > 2
    for tensor, reference in zip(result, expected, strict=True):
        assert torch.equal(tensor, reference)
