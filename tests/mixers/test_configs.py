"""Mixer configs: serialisation, validation errors, and costs."""

import json
import pickle
import re

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from deltazoo.backends.io.errors import (
    ConfigError,
    DtypeError,
    OperandError,
    PluginError,
    ShapeError,
    StateError,
    UnknownNameError,
    ValueRangeError,
)
from deltazoo.backends.update import registry
from deltazoo.mixers import (
    Attention,
    Context,
    DeltaNet,
    DeltaProduct,
    GatedDeltaNet,
    GatedDeltaProduct,
    LinearAttention,
    Mamba2,
    Mamba3,
    Mesa,
    MixerConfig,
    RetNet,
    SlidingWindow,
)
from deltazoo.mixers.core import state as states
from deltazoo.mixers.core.config import dump, parse
from deltazoo.mixers.core.delta_mixer import DeltaMixer
from deltazoo.mixers.core.mixer import Mixer
from deltazoo.mixers.core.update import Update
from deltazoo.mixers.families.update import UpdateConfig, update_flops


def test_json_round_trip_gives_an_equal_config(config: MixerConfig) -> None:
    text = json.dumps(dump(config))
    assert parse(json.loads(text)) == config
    assert json.loads(text)["mixer"] == config.name


def test_missing_fields_have_their_defaults(one_of_each: MixerConfig) -> None:
    assert parse({"mixer": one_of_each.name}) == type(one_of_each)()


class UnregisteredWindow(SlidingWindow):
    """Has the `name` of a registered mixer, but is another class."""


def test_an_unregistered_config_is_tagged_with_its_module_and_class() -> None:
    assert dump(UnregisteredWindow(window=7))["mixer"] == f"{__name__}:UnregisteredWindow"


UNTRUSTED = {"mixer": "deltazoo.mixers.deltanet:DeltaNet", "heads": 3}


@pytest.mark.parametrize("data", [UNTRUSTED, {"mixer": "mom", "memory": UNTRUSTED}], ids=["alone", "inside mom"])
def test_a_module_and_class_in_data_needs_trust(data: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="pass trust=True"):
        parse(data)
    config = parse(data, trust=True)
    assert getattr(config, "memory", config) == DeltaNet(heads=3)


def test_state_dict_round_trip_gives_equal_outputs(config: MixerConfig, x: Tensor) -> None:
    mixer, other = (config.build(x.shape[2], backend="reference").double() for _ in range(2))
    assert not torch.allclose(other(x)[0], mixer(x)[0])
    other.load_state_dict(mixer.state_dict())
    assert torch.equal(other(x)[0], mixer(x)[0])


def test_pickle_round_trip_gives_equal_outputs(mixer: Mixer, x: Tensor) -> None:
    assert torch.equal(pickle.loads(pickle.dumps(mixer))(x)[0], mixer(x)[0])


def test_equal_seeds_give_equal_weights(config: MixerConfig) -> None:
    torch.manual_seed(5)
    first = config.build(24)
    torch.manual_seed(5)
    for left, right in zip(first.parameters(), config.build(24).parameters(), strict=True):
        assert torch.equal(left, right)


def test_default_fields_build_at_ordinary_widths(one_of_each: MixerConfig) -> None:
    for width in (64, 256):
        x = torch.randn(1, 2, width)
        assert type(one_of_each)().build(width, backend="reference")(x)[0].isfinite().all()


def test_cost_equals_the_bytes_of_the_state(config: MixerConfig) -> None:
    cost = config.cost(24)
    mixer = config.build(24)
    for capacity in (5, 11):  # at least a window
        assert cost.state_bytes + capacity * cost.cache_bytes == states.nbytes(mixer.init_state(1, capacity))


def test_cost_is_at_least_the_flops_of_the_linear_maps(config: MixerConfig) -> None:
    module = config.build(24)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, torch.nn.Linear):
                layer(torch.randn(1, layer.in_features))
    assert config.cost(24).flops >= counter.get_total_flops() > 0


def test_cost_equals_the_flops_that_torch_counts_outside_the_update(update_config: UpdateConfig) -> None:
    config = update_config
    if isinstance(config, Mesa):
        pytest.skip("torch does not count the products of its solve; see the next test")
    mixer = config.build(24, backend="reference")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        mixer(torch.randn(1, 1, 24))
    update_counted = sum(
        sum(counts.values())
        for name, counts in counter.get_flop_counts().items()
        if name.rpartition(".")[2] == "update"
    )
    updates = sum(update_flops(m.spec, m.shape) for m in mixer.modules() if isinstance(m, Update))
    assert config.cost(24).flops - updates == counter.get_total_flops() - update_counted


def test_cost_of_a_solve_is_a_matrix_vector_product_per_head_and_step() -> None:
    more, less = (Mesa(heads=2, key_width=4, steps=steps).cost(24).flops for steps in (9, 8))
    assert more - less == 2 * 2 * 4 * 4


def test_equation_and_source_are_stated(config: MixerConfig) -> None:
    assert "o_t = " in config.equation()
    assert re.search(r"arXiv|[\w-]+/[\w-]+", config.source), "neither a paper nor the authors' repository"


def test_build_on_the_meta_device_allocates_no_memory(config: MixerConfig) -> None:
    with torch.device("meta"):
        mixer = config.build(4096)
    assert all(parameter.is_meta for parameter in mixer.parameters())
    assert all(leaf.is_meta for leaf in tree_leaves(mixer.init_state(1, 8)))


def test_initial_decay_and_step_follow_the_papers() -> None:
    torch.manual_seed(0)
    decay = Mamba2(value_heads=512).build(64, backend="reference").operands["decay"]
    dt = torch.nn.functional.softplus(decay.dt_bias)
    assert 1e-3 * 0.99 < dt.min() < 1.2e-3
    assert 0.8e-1 < dt.max() < 1e-1 * 1.01
    assert abs(float(dt.detach().log10().mean()) + 2) < 0.1  # uniform in the logarithm
    assert 1 <= decay.A_log.exp().min() < 1.5
    assert 15 < decay.A_log.exp().max() <= 16


@pytest.mark.parametrize("config_type", [DeltaProduct, GatedDeltaProduct])
def test_deltaproduct_has_the_shapes_of_flas_layer(config_type: type[MixerConfig]) -> None:
    """The defaults of fla's layer: hidden_size=2048, num_heads=6, head_dim=256, expand_v=2, with its gate."""
    with torch.device("meta"):
        mixer = config_type(heads=6, key_width=256, value_width=512).build(2048, backend="reference")
    shapes = {name: tuple(parameter.shape) for name, parameter in mixer.named_parameters()}
    assert shapes["project.to_qkv.weight"] == (1536 + 2 * 1536 + 2 * 3072, 2048)
    assert shapes["operands.beta.proj.weight"] == (2 * 6, 2048)
    assert shapes["outputs.gate.proj.weight"] == (3072, 2048)
    assert shapes["outputs.norm.weight"] == (512,)
    assert shapes["out.weight"] == (2048, 3072)


def test_rebind_changes_the_backend(one_of_each: MixerConfig) -> None:
    mixer = one_of_each.build(24, backend="reference")
    if not isinstance(mixer, DeltaMixer):
        pytest.skip("has no rebind")
    with pytest.raises(UnknownNameError, match="unknown backend 'referense'; did you mean 'reference'"):
        mixer.rebind("referense")
    mixer.rebind("reference")
    assert mixer.update.bound.requested == "reference"


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ({"mixer": "gated_deltanet", "head": 4}, ConfigError, "has no field 'head'; did you mean 'heads'"),
        (
            {"mixer": "gated_deltanet", "heads": 0},
            ConfigError,
            "heads must be at least 1, got 0",
        ),
        ({"mixer": "gated_deltanett"}, UnknownNameError, "did you mean 'gated_deltanet'"),
        ({"heads": 3}, ConfigError, "needs the key 'mixer'"),
        ({"mixer": 3}, ConfigError, "needs the key 'mixer'"),
        ("gated_deltanet", ConfigError, "must be a mapping"),
        (
            {"mixer": "deltanet", "reparam": "efla", "negative_eigenvalues": "both"},
            ConfigError,
            "its eigenvalue is positive by construction",
        ),
        ({"mixer": "linear_attention", "feature": "silu"}, ConfigError, "normaliser=True needs a positive feature"),
        ({"mixer": "attention", "heads": 4, "key_value_heads": 3}, ConfigError, "must divide heads = 4, got 3"),
    ],
)
def test_invalid_data_is_refused_with_a_reason(data: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        parse(data)


def test_a_trusted_name_must_be_a_mixer_config() -> None:
    with pytest.raises(PluginError, match=r"must be a subclass of deltazoo.MixerConfig"):
        parse({"mixer": "collections:OrderedDict"}, trust=True)
    with pytest.raises(PluginError, match="cannot be loaded"):
        parse({"mixer": "no_such_module:Thing"}, trust=True)


def test_invalid_fields_are_refused_with_a_reason() -> None:
    with pytest.raises(ConfigError, match="RetNet: negative_eigenvalues: unknown field"):
        RetNet(negative_eigenvalues="both")
    with pytest.raises(ConfigError, match=r"GatedDeltaNet\.heads cannot be set: a config does not change"):
        GatedDeltaNet().heads = 3
    with pytest.raises(ConfigError, match="value_heads must be a multiple of heads = 2, got 3"):
        GatedDeltaNet(heads=2, value_heads=3).build(64)
    with pytest.raises(ConfigError, match="key_width must be at least 1, got 0"):
        GatedDeltaNet(heads=100).build(64)
    with pytest.raises(ConfigError, match="heads must be at most width = 8"):
        Attention(heads=16).build(8)
    with pytest.raises(ConfigError, match=r"rotary_fraction must rotate at least two channels of a key, got 0.5 of 3"):
        Mamba3(key_width=3, value_width=4).build(8)


def test_invalid_calls_are_refused_with_a_reason(mixer: Mixer, x: Tensor) -> None:
    pack = torch.tensor([0, 9], dtype=torch.int32)
    mask = torch.ones(3, 9, dtype=torch.bool)
    cases: list[tuple[Tensor, Context, type[Exception], str]] = [
        (x[..., :5], Context(), ShapeError, r"x must have shape \[B, T, 24\], got \[3, 9, 5\]"),
        (x[0], Context(), ShapeError, "x must have shape"),
        (x.long(), Context(), DtypeError, "x must be float64, float32, bfloat16 or float16, got torch.int64"),
        (
            x.half(),
            Context(),
            DtypeError,
            "x must be torch.float(64|32) like the weights, or torch.autocast must be on",
        ),
        (x, Context(cu_seqlens=pack), ShapeError, "need B = 1, got B = 3"),
        (x[:1], Context(cu_seqlens=pack.long()), DtypeError, "must be int32"),
        (x[:1], Context(cu_seqlens=pack - 1), ValueRangeError, "must rise from 0 to T = 9, got"),
        (x[:1], Context(cu_seqlens=pack, mask=mask[:1]), OperandError, "packed sequences have no padding"),
        (x, Context(mask=mask[:, 1:]), ShapeError, "context.mask must have shape"),
        (x, Context(mask=mask.int()), DtypeError, "context.mask must be torch.bool"),
        (x, Context(positions=mask.int()), DtypeError, "context.positions must be torch.int64"),
        (x, Context(mask=mask & (torch.arange(9) != 4)), ValueRangeError, "padding must be left or right"),
    ]
    for tokens, context, error, message in cases:
        with pytest.raises(error, match=message):
            mixer(tokens, None, context)


def test_invalid_states_are_refused_with_a_reason() -> None:
    x, other = torch.randn(1, 2, 32), LinearAttention().build(32, backend="reference")
    with pytest.raises(StateError, match=r"\['project', 'gated_deltanet.update'\], got \['linear_attention.update'\]"):
        GatedDeltaNet().build(32, backend="reference")(
            x, LinearAttention().build(32, backend="reference").init_state(1)
        )
    with pytest.raises(StateError, match="needs the maximum length of a sequence"):
        Attention().build(32).init_state(1)
    mixer = Attention().build(32)
    with pytest.raises(StateError, match="the cache is full: its capacity is 3 tokens"):
        mixer(torch.randn(1, 4, 32), mixer.init_state(1, 3))
    with pytest.raises(StateError, match="must have at most window = 5 slots, got 6"):
        SlidingWindow(window=5).build(32)(x, SlidingWindow(window=6).build(32).init_state(1))
    with pytest.raises(StateError, match="must be a KVCache"):
        Attention().build(32)(x, other.init_state(1))


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("attention", {"scale": -1.0}, "scale.*greater than 0"),
        ("attention", {"norm_eps": float("inf")}, "norm_eps.*finite"),
        ("lru", {"phase": float("inf")}, "phase.*finite"),
    ],
)
def test_field_out_of_range_is_refused_by_name(name: str, fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        registry.load(registry.MIXERS, name)(**fields)


@pytest.mark.parametrize("ring", [(0.9, 0.1), (-1.0, 2.0), (0.5, float("nan"))])
def test_ring_of_lru_must_be_increasing(ring: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match="ring must be two increasing numbers between 0 and 1, got"):
        registry.load(registry.MIXERS, "lru")(ring=ring).build(32)


def test_blocks_of_rg_lru_must_divide_its_channels() -> None:
    rg_lru = registry.load(registry.MIXERS, "rg_lru")
    for width in (100, 640, 800, 1000):
        assert rg_lru().build(width, backend="reference")(torch.randn(1, 2, width))[0].shape == (1, 2, width)
    with pytest.raises(ConfigError, match="blocks must divide the 32 channels, got 7"):
        rg_lru(blocks=7).build(32)


def test_a_width_that_is_no_integer_is_refused(one_of_each: MixerConfig) -> None:
    with pytest.raises(ValueRangeError, match="width must be an integer >= 1, got '64'"):
        one_of_each.build("64")
