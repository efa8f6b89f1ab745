"""StackSpec: equal from Python, YAML and JSON; errors name the path and the nearest key."""

import contextlib
import itertools
import json
import pickle
from pathlib import Path

import jsonschema
import pytest
import torch

import deltazoo
from deltazoo.backends.io import yaml_text
from deltazoo.backends.io.errors import ConfigError, ConfigWarning, PatternError, UnknownNameError
from deltazoo.backends.update import registry
from deltazoo.blocks import preset
from deltazoo.blocks.checkpoints import folder as checkpoint
from deltazoo.blocks.inspect.show import field_rows
from deltazoo.blocks.model.mlp import Dense
from deltazoo.blocks.model.moe import MoE
from deltazoo.blocks.spec import document, presets
from deltazoo.blocks.spec.stack_spec import LayerSpec, StackSpec
from deltazoo.blocks.training.config import RunSettings, TextOrigin, TrainConfig
from deltazoo.mixers import KDA, Attention, GatedDeltaNet, SlidingWindow
from deltazoo.mixers.core import config as configs
from deltazoo.mixers.core.patterns import At
from deltazoo.mixers.core.update import Update

YAML = (
    "{width: 768, depth: 12, vocab: 256, pattern: 3*gdn + swa, layers: "
    "{gdn: {mixer: gated_deltanet, heads: 6}, swa: {mixer: sliding_window, window: 2048}}}"
)
NAMED = StackSpec(
    width=768,
    depth=12,
    vocab=256,
    pattern="3*gdn + swa",
    layers={"gdn": GatedDeltaNet(heads=6), "swa": SlidingWindow(window=2048)},
)
SMALL = {"width": 16, "depth": 3, "vocab": 29, "pattern": "gdn", "layers": {"gdn": GatedDeltaNet(heads=2)}}


@pytest.mark.parametrize("given", ["stack", "argument"])
def test_an_unknown_backend_is_refused_where_no_mixer_has_an_update(given):
    name = {"backend": "refrence"}
    spec = StackSpec(width=16, depth=1, vocab=9, pattern="attention(heads=1)", **(name if given == "stack" else {}))
    with pytest.raises(UnknownNameError, match="unknown backend 'refrence'; did you mean 'reference'"):
        spec.build(**(name if given == "argument" else {}))


def test_python_yaml_and_json_give_equal_specs(tmp_path: Path):
    (tmp_path / "stack.yaml").write_text(YAML)
    (tmp_path / "stack.json").write_text(json.dumps(document.parse(YAML, ".yaml", "")))
    unnamed = StackSpec(width=768, depth=12, vocab=256, pattern=3 * GatedDeltaNet(heads=6) + SlidingWindow(window=2048))
    others = [StackSpec.load(tmp_path / "stack.yaml"), StackSpec.load(str(tmp_path / "stack.json")), unnamed]
    for other in others:
        assert other == NAMED
        assert hash(other) == hash(NAMED)
        assert other.expand() == NAMED.expand()
    assert others[0].model_dump() == others[1].model_dump() == NAMED.model_dump()
    assert unnamed.pattern == "3*gated_deltanet + sliding_window"
    assert [type(layer.mixer).__name__ for layer in NAMED.expand()] == 3 * (3 * ["GatedDeltaNet"] + ["SlidingWindow"])


@pytest.mark.parametrize("name", ["stack.yaml", "stack.json"])
def test_save_and_load_round_trip(tmp_path: Path, spec: StackSpec, name: str):
    for original in (spec, NAMED, *map(StackSpec.load, presets.names())):
        original.save(tmp_path / name)
        loaded = StackSpec.load(tmp_path / name)
        assert loaded == original
        assert loaded.model_dump() == original.model_dump()
        assert StackSpec.model_validate_json(original.model_dump_json()) == original
        assert pickle.loads(pickle.dumps(original)) == original


def test_changed_fields_give_an_equal_spec_and_omit_the_defaults():
    layers = {
        "a": {"mixer": "kda", "heads": 2, "conv_width": 4},
        "b": {"mixer": [{"mixer": "attention"}, {"mixer": "mom", "memory": {"mixer": "gla", "heads": 3}}], "mlp": {}},
        "c": {"mixer": "none", "mlp": {"type": "moe"}, "share": "1e5"},
        "d": {"mixer": {"mixer": "mom", "memory": {"mixer": "gated_deltanet"}}, "mlp": "none", "norm_eps": 0.5},
    }
    spec = StackSpec(width=16, depth=9, vocab=9, pattern="a + b + c + d", layers=layers, mlp="x", mlps={"x": {}})
    data = spec.changed_fields()
    assert data == {
        "width": 16,
        "depth": 9,
        "vocab": 9,
        "pattern": "a + b + c + d",
        "layers": {
            "a": {"mixer": "kda", "heads": 2},
            "b": {
                "mixer": [{"mixer": "attention"}, {"mixer": "mom", "memory": {"mixer": "gla", "heads": 3}}],
                "mlp": {"type": "dense"},
            },
            "c": {"mixer": "none", "mlp": {"type": "moe"}, "share": "1e5"},
            "d": {"mixer": {"mixer": "mom"}, "mlp": "none", "norm_eps": 0.5},
        },
        "mlp": "x",
        "mlps": {"x": {"type": "dense"}},
    }
    for read in (data, document.parse(yaml_text.dump(data), ".yaml", ""), json.loads(json.dumps(data))):
        assert StackSpec(**read).model_dump() == spec.model_dump()
    plain = StackSpec(width=16, depth=1, vocab=9, pattern="kda", mlp=MoE())
    assert plain.changed_fields() == {"width": 16, "depth": 1, "vocab": 9, "pattern": "kda", "mlp": {"type": "moe"}}


def test_the_folder_of_a_training_run_holds_every_field(tmp_path: Path):
    origin = TextOrigin(source="a text", path=None, digest="0")
    checkpoint.create(tmp_path, NAMED, RunSettings(train=TrainConfig(), text=origin))
    assert document.read(tmp_path / checkpoint.STACK) == NAMED.model_dump(mode="json")


@pytest.mark.parametrize("width", [40, 120])
def test_the_yaml_of_every_preset_fits_a_width_and_reads_back(width: int):
    for name in presets.names():
        text = yaml_text.dump(preset(name).changed_fields(), width)
        assert max(map(len, text.splitlines())) <= width
        assert StackSpec(**document.parse(text, ".yaml", name)).model_dump() == preset(name).model_dump()
        if width == 120:
            lines = [line for line in presets.text(name).splitlines() if not line.startswith("#")]
            assert len(text.splitlines()) <= len(lines) + 6, name  # floats are longer


CANDIDATES = (True, False, 1, 2, 3, 0.5, 1e-3, "both", "efla", "softmax", "all", "weighted", None)


@pytest.mark.parametrize("name", registry.names(registry.MIXERS))
def test_changed_fields_of_every_mixer_read_back(name: str):
    kind = configs.config_class(name)
    layers = {"default": kind()}
    for field, candidate in itertools.product(kind.model_fields, CANDIDATES):
        with contextlib.suppress(ConfigError):
            layers[f"{field}_{len(layers)}"] = kind(**{field: candidate})
    defaults = {row.name: document.parse_value(yaml_text.dump_inline(row.default), name) for row in field_rows(kind)}
    assert configs.parse({"mixer": name, **defaults}) == kind()
    for key, config in layers.items():
        assert {*configs.dump_changed(config)} - {"mixer"} <= {key.rpartition("_")[0]}
    changed = [config for config in layers.values() if config != kind()]
    assert changed or not kind.model_fields
    pattern = " + ".join(layers)
    spec = StackSpec(width=16, depth=len(layers), vocab=9, pattern=pattern, layers=layers)
    read = StackSpec(**document.parse(yaml_text.dump(spec.changed_fields()), ".yaml", name))
    assert read.layers == layers


def test_specs_are_equal_if_they_describe_the_same_model():
    stack = StackSpec(**SMALL)
    assert stack == StackSpec(**SMALL | {"pattern": "2*gdn"})
    assert stack == StackSpec(**SMALL | {"pattern": "gated_deltanet(heads=2)"})
    assert stack == StackSpec(**SMALL | {"layers": {"gdn": LayerSpec(mixer=GatedDeltaNet(heads=2))}})
    changes = [
        {"width": 32}, {"depth": 4}, {"vocab": 30}, {"tied": False}, {"norm_eps": 1e-5}, {"mlp": "none"},
        {"mlp": "dense@[0] else moe"},
        {"backend": "reference"}, {"layers": {"gdn": GatedDeltaNet(heads=4)}}, {"pattern": "gdn@[0] else attention"},
    ]  # fmt: skip
    for change in changes:
        assert stack != StackSpec(**SMALL | change), change


def test_python_patterns_give_each_config_its_own_name():
    pattern = At(Attention(), [0], over=GatedDeltaNet(heads=1) + GatedDeltaNet(heads=2) + GatedDeltaNet(heads=1))
    spec = StackSpec(width=16, depth=4, vocab=9, pattern=pattern, layers={"gated_deltanet": Attention(heads=3)})
    assert spec.pattern == "attention@[0] else gated_deltanet_2 + gated_deltanet_3 + gated_deltanet_2"
    heads = [layer.mixer.heads for layer in spec.expand()]
    assert heads == [None, 2, 1, 1]


def test_the_fields_of_a_layer_override_those_of_the_stack():
    layers = {
        "plain": GatedDeltaNet(),
        "own": {
            "mixer": {"mixer": "attention", "heads": 2},
            "mlp": {"width": 5},
            "norm_eps": 0.1,
            "backend": "compile",
        },
        "bare": {"mixer": [{"mixer": "attention"}, {"mixer": "gated_deltanet"}], "mlp": "none"},
    }
    stack = {"mlp": {"ratio": 2.0}, "norm_eps": 1e-3, "backend": "reference"}
    spec = StackSpec(width=16, depth=4, vocab=9, pattern="plain + own + bare + bare(mlp=null)", layers=layers, **stack)
    plain, own, bare, again = spec.expand()
    assert (plain.mlp, plain.norm_eps, plain.backend) == (Dense(ratio=2.0), 1e-3, "reference")
    assert (own.mlp, own.norm_eps, own.backend) == (Dense(width=5), 0.1, "compile")
    assert (bare.mlp, bare.norm_eps, len(bare.mixers)) == ("none", 1e-3, 2)
    assert again.mlp == Dense(ratio=2.0)
    model = StackSpec(**dict(spec) | {"backend": None}).build()
    assert model.stack.layers[0].mlp.out.weight.shape == (16, 64)
    assert model.stack.layers[1].mlp.out.weight.shape == (16, 5)
    assert model.stack.layers[2].mlp is None
    assert [layer.norm.eps for layer in model.stack.layers] == [1e-3, 0.1, 1e-3, 1e-3]


TWICE = """
{width: 16, depth: 5, vocab: 29, pattern: kda + sparse + attention + sparse, mlp: {width: 24}, layers: {
  kda: {mixer: kda, heads: 1},
  sparse: {mixer: {mixer: kda, heads: 1}, mlp: {type: moe, width: 8, experts: 4}},
  attention: {mixer: attention, heads: 2}}}
"""
ONCE = """
{width: 16, depth: 5, vocab: 29, pattern: 2*kda + attention + kda, mlp: dense + moe,
 layers: {kda: {mixer: kda, heads: 1}, attention: {mixer: attention, heads: 2}},
 mlps: {dense: {width: 24}, moe: {type: moe, width: 8, experts: 4}}}
"""


def test_a_pattern_of_mlps_equals_layers_that_are_defined_twice(tmp_path: Path):
    (tmp_path / "stack.yaml").write_text(ONCE)
    (tmp_path / "stack.json").write_text(json.dumps(document.parse(ONCE, ".yaml", "")))
    twice = StackSpec(**document.parse(TWICE, ".yaml", ""))
    kda, mlp = KDA(heads=1), Dense(width=24) + MoE(width=8, experts=4)
    python = StackSpec(width=16, depth=5, vocab=29, pattern=2 * kda + Attention(heads=2) + kda, mlp=mlp)
    torch.manual_seed(0)
    weights = twice.build().state_dict()
    for spec in (StackSpec.load(tmp_path / "stack.yaml"), StackSpec.load(tmp_path / "stack.json"), python):
        assert spec == twice
        assert spec.expand() == twice.expand()
        assert (spec.mlp, spec.mlps) == ("dense + moe", {"dense": Dense(width=24), "moe": MoE(width=8, experts=4)})
        torch.manual_seed(0)
        torch.testing.assert_close(spec.build().state_dict(), weights, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("pattern", "mlps"),
    [
        ("3*dense + moe", [Dense(), Dense(), Dense(), MoE(), Dense(), Dense()]),
        ("dense@[0] else moe", [Dense()] + 5 * [MoE()]),
        ("spread(moe, 2) else none", ["none", MoE(), "none", "none", MoE(), "none"]),
        ("wide + dense(bias=true)", 3 * [Dense(width=99), Dense(bias=True)]),
        ("wide(gated=false)", 6 * [Dense(width=99, gated=False)]),
        ("moe", 6 * [MoE()]),
        ("none", 6 * ["none"]),
        (At(Dense(), [-1], over=2 * MoE(experts=3) + Dense()), 2 * [MoE(experts=3), MoE(experts=3), Dense()]),
    ],
)
def test_an_mlp_pattern_is_expanded_like_the_pattern(pattern, mlps):
    named = {"mlps": {"wide": {"width": 99}}} if "wide" in str(pattern) else {}
    spec = StackSpec(width=16, depth=6, vocab=9, pattern="retnet(heads=1)", mlp=pattern, **named)
    assert [layer.mlp for layer in spec.expand()] == mlps
    assert spec == StackSpec(**spec.model_dump(mode="json"))


def test_the_mlp_of_a_layer_overrides_the_pattern_of_mlps():
    own = {"own": {"mixer": {"mixer": "attention"}, "mlp": {"width": 5}}}
    spec = StackSpec(width=16, depth=4, vocab=9, pattern="retnet + retnet + own", layers=own, mlp="moe + dense")
    assert [layer.mlp for layer in spec.expand()] == [MoE(), Dense(), Dense(width=5), Dense()]


def layers(**fields: object) -> dict[str, object]:
    return {"layers": {"gdn": fields}}


ERRORS = [
    ({"widht": 3}, "widht: unknown key; did you mean 'width'?"),
    (layers(mixer="gated_deltanet", haeds=6), "layers.gdn.haeds: unknown key; did you mean 'heads'?"),
    (layers(mixer="gated_deltanet", heads=0), "layers.gdn.heads must be at least 1"),
    (layers(mixer="gated_deltnet"), "layers.gdn.mixer: unknown mixer 'gated_deltnet'; did you mean 'gated_deltanet'?"),
    (layers(heads=2), "layers.gdn: must be a mapping with a mixer's name"),
    ({"layers": {"gdn": 3}}, "layers.gdn: must be"),
    ({"layers": 3}, "layers: must map names"),
    ({"layers": {"else": GatedDeltaNet()}}, "layers: a layer's name must be a word"),
    (layers(mixer={"mixer": "attention"}, mpl="none"), "layers.gdn.mpl: unknown key; did you mean 'mlp'?"),
    (layers(mixer=[{"mixer": "attention", "haeds": 1}]), "layers.gdn.mixer.0.haeds: unknown key"),
    (layers(mixer=[]), "layers.gdn.mixer: a layer needs at least one mixer"),
    (
        layers(mixer={"mixer": "attention"}, mlp="dense + moe"),
        "layers.gdn.mlp: must be {width: ...}, {ratio: ...}, {type: moe, ...} or none, got 'dense + moe'; only the",
    ),
    (layers(mixer={"mixer": "attention"}, mlp={"widht": 3}), "layers.gdn.mlp.widht: unknown key"),
    ({"layers": {"gdn": {"mixer": {"mixer": "attention"}, 1: 2}}}, "layers.gdn.1: unknown key"),
    ({"norm_eps": float("inf")}, "norm_eps must be a finite number"),
    (
        {"mlp": ["dense", "moe"]},
        "mlp: must be {width: ...}, {ratio: ...}, {type: moe, ...} or none, or a pattern such as dense + moe, got",
    ),
    ({"mlp": {"width": 3, "ratio": 2}}, "mlp: give width or ratio, not both"),
    ({"mlp": {"type": "mo"}}, "mlp.type: must be dense or moe, got 'mo'"),
    ({"mlp": {"type": "moe", "expert": 3}}, "mlp.expert: unknown key; did you mean 'experts'?"),
    ({"mlp": {"type": "moe", "experts": 2, "active": 3}}, "mlp: active must be at most experts = 2, got 3"),
    ({"mlp": {"type": "moe", "shared_gate": True}}, "mlp: shared_gate needs shared_width, the hidden width of"),
    ({"mlps": [1]}, "mlps: must map names to MLPs, got [1]"),
    ({"mlps": {"none": {}}}, "mlps: an MLP's name must be a word other than else, spread, none, got 'none'"),
    ({"mlps": {"wide": {"widht": 3}}}, "mlps.wide.widht: unknown key; did you mean 'width'?"),
    ({"width": 0}, "width must be at least 1, got 0"),
    ({"width": None}, "width must be an integer"),
    ({"pattern": 3}, "pattern: must be text"),
]


@pytest.mark.parametrize(("change", "sentence"), ERRORS)
def test_an_error_names_the_path_and_the_nearest_key(tmp_path: Path, change, sentence):
    with pytest.raises(ConfigError) as caught:
        StackSpec(**SMALL | change)
    assert str(caught.value).startswith(sentence)


PATTERN_ERRORS = [
    ("2*gdnn", "unknown layer 'gdnn'; did you mean 'gdn'?", 2),
    ("gdn + gdn(haeds=3)", "gdn.haeds: unknown key; did you mean 'heads'?", 6),
    ("gdn(heads=0)", "gdn.heads must be at least 1, got 0", 0),
    ("gdn + layer | gdn", "'|' takes single layers", 12),
]


@pytest.mark.parametrize(("pattern", "sentence", "column"), PATTERN_ERRORS)
def test_an_invalid_pattern_raises_an_error_with_a_caret(tmp_path: Path, pattern, sentence, column):
    fields = SMALL | {"pattern": pattern, "layers": {"gdn": {"mixer": "gated_deltanet", "heads": 2}}}
    document.write(tmp_path / "stack.yaml", fields)
    for make in (lambda: StackSpec(**fields), lambda: StackSpec.load(tmp_path / "stack.yaml")):
        with pytest.raises(PatternError) as caught:
            make()
        assert sentence in str(caught.value)
        assert str(caught.value).split("\n")[-1] == " " * (4 + column) + "^"


@pytest.mark.parametrize(
    ("mlp", "sentence", "column"),
    [
        ("2*dense + mo", "mlp: unknown MLP 'mo'; did you mean 'moe'?", 10),
        ("dense + dense(widht=3)", "mlp: dense.widht: unknown key; did you mean 'width'?", 8),
        ("moe(experts=1)", "mlp: moe: active must be at most experts = 1, got 2", 0),
        ("none(width=3)", "mlp: none is no MLP and has no fields", 0),
        ("dense +", "mlp: expected a layer's name, a count or '(', got the end", 7),
    ],
)
def test_an_invalid_mlp_pattern_raises_an_error_with_a_caret(mlp, sentence, column):
    with pytest.raises(PatternError) as caught:
        StackSpec(**SMALL | {"mlp": mlp})
    assert str(caught.value).startswith(sentence)
    assert str(caught.value).split("\n")[-1] == " " * (4 + column) + "^"


def test_an_mlp_pattern_takes_one_mlp_for_each_layer():
    with pytest.raises(
        PatternError, match=r"mlp: '\|' joins parallel mixers, and a layer has one MLP, got 'dense \| moe'"
    ):
        StackSpec(**SMALL | {"mlp": "dense | moe"})
    with pytest.raises(PatternError, match=r"mlp: the MLP of a layer must be a Dense or a MoE, got GatedDeltaNet\("):
        StackSpec(**SMALL | {"mlp": Dense() + GatedDeltaNet()})


def test_parallel_branches_must_be_mixers():
    layers = {"whole": LayerSpec(mixer=GatedDeltaNet(), mlp="none"), "gdn": GatedDeltaNet()}
    with pytest.raises(PatternError, match="takes mixers, got the layer"):
        StackSpec(**SMALL | {"pattern": "gdn | whole", "layers": layers})


def test_a_mixer_that_does_not_fit_the_width_is_named_with_its_layer():
    with pytest.raises(ConfigError, match=r"layer 2 \(attention\): .*heads"):
        StackSpec(**SMALL | {"pattern": "2*gdn + attention(heads=99)"}).build()


def test_an_unknown_preset_suggests_the_nearest():
    with pytest.raises(UnknownNameError, match="did you mean 'gated-deltanet"):
        StackSpec.load("gated-deltanet-h")


def test_the_schema_accepts_what_load_accepts():
    schema = StackSpec.json_schema()
    validator = jsonschema.validators.validator_for(schema)
    validator.check_schema(schema)
    check = validator(schema)
    for name in presets.names():
        assert check.is_valid(presets.read(name))
        assert check.is_valid(StackSpec.load(name).model_dump(mode="json"))
    valid = document.parse(YAML, ".yaml", "")
    assert check.is_valid(valid)
    assert check.is_valid(valid | {"mlp": {"type": "moe", "experts": 4, "width": 8}})
    assert check.is_valid(valid | {"mlp": "dense + moe", "mlps": {"moe": {"type": "moe", "experts": 4}}})
    for change in (
        {"widht": 3},
        {"layers": {"gdn": {"mixer": "gated_deltanet", "haeds": 6}}},
        {"mlp": 4},
        {"mlp": {"type": "mo"}},
        {"mlps": {"moe": {"widht": 3}}},
        {"width": 0},
    ):
        assert not check.is_valid(valid | change), change


def backends_of(model: torch.nn.Module) -> set[str]:
    return {str(module.bound.requested) for module in model.modules() if isinstance(module, Update)}


def test_backends_take_precedence_from_argument_to_layer_to_stack_to_context():
    spec = StackSpec(**SMALL)
    with_backend = StackSpec(**SMALL | {"backend": "compile"})
    layer = LayerSpec(mixer=GatedDeltaNet(heads=2), backend="reference")
    assert backends_of(spec.build()) == {"None"}
    with deltazoo.use_backend("reference"):
        built = spec.build()
        assert backends_of(with_backend.build()) == {"compile"}
    assert backends_of(built) == {"reference"}
    assert backends_of(with_backend.build("reference")) == {"reference"}
    assert backends_of(StackSpec(**dict(with_backend) | {"layers": {"gdn": layer}}).build()) == {"reference"}
    assert backends_of(built.rebind("compile")) == {"compile"}
    with pytest.raises(UnknownNameError, match="did you mean 'reference'"):
        built.rebind("referense")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"layers": {"m": {"mixer": "mamba2", "share": "a"}}}, r"layers\.m\.share: .* nested: \{mixer: \{mixer: NAME"),
        ({"mlp": {"width": 32, "experts": 4}}, r"mlp\.experts: unknown key; a mixture of experts has type: moe"),
    ],
)
def test_a_key_of_another_place_says_where_it_belongs(change: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        StackSpec(**{"width": 64, "depth": 2, "vocab": 16, "pattern": "m + gated_deltanet"} | change)


@pytest.mark.parametrize("width", [200_000, 10**9, 10**30])
def test_a_model_that_does_not_fit_in_memory_is_refused(width):
    spec = StackSpec(width=width, depth=100, vocab=256, pattern="gated_deltanet(heads=4)")
    with pytest.raises(ConfigError, match=rf"(the weights need [\d.,]+ .iB, and this|not enough mem).*width={width}"):
        spec.build()


def test_parts_without_effect_warn_at_the_caller():
    with pytest.warns(ConfigWarning) as warned:
        StackSpec(width=16, depth=3, vocab=9, pattern="3*kda + mla", layers={"spare": {"mixer": "gla"}})
    assert [str(warning.message) for warning in warned] == [
        "layers.spare is not in the pattern '3*kda + mla'",
        "mla in the pattern '3*kda + mla' is not reached: depth=3 has no layer for it",
    ]
    assert {warning.filename for warning in warned} == {__file__}


@pytest.mark.parametrize(
    ("mlp", "sentences"),
    [
        ("3*dense + moe", ["moe in the mlp pattern '3*dense + moe' is not reached: depth=3 has"]),
        ("dense + moe", ["moe in the mlp pattern 'dense + moe' is not reached: depth=3 has"]),
        ("dense", ["mlps.spare is not in the mlp pattern 'dense'"]),
        ({"width": 8}, ["mlps.spare has no effect: mlp is not a pattern"]),
        ("spare + moe + dense", ["moe in the mlp pattern 'spare + moe + dense' is not reached: depth=3 has"]),
    ],
)
def test_mlps_without_effect_warn(mlp, sentences):
    layers = {"own": {"mixer": {"mixer": "kda"}, "mlp": "none"}}  # layer 1
    spare = {"mlps": {"spare": {"width": 9}}} if "spare" in str(sentences) else {}
    with pytest.warns(ConfigWarning) as warned:
        StackSpec(width=16, depth=3, vocab=9, pattern="kda + own", layers=layers, mlp=mlp, **spare)
    reason = " no layer for it without an mlp of its own"
    assert [str(x.message) for x in warned] == [x + reason if x.endswith(" has") else x for x in sentences]


def test_presets_have_no_parts_without_effect():
    assert [sentence for name in presets.names() for sentence in StackSpec.load(name).unused()] == []
