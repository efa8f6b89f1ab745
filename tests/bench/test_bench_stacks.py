"""The small presets: a training step, compiled, and a decoded token."""

from typing import Any

import pytest
import torch

from deltazoo.blocks.spec import presets
from deltazoo.blocks.spec.stack_spec import StackSpec

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = [name for name in presets.names() if name.endswith("-small")]


@pytest.mark.parametrize("name", SMALL)
def test_training_step(timed: Any, name: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = StackSpec.load(name).build().to(DEVICE)
    loss = torch.compile(model.loss, fullgraph=True)
    tokens = torch.randint(256, (8, 257), device=DEVICE)

    def step() -> None:
        loss(tokens[:, :-1], tokens[:, 1:]).backward()

    timed(step)


@pytest.mark.parametrize("name", SMALL)
def test_decoded_token(timed: Any, name: str) -> None:
    torch.manual_seed(0)
    model = StackSpec.load(name).build().to(DEVICE).eval()
    token = torch.randint(256, (1, 1), device=DEVICE)
    state = model.init_state(1, 8192)

    def step() -> None:
        nonlocal state
        with torch.no_grad():
            _, state = model(token, state)

    timed(step)
