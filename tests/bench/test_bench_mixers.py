"""Every installed mixer, compiled: a training step's forward and backward."""

from typing import Any

import pytest
import torch

from deltazoo.backends import registry

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTH, LENGTH = (2048, 4096) if DEVICE.type == "cuda" else (256, 512)


@pytest.mark.parametrize("name", registry.names(registry.MIXERS))
def test_mixer_forward_and_backward(timed: Any, name: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    mixer = registry.load(registry.MIXERS, name)().build(WIDTH).to(DEVICE)
    compiled = torch.compile(mixer, fullgraph=True)
    x = torch.randn(1, LENGTH, WIDTH, device=DEVICE, requires_grad=True)

    def step() -> None:
        compiled(x)[0].square().mean().backward()

    timed(step)
