"""Cases at the edge: long sequences in 16 bits, extreme gates, no rows, no tokens, and every feature map."""

import copy
from typing import get_args

import pytest
import torch
from small_configs import small

from deltazoo.backends.compile import CompileBackend
from deltazoo.mixers.core.conformance import relative_error
from deltazoo.mixers.parts.feature_maps import Feature, LearnedFeature

EAGER = CompileBackend(compiled=False)


@pytest.mark.parametrize(("name", "parameter"), [("hgrn", "turn"), ("lru", "theta"), ("s5", "imaginary")])
@pytest.mark.parametrize("autocast", [True, False])
def test_angles_of_long_sequences_in_16_bits_have_accurate_gradients(name: str, parameter: str, autocast: bool) -> None:
    torch.manual_seed(0)
    mixer = small(name).build(16, backend=EAGER).to(torch.float32 if autocast else torch.bfloat16)
    x, dy = torch.randn(2, 1, 2048, 16).to(torch.bfloat16)
    exact = copy.deepcopy(mixer).double()
    (exact(x.double()).y * dy).sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        (mixer(x.to(torch.float32 if autocast else torch.bfloat16)).y * dy).sum().backward()
    (path,) = [path for path, _ in mixer.named_parameters() if path.endswith(parameter)]
    actual, expected = (dict(module.named_parameters())[path].grad for module in (mixer, exact))
    assert actual is not None and expected is not None
    assert relative_error(actual, expected) < 0.02


@pytest.mark.parametrize("bias", [-39.0, -41.0, -110.0, -800.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gates_of_rodimus_near_zero_have_finite_gradients(bias: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    mixer = small("rodimus").build(16, backend=EAGER).to(dtype)
    raw = mixer.project.to_g
    torch.nn.init.constant_(raw.bias, bias)
    x = torch.randn(2, 5, 16, dtype=dtype, requires_grad=True)
    mixer(x).y.square().sum().backward()
    gradients = [x.grad, *(parameter.grad for parameter in mixer.parameters())]
    assert all(gradient is None or bool(gradient.isfinite().all()) for gradient in gradients)


@pytest.mark.parametrize("name", ["mlstm", "rwkv4"])
def test_exponents_far_below_zero_are_computed_and_decoded(name: str) -> None:
    torch.manual_seed(0)
    mixer = small(name).build(16, backend=EAGER)
    exact, x = copy.deepcopy(mixer).double(), 3000 * torch.randn(2, 20, 16)
    inputs = x.clone().requires_grad_(), x.double().requires_grad_()
    y, expected = mixer(inputs[0]).y, exact(inputs[1]).y
    dx, expected_dx = torch.autograd.grad(y.sum() + expected.sum(), inputs)
    assert relative_error(y, expected) < 1e-4
    assert relative_error(dx, expected_dx) < 1e-3
    state, outputs = exact.init_state(2), []
    with torch.no_grad():
        for token in x.double().split(1, 1):
            decoded, state, _ = exact(token, state)
            outputs.append(decoded)
    assert relative_error(torch.cat(outputs, 1), expected) < 1e-9


@pytest.mark.parametrize("feature", [*get_args(Feature), *get_args(LearnedFeature)])
@pytest.mark.parametrize("name", ["gsa", "raven", "simple_gla"])
def test_every_feature_map_builds_and_decodes(name: str, feature: str) -> None:
    mixer = small(name, feature=feature).build(16, backend=EAGER).double()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    state, outputs = mixer.init_state(2), []
    with torch.no_grad():
        for t in range(5):
            y, state, _ = mixer(x[:, t : t + 1], state)
            outputs.append(y)
    assert relative_error(torch.cat(outputs, 1), mixer(x).y) < 1e-9


@pytest.mark.parametrize("name", ["mom", "momentum_deltanet", "rwkv7", "log_linear_gdn", "ttt_linear"])
@pytest.mark.parametrize(("rows", "tokens"), [(0, 5), (1, 0), (2, 0)])
def test_no_rows_and_no_tokens(name: str, rows: int, tokens: int) -> None:
    mixer = small(name).build(16, backend=EAGER)
    x = torch.randn(rows, tokens, 16, requires_grad=True)
    mixer(x).y.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    with torch.no_grad():
        assert mixer(x, mixer.init_state(rows)).y.shape == x.shape


def test_one_sequence_without_tokens_keeps_the_states_of_memories() -> None:
    memory = {"mixer": "deltanet", "heads": 2, "key_width": 4}
    mixer = small("mom", memory=memory, memories=2, active=1, shared=False).build(24, backend=EAGER)
    with torch.no_grad():
        _, state, _ = mixer(torch.randn(1, 3, 24), mixer.init_state(1))
        before = copy.deepcopy(dict(state))
        _, after, _ = mixer(torch.randn(1, 0, 24), state)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
