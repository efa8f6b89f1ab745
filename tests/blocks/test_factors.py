"""Constant factors and limits that published models have: Granite 4, Falcon-H1, MiniMax, Nemotron-H."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltazoo import StackSpec
from deltazoo.backends.io.errors import ConfigError
from deltazoo.blocks.model.layer import LayerSpec
from deltazoo.blocks.model.mlp import Dense
from deltazoo.mixers import Attention, Context, Mamba2, MoM
from deltazoo.mixers.core.mixer import FIRST_PLACE
from deltazoo.mixers.parts.ssm.stream_factors import StreamFactors

WIDTH = 12
MAMBA2 = {"heads": 2, "value_heads": 4, "key_width": 3, "value_width": 5}


def randomize(module: nn.Module) -> nn.Module:
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("position", ["pre", "output", "post"])
def test_factors_of_mixers_branches_and_mlps_multiply_their_outputs(position: str) -> None:
    torch.manual_seed(0)
    mixers = (Attention(heads=2), Mamba2(**MAMBA2))
    mlp = Dense(width=10, gate_scale=1.5, out_scale=0.7)
    spec = LayerSpec(mixer=mixers, mlp=mlp, norm_position=position, branch_scale=0.3, mixer_scales=(0.6, 1.2))
    layer = randomize(spec.build(WIDTH, FIRST_PLACE, "reference"))

    def mix(x: Tensor) -> Tensor:
        return 0.6 * layer.mixers[0](x)[0] + 1.2 * layer.mixers[1](x)[0]

    def feed_forward(x: Tensor) -> Tensor:
        gate, up = layer.mlp.to_hidden(x).chunk(2, -1)
        return 0.7 * layer.mlp.out(F.silu(1.5 * gate) * up)

    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    expected = x
    for norm, branch in ((layer.norm, mix), (layer.mlp_norm, feed_forward)):
        if position == "pre":
            expected = expected + 0.3 * branch(norm(expected))
        elif position == "output":
            expected = expected + 0.3 * norm(branch(expected))
        else:
            expected = norm(expected) + 0.3 * branch(norm(expected))
    assert_equal(layer(x)[0], expected)


@pytest.mark.parametrize("tied", [True, False])
def test_the_factor_of_the_logits_is_before_the_cap_and_in_the_loss(tied: bool) -> None:
    torch.manual_seed(0)
    spec = StackSpec(
        width=WIDTH, depth=1, vocab=9, pattern=Attention(heads=1), logit_scale=2.5, logit_cap=0.4, tied=tied
    )
    model = randomize(spec.build())
    tokens = torch.randint(9, (2, 5))
    weight = model.embedding.weight if tied else model.head.weight
    expected = 0.4 * torch.tanh(2.5 * model.features(tokens)[0] @ weight.T / 0.4)
    assert_equal(model(tokens)[0], expected)
    torch.testing.assert_close(model.loss(tokens, tokens), F.cross_entropy(expected.flatten(0, 1), tokens.flatten()))
    assert StackSpec(**spec.changed_fields()) == spec != StackSpec(**spec.changed_fields() | {"logit_scale": 1.0})


def test_factors_of_mamba2_equal_factors_of_its_weights_also_inside_mom_and_while_decoding() -> None:
    torch.manual_seed(0)
    factors = StreamFactors(gate=0.5, x=2.0, B=1.5, C=0.7, dt=1.3)
    plain, scaled = Mamba2(**MAMBA2), Mamba2(**MAMBA2, factors=factors)
    ours = randomize(scaled.build(WIDTH, backend="reference"))
    folded = plain.build(WIDTH, backend="reference").double()
    folded.load_state_dict(ours.state_dict())
    with torch.no_grad():
        rows = torch.tensor([factors.C] * 6 + [factors.B] * 6 + [factors.x] * 20, dtype=torch.float64)
        folded.project.to_qkv.weight.mul_(rows[:, None])
        folded.outputs.gate.proj.weight.mul_(factors.gate)
        folded.operands.decay.proj.weight.mul_(factors.dt)
    x = torch.randn(2, 7, WIDTH, dtype=torch.float64)
    expected = folded(x).y
    assert_equal(ours(x).y, expected)
    state, steps = ours.init_state(2), []
    with torch.no_grad():
        for token in x.split(1, 1):
            y, state, _ = ours(token, state)
            steps.append(y)
    assert_equal(torch.cat(steps, 1), expected)
    mixed = randomize(MoM(memory=scaled, memories=3, active=2, shared=False).build(WIDTH, backend="reference"))
    grouped = mixed(x).y
    for memory in mixed.modules():
        memory.register_forward_hook(lambda *_: None)  # a hook prevents the grouped products
    assert_equal(mixed(x).y, grouped)


def test_the_step_of_mamba2_is_clamped() -> None:
    torch.manual_seed(0)
    mixer = randomize(Mamba2(**MAMBA2, step_limits=(0.4, 0.8)).build(WIDTH))
    x = 3 * torch.randn(2, 6, WIDTH, dtype=torch.float64)
    decay = mixer.operands.decay
    dt = F.softplus(decay.proj(x) + decay.dt_bias).clamp(0.4, 0.8)
    assert (dt == 0.4).any() and (dt == 0.8).any() and ((dt > 0.4) & (dt < 0.8)).any()
    inputs, _ = mixer.project(x, None, Context())
    prepared = decay.prepare(decay.proj(x), inputs)
    assert_equal(prepared.log_decay, -dt * decay.A_log.exp())
    assert_equal(prepared.v, inputs.v * dt[..., None])


def test_the_norm_of_mamba2_may_precede_the_gate() -> None:
    torch.manual_seed(0)
    mixer = randomize(Mamba2(**MAMBA2, norm="first").build(WIDTH))
    assert [*mixer.outputs] == ["skip", "norm", "gate"]
    after = randomize(Mamba2(**MAMBA2).build(WIDTH))
    assert [*after.outputs] == ["skip", "gate", "norm"]


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: LayerSpec(mixer=Attention(), mixer_scales=(1.0, 2.0)), "one factor for each of 1 mixers"),
        (lambda: StackSpec(width=8, depth=1, vocab=3, pattern="attention", mlp={"gated": False, "gate_scale": 2}),
         "gate_scale needs gated=True"),
        (lambda: StackSpec(width=8, depth=1, vocab=3, pattern="mamba2", mlp={"type": "moe", "experts": 4, "groups": 3}),
         "groups must divide experts = 4, got 3"),
        (lambda: StackSpec(width=8, depth=1, vocab=3, pattern="mamba2",
                           mlp={"type": "moe", "experts": 4, "active": 3, "groups": 2}),
         "active must be at most the 2 experts of the active groups, got 3"),
    ],
)  # fmt: skip
def test_a_factor_or_limit_without_effect_is_refused(build, sentence) -> None:
    with pytest.raises(ConfigError, match=sentence):
        build()
