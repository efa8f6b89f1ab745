"""Mixers on the meta device, where `describe` builds models too large for memory."""

import pytest
import torch

from deltazoo.backends.update import registry


@pytest.mark.parametrize("name", registry.names(registry.MIXERS))
def test_shapes_and_states_on_the_meta_device_equal_those_on_the_cpu(name: str) -> None:
    config = registry.load(registry.MIXERS, name)()
    shapes = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            mixer, x = config.build(64, backend="reference" if device == "cpu" else None), torch.zeros(2, 3, 64)
            y, state, _ = mixer(x, mixer.init_state(2, 8))
            shapes.append([(t.shape, t.dtype) for t in (y, *torch.utils._pytree.tree_leaves(state))])
    assert shapes[0] == shapes[1]
