"""Every registered mixer with its default fields on a GPU in bfloat16: compiled forward, backward and decode.

Each is compared with the same weights on a CPU in float32. Run in parallel: `pytest -n auto tests/mixers/test_gpu.py`.
"""

import pytest
import torch
from torch.utils._pytree import tree_map

from deltazoo.backends.update import registry
from deltazoo.mixers.core.config import parse

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

WIDTH = 256
# Scans token by token are unrolled or run as many small kernels, so that a longer sequence takes minutes.
LENGTHS = dict.fromkeys(("titans", "ttt_linear"), 32)
LENGTH = 320  # several chunks, the last one not full
TOLERANCE = 2e-2  # relative RMS error; all products of the layer round to bfloat16

OURS = [
    name for name in registry.names(registry.MIXERS) if registry.owner(registry.MIXERS, name).startswith("deltazoo ")
]


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", OURS)
def test_compiled_mixer_on_a_gpu_equals_the_cpu(name: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = parse({"mixer": name})
    mixer = config.build(WIDTH).to("cuda", torch.bfloat16)
    exact = config.build(WIDTH, backend="reference")
    exact.load_state_dict({key: value.float().cpu() for key, value in mixer.state_dict().items()})
    T = LENGTHS.get(name, LENGTH)
    x = torch.randn(2, T, WIDTH, device="cuda").bfloat16().requires_grad_()
    x_exact = x.detach().float().cpu().requires_grad_()
    expected = exact(x_exact)[0]
    weight = torch.randn_like(expected)
    compiled = torch.compile(mixer, fullgraph=True)
    with torch.device("cuda"):  # a torch function mode is active, as after set_default_device
        y = compiled(x)[0]
    assert error(y, expected) < TOLERANCE
    (gradient,) = torch.autograd.grad((y * weight.to(y)).sum(), x)
    assert error(gradient, torch.autograd.grad((expected * weight).sum(), x_exact)[0]) < TOLERANCE
    with torch.no_grad():
        state = tree_map(lambda leaf: leaf.clone(), mixer.init_state(2, T))
        state = mixer(x[:, :-3], state).state
        for t in range(T - 3, T):
            y, state, _ = compiled(x[:, t : t + 1], state)
            assert error(y, expected[:, t : t + 1]) < 2 * TOLERANCE
