"""The parts on their own, against torch or the equation."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from deltazoo.backends.base import UpdateInputs
from deltazoo.backends.errors import ConfigError
from deltazoo.backends.spec import UpdateSpec
from deltazoo.mixers.core.delta_mixer import DeltaMixer, mask_padding
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import HeadShape, OutputArguments, Parts, together
from deltazoo.mixers.core.sequences import left_align, undo_left_align
from deltazoo.mixers.gated_deltanet import GatedDeltaNet
from deltazoo.mixers.parts.convolution import ShortConv
from deltazoo.mixers.parts.decays import FixedDecay, SigmoidDecay, SoftplusDecay
from deltazoo.mixers.parts.feature_maps import FeatureMap
from deltazoo.mixers.parts.norms import HeadNorm, RMSNorm, UnitNorm
from deltazoo.mixers.parts.projections import QKVProjection
from deltazoo.mixers.parts.rotary import angles, apply_rotary

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
    want = F.conv1d(x.mT, conv.weight[:, None], conv.bias, padding=taps - 1, groups=6).mT[:, :9]
    (got,), state = conv(x, None, Context())
    assert state is None
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)
    weight = torch.randn_like(want)
    for ours, theirs in zip(
        torch.autograd.grad((got * weight).sum(), [x, *conv.parameters()]),
        torch.autograd.grad((want * weight).sum(), [x, *conv.parameters()]),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_an_empty_pack_is_nothing() -> None:
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
def test_head_norms_equal_torch_head_by_head(over: str) -> None:
    o = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    flow = OutputArguments(o, operands(), operands())
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
        torch.testing.assert_close(norm(o, flow, None, Context())[0], (plain * weight).view_as(o), rtol=1e-12, atol=0)


def test_unit_norm_makes_unit_vectors_and_leaves_zero() -> None:
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
def test_decays_forget_and_never_grow(dtype: torch.dtype) -> None:
    x = (torch.randn(2, 50, 8) * 30).to(dtype)
    inputs = UpdateInputs(*(stream.to(dtype) for stream in operands(2, 50)[:3]))
    for part in (
        SoftplusDecay(SHAPE),
        SoftplusDecay(SHAPE, "channel", rank=2),
        SigmoidDecay(SHAPE),
        SigmoidDecay(SHAPE, "head", rank=None, temperature=1.0),
        FixedDecay(SHAPE),
    ):
        log_decay = part.to(dtype)(x, inputs, None, Context())[0].log_decay
        assert log_decay.isfinite().all()
        assert log_decay.max() <= 0
        assert log_decay.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_fixed_decay_is_retnets() -> None:
    log_decay = FixedDecay(SHAPE)(torch.empty(1, 1, 8), operands(), None, Context())[0].log_decay
    want = [1 - 2.0**-5, 1 - 2.0**-6, 1 - 2.0**-7, 1 - 2.0**-8]
    torch.testing.assert_close(log_decay.exp(), torch.tensor(want, dtype=torch.float64), rtol=1e-14, atol=0)


def test_rotation_keeps_lengths_and_depends_on_distance_alone() -> None:
    q, k = torch.randn(2, 1, 1, 1, 10, dtype=torch.float64)

    def meet(t: int, s: int) -> Tensor:
        at_t, at_s = (angles(torch.tensor([[p]]), 4, 100.0, torch.float64) for p in (t, s))
        return (apply_rotary(q, at_t) * apply_rotary(k, at_s)).sum()

    torch.testing.assert_close(meet(7, 3), meet(104, 100), rtol=1e-12, atol=0)
    assert not torch.isclose(meet(7, 3), meet(7, 4))
    turned = apply_rotary(q, angles(torch.tensor([[5]]), 4, 100.0, torch.float64))
    torch.testing.assert_close(turned.norm(), q.norm(), rtol=1e-12, atol=0)
    assert torch.equal(turned[..., 8:], q[..., 8:])


def test_dpfp_is_positive_and_widens_the_keys() -> None:
    part = FeatureMap("dpfp")
    got = part(torch.empty(0), operands(), None, Context())[0]
    assert part.resize_heads(SHAPE).key_width == got.k.shape[-1] == 36
    assert got.k.min() >= 0


@pytest.mark.parametrize("decay", ["head", "channel", "rate", "fixed"])
def test_hidden_tokens_leave_any_state_as_it_was(decay: str) -> None:
    """Of every spec: dplr and step x rate too, which no mixer here has."""
    from deltazoo.backends.dispatch import update

    for transition in ("additive", "delta", "dplr"):
        spec = UpdateSpec(decay=decay, transition=transition)
        shapes = spec.operands(2, 3, 2, 4, 6, 5)
        random = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
        for name, sign in (("log_decay", -1), ("step", 1), ("rate", -1)):
            if name in random:
                random[name] = sign * random[name].abs()
        state = torch.randn(2, 4, 6, 5, dtype=torch.float64)
        inputs = mask_padding(UpdateInputs(**random), torch.zeros(2, 3, dtype=torch.bool))
        plain = spec.model_copy(update={"decay": "head"}) if decay == "fixed" else spec
        out = update(plain, inputs._replace(state=state), backend="reference")
        torch.testing.assert_close(out.state, state, rtol=0, atol=0)


def test_aligned_puts_real_tokens_first_and_restored_puts_them_back() -> None:
    x = torch.arange(1, 13.0).view(2, 6, 1)
    mask = torch.tensor([[False, False, True, True, True, False], [True, True, False, False, False, False]])
    moved, context, order = left_align(x, 1, Context(mask=mask))
    assert moved[..., 0].tolist() == [[3, 4, 5, 0, 0, 0], [7, 8, 0, 0, 0, 0]]
    assert context.mask.sum(1).tolist() == [3, 2]
    assert torch.equal(undo_left_align(moved, order), torch.where(mask[..., None], x, 0.0))


def test_parts_need_names_of_their_own() -> None:
    with pytest.raises(ConfigError, match="distinct names"):
        Parts(QKVProjection(SHAPE), {"norm": UnitNorm()}, {"norm": HeadNorm(SHAPE, 1e-5)})


def test_a_mixer_may_be_put_together_by_hand() -> None:
    """Parts compose without a config: here Gated DeltaNet's update without any of its surroundings."""
    spec = UpdateSpec(decay="head")
    parts = Parts(QKVProjection(SHAPE), {"unit": UnitNorm(), "decay": SoftplusDecay(SHAPE)})
    mixer = DeltaMixer(SHAPE, spec, parts, "reference").double()
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    y, state = mixer(x, mixer.init_state(1))
    assert list(state) == ["update"]
    torch.testing.assert_close(mixer(x[:, :3])[0], y[:, :3], rtol=1e-12, atol=0)


class Products(TorchDispatchMode):
    """Counts the matrix products inside."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return function(*args, **(kwargs or {}))


def test_narrow_maps_are_one_product_with_the_numbers_and_gradients_of_two() -> None:
    mixer = GatedDeltaNet(heads=2, conv_width=0).build(64, backend="reference").double()
    x = torch.randn(1, 5, 64, dtype=torch.float64, requires_grad=True)
    wanted = [x, *mixer.parameters()]

    def run():
        with Products() as products:
            y = mixer(x)[0]
        return products.count, y, torch.autograd.grad(y.square().sum(), wanted)

    one, y, grads = run()
    # a hook wants its module to be called
    called = []
    for name in ("beta", "decay"):
        mixer.operands[name].proj.register_forward_hook(lambda *_, name=name: called.append(name))
    two, want, want_grads = run()
    assert called == ["beta", "decay"] and two == one + 1
    torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-12)
    for grad, want_grad in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(grad, want_grad, rtol=1e-12, atol=1e-12)


def test_only_plain_narrow_maps_are_put_together() -> None:
    x = torch.randn(2, 3, 64)
    narrow, other = (nn.Linear(64, size, bias=False) for size in (2, 8))
    found = together(x, {"a": narrow, "b": other})
    for name, layer in ("a", narrow), ("b", other):
        torch.testing.assert_close(found[name], layer(x))
    wide, biased, several = nn.Linear(64, 9, bias=False), nn.Linear(64, 2), nn.Sequential(nn.Linear(64, 2, bias=False))
    for left_alone in (wide, biased, several):
        assert together(x, {"a": narrow, "b": left_alone}) == {}
