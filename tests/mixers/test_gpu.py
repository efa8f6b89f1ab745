"""Every registered mixer on a GPU in bfloat16: compiled forward, backward and decode, dense and packed, as one graph.

Each is compared with the same weights on a CPU in float64. `make test-gpu` runs this file in parallel.
"""

import pytest
import torch
from small_configs import OURS, WIDTH, small
from torch.utils._pytree import tree_map

from deltazoo.mixers.core.config import parse
from deltazoo.mixers.core.mixer import Context, MixerConfig

pytestmark = pytest.mark.cuda

LENGTH = 320  # several chunks, the last one not full
BOUNDS = (0, 70, 70, 135, LENGTH)  # one sequence is empty
TOLERANCE = 2e-2  # relative RMS error, or 1.5 times that of the same layer on a CPU if it is larger
CONFIGS: dict[str, tuple[MixerConfig, int]] = {
    **{name: (parse({"mixer": name}), 256) for name in OURS},
    **{f"{name}-small": (small(name), WIDTH) for name in OURS},
    "hyena-small": (small("hyena", max_length=LENGTH), WIDTH),
}


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("name", CONFIGS)
def test_compiled_mixer_equals_float64(name: str, packed: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    config, width = CONFIGS[name]
    mixer = config.build(width).to("cuda", torch.bfloat16)
    exact = config.build(width, backend="reference").double()
    exact.load_state_dict({key: value.double().cpu() for key, value in mixer.state_dict().items()})
    x = torch.randn(1 if packed else 2, LENGTH, width, device="cuda").bfloat16().requires_grad_()
    x_exact = x.detach().double().cpu().requires_grad_()
    bounds = torch.tensor(BOUNDS, dtype=torch.int32)
    contexts = [Context(cu_seqlens=bounds.to(device)) if packed else None for device in ("cpu", "cuda")]
    expected = exact(x_exact, None, contexts[0])[0]
    weight = torch.randn_like(expected)
    compiled = torch.compile(mixer, fullgraph=True)
    with torch.device("cuda"):  # a torch function mode is active, as after set_default_device
        y = compiled(x, None, contexts[1])[0]
    (gradient,) = torch.autograd.grad((y * weight.to(y)).sum(), x)
    (expected_gradient,) = torch.autograd.grad((expected * weight).sum(), x_exact, retain_graph=True)
    errors = error(y, expected), error(gradient, expected_gradient)
    if max(errors) >= TOLERANCE:  # small layers may round more: a CPU shows how much
        x_rounded = x.detach().cpu().requires_grad_()
        rounded = config.build(width, backend="reference").bfloat16()
        rounded.load_state_dict(mixer.state_dict())
        y_rounded = rounded(x_rounded, None, contexts[0])[0]
        (rounded_gradient,) = torch.autograd.grad((y_rounded * weight).sum(), x_rounded)
        assert errors[0] < max(TOLERANCE, 1.5 * error(y_rounded, expected))
        assert errors[1] < max(TOLERANCE, 1.5 * error(rounded_gradient, expected_gradient))
    if packed:
        return
    with torch.no_grad():
        state = tree_map(lambda leaf: leaf.clone(), mixer.init_state(2, LENGTH))
        state = mixer(x[:, :-3], state).state
        for t in range(LENGTH - 3, LENGTH):
            y, state, _ = compiled(x[:, t : t + 1], state)
            assert error(y, expected[:, t : t + 1]) < 2 * TOLERANCE
