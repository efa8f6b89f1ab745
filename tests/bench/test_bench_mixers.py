"""Every installed mixer with default arguments: forward and backward of a training step.

Compiled on a GPU. Eager on a CPU, because Inductor needs a quarter of an hour for all of them; `test_bench_backends`
and `test_bench_stacks` time compiled code there.
"""

from typing import Any

import pytest
import torch

from deltazoo.backends.compile import CompileBackend
from deltazoo.backends.update import registry
from deltazoo.backends.update.dispatch import use_backend

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTH, LENGTH = (2048, 4096) if DEVICE.type == "cuda" else (128, 256)


@pytest.mark.parametrize("name", registry.names(registry.MIXERS))
def test_mixer_forward_and_backward(timed: Any, name: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = registry.load(registry.MIXERS, name)()
    if DEVICE.type == "cuda":
        mixer = torch.compile(config.build(WIDTH).to(DEVICE), fullgraph=True)
    else:
        with use_backend(CompileBackend(compiled=False)):
            mixer = config.build(WIDTH)
    x = torch.randn(1, LENGTH, WIDTH, device=DEVICE, requires_grad=True)

    def step() -> None:
        mixer(x)[0].square().mean().backward()

    timed(step)
