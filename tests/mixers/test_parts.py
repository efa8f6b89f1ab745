"""Each part in isolation, against torch or its equation."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from equations import assert_same_with_gradients
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.update.base import UpdateInputs
from deltazoo.backends.update.dispatch import update
from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.delta_mixer import DeltaMixer
from deltazoo.mixers.core.initialization import init_weights
from deltazoo.mixers.core.mixer import Context, Place
from deltazoo.mixers.core.part import HeadShape, OutputArguments, Parts, project_jointly
from deltazoo.mixers.core.sequences import left_align, mask_padding, segment_cumsum, undo_left_align
from deltazoo.mixers.gated_deltanet import GatedDeltaNet
from deltazoo.mixers.parts.attention.slot_attention import SoftmaxSlots
from deltazoo.mixers.parts.convolution import ShortConv
from deltazoo.mixers.parts.feature_maps import FeatureMap, RandomFourierFeatures, phi
from deltazoo.mixers.parts.gates.decays import FixedDecay, SigmoidDecay, SlopeDecay, Slopes, SoftplusDecay
from deltazoo.mixers.parts.gates.exponential_gating import ExponentialGate
from deltazoo.mixers.parts.gates.rg_lru import RGLRUGate
from deltazoo.mixers.parts.low_rank import Ranks
from deltazoo.mixers.parts.memory.conjugate_gradient import ConjugateGradientSolve
from deltazoo.mixers.parts.memory.feedback import Feedback
from deltazoo.mixers.parts.memory.log_linear import LogLinearUpdate
from deltazoo.mixers.parts.memory.preconditioner import Preconditioner
from deltazoo.mixers.parts.norms import HeadNorm, RMSNorm, UnitNorm
from deltazoo.mixers.parts.projections import ChannelProjection, QKVProjection
from deltazoo.mixers.parts.rotary import apply_rotary, rotation_at
from deltazoo.mixers.parts.rwkv.rwkv4 import RWKV4Projection, WKVBonus, WKVGate
from deltazoo.mixers.parts.rwkv.rwkv6 import RWKV6Projection, initial_bonus
from deltazoo.mixers.parts.rwkv.rwkv7 import RWKV7Projection
from deltazoo.mixers.parts.skips import Bonus, Feedthrough, Skip
from deltazoo.mixers.parts.ssm.complex_decays import LRUDecay, S5Decay
from deltazoo.mixers.parts.ssm.complex_states import ToRotatingFrame
from deltazoo.mixers.parts.ssm.diagonal_ssm import DiagonalSSM
from deltazoo.mixers.parts.ssm.mamba3 import BiasedNorm, TrapezoidalGates, accumulated_angle
from deltazoo.mixers.parts.ssm.selective import SelectiveOperands

SHAPE = HeadShape(width=8, heads=2, value_heads=4, key_width=6, value_width=5)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def operands(B: int = 2, T: int = 7) -> UpdateInputs:
    return UpdateInputs(
        torch.randn(B, T, 2, 6, dtype=torch.float64),
        torch.randn(B, T, 2, 6, dtype=torch.float64),
        torch.randn(B, T, 4, 5, dtype=torch.float64),
    )


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_short_conv_equals_conv1d(taps: int, bias: bool) -> None:
    conv = ShortConv(6, taps, bias).double()
    x = torch.randn(2, 9, 6, dtype=torch.float64, requires_grad=True)
    expected = F.conv1d(x.mT, conv.weight[:, None], conv.bias, padding=taps - 1, groups=6).mT[:, :9]
    (actual,), state = conv(x, None, Context())
    assert state is None
    assert_same_with_gradients(actual, expected, [x, *conv.parameters()], 1e-12)


def test_short_conv_of_zero_packed_sequences_is_empty() -> None:
    conv = ShortConv(6, 4)
    (y,), state = conv(
        torch.randn(1, 0, 6), torch.zeros(0, 3, 6), Context(cu_seqlens=torch.zeros(1, dtype=torch.int32))
    )
    assert y.numel() == 0
    assert state.shape == (0, 3, 6)


def test_rms_norm_equals_torch() -> None:
    norm = RMSNorm(12, eps=1e-3).double()
    with torch.no_grad():
        norm.weight.normal_()
    x = torch.randn(3, 5, 12, dtype=torch.float64)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (12,), norm.weight, 1e-3), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("over", ["head", "group"])
def test_head_norm_equals_torch(over: str) -> None:
    o = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    arguments = OutputArguments(o, operands(), operands())
    grouped = o if over == "head" else o.view(2, 3, 2, 10)
    for kind in ("rms", "layer"):
        norm = HeadNorm(SHAPE, 1e-3, kind, over).double()
        with torch.no_grad():
            norm.weight.normal_()
        if kind == "rms":
            plain = F.rms_norm(grouped, grouped.shape[-1:], None, 1e-3)
        else:
            plain = F.layer_norm(grouped, grouped.shape[-1:], None, None, 1e-3)
        weight = norm.weight if over == "head" else norm.weight.view(2, 10)
        torch.testing.assert_close(
            norm(o, arguments, None, Context())[0], (plain * weight).view_as(o), rtol=1e-12, atol=0
        )
        unweighted = HeadNorm(SHAPE, 1e-3, kind, over, weighted=False)
        torch.testing.assert_close(unweighted(o, arguments, None, Context())[0], plain.view_as(o), rtol=1e-12, atol=0)


def test_unit_norm_divides_by_the_norm_and_maps_zero_to_zero() -> None:
    inputs = operands()
    inputs.k[0, 0, 0] = 0
    for norm, order in (("l2", 2), ("l1", 1)):
        q, k, *_ = UnitNorm(norm)(inputs.q, inputs, None, Context())[0]
        lengths = torch.linalg.vector_norm(k, order, dim=-1)
        assert lengths[0, 0, 0] == 0
        torch.testing.assert_close(lengths.flatten()[1:], torch.ones(27, dtype=torch.float64), rtol=1e-5, atol=0)
        assert torch.equal(UnitNorm(norm, "q")(inputs.q, inputs, None, Context())[0].k, inputs.k)
        torch.testing.assert_close(q, inputs.q / torch.linalg.vector_norm(inputs.q, order, -1, True), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_decays_are_finite_and_at_most_one(dtype: torch.dtype) -> None:
    x = (torch.randn(2, 50, 8) * 30).to(dtype)
    inputs = UpdateInputs(*(stream.to(dtype) for stream in operands(2, 50)[:3]))
    for part in (
        SoftplusDecay(SHAPE),
        SoftplusDecay(SHAPE, "channel", rank=2),
        SigmoidDecay(SHAPE),
        SigmoidDecay(SHAPE, "head", rank=None, temperature=1.0),
        FixedDecay(SHAPE),
        SoftmaxSlots(SHAPE, 3),
    ):
        log_decay = part.to(dtype)(x, inputs, None, Context())[0].log_decay
        assert log_decay.isfinite().all()
        assert log_decay.max() <= 0
        assert log_decay.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_fixed_decay_equals_the_decay_of_retnet() -> None:
    log_decay = FixedDecay(SHAPE)(torch.empty(1, 1, 8), operands(), None, Context())[0].log_decay
    expected = [1 - 2.0**-5, 1 - 2.0**-6, 1 - 2.0**-7, 1 - 2.0**-8]
    torch.testing.assert_close(log_decay.exp(), torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("slopes", "exponents"),
    [
        # -log2 of _build_slope_tensor(n) in OpenNLPLab's lightning-attention
        ("alibi", [4, 8]),
        ("alibi", [4, 8, 2]),
        ("alibi", [2, 4, 6, 8, 1, 3]),
        ("alibi", [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),
        ("alibi", [*(i / 2 for i in range(1, 17)), 0.25, 0.75, 1.25, 1.75]),
        # of get_slope_rate in transformers' MiniMaxLightningAttention
        ("power", [4, 8]),
        ("power", [8 / 6 * i for i in range(1, 7)]),
    ],
)
@pytest.mark.parametrize(("layer", "depth", "factor"), [(0, 1, 1 + 1e-5), (2, 5, 0.5 + 1e-5), (4, 5, 1e-5)])
def test_slopes_equal_those_of_lightning_attention(
    slopes: Slopes, exponents: list[float], layer: int, depth: int, factor: float
) -> None:
    decay = SlopeDecay(SHAPE._replace(value_heads=len(exponents)), Place(layer, depth), slopes)
    log_decay = decay(torch.empty(1, 1, 8), operands(), None, Context())[0].log_decay
    expected = [-factor * 2.0**-exponent for exponent in exponents]
    torch.testing.assert_close(log_decay, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


def test_rotary_preserves_norms_and_depends_on_relative_positions_only() -> None:
    q, k = torch.randn(2, 1, 1, 1, 10, dtype=torch.float64)

    def rotated(y: Tensor, position: int) -> Tensor:
        return apply_rotary(y, rotation_at(torch.tensor([[position]]), 4, 100.0, torch.float64))

    def score(t: int, s: int) -> Tensor:
        return (rotated(q, t) * rotated(k, s)).sum()

    torch.testing.assert_close(score(7, 3), score(104, 100), rtol=1e-12, atol=0)
    assert not torch.isclose(score(7, 3), score(7, 4))
    torch.testing.assert_close(rotated(q, 5).norm(), q.norm(), rtol=1e-12, atol=0)
    assert torch.equal(rotated(q, 5)[..., 8:], q[..., 8:])


def test_rotary_angles_at_large_positions_are_as_exact_as_at_small_ones() -> None:
    position, half, theta = 1_000_003, 8, 10000.0
    angles = [position * theta ** (-pair / half) for pair in range(half)]
    for tokens in (1, 2):  # one token is traced, several are an operator
        rotation = rotation_at(torch.full((1, tokens), position), half, theta, torch.float32)
        for values, function in zip(rotation, (math.cos, math.sin), strict=True):
            expected = torch.tensor([function(angle) for angle in angles], dtype=torch.float64)
            assert (values[0, -1].double() - expected).abs().max() < 1e-6


def test_rotations_of_several_positions_are_those_of_each() -> None:
    position = torch.tensor([[0, 1, 77], [5, 4, 3]])
    together = rotation_at(position, 4, 100.0, torch.float64)
    for t in range(3):
        alone = rotation_at(position[:, t : t + 1], 4, 100.0, torch.float64)
        assert all(torch.equal(x[:, t : t + 1], y) for x, y in zip(together, alone, strict=True))


def test_accumulated_angles_in_float32_are_exact_for_long_sequences() -> None:
    turn = 0.5 * torch.rand(1, 20000, 1, 1)
    angle = accumulated_angle(turn, None, Context())
    assert angle.min() >= 0
    assert angle.max() <= 2 * math.pi
    exact = turn.double().cumsum(1)
    assert float((angle.sin() - exact.sin()).abs().max()) < 1e-6


def test_an_accumulated_angle_that_is_not_finite_stays_in_its_sequence() -> None:
    turn, context = torch.rand(1, 7, 1, 1), Context(cu_seqlens=torch.tensor([0, 3, 7], dtype=torch.int32))
    expected = accumulated_angle(turn, None, context)
    turn[0, 1] = torch.inf
    angle = accumulated_angle(turn, None, context)
    assert angle[0, 1].isnan()
    torch.testing.assert_close(angle[:, 3:], expected[:, 3:])


def test_dpfp_is_nonnegative_and_six_times_as_wide() -> None:
    part = FeatureMap("dpfp")
    actual = part(torch.empty(0), operands(), None, Context())[0]
    assert part.resize_heads(SHAPE).key_width == actual.k.shape[-1] == 36
    assert actual.k.min() >= 0


@pytest.mark.parametrize("key_width", [1, 2, 5, 16])
def test_taylor_features_give_the_second_order_expansion_of_the_exponential(key_width: int) -> None:
    q, k = 3 * torch.randn(2, 50, key_width, dtype=torch.float64)
    a = q @ k.mT / key_width**0.5
    features = phi("taylor", q), phi("taylor", k)
    torch.testing.assert_close(features[0] @ features[1].mT, 1 + a + a**2 / 2, rtol=1e-12, atol=1e-12)
    # The size of the state in the paper's code is 1 + K + K^2, with both orders of each pair.
    assert features[0].shape[-1] == {1: 3, 2: 6, 5: 21, 16: 153}[key_width]
    assert FeatureMap("taylor").resize_heads(SHAPE._replace(key_width=key_width)).key_width == features[0].shape[-1]


@pytest.mark.parametrize("decay", ["head", "channel", "rate", "fixed"])
def test_masked_tokens_leave_the_state_unchanged(decay: str) -> None:
    """Every transition and decay, also combinations that no mixer uses."""
    for transition in ("additive", "delta", "dplr"):
        spec = UpdateSpec(decay=decay, transition=transition)
        shapes = spec.operands(2, 3, 2, 4, 6, 5)
        random = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
        for name, sign in (("log_decay", -1), ("step", 1), ("rate", -1)):
            if name in random:
                random[name] = sign * random[name].abs()
        state = torch.randn(2, 4, 6, 5, dtype=torch.float64)
        inputs = mask_padding(UpdateInputs(**random), torch.zeros(2, 3, dtype=torch.bool))
        masked_spec = spec.model_copy(update={"decay": "head"}) if decay == "fixed" else spec
        out = update(masked_spec, inputs._replace(state=state), backend="reference")
        torch.testing.assert_close(out.state, state, rtol=0, atol=0)


def test_left_align_moves_real_tokens_first_and_undo_restores_the_order() -> None:
    x = torch.arange(1, 13.0).view(2, 6, 1)
    mask = torch.tensor([[False, False, True, True, True, False], [True, True, False, False, False, False]])
    moved, context, order = left_align(x, 1, Context(mask=mask))
    assert moved[..., 0].tolist() == [[3, 4, 5, 0, 0, 0], [7, 8, 0, 0, 0, 0]]
    assert context.mask.sum(1).tolist() == [3, 2]
    assert torch.equal(undo_left_align(moved, order), torch.where(mask[..., None], x, 0.0))


def test_parts_with_equal_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"got \[.*'norm', 'norm'\]"):
        Parts(QKVProjection(SHAPE), {"norm": UnitNorm()}, {"norm": HeadNorm(SHAPE, 1e-5)})


def test_parts_compose_without_a_config() -> None:
    spec = UpdateSpec(decay="head")
    parts = Parts(QKVProjection(SHAPE), {"unit": UnitNorm(), "decay": SoftplusDecay(SHAPE)})
    mixer = DeltaMixer(SHAPE, spec, parts, "reference").double()
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    y, state, _ = mixer(x, mixer.init_state(1))
    assert list(state) == ["mixer.update"]
    torch.testing.assert_close(mixer(x[:, :3])[0], y[:, :3], rtol=1e-12, atol=0)


class MatrixProducts(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
        return function(*args, **(kwargs or {}))


def test_narrow_maps_share_one_product_with_equal_outputs_and_gradients() -> None:
    mixer = GatedDeltaNet(heads=2, conv_width=0).build(64, backend="reference").double()
    x = torch.randn(1, 5, 64, dtype=torch.float64, requires_grad=True)

    def run() -> tuple[int, Tensor]:
        with MatrixProducts() as products:
            y = mixer(x)[0]
        return products.count, y

    shared_count, shared = run()
    # Maps with a forward hook are called separately, so they do not share a product.
    called = []
    for name in ("beta", "decay"):
        mixer.operands[name].proj.register_forward_hook(lambda *_, name=name: called.append(name))
    separate_count, separate = run()
    assert called == ["beta", "decay"]
    assert separate_count == shared_count + 1
    assert_same_with_gradients(shared, separate, [x, *mixer.parameters()], 1e-12)


def test_random_features_of_one_token_are_one_product_equal_to_those_of_all_tokens() -> None:
    part = RandomFourierFeatures(SHAPE, 3).double()
    q, k = torch.randn(2, 2, 5, SHAPE.heads, SHAPE.key_width, dtype=torch.float64)
    inputs = UpdateInputs(q=q, k=k, v=q)
    expected, _ = part(q, inputs, None, Context())
    with MatrixProducts() as products:
        step, _ = part(q, UpdateInputs(q=q[:, 2:3], k=k[:, 2:3], v=q), None, Context())
    torch.testing.assert_close(step.q, expected.q[:, 2:3])
    torch.testing.assert_close(step.k, expected.k[:, 2:3])
    assert products.count == 1


def test_only_plain_narrow_maps_share_a_product() -> None:
    x = torch.randn(2, 3, 64)
    narrow, other = (nn.Linear(64, size, bias=False) for size in (2, 8))
    outputs = project_jointly(x, {"a": narrow, "b": other})
    for name, layer in ("a", narrow), ("b", other):
        torch.testing.assert_close(outputs[name], layer(x))
    wide, biased, nested = nn.Linear(64, 9, bias=False), nn.Linear(64, 2), nn.Sequential(nn.Linear(64, 2, bias=False))
    for excluded in (wide, biased, nested):
        assert project_jointly(x, {"a": narrow, "b": excluded}) == {}


PLACE = Place(2, 4)
SSM_SHAPE = HeadShape(width=8, heads=1, value_heads=6, key_width=3, value_width=2)
PARTS: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: ShortConv(6, 4, bias=True),
    "softplus decay": lambda: SoftplusDecay(SHAPE, "channel", rank=2),
    "sigmoid decay": lambda: SigmoidDecay(SHAPE, floor=0.3),
    "norm": lambda: HeadNorm(SHAPE, 1e-5, bias=True),
    "random features": lambda: RandomFourierFeatures(SHAPE, 7),
    "feedback": lambda: Feedback(SHAPE, 0.1),
    "exponential gate": lambda: ExponentialGate(SHAPE),
    "conjugate gradient": lambda: ConjugateGradientSolve(SHAPE, 3, 0.25),
    "skip": lambda: Skip(SHAPE),
    "bonus": lambda: Bonus(SHAPE, initial_bonus(SHAPE, PLACE)),
    "feedthrough": lambda: Feedthrough(8),
    "rotating frame": lambda: ToRotatingFrame(SSM_SHAPE, 100.0),
    "lru": lambda: LRUDecay(SSM_SHAPE, (0.5, 0.9), 6.28),
    "s5": lambda: S5Decay(SSM_SHAPE, 2, "zoh"),
    "s4d": lambda: DiagonalSSM(6, 3),
    "s4d, real": lambda: DiagonalSSM(6, 3, "real"),
    "mamba": lambda: SelectiveOperands(SSM_SHAPE, 2, "mamba", 1e-6),
    "longhorn": lambda: SelectiveOperands(SSM_SHAPE, 2, "longhorn"),
    "rg-lru": lambda: RGLRUGate(SSM_SHAPE, 2),
    "channel projection": lambda: ChannelProjection(SSM_SHAPE, 0, False, 0.1),
    "wkv gate": lambda: WKVGate(SHAPE, 0.5),
    "wkv bonus": lambda: WKVBonus(SHAPE),
    "preconditioner": lambda: Preconditioner(SHAPE, 1.5, UpdateSpec(beta="head", erase_key="own"), (1, 16)),
    "biased norm": lambda: BiasedNorm(SHAPE, 1e-5),
    "trapezoidal gates": lambda: TrapezoidalGates(SHAPE),
    "log-linear": lambda: LogLinearUpdate(SHAPE, UpdateSpec(decay="head", beta="head", scale=1.0), 4),
    "rwkv4": lambda: RWKV4Projection(SHAPE, PLACE),
    "rwkv6": lambda: RWKV6Projection(SHAPE, PLACE, Ranks(3, 2)),
    "rwkv7": lambda: RWKV7Projection(SHAPE, PLACE, Ranks(3, 0, 3, 2, 4)),
}


@pytest.mark.parametrize("name", PARTS)
def test_init_weights_initialises_a_part_built_on_the_meta_device(name: str) -> None:
    built, other = PARTS[name](), PARTS[name]()
    with torch.device("meta"):
        part = PARTS[name]()
    part.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in part.state_dict().values():
            tensor.fill_(torch.nan)
    init_weights(part)
    for key, tensor in part.state_dict().items():
        assert tensor.isfinite().all(), key
        if torch.equal(built.state_dict()[key], other.state_dict()[key]):  # not random
            torch.testing.assert_close(tensor, built.state_dict()[key], rtol=0, atol=0)


@pytest.mark.parametrize("name", PARTS)
def test_init_weights_sets_tensors_in_place(name: str) -> None:
    part = PARTS[name]()
    tensors = part.state_dict(keep_vars=True)
    init_weights(part)
    assert all(tensor is tensors[key] for key, tensor in part.state_dict(keep_vars=True).items())


def test_sums_of_a_packed_sequence_do_not_depend_on_earlier_sequences() -> None:
    """In precision, by NaN, and for tokens after the last sequence."""
    torch.manual_seed(0)
    x = -5 * torch.rand(1, 40_000, 2)
    bounds = torch.tensor([0, 39_900, 39_990], dtype=torch.int32)
    before = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    context = Context(cu_seqlens=bounds)
    expected = x[:, 39_900:39_990].double().cumsum(1) + before[1]
    torch.testing.assert_close(segment_cumsum(x, before, context)[:, 39_900:39_990], expected, rtol=1e-10, atol=1e-8)
    x[0, 100] = torch.inf
    sums = segment_cumsum(x, before, context)
    assert sums[:, :100].isfinite().all()
    assert sums[:, 100:39_900].isnan().all()
    torch.testing.assert_close(sums[:, 39_900:39_990], expected, rtol=1e-10, atol=1e-8)
