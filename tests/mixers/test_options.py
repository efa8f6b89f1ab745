"""Options of mixers: states, packs and padding in float64, initialisation, and combinations that are refused.

Their equations are in test_equations_*.py.
"""

from typing import Any

import pytest
import torch
from small_configs import WIDTH, small

from deltazoo.backends.conformance.decode_step import FusedOperands, reference_step
from deltazoo.backends.io.errors import ConfigError
from deltazoo.mixers import MixerConfig
from deltazoo.mixers.core import conformance
from deltazoo.mixers.core.config import parse

SHARED: dict[str, Any] = {"heads": 4, "value_heads": None, "key_value_heads": 2}
OPTIONS: dict[str, MixerConfig] = {
    "kda": small("kda", gate_rank="full", gate_bias=True, conv_bias=True),
    "gated_deltanet": small("gated_deltanet", gate_activation="sigmoid", beta_bias=True, conv_bias=True),
    "gated_deltanet2": small("gated_deltanet2", heads=2, householders=2),
    "preconditioned_deltanet": small("preconditioned_deltanet", negative_eigenvalues="both", gate=False),
    "preconditioned_kda": small("preconditioned_kda", decay_bound=-5.0),
    "mla": small("mla", gate="head", window=4, bias=True, query_rank=3),
    "raven": small("raven", **SHARED, router="softmax", gate=True, feature="t2r"),
    "momentum_deltanet": small("momentum_deltanet", double_beta=True, correction=False, gate=False),
    "mamba3": small("mamba3", rate="softplus", output_norm=True),
    "gla": small("gla", **SHARED, conv_width=3, feature="relu"),
    "simple_gla": small("simple_gla", **SHARED, feature="hedgehog"),
    "gsa": small("gsa", **SHARED, conv_width=3, feature="t2r"),
    "abc": small("abc", conv_width=3),
    "hgrn2": small("hgrn2", conv_width=3),
    "linear_attention": small("linear_attention", **SHARED, feature="t2r"),
}
CHECKS = ("train", "decode", "packed", "padded", "init_weights")


@pytest.mark.parametrize("name", OPTIONS)
def test_options_keep_the_properties_of_a_mixer(name: str) -> None:
    for check in CHECKS:
        error = conformance.error(OPTIONS[name], check, backend="reference")
        assert error <= conformance.PROPERTIES[check][1], check


@pytest.mark.parametrize("name", ["kda", "gated_deltanet"])
@torch.no_grad()
def test_fused_decode_step_contains_the_options(name: str) -> None:
    torch.manual_seed(0)
    mixer = OPTIONS[name].build(WIDTH, backend="reference").double()
    x = torch.randn(2, 6, WIDTH, dtype=torch.float64)
    mixer.project.conv.bias.normal_()
    _, state, _ = mixer(x[:, :5], mixer.init_state(2))
    fusion = mixer.decode_fusion()
    assert not fusion.remaining
    operands = FusedOperands(fusion.inputs(x[:, 5:], state["project"]), state[mixer.update_key], None)
    o, _ = reference_step(fusion.step, operands)
    torch.testing.assert_close(mixer.out(o.flatten(2)), mixer(x)[0][:, 5:], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"mixer": "gated_deltanet", "gate": False, "gate_activation": "sigmoid"}, "needs gate=True, got gate=False"),
        ({"mixer": "kda", "conv_width": 0, "conv_bias": True}, "conv_bias=True needs a conv_width of at least 1"),
        ({"mixer": "gla", "key_value_heads": 2, "value_heads": 4}, "value_heads must be None with key_value_heads = 2"),
        ({"mixer": "raven", "slots": 16}, "active must be at most slots = 16, got 32"),
    ],
)
def test_options_that_mean_nothing_together_are_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse(fields)


def test_key_value_heads_divide_the_query_heads() -> None:
    with pytest.raises(ConfigError, match="key_value_heads must divide heads = 4, got 3"):
        small("gsa", **SHARED | {"key_value_heads": 3}).build(WIDTH)


@pytest.mark.parametrize(
    ("name", "key_norm", "normalises"),
    [("deltanet", None, True), ("deltanet", False, False), ("efla", None, False), ("efla", True, True)],
)
@torch.no_grad()
def test_key_norm_removes_the_length_of_the_keys(name: str, key_norm: bool | None, normalises: bool) -> None:
    torch.manual_seed(0)
    config = small(name, heads=2, key_width=4, feature="relu", conv_width=0, key_norm=key_norm)
    mixer = config.build(WIDTH, backend="reference").double()
    x = torch.randn(2, 6, WIDTH, dtype=torch.float64)
    before = mixer(x)[0]
    mixer.project.to_qkv.weight[8:16] *= 3  # k
    assert torch.allclose(mixer(x)[0], before, atol=1e-3) == normalises  # the norm adds 1e-6 to the square
