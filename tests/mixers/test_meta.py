"""On the meta device every mixer gives shapes: models too large for the machine can be laid out and described."""

import pytest
import torch

from deltazoo.backends import registry


@pytest.mark.parametrize("name", registry.names(registry.MIXERS))
def test_on_the_meta_device_shapes_and_states_are_those_of_the_cpu(name: str) -> None:
    config = registry.load(registry.MIXERS, name)()
    found = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            mixer, x = config.build(64, backend="reference" if device == "cpu" else None), torch.zeros(2, 3, 64)
            y, state = mixer(x, mixer.init_state(2, 8))
            found.append([(t.shape, t.dtype) for t in (y, *torch.utils._pytree.tree_leaves(state))])
    assert found[0] == found[1]
