"""Mixers that decode a token up to the output map by kernels of their own: in Triton's interpreter, or on a GPU."""

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from triton_cases import DEVICE, needs_triton

from deltazoo import watch
from deltazoo.backends.ops import gemv
from deltazoo.backends.ops.rms_norm import rms_norm
from deltazoo.backends.update.base import UpdateInputs
from deltazoo.mixers import (
    H3,
    HGRN,
    LRU,
    MLSTM,
    RGLRU,
    RWKV4,
    RWKV6,
    S4D,
    S5,
    ABCAttention,
    Based,
    GatedRFA,
    LinearAttention,
    LonghornDiagonal,
    Mamba,
    MixerConfig,
    PreconditionedDeltaNet,
    PreconditionedKDA,
    Raven,
    ReBased,
    Rodimus,
)
from deltazoo.mixers.core.delta_mixer import DeltaMixer
from deltazoo.mixers.core.mixer import Context, Place
from deltazoo.mixers.parts.feature_maps import FeatureMap
from deltazoo.mixers.parts.gates.beta import Beta
from deltazoo.mixers.parts.ssm import diagonal_ssm
from deltazoo.mixers.parts.ssm.diagonal_ssm import DiagonalSSM

B, T, D = 2, 3, 16
MIXERS: dict[str, tuple[MixerConfig, str]] = {
    "mamba": (Mamba(), "selective_step_kernel"),
    "longhorn_diagonal": (LonghornDiagonal(conv_width=0), "selective_step_kernel"),
    "lru": (LRU(channels=20), "rotating_step_kernel"),
    "s5": (S5(), "rotating_step_kernel"),
    "hgrn": (HGRN(channels=12), "rotating_step_kernel"),
    "rwkv4": (RWKV4(channels=24), "wkv_step_kernel"),
    "rwkv6": (RWKV6(heads=2, mix_rank=3, decay_rank=5), "rwkv_step_kernel"),
    "rg_lru": (RGLRU(channels=40, blocks=2), "rg_lru_step_kernel"),
    "raven": (Raven(heads=2, key_width=8, value_width=12, slots=6, active=3), "routed_slots_step_kernel"),
    "raven with shared keys": (
        Raven(heads=4, key_value_heads=2, key_width=5, value_width=7, slots=9, active=2, router="softmax", scale=None),
        "routed_slots_step_kernel",
    ),
    "rg_lru without a convolution": (RGLRU(conv_width=0, bias=False), "rg_lru_step_kernel"),
    "gated_rfa": (GatedRFA(heads=2, key_width=6, value_width=5, features=3), "normalised_step_kernel"),
    "linear_attention": (LinearAttention(heads=2, key_width=6, value_width=5), "normalised_step_kernel"),
    "based": (Based(heads=2, key_width=6, value_width=5), "normalised_step_kernel"),
    "rebased": (ReBased(heads=2, key_width=6, value_width=5), "normalised_step_kernel"),
    "abc": (ABCAttention(heads=2, key_width=5, value_width=6, slots=3), "softmax_slots_step_kernel"),
    "rodimus": (Rodimus(key_width=5, expand=1, gate_rank=3), "tempered_step_kernel"),
    "preconditioned_deltanet": (
        PreconditionedDeltaNet(heads=2, key_width=6, value_width=5),
        "preconditioned_operands_kernel",
    ),
    "preconditioned_deltanet without a convolution": (
        PreconditionedDeltaNet(
            heads=2, key_width=6, value_width=5, conv_width=0, gate=False, negative_eigenvalues="both"
        ),
        "preconditioned_operands_kernel",
    ),
    "preconditioned_kda": (
        PreconditionedKDA(
            heads=1,
            value_heads=2,
            key_width=6,
            value_width=5,
            decay_bound=-5.0,
            preconditioner_per="key",
            beta_per="value",
        ),
        "preconditioned_operands_kernel",
    ),
    "mlstm": (MLSTM(heads=1, value_heads=2, key_width=6, value_width=5), "normalised_step_kernel"),
}
OTHERS: dict[str, MixerConfig] = {
    "s5": S5(discretisation="bilinear"),
    "hgrn": HGRN(turning=False),
    "rg_lru": RGLRU(conv_width=1),
    "linear_attention": LinearAttention(heads=2, key_width=6, value_width=5, feature="relu"),
    "based": Based(heads=2, key_value_heads=1, key_width=6, value_width=5),
    "rebased": ReBased(heads=2, key_value_heads=1, key_width=6, value_width=5),
    "rwkv6": RWKV6(heads=2, mix_rank=257),
    "raven": Raven(heads=2, key_width=8, slots=6, active=3, gate=True),
    "raven with shared keys": Raven(heads=2, key_width=8, slots=6, active=3, feature="relu"),
    "rodimus": Rodimus(key_width=5, expand=1, conv_width=1),
    "preconditioned_kda": PreconditionedKDA(heads=1, value_heads=2, key_width=6, value_width=5, beta_per="value"),
    "preconditioned_deltanet": PreconditionedDeltaNet(heads=2, key_width=6, value_width=5, conv_width=1),
    "preconditioned_deltanet without a convolution": PreconditionedDeltaNet(heads=1, key_width=6, value_width=520),
}


def build(config: MixerConfig) -> DeltaMixer:
    torch.manual_seed(0)
    mixer = config.build(D, Place(1, 2), "triton").to(DEVICE)
    assert isinstance(mixer, DeltaMixer)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape).to(DEVICE))
    return mixer


@torch.no_grad()
def decode(mixer: DeltaMixer, monkeypatch: pytest.MonkeyPatch, packed: bool = True) -> tuple[list[Tensor], list[str]]:
    """Return the outputs of T tokens after two, and the new state; and the kernels. packed: by products of few rows."""
    x = torch.randn(T, B, 1, D, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    positions = torch.tensor([[100_000], [3]], device=DEVICE)
    with monkeypatch.context() as patch:
        patch.setattr(gemv, "kernel_refusals", lambda *_: [] if packed else ["it is off."])
        state = mixer.init_state(B)
        mixer(x[:2, :, 0].transpose(0, 1), state)
        with watch() as record:
            outputs = [mixer(x_t, state).y for x_t in x] + [mixer(x[0], state, Context(positions=positions)).y]
    return [*outputs, *state.values()], [run.name for run in record.runs]


@needs_triton
@pytest.mark.parametrize("name", [pytest.param("lru", marks=pytest.mark.kernel_smoke), *sorted({*MIXERS} - {"lru"})])
def test_a_step_by_one_kernel_equals_one_by_parts(name, monkeypatch):
    config, kernel = MIXERS[name]
    mixer = build(config)
    separate, others = decode(mixer, monkeypatch, packed=False)
    packed, kernels = decode(mixer, monkeypatch)
    assert kernels.count(kernel) == T + 1 and kernel not in others
    for ours, reference in zip(packed, separate, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)


@needs_triton
@pytest.mark.parametrize(
    "name",
    [
        "mamba",
        "longhorn_diagonal",
        "hgrn",
        "rg_lru without a convolution",
        "linear_attention",
        "rebased",
        "mlstm",
        "abc",
        "rodimus",
        "rwkv6",
        "preconditioned_kda",
        "lru",
        "rwkv4",
    ],
)
@torch.no_grad()
def test_a_residual_step_norms_its_input(name, monkeypatch):
    monkeypatch.setattr(gemv, "kernel_refusals", lambda *_: [])
    mixer, norm = build(MIXERS[name][0]), gemv.Norm(torch.linspace(0.5, 1.5, D, device=DEVICE), 1e-5)
    x = torch.randn(B, 1, D, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    states = [mixer.init_state(B) for _ in range(3)]
    result = mixer.residual_step(x, norm, states[0], Context())
    expected = x + mixer(rms_norm(x, norm.weight, norm.eps), states[1]).y
    if name in ("lru", "rwkv4"):  # a feedthrough; shifted tokens without a norm
        assert result is None
        torch.testing.assert_close(dict(states[0]), dict(states[2]))
        return
    assert result is not None
    torch.testing.assert_close(result.y, expected)
    torch.testing.assert_close(dict(states[0]), dict(states[1]))


@needs_triton
@pytest.mark.parametrize("name", OTHERS)
def test_options_without_a_kernel_decode_by_parts(name, monkeypatch):
    mixer = build(OTHERS[name])
    separate, _ = decode(mixer, monkeypatch, packed=False)
    packed, kernels = decode(mixer, monkeypatch)
    assert MIXERS[name][1] not in kernels
    for ours, reference in zip(packed, separate, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)


@needs_triton
def test_a_layer_norm_before_another_feature_map_decodes_by_parts(monkeypatch):
    mixer = build(ReBased(heads=2, key_width=1, value_width=5))
    mixer.operands["feature"] = FeatureMap("elu+1")  # it also has one feature per channel
    separate, _ = decode(mixer, monkeypatch, packed=False)
    packed, kernels = decode(mixer, monkeypatch)
    assert "normalised_step_kernel" not in kernels
    torch.testing.assert_close(packed, separate, rtol=1e-4, atol=1e-5)


@needs_triton
@pytest.mark.parametrize("config", [S4D(states=3), H3(states=3, shift=4)], ids=["s4d", "h3"])
@torch.no_grad()
def test_a_filter_decodes_with_the_operations_around_it(config, monkeypatch):
    torch.manual_seed(0)
    mixer = config.build(D, backend="triton").to(DEVICE)
    x = torch.randn(T, B, 1, D, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    results = []
    for reasons in (["it is off."], []):
        monkeypatch.setattr(diagonal_ssm, "kernel_refusals", lambda _, reasons=reasons: reasons)
        state = mixer.init_state(B)
        results.append([*(mixer(x_t, state).y for x_t in x), *state.values()])
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)
    (name,) = (name for name, module in mixer.filters.items() if isinstance(module, DiagonalSSM))
    mixer.filters[name].register_forward_hook(lambda module, arguments, output: (0 * output[0], output[1]))
    torch.testing.assert_close(mixer(x[0], mixer.init_state(B)).y, mixer(0 * x[0], mixer.init_state(B)).y)


@torch.no_grad()
def step(mixer: DeltaMixer, context: Context | None = None, rows: int = 1) -> tuple[Tensor, list[str]]:
    """Return the output of one token, and the kernels."""
    x = torch.randn(rows, 1, D, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    with watch() as record:
        y = mixer(x, mixer.init_state(rows), context).y
    return y, [run.name for run in record.runs]


@needs_triton
@pytest.mark.parametrize("name", MIXERS)
def test_a_part_with_a_hook_is_called(name, monkeypatch):
    config, kernel = MIXERS[name]
    mixer = build(config)
    monkeypatch.setattr(gemv, "kernel_refusals", lambda *_: [])
    for path, module in [pair for part in mixer._parts().values() for pair in part.named_modules()]:
        calls = []
        hook = module.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        kernels = step(mixer)[1]
        assert calls and (path or kernel not in kernels), (path, module)
        hook.remove()
    assert kernel in step(mixer)[1]


class Doubled(nn.Linear):
    """A linear map that is not plain."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@needs_triton
@pytest.mark.parametrize("name", MIXERS)
def test_maps_that_are_not_plain_are_called(name, monkeypatch):
    mixer = build(MIXERS[name][0])
    for path, linear in [*mixer.named_modules()]:
        if isinstance(linear, nn.Linear):
            parent, _, child = path.rpartition(".")
            doubled = Doubled(linear.in_features, linear.out_features, linear.bias is not None, device=DEVICE)
            doubled.load_state_dict(linear.state_dict())
            setattr(mixer.get_submodule(parent), child, doubled)
            separate = step(mixer)[0]
            with monkeypatch.context() as patch:
                patch.setattr(gemv, "kernel_refusals", lambda *_: [])
                torch.testing.assert_close(step(mixer)[0], separate, rtol=1e-4, atol=1e-5)
            setattr(mixer.get_submodule(parent), child, linear)


class HalvedBeta(Beta):
    """A beta of at most 1 / 2."""

    def prepare(self, raw: Tensor, inputs: UpdateInputs) -> UpdateInputs:
        inputs = super().prepare(raw, inputs)
        return inputs._replace(beta=inputs.beta / 2)


@needs_triton
def test_other_gates_of_a_preconditioner_are_called(monkeypatch):
    config, kernel = MIXERS["preconditioned_deltanet"]
    mixer = build(config)
    mixer.operands["preconditioner"].beta.__class__ = HalvedBeta
    separate = step(mixer)[0]
    monkeypatch.setattr(gemv, "kernel_refusals", lambda *_: [])
    y, kernels = step(mixer)
    assert kernel not in kernels
    torch.testing.assert_close(y, separate, rtol=1e-4, atol=1e-5)


class Mode(TorchFunctionMode):
    """Calls every function as without the mode."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@needs_triton
def test_modes_autocast_padding_and_packs_decode_by_parts(monkeypatch):
    config, kernel = MIXERS["lru"]
    mixer = build(config)
    monkeypatch.setattr(gemv, "kernel_refusals", lambda *_: [])
    mask = Context(mask=torch.ones(1, 1, dtype=torch.bool, device=DEVICE))
    pack = Context(cu_seqlens=torch.tensor([0, 1], dtype=torch.int32, device=DEVICE))
    for context in (mask, pack):
        assert kernel not in step(mixer, context)[1]
    for manager in (Mode(), torch.autocast(DEVICE, torch.float16)):
        with manager:
            assert kernel not in step(mixer)[1]
    assert kernel in step(mixer)[1]


@needs_triton
@pytest.mark.parametrize("name", MIXERS)
@torch.no_grad()
def test_a_step_is_one_graph(name, monkeypatch):
    torch._dynamo.reset()  # else it counts the forward methods that other tests have compiled
    monkeypatch.setattr(gemv, "kernel_refusals", lambda *_: [])
    mixer, x = build(MIXERS[name][0]), torch.randn(B, 1, D, device=DEVICE)
    states = [mixer.init_state(B) for _ in range(2)]
    compiled = torch.compile(mixer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, states[0]).y, mixer(x, states[1]).y)
    torch.testing.assert_close(dict(states[0]), dict(states[1]))
