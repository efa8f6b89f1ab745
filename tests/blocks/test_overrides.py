"""Settings by dotted path change exactly the named field; a wrong one names the key and the nearest known key."""

import pytest

from deltazoo.backends.io.errors import ConfigError
from deltazoo.blocks import preset
from deltazoo.blocks.model.mlp import Dense
from deltazoo.blocks.model.moe import MoE
from deltazoo.blocks.spec.assemble import assemble
from deltazoo.blocks.spec.stack_spec import StackSpec
from deltazoo.mixers import KDA, DeltaNet, SlidingWindow

PATTERN = {"width": 16, "depth": 2, "vocab": 9, "pattern": "gated_deltanet(heads=2) + sliding_window"}


def test_a_setting_changes_one_field():
    spec = preset("deltanet-swa-tiny")
    changed = assemble(
        "deltanet-swa-tiny", {"depth": 12}, settings=["layers.sliding_window.window=1024", "norm_eps=1e-4"]
    )
    layers = spec.layers | {"sliding_window": SlidingWindow(heads=2, window=1024)}
    assert changed == StackSpec(**dict(spec) | {"depth": 12, "layers": layers, "norm_eps": 1e-4})
    assert assemble("deltanet-swa-tiny") == spec


def test_settings_reach_nested_mixers_mlps_and_items_of_lists(tmp_path):
    settings = ["layers.attention.mixer.heads=4", "layers.mlp.mlp.width=99", "layers.mlp.share=a"]
    changed = assemble("nemotron-h-tiny", settings=settings)
    layers = {layer.title: layer for layer in changed.expand()}
    assert layers["attention"].mixer.heads == 4
    assert (layers["mlp"].mlp.width, layers["mlp"].share) == (99, "a")
    path = tmp_path / "stack.yaml"
    path.write_text(
        "{width: 16, depth: 1, vocab: 9, pattern: both, layers: "
        "{both: {mixer: [{mixer: attention}, {mixer: gated_deltanet}]}}}"
    )
    both = assemble(str(path), settings=["layers.both.mixer.1.heads=3"]).expand()[0]
    assert [config.heads for config in both.mixers] == [None, 3]


def test_the_mlp_of_a_layer_starts_from_that_of_the_stack():
    changed = assemble("olmo-hybrid-tiny", settings=["layers.attention.mlp.bias=true"])
    assert changed.layers["attention"].mlp == Dense(width=128, bias=True)
    assert changed.mlp == Dense(width=128)
    with pytest.raises(ConfigError, match=r"'mlp' is unknown\. Known: mixer, heads"):
        assemble("olmo-hybrid-tiny", settings=["layers.gated_deltanet.mlp.bias=true"])


def test_values_are_yaml():
    spec = assemble(
        "deltanet-swa-tiny", settings=["mlp=none", "tied=false", "layers.sliding_window={mixer: kda, heads: 1}"]
    )
    assert (spec.mlp, spec.tied, spec.layers["sliding_window"]) == ("none", False, KDA(heads=1))


def test_a_new_mixer_or_type_resets_the_fields_beside_it():
    settings = [
        "layers.sliding_window.mixer=deltanet",
        "layers.sliding_window.heads=4",
        "mlp.type=moe",
        "mlp.experts=4",
    ]
    spec = assemble("deltanet-swa-tiny", settings=settings)
    assert spec.layers["sliding_window"] == DeltaNet(heads=4)
    assert spec.mlp == MoE(experts=4)
    same = assemble("deltanet-swa-tiny", settings=["mlp.type=dense"])
    assert same.mlp == preset("deltanet-swa-tiny").mlp == Dense(width=128)


def test_mixers_that_only_the_pattern_names_can_be_set():
    changed = assemble(None, PATTERN, settings=["layers.sliding_window.window=7"])
    assert changed.expand()[1].mixer == SlidingWindow(window=7)
    assert changed.expand()[0].mixer.heads == 2


ERRORS = [
    ("widht=3", "widht: unknown key; did you mean 'width'?"),
    ("layers.sliding_window.windw=3", "layers.sliding_window.windw: unknown key; did you mean 'window'?"),
    (
        "layers.slidingwindow.window=3",
        "layers.slidingwindow.window: 'slidingwindow' is unknown; did you mean 'sliding_window'?",
    ),
    (
        "layers.slidingwindow={mixer: kda}",
        "layers.slidingwindow: 'slidingwindow' is unknown; did you mean 'sliding_window'?",
    ),
    ("mpl.width=3", "mpl.width: 'mpl' is unknown; did you mean 'mlp'?"),
    ("mlp.widht=3", "mlp.widht: unknown key; did you mean 'width'?"),
    ("width.x=3", "width.x: 'x' cannot be set in 64, which has no fields"),
    ("layers.sliding_window.window=0", "layers.sliding_window.window must be at least 1, got 0"),
    (
        "sliding_window.window=3",
        "sliding_window.window: 'sliding_window' is a layer; write layers.sliding_window.window=3",
    ),
    (
        "layers.sliding_window.window",
        "a setting must be PATH=VALUE, such as layers.sliding_window.window=1024, got 'layers.sliding_window.window'",
    ),
    ("layers..window=3", "a setting must be PATH=VALUE"),
    ("width=[1", "width=[1: the value is not YAML"),
]


@pytest.mark.parametrize(("setting", "sentence"), ERRORS)
def test_a_wrong_setting_names_the_key_and_the_nearest(setting, sentence):
    with pytest.raises(ConfigError) as caught:
        assemble("deltanet-swa-tiny", settings=[setting])
    assert str(caught.value).startswith(sentence)


def test_a_setting_that_the_pattern_overrides_is_refused():
    with pytest.raises(ConfigError, match="the pattern sets 'heads' itself, in 'gated_deltanet\\(heads=2\\)'"):
        assemble(None, PATTERN, settings=["layers.gated_deltanet.heads=4"])


def test_a_layer_that_only_the_new_pattern_names_is_unknown():
    with pytest.raises(ConfigError, match=r"layers\.foo\.mlp\.width: 'foo' is unknown"):
        assemble("samba-tiny", {"pattern": "foo"}, settings=["layers.foo.mlp.width=3"])


def test_an_index_outside_a_list_is_refused(tmp_path):
    path = tmp_path / "stack.yaml"
    path.write_text("{width: 16, depth: 1, vocab: 9, pattern: a, layers: {a: {mixer: [{mixer: kda}]}}}")
    with pytest.raises(ConfigError, match="'3' must be an index from 0 to 0"):
        assemble(str(path), settings=["layers.a.mixer.3.heads=2"])


SPARSE = PATTERN | {"mlp": "dense + moe(active=1)"}


def test_mlps_of_the_pattern_can_be_set():
    changed = assemble(None, SPARSE, settings=["mlps.moe.experts=4", "mlps.dense.width=32", "norm_eps=1e-4"])
    assert [layer.mlp for layer in changed.expand()] == [Dense(width=32), MoE(experts=4, active=1)]
    assert changed.layers == {}
    pattern = assemble("deltanet-swa-tiny", settings=["mlp=moe@[0] else dense", "mlps.moe={type: moe, width: 16}"])
    assert [layer.mlp for layer in pattern.expand()] == [MoE(width=16), Dense()]


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("mlp.width=3", "mlp.width: mlp is the pattern 'dense + moe(active=1)'; set mlps.NAME.width"),
        ("moe.experts=3", "moe.experts: 'moe' is an MLP; write mlps.moe.experts=3"),
        ("mlps.mo.experts=3", "mlps.mo.experts: 'mo' is unknown; did you mean 'moe'?"),
        ("mlps.x.experts=3", "mlps.x.experts: 'x' is unknown. Known: dense, moe."),
        ("mlps.moe.expert=3", "mlps.moe.expert: unknown key; did you mean 'experts'?"),
        ("mlps.moe.active=3", "mlps.moe.active: the pattern sets 'active' itself, in 'moe(active=1)'"),
        ("layers.plain.mlp.width=3", "layers.plain.mlp.width: the layer has its MLP from the pattern"),
    ],
)
def test_a_wrong_setting_of_an_mlp_pattern_says_where_the_field_is(setting, sentence):
    plain = {"pattern": "plain", "layers": {"plain": {"mixer": {"mixer": "kda", "heads": 1}}}}
    with pytest.raises(ConfigError) as caught:
        assemble(None, SPARSE | plain, settings=[setting])
    assert str(caught.value).startswith(sentence)
    with pytest.raises(
        ConfigError, match=r"mlps\.moe\.experts: mlp is not a pattern; set it first, such as mlp='dense"
    ):
        assemble(None, PATTERN, settings=["mlps.moe.experts=3"])
