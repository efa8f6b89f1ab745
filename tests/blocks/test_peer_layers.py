"""The table of FLA's layers: every entry is a mixer, and arguments are made for its default config."""

import pytest

from deltazoo.backends.io.errors import ConfigError
from deltazoo.blocks.inspect.peer_layers import FLA_LAYERS, fla_layer
from deltazoo.mixers import GLA, HGRN, KDA
from deltazoo.mixers.core.config import config_class


@pytest.mark.parametrize("name", FLA_LAYERS)
def test_arguments_follow_the_config(name):
    config = config_class(name)()
    entry = FLA_LAYERS[name]
    assert entry.fields <= {*dict(config)}
    assert entry.arguments(config, 2048)


def test_sizes_are_taken_over():
    arguments = FLA_LAYERS["gla"].arguments(GLA(heads=8, key_width=32, value_width=64, gate_rank=4), 256)
    assert arguments == {"num_heads": 8, "expand_k": 1.0, "expand_v": 2.0, "gate_low_rank_dim": 4}


def test_shared_keys_and_the_convolution_are_taken_over():
    config = GLA(heads=8, key_width=32, value_width=64, key_value_heads=2, conv_width=3)
    arguments = FLA_LAYERS["gla"].arguments(config, 256)
    assert arguments["num_kv_heads"] == 2
    assert arguments["use_short_conv"] is True and arguments["conv_size"] == 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (HGRN(), "it has no such layer."),
        (KDA(decay_bound=-5.0), "its layer has no decay_bound."),
        (KDA(negative_eigenvalues="erase"), "it has no negative_eigenvalues='erase'"),
    ],
)
def test_a_config_without_a_counterpart_is_refused(config, message, monkeypatch):
    monkeypatch.setattr("deltazoo.blocks.inspect.peer_layers.missing_packages", lambda packages: [])
    with pytest.raises(ConfigError, match=message):
        fla_layer(config, 256)
