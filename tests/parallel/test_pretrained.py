"""Folders read straight into models that FSDP2 shards."""

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from pretrained_rank import run_pretrained_rank

import deltazoo
from deltazoo import StackSpec
from deltazoo.mixers import Attention


@pytest.mark.parallel
def test_each_rank_keeps_its_part_of_the_weights(tmp_path: Path) -> None:
    """Uneven sizes: 3 and 13 rows do not divide by two ranks."""
    torch.manual_seed(0)
    layer = Attention(heads=3, key_value_heads=1, head_width=4)
    spec = StackSpec(width=12, depth=2, vocab=13, pattern=layer, mlp={"width": 7}, tied=False)
    spec.build().save_pretrained(tmp_path / "weights", model_type="llama")
    mp.spawn(run_pretrained_rank, (str(tmp_path),), nprocs=2)
    logits, weights, gradient, kept = torch.load(tmp_path / "result.pt")
    model = deltazoo.from_pretrained(tmp_path / "weights", backend="reference")
    expected = model.state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], x) for name, x in expected.items())
    torch.testing.assert_close(logits, model(torch.arange(9).view(1, 9))[0].detach())
    model(torch.arange(9).view(1, 9))[0].square().mean().backward()
    torch.testing.assert_close(gradient, model.embedding.weight.grad)
    total = sum(4 * x.numel() for x in model.parameters())
    assert kept < 0.6 * total
