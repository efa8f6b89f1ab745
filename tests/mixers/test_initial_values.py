"""Initial values: formulas and distributions of the papers and their code.

The conformance kit (test_matrix.py) compares `init_weights` with an ordinary build.
"""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from deltazoo.backends.io.errors import ConfigError
from deltazoo.mixers import (
    H3,
    HGRN,
    KDA,
    LRU,
    MLSTM,
    RGLRU,
    RWKV6,
    RWKV7,
    S5,
    Comba,
    GatedDeltaNet,
    LFM2Conv,
    LogLinearGDN,
    LogLinearMamba2,
    LonghornDiagonal,
    Mamba,
    Mamba2,
    Mamba3,
    Mesa,
    MomentumDeltaNet,
    PreconditionedDeltaNet,
    PreconditionedKDA,
)
from deltazoo.mixers.core.mixer import Mixer, MixerConfig, Place

WIDTH, PLACE = 2048, Place(2, 5)


def build(config: MixerConfig, width: int = WIDTH) -> Mixer:
    torch.manual_seed(0)
    return config.build(width, PLACE, backend="reference")


def parameter(mixer: Mixer, name: str) -> Tensor:
    return dict(mixer.named_parameters())[name].detach()


def assert_uniform(x: Tensor, low: float, high: float) -> None:
    """Check the bounds, the mean and the standard deviation."""
    span = high - low
    assert low <= x.min() < low + 0.05 * span
    assert high - 0.05 * span < x.max() <= high
    assert abs(float(x.mean()) - (low + high) / 2) < 0.05 * span
    assert abs(float(x.std()) - span / 12**0.5) < 0.03 * span


@pytest.mark.parametrize(
    ("config", "low", "high"),
    [
        (GatedDeltaNet(heads=512), 0, 16),
        (Comba(heads=512), 0, 16),
        (KDA(heads=512), 1, 16),
        (Mamba2(value_heads=512, value_width=4), 1, 16),
    ],
)
def test_decay_rates_and_steps_are_those_of_mamba2(config: MixerConfig, low: float, high: float) -> None:
    mixer = build(config)
    assert_uniform(parameter(mixer, "operands.decay.A_log").exp(), low, high)
    dt = torch.nn.functional.softplus(parameter(mixer, "operands.decay.dt_bias"))
    assert_uniform(dt.log(), math.log(1e-3), math.log(1e-1))


def test_bounded_decay_of_kda_starts_with_a_rate_of_one() -> None:
    """As flash-linear-attention's KimiDeltaAttention(safe_gate=True) and transformers' Glm5Next initialise it."""
    mixer = build(KDA(heads=16, key_width=128, decay_bound=-5.0))
    assert torch.equal(parameter(mixer, "operands.decay.A_log"), torch.zeros(16))
    dt = torch.nn.functional.softplus(parameter(mixer, "operands.decay.dt_bias"))
    assert_uniform(dt.log(), math.log(1e-3), math.log(1e-1))
    inputs = []
    mixer.update.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    mixer(torch.zeros(1, 1, WIDTH))
    # sigmoid(softplus^-1(dt)) = 1 - exp(-dt), with dt at least 1e-3
    torch.testing.assert_close(inputs[0].log_decay.flatten(), 5 * torch.expm1(-dt), rtol=1e-4, atol=0)
    assert inputs[0].log_decay.max() < -4.9e-3


@pytest.mark.parametrize(("config", "low"), [(PreconditionedDeltaNet(heads=512), 0), (PreconditionedKDA(heads=512), 1)])
def test_preconditioner_starts_from_the_values_of_its_code(config: MixerConfig, low: float) -> None:
    """fla's layers precond_gated_deltanet and precond_kda."""
    mixer = build(config)
    for part in ("decay", "preconditioner.decay"):
        assert_uniform(parameter(mixer, f"operands.{part}.A_log").exp(), low, 16)
        dt = torch.nn.functional.softplus(parameter(mixer, f"operands.{part}.dt_bias"))
        assert_uniform(dt.log(), math.log(1e-3), math.log(1e-1))
    torch.testing.assert_close(parameter(mixer, "operands.preconditioner.center"), torch.full((512,), -0.2))


def test_initial_values_of_momentum_deltanet_are_those_of_its_layer() -> None:
    """fla's layers/momentum_deltanet.py."""
    mixer = build(MomentumDeltaNet(heads=512))
    for name, high in (("A_log", 16), ("A_mu_log", 16), ("f_log", 4), ("d_log", 1)):
        assert_uniform(parameter(mixer, f"gates.{name}").exp(), 0, high)
    for name in ("alpha_bias", "mu_bias"):
        dt = torch.nn.functional.softplus(parameter(mixer, f"gates.{name}"))
        assert_uniform(dt.log(), math.log(1e-3), math.log(1e-1))


def test_mamba_starts_from_s4d_real_and_rounds_the_step_rank_up() -> None:
    mixer = build(Mamba(), 40)
    torch.testing.assert_close(parameter(mixer, "operands.selective.A_log").exp(), torch.arange(1.0, 17).expand(80, 16))
    assert parameter(mixer, "operands.selective.to_step.weight").shape == (80, 3)


def test_initial_values_of_mamba3_are_those_of_its_code() -> None:
    mixer = build(Mamba3(value_heads=512, value_width=4))
    dt = torch.nn.functional.softplus(parameter(mixer, "operands.gates.dt_bias"))
    assert_uniform(dt.log(), math.log(1e-3), math.log(1e-1))
    for name in ("operands.norm.q_bias", "operands.norm.k_bias", "operands.norm.k_norm.weight", "outputs.skip.D"):
        assert (parameter(mixer, name) == 1).all()
    assert parameter(mixer, "operands.rotary.proj.weight").shape == (32, WIDTH)


def test_initial_values_of_log_linear_attention_are_those_of_its_code() -> None:
    """A_log, L and dt_bias in HAttentionPreTrainedModel and HGatedDeltaNetPreTrainedModel."""
    mamba2, gdn = build(LogLinearMamba2(value_heads=512, value_width=4)), build(LogLinearGDN(heads=512))
    torch.testing.assert_close(parameter(mamba2, "operands.decay.A_log"), torch.arange(1.0, 513).log())
    assert_uniform(parameter(gdn, "operands.decay.A_log").exp(), 0, 16)
    for mixer in (mamba2, gdn):
        dt = torch.nn.functional.softplus(parameter(mixer, "operands.decay.dt_bias"))
        assert_uniform(dt.log(), math.log(1e-3), math.log(1e-1))
        torch.testing.assert_close(parameter(mixer, "update.gain"), torch.ones(512, 15))


@pytest.mark.parametrize(
    "config", [Mamba(), Mamba2(), LonghornDiagonal(), LogLinearMamba2()], ids=lambda config: config.name
)
def test_bias_of_the_convolution_starts_as_that_of_conv1d(config: MixerConfig) -> None:
    """state-spaces/mamba and Cranial-XIX/longhorn create torch's Conv1d with 4 taps; transformers has zeros."""
    assert_uniform(parameter(build(config, 256), "project.conv.bias"), -0.5, 0.5)
    zero = build(config.model_copy(update={"conv_bias_start": "zero"}), 256)
    assert not parameter(zero, "project.conv.bias").any()


@pytest.mark.parametrize("config", [GatedDeltaNet(heads=512), Mamba2(value_heads=512, value_width=4)])
def test_decays_start_in_the_range_of_the_config(config: MixerConfig) -> None:
    """As `A_init_range` of Mamba2 in state-spaces/mamba."""
    slow = parameter(build(config.model_copy(update={"A_init_range": (0.25, 1.0)})), "operands.decay.A_log")
    assert_uniform(slow.exp(), 0.25, 1.0)


@pytest.mark.parametrize(
    ("interval", "message"),
    [
        ((2, 1), r"A_init_range: must be \(low, high\) with low <= high"),
        ((0, 1), "A_init_range.0 must be greater than 0"),
    ],
)
def test_a_range_of_decays_that_is_no_interval_is_refused(interval: tuple[float, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GatedDeltaNet(A_init_range=interval)


def test_convolution_of_lfm2_starts_normal_on_request() -> None:
    weight = parameter(build(LFM2Conv(conv_std=0.02)), "filters.conv.weight")
    assert abs(float(weight.std()) / 0.02 - 1) < 0.03
    assert float(weight.abs().max()) > 0.06
    assert_uniform(parameter(build(LFM2Conv()), "filters.conv.weight"), -(3**-0.5), 3**-0.5)


def test_initial_values_of_rwkv6_are_the_published_ones() -> None:
    mixer = build(RWKV6(), 128)
    u = parameter(mixer, "outputs.bonus.u").flatten()
    expected = [2 / 4 * (1 - n / 127) + 0.1 * ((n + 1) % 3 - 1) for n in range(128)]
    torch.testing.assert_close(u, torch.tensor(expected))
    w = parameter(mixer, "project.decay.bias")
    torch.testing.assert_close(w, torch.tensor([-6 + 5 * (n / 127) ** (0.7 + 1.3 * 2 / 4) for n in range(128)]))
    assert not parameter(mixer, "project.mix_down.weight").any()
    assert not parameter(mixer, "project.decay.down.weight").any()
    assert_uniform(parameter(mixer, "project.mix_up"), -0.01, 0.01)
    assert_uniform(parameter(mixer, "project.decay.up.weight"), -0.01, 0.01)


def test_initial_values_of_rwkv7_are_the_published_ones() -> None:
    mixer = build(RWKV7(), 128)
    zigzag = [((n % 64) - 31.5) / 31.5 for n in range(128)]
    zigzag = [z * abs(z) for z in zigzag]
    w = [-6 + 6 * (n / 127) ** (1 + (2 / 4) ** 0.3) + 0.5 + 2.5 * z for n, z in enumerate(zigzag)]
    torch.testing.assert_close(parameter(mixer, "project.decay.bias"), torch.tensor(w))
    a = [-0.19 + 0.3 * z + 0.4 * (n / 127 - 0.5) for n, z in enumerate(zigzag)]
    torch.testing.assert_close(parameter(mixer, "project.rate.bias"), torch.tensor(a))
    v = [0.73 - 0.4 * (n / 127 - 0.5) for n in range(128)]
    torch.testing.assert_close(parameter(mixer, "project.value.bias"), torch.tensor(v))
    for name, spread in (("to_r", 0.5), ("to_k", 0.05), ("to_v", 0.5)):
        assert_uniform(parameter(mixer, f"project.{name}.weight"), -spread * 128**-0.5, spread * 128**-0.5)


@pytest.mark.parametrize("config", [RWKV6(), RWKV7()], ids=lambda config: config.name)
def test_group_norm_of_rwkv_starts_at_a_power_of_the_layer(config: MixerConfig) -> None:
    """((1 + l) / n_layer) ** 0.7: `generate_init_weight` of RWKV-v5 and of RWKV-v7/train_temp, src/model.py."""
    for layer, weight in enumerate([0.324131, 0.526553, 0.699368, 0.855388, 1.0]):
        mixer = config.build(128, Place(layer, 5), backend="reference")
        for _ in range(2):
            torch.testing.assert_close(
                parameter(mixer, "outputs.norm.weight"), torch.full((128,), weight), rtol=2e-6, atol=0
            )
            assert not parameter(mixer, "outputs.norm.bias").any()
            torch.nn.init.normal_(mixer.get_parameter("outputs.norm.weight"))
            mixer.init_weights()


def test_initial_angles_of_hgrn_are_the_published_ones() -> None:
    turn = parameter(build(HGRN(channels=8), 8), "operands.turn_in.turn")
    torch.testing.assert_close(turn, torch.tensor([10000 ** (-2 * i / 8) for i in range(8)]))


def test_gate_weights_of_griffin_are_normal_and_its_decays_uniform() -> None:
    mixer = build(RGLRU(blocks=8))
    weight = parameter(mixer, "operands.real.weight")
    assert abs(float(weight.std()) - (2048 / 8) ** -0.5) < 0.01 * float(weight.std())
    assert_uniform((-8 * torch.nn.functional.softplus(parameter(mixer, "operands.real.L"))).exp(), 0.9, 0.999)


def test_maps_of_griffin_have_the_scale_of_recurrentgemma_and_zero_biases() -> None:
    """`RecurrentBlock` in torch/modules.py, `Conv1D` in torch/layers.py, and their arguments in torch/griffin.py."""
    mixer = build(RGLRU(channels=1024, conv_width=4))
    maps = {
        "project.to_v": (1 / 2048) ** 0.5,
        "project.conv": (0.01 / 4) ** 0.5,
        "outputs.gate.proj": (1 / 2048) ** 0.5,
        "out": (2 / 5 / 1024) ** 0.5,
    }
    for name, std in maps.items():
        weight = parameter(mixer, f"{name}.weight")
        assert abs(float(weight.std()) / std - 1) < 0.02, name
        assert float(weight.abs().max()) > 3 * std, name  # normal, not uniform
        assert not parameter(mixer, f"{name}.bias").any(), name
    without = dict(build(RGLRU(bias=False), 8).named_parameters())
    assert not {"project.to_v.bias", "outputs.gate.proj.bias", "out.bias"} & without.keys()


def test_initial_eigenvalues_of_lru_lie_on_a_ring() -> None:
    mixer = build(LRU(ring=(0.5, 0.9)))
    square = (-2 * parameter(mixer, "operands.decay.nu").exp()).exp()
    assert_uniform(square, 0.25, 0.81)
    torch.testing.assert_close(parameter(mixer, "operands.decay.gamma").exp(), (1 - square).sqrt(), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("config", "into", "out"),
    [(LRU(channels=128), (2 * 256) ** -0.5, 128**-0.5), (S5(channels=128), (4 * 128) ** -0.5, (2 / 128) ** 0.5)],
)
def test_maps_of_complex_states_have_the_published_scale(config: MixerConfig, into: float, out: float) -> None:
    mixer = build(config, 256)
    assert abs(float(parameter(mixer, "project.to_v.weight").std()) / into - 1) < 0.02
    assert abs(float(parameter(mixer, "out.weight").std()) / out - 1) < 0.02


def test_mlstm_starts_with_a_closed_input_gate_and_an_open_forget_gate() -> None:
    mixer = build(MLSTM(heads=4), 16)
    assert not parameter(mixer, "operands.gates.proj.weight").any()
    assert parameter(mixer, "operands.gates.proj.bias").tolist() == [-10, -10, -10, -10, 3, 4, 5, 6]


def test_lambda_of_mesa_is_one_and_its_gates_have_a_bias() -> None:
    mixer = build(Mesa(heads=4), 16)
    log_lambda = parameter(mixer, "operands.solve.log_lambda")
    torch.testing.assert_close(0.25 + torch.nn.functional.softplus(log_lambda), torch.ones(4, 4))
    assert parameter(mixer, "operands.beta.proj.bias").shape == (4,)
    assert parameter(mixer, "operands.decay.proj.bias").shape == (4,)


def test_current_tap_of_the_h3_shift_is_normal() -> None:
    weight = parameter(build(H3(states=1, shift=16)), "filters.shift.weight")
    assert_uniform(weight[:, :-1], -0.25, 0.25)
    assert 0.9 < float(weight[:, -1].std()) < 1.1


@pytest.fixture
def default_dtype() -> Iterator[Callable[[torch.dtype], None]]:
    yield torch.set_default_dtype
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_weights_of_16_bits_are_the_finite_rounded_draw_of_float32(
    config: MixerConfig, dtype: torch.dtype, default_dtype: Callable[[torch.dtype], None]
) -> None:
    torch.manual_seed(0)
    expected = config.build(24, Place(1, 4), "reference").to(dtype).state_dict()
    default_dtype(dtype)
    torch.manual_seed(0)
    built = config.build(24, Place(1, 4), "reference").state_dict()
    with torch.device("meta"):
        mixer = config.build(24, Place(1, 4), "reference")
    default_dtype(torch.float32)
    mixer.to_empty(device="cpu")
    torch.manual_seed(0)
    mixer.init_weights()
    initialised = mixer.state_dict()
    for name, tensor in expected.items():
        assert tensor.isfinite().all(), name
        for other in (built[name], initialised[name]):
            assert other.dtype == tensor.dtype, name
            assert torch.equal(other, tensor), name


@pytest.mark.parametrize("seed", range(20))
def test_lru_of_16_bits_has_finite_weights(seed: int, default_dtype: Callable[[torch.dtype], None]) -> None:
    default_dtype(torch.bfloat16 if seed % 2 else torch.float16)
    torch.manual_seed(seed)
    for name, tensor in LRU().build(256, backend="reference").state_dict().items():
        assert tensor.isfinite().all(), name


@pytest.mark.parametrize("bound", ["low", "high"])
def test_draws_at_the_bounds_of_their_interval_give_finite_weights(
    config: MixerConfig, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw(self: Tensor, low: float = 0.0, high: float = 1.0, generator: None = None) -> Tensor:
        return self.fill_(low if bound == "low" else high)

    monkeypatch.setattr(Tensor, "uniform_", draw)
    for name, tensor in config.build(24, Place(1, 4), "reference").state_dict().items():
        assert tensor.isfinite().all(), name


def test_init_weights_refuses_a_module_without_reset_parameters() -> None:
    mixer = GatedDeltaNet().build(16, backend="reference")
    mixer.extra = torch.nn.ParameterList([torch.zeros(1)])
    with pytest.raises(TypeError, match=r"ParameterList .* needs a method reset_parameters"):
        mixer.init_weights()
