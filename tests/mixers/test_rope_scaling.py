"""Scaled rotary frequencies against transformers' functions, and attention with them against explicit rotations."""

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from deltazoo.backends.io.errors import ConfigError
from deltazoo.mixers import MLA, Attention
from deltazoo.mixers.core.config import dump, parse
from deltazoo.mixers.parts.rope_scaling import RopeScaling
from deltazoo.mixers.parts.rotary import rotation_at

SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 8.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
    "llama3, narrow": {
        "rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 64, "low_freq_factor": 2.0,
        "high_freq_factor": 3.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn, mscale": {
        "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    "yarn, exact bounds": {
        "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False,
        "attention_factor": 1.5, "beta_fast": 16.0, "beta_slow": 2.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize(("theta", "head_width"), [(10000.0, 64), (500000.0, 10)])
def test_scaled_rotation_equals_transformers(name: str, theta: float, head_width: int) -> None:
    # transformers insists on these keys, and computes in float32
    needed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if SCALINGS[name]["rope_type"] == "llama3" else {}
    parameters = {"rope_theta": theta, **needed, **SCALINGS[name]}
    config = LlamaConfig(hidden_size=4 * head_width, num_attention_heads=4, rope_parameters=parameters)
    frequency, amplitude = ROPE_INIT_FUNCTIONS[SCALINGS[name]["rope_type"]](config)
    position = torch.tensor([[0, 1, 7, 100]])
    angle = position[..., None] * frequency
    for T in (4, 1):  # the operator, and plain torch for one token
        rotation = rotation_at(position[:, :T], head_width // 2, theta, torch.float64, RopeScaling(**SCALINGS[name]))
        torch.testing.assert_close(rotation.cos, (amplitude * angle[:, :T].cos()).double(), rtol=0, atol=3e-5)
        torch.testing.assert_close(rotation.sin, (amplitude * angle[:, :T].sin()).double(), rtol=0, atol=3e-5)


def test_attention_with_linear_scaling_equals_attention_at_divided_positions() -> None:
    torch.manual_seed(0)
    mixer = Attention(heads=2, rope_scaling=RopeScaling(rope_type="linear", factor=4.0)).build(16).double()
    x = torch.randn(1, 9, 16, dtype=torch.float64)
    q, k, v = (y.view(1, 9, 2, 8) for y in mixer.to_qkv(x).split(16, -1))
    angle = torch.arange(9)[:, None] / 4 * 10000.0 ** (-torch.arange(4).double() / 4)
    turned = [
        torch.complex(y[..., :4], y[..., 4:]) * torch.polar(torch.ones_like(angle), angle)[:, None] for y in (q, k)
    ]
    scores = torch.einsum("bthe,bshe->bhts", turned[0], turned[1].conj()).real / math.sqrt(8)
    weights = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf).softmax(-1)
    expected = mixer.out(torch.einsum("bhts,bshe->bthe", weights, v).flatten(2))
    torch.testing.assert_close(mixer(x).y, expected, rtol=1e-9, atol=1e-11)


def test_a_config_with_scaling_survives_plain_data() -> None:
    config = MLA(rope_scaling=RopeScaling(**SCALINGS["yarn, mscale"]))
    assert parse(dump(config)) == config


@pytest.mark.parametrize(
    ("scaling", "sentence"),
    [
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3.0}, "beta_fast must not be set with rope_type='linear'"),
        ({"rope_type": "yarn", "factor": 2.0}, "original_max_position_embeddings must be set with rope_type='yarn'"),
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type"),
        ({"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 8, "low_freq_factor": 4.0}, "high"),
    ],
)
def test_impossible_scalings_are_refused(scaling: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        RopeScaling(**scaling)


@pytest.mark.parametrize("mixer", [Attention, MLA])
def test_scaling_without_rotary_embeddings_is_refused(mixer: type[Attention | MLA]) -> None:
    with pytest.raises(ConfigError, match="rope_scaling must be None without rotary_theta"):
        mixer(rotary_theta=None, rope_scaling=RopeScaling(rope_type="linear", factor=2.0))
