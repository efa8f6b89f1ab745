"""The slots that Raven's router activates where scores are equal."""

import pytest
import torch

from deltazoo.backends.update.base import UpdateInputs
from deltazoo.mixers import Raven
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import HeadShape
from deltazoo.mixers.parts.attention.slot_attention import RoutedSlots


@pytest.mark.parametrize("active", [1, 3, 8])
@pytest.mark.parametrize("router", ["sigmoid", "softmax"])
def test_of_equal_scores_the_first_slots_are_active(router, active):
    B, T, H, M = 2, 5, 3, 8
    part = RoutedSlots(HeadShape(16, H, H, 4, 4), M, active, router, H)
    raw = (2 * torch.randn(B, T, H * M, generator=torch.Generator().manual_seed(0))).round() / 2
    x = torch.zeros(B, T, H, 4)
    inputs = UpdateInputs(x, x, x, log_decay=-torch.ones(B, T, H))
    log_decay, write, _ = part.strengths(raw, inputs, None, Context())
    for scores, decays in zip(raw.view(-1, M).tolist(), log_decay.view(-1, M), strict=True):
        chosen = sorted(range(M), key=lambda m: (-scores[m], m))[:active]
        assert sorted(chosen) == decays.nonzero()[:, 0].tolist()
    torch.testing.assert_close(write, 1 - log_decay.exp())


def test_a_score_that_is_nan_makes_its_head_nan():
    part = RoutedSlots(HeadShape(16, 1, 1, 4, 4), 8, 2, "sigmoid", 1)
    raw = torch.arange(8.0).view(1, 1, 8).index_fill(2, torch.tensor(0), torch.nan)
    x = torch.zeros(1, 1, 1, 4)
    inputs = UpdateInputs(x, x, x, log_decay=-torch.ones(1, 1, 1))
    assert part.strengths(raw, inputs, None, Context())[0].isnan().any()


@torch.no_grad()
def test_tokens_choose_the_slots_of_the_whole_sequence_under_autocast():
    torch.manual_seed(0)
    mixer = Raven(heads=2, key_width=8, value_width=8, slots=16, active=5).build(16, backend="reference")
    slots = mixer.operands["slots"]
    slots.proj.weight.mul_(8).round_().div_(8)  # few different scores
    x = torch.randint(-1, 2, (2, 12, 16)).float()
    scores = slots.proj(x).view(2, 12, 2, 16)
    assert sum(len(row.unique()) for row in scores.view(-1, 16)) < 0.7 * scores.numel()
    with torch.autocast("cpu", torch.bfloat16):
        y, whole = mixer(x, mixer.init_state(2))[:2]
        state, outputs = mixer.init_state(2), []
        for t in range(12):
            outputs.append(mixer(x[:, t : t + 1], state).y)
    torch.testing.assert_close(torch.cat(outputs, 1), y, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(dict(state), dict(whole), rtol=2e-2, atol=2e-2)
