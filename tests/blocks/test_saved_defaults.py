"""Stacks that leave out defaults are written as the family that spells them out, and refused with the difference."""

import pytest
import torch
from small_configs import WIDTH, ZOO

import deltazoo
from deltazoo import StackSpec
from deltazoo.backends.io.errors import ConfigError
from deltazoo.blocks.checkpoints.built import first_difference
from deltazoo.mixers import Attention, GatedDeltaNet, SlidingWindow


@pytest.mark.parametrize(
    "pattern", [Attention(heads=2), GatedDeltaNet(heads=2, norm_eps=1e-6)], ids=["llama", "gated_deltanet"]
)
def test_a_stack_with_defaults_is_saved_and_read(pattern, tmp_path):
    model = StackSpec(width=64, depth=2, vocab=256, pattern=pattern).build("reference").double().eval()
    model.save_pretrained(tmp_path / "saved")
    read = deltazoo.from_pretrained(tmp_path / "saved", backend="reference").double().eval()
    tokens = torch.randint(256, (2, 9))
    torch.testing.assert_close(read(tokens), model(tokens), rtol=1e-6, atol=1e-6)  # weights pass through float32


def test_the_reasons_name_what_differs_and_no_exception(tmp_path):
    model = deltazoo.preset("gated-deltanet-small").build()
    with pytest.raises(ConfigError) as caught:
        model.save_pretrained(tmp_path / "saved")
    lines = str(caught.value).splitlines()
    assert "  gated_deltanet: layer 0: mixer.norm_eps must be 1e-06, got 1e-05" in lines
    assert lines[-1].startswith("  other layers or settings: ") and "llama" in lines[-1]
    assert not any(word in str(caught.value) for word in ("Error", "object", "class", "StopIteration"))


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"pattern": Attention(heads=2, rotary_theta=5e3)}, "layer 0: mixer.rotary_theta must be 5000.0, got 10000.0"),
        ({"pattern": Attention(heads=4)}, "layer 0: mixer.heads must be 4, got 2"),
        ({"pattern": Attention(heads=2, scale=0.3)}, "stack.layers.0.mixers.0.scale must be 0.3, got 0.17677"),
        ({"pattern": SlidingWindow(heads=2, window=8)}, "layer 0: mixer must be 'SlidingWindow', got 'Attention'"),
        ({"mlp": {"width": 100}}, "stack.layers.0.mlp.to_hidden.out_features must be 200, got 384"),
        ({"mlp": {"activation": "gelu"}}, "layer 0: mlp.activation must be 'gelu', got 'silu'"),
        ({"logit_cap": 30.0}, "logit_cap must be 30.0, got None"),
        ({"mlp": {"width": 192}}, None),
        ({"pattern": Attention(heads=2, key_value_heads=2, head_width=32)}, None),
    ],
)
def test_the_first_difference_of_two_models_is_named(changes, difference):
    spec = StackSpec(width=64, depth=2, vocab=256, pattern=Attention(heads=2))
    found = first_difference(
        spec, StackSpec(**{"width": 64, "depth": 2, "vocab": 256, "pattern": Attention(heads=2), **changes})
    )
    assert found is None if difference is None else str(found).startswith(difference), found


@pytest.mark.parametrize("name", sorted(ZOO))
def test_a_field_without_a_value_differs_or_has_no_effect(name):
    """Values of the fields whose default is None."""
    config = ZOO[name]
    spec = StackSpec(width=WIDTH, depth=1, vocab=8, pattern=config)
    for field in (field for field in type(config).model_fields if getattr(config, field) is None):
        for value in (1, 2, 0.3, True, "head", "silu"):
            try:
                changed = type(config)(**{**dict(config), field: value})
                other = StackSpec(width=WIDTH, depth=1, vocab=8, pattern=changed)
                other.build()
            except ConfigError:
                continue
            assert first_difference(spec, other) or torch.equal(logits(spec), logits(other)), (field, value)


def logits(spec):
    torch.manual_seed(0)
    model = spec.build("reference").eval()
    for weight in model.parameters():
        weight.data += 0.3 * torch.randn_like(weight)
    with torch.no_grad():
        return model(torch.arange(6)[None] % 8)[0]
