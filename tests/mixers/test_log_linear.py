"""Log-linear attention against its definition in float64, over several chunks.

B batch, T time, HV value heads, K key width, V value width, L levels
"""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from equations import (
    HEADS,
    HV,
    D,
    Equation,
    K,
    V,
    Weights,
    assert_same_with_gradients,
    beta,
    gate,
    linear,
    out,
    outer,
    qkv,
    rms_norm,
    softplus_decay,
    unit,
)
from torch import Tensor

from deltazoo.backends.update.base import UpdateInputs
from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers import Context, LogLinearGDN, LogLinearMamba2, MixerConfig
from deltazoo.mixers.core.conformance import relative_error
from deltazoo.mixers.core.mixer import Mixer
from deltazoo.mixers.core.part import HeadShape
from deltazoo.mixers.core.state import snapshot
from deltazoo.mixers.parts.memory.log_linear import LogLinearUpdate

T = 150  # three chunks of 64


def level(t: int, s: int, levels: int) -> int:
    """Level of token s at time t: the tokens before t are divided into powers of two, the largest first.

    Paper, section 3.1; get_level_index_weak in the authors' code. The last level here holds all older tokens.
    """
    if s == t:
        return 0
    low, rest = 0, t
    while True:
        size = 2 ** (rest.bit_length() - 1)
        if s < low + size:
            return min(size.bit_length(), levels - 1)
        low, rest = low + size, rest - size


def read_levels(q: Tensor, k: Tensor, v: Tensor, a: Tensor, erase: Tensor | None, scales: Tensor) -> Tensor:
    """o_t = sum_s lambda_t[level(t, s)] q_t^T X_s with a state X_s for the write of every token s.

    a and erase: [B, T, HV, 1]; scales: lambda, [B, T, HV, L].
    """
    X, outputs = [], []
    for t in range(q.shape[1]):
        states = torch.stack(X) if X else q.new_zeros(0, *q.shape[:1], HV, K, V)
        states = a[:, t, ..., None] * states
        if erase is not None:
            erased = torch.einsum("sbhkv,bhk->sbhv", states, erase[:, t] * k[:, t])
            states = states - k[:, t, ..., None] * erased[..., None, :]
        X = [*states.unbind(0), outer(k[:, t], v[:, t])]
        index = torch.tensor([level(t, s, scales.shape[-1]) for s in range(t + 1)])
        outputs.append(torch.einsum("bhs,sbhkv,bhk->bhv", scales[:, t][..., index], torch.stack(X), q[:, t]))
    return torch.stack(outputs, 1)


def level_scales(w: Weights, x: Tensor) -> Tensor:
    return torch.log1p(torch.exp(w["update.gain"] * linear(w, "update.proj", x).unflatten(-1, (HV, -1))))


def log_linear_gdn(w: Weights, x: Tensor) -> Tensor:
    q, k, v = (F.silu(y) for y in qkv(w, x))
    q, k, b = unit(q), unit(k), beta(w, x)
    o = read_levels(q, k, b * v, softplus_decay(w, x), b, level_scales(w, x))
    return out(w, gate(w, x, rms_norm(w, o)))


def log_linear_mamba2(w: Weights, x: Tensor) -> Tensor:
    q, k, v = (F.silu(y) for y in qkv(w, x))
    dt = torch.log1p(torch.exp(linear(w, "operands.decay.proj", x) + w["operands.decay.dt_bias"]))[..., None]
    o = read_levels(q, k, dt * v, softplus_decay(w, x), None, level_scales(w, x))
    gated = gate(w, x, o + w["outputs.skip.D"][:, None] * v).flatten(2).unflatten(2, (2, -1))  # two groups
    normed = gated / (gated.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    return linear(w, "out", w["outputs.norm.weight"] * normed.flatten(2))


def perturbed(config: MixerConfig) -> Mixer:
    """Build a mixer in float64 whose parameters all have random noise."""
    torch.manual_seed(0)
    mixer = config.build(D).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return mixer


CASES: dict[str, tuple[MixerConfig, Equation]] = {
    "gdn": (LogLinearGDN(**HEADS, levels=9), log_linear_gdn),
    "gdn, two levels": (LogLinearGDN(**HEADS, levels=2), log_linear_gdn),
    "mamba2": (LogLinearMamba2(**HEADS, levels=9), log_linear_mamba2),
    "mamba2, last level within a chunk": (LogLinearMamba2(**HEADS, levels=4), log_linear_mamba2),
}


@pytest.mark.parametrize("name", CASES)
def test_mixer_equals_its_definition(name: str) -> None:
    config, equation = CASES[name]
    mixer = perturbed(config)
    x = torch.randn(1, T, D, dtype=torch.float64, requires_grad=True)
    expected = equation(dict(mixer.named_parameters()), x)
    assert_same_with_gradients(mixer(x)[0], expected, [x, *mixer.parameters()], 1e-9)


@pytest.fixture(params=[LogLinearGDN(**HEADS, levels=9), LogLinearMamba2(**HEADS, levels=8)], ids=["gdn", "mamba2"])
def mixer(request: pytest.FixtureRequest) -> Mixer:
    return perturbed(request.param)


@pytest.mark.parametrize("pieces", [[70, 1, 1, 78], [3, 100, 0, 47], [64, 64, 22], [149, 1]], ids=str)
@torch.no_grad()
def test_pieces_that_start_inside_chunks_equal_one_call(mixer: Mixer, pieces: list[int]) -> None:
    x = torch.randn(2, T, D, dtype=torch.float64)
    state, outputs = mixer.init_state(2), []
    for piece in x.split(pieces, 1):
        y, state, _ = mixer(piece, state)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1), mixer(x)[0], rtol=1e-9, atol=1e-11)
    assert state["seen"].tolist() == [T, T]


@torch.no_grad()
def test_packed_and_padded_sequences_of_several_chunks_equal_separate_ones(mixer: Mixer) -> None:
    bounds = [0, 66, 66, 149, T]
    x = torch.randn(1, T, D, dtype=torch.float64)
    sequences = [x[:, start:stop] for start, stop in itertools.pairwise(bounds)]
    expected = torch.cat([mixer(sequence)[0] for sequence in sequences], 1)
    context = Context(cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    torch.testing.assert_close(mixer(x, None, context)[0], expected, rtol=1e-9, atol=1e-11)
    y, state, _ = mixer(x, mixer.init_state(4), context)
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-11)
    time = torch.arange(T)
    mask = torch.stack([time >= 67, time < 66])
    rows = torch.cat([torch.cat([x[:, :67], sequences[2]], 1), torch.cat([sequences[0], x[:, 66:]], 1)])
    padded, padded_state, _ = mixer(rows, mixer.init_state(2), Context(mask=mask))
    torch.testing.assert_close(padded[:1, 67:], mixer(sequences[2])[0], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(padded[1:, :66], mixer(sequences[0])[0], rtol=1e-9, atol=1e-11)
    for name, tensor in padded_state.items():
        torch.testing.assert_close(tensor.flip(0), state[name][[0, 2]], rtol=1e-9, atol=1e-11)


@torch.no_grad()
def test_state_after_t_tokens_has_a_level_for_each_binary_digit_of_t(mixer: Mixer) -> None:
    _, state, _ = mixer(torch.randn(1, 0b1101001, D, dtype=torch.float64), mixer.init_state(1))
    used = [bool(tensor.any()) for tensor in state[mixer.levels_key][0]]
    assert used == [bool(0b1101001 >> i & 1) for i in range(len(used))]


@torch.no_grad()
def test_levels_depend_on_the_last_digits_of_the_position_only(mixer: Mixer) -> None:
    """Positions are computed modulo 2^23; 2^23 - 70 and 2^12 - 70 have the same last 12 digits."""
    x = torch.randn(1, T, D, dtype=torch.float64)
    _, state, _ = mixer(torch.randn(1, T, D, dtype=torch.float64), mixer.init_state(1))
    late, early = ({**snapshot(state), "seen": torch.tensor([2**digits - 70])} for digits in (23, 12))
    (y_late, late, _), (y_early, early, _) = mixer(x, late), mixer(x, early)
    torch.testing.assert_close(y_late, y_early)
    torch.testing.assert_close(late[mixer.levels_key], early[mixer.levels_key])


@pytest.mark.parametrize("transition", ["additive", "delta"])
@pytest.mark.parametrize("adversary", ["decays of 0, -20 and -60", "decays to -inf", "near-parallel keys"])
def test_float32_is_close_to_float64_for_adversarial_inputs(transition: str, adversary: str) -> None:
    torch.manual_seed(0)
    q, k = (unit(torch.randn(1, T, 2, 16)) for _ in range(2))
    log_decay, strength = -0.2 * torch.rand(1, T, 2), torch.rand(1, T, 2)
    if adversary == "near-parallel keys":
        k, strength = unit(k[:, :1] + 0.01 * k), 1 - 0.05 * strength
    else:
        lowest = -60.0 if adversary == "decays of 0, -20 and -60" else -math.inf
        log_decay = torch.tensor([0.0, -20.0, lowest])[torch.randint(3, (1, T, 2))]
    operands = [q, k, torch.randn(1, T, 2, 16), log_decay, strength][: 5 if transition == "delta" else 4]
    spec = UpdateSpec(decay="head", transition=transition, beta="head" if transition == "delta" else "none", scale=1.0)
    update, x, weight = LogLinearUpdate(HeadShape(D, 2, 2, 16, 16), spec, 9), torch.randn(1, T, D), torch.randn(16)
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = [y.to(dtype).requires_grad_() for y in operands]
        names = ("q", "k", "v", "log_decay", "beta")
        inputs = UpdateInputs(**dict(zip(names, leaves, strict=False)))
        o, _ = update.to(dtype)(x.to(dtype), inputs, None, Context())
        results.append([o, *torch.autograd.grad((o * weight.to(dtype)).sum(), leaves)])
    for actual, expected in zip(*results, strict=True):
        assert relative_error(actual, expected) < 1e-4
