"""A state fits only the kind of mixer that made it, also where all shapes are equal."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

from deltazoo.backends.compile import CompileBackend
from deltazoo.backends.io.errors import DeltazooError, DeviceError, StateError
from deltazoo.blocks.spec.stack_spec import StackSpec
from deltazoo.mixers import (
    DeltaNet,
    GatedDeltaNet,
    LogLinearGDN,
    LogLinearMamba2,
    Longhorn,
    MixerConfig,
    RetNet,
    SimpleGLA,
)
from deltazoo.mixers.core import state as states
from deltazoo.mixers.core.config import config_class

EAGER = CompileBackend(compiled=False)
SIZES = {"heads": 2, "key_width": 8, "value_width": 8}
PAIRS = [
    (GatedDeltaNet(**SIZES), DeltaNet(**SIZES)),
    (GatedDeltaNet(**SIZES), Longhorn(**SIZES)),
    (SimpleGLA(**SIZES), RetNet(**SIZES)),
    (LogLinearGDN(heads=1, levels=4), LogLinearMamba2(heads=1, levels=4, value_heads=1)),
]


@pytest.mark.parametrize(("config", "other"), PAIRS, ids=[f"{a.name}-{b.name}" for a, b in PAIRS])
@torch.no_grad()
def test_a_state_of_another_kind_is_refused(config: MixerConfig, other: MixerConfig) -> None:
    mixer, state = config.build(32, backend=EAGER), other.build(32, backend=EAGER).init_state(2, 8)
    for tokens in (1, 3):
        with pytest.raises(StateError, match=rf"must have the tensors .*{config.name}\..*, got .*{other.name}\."):
            mixer(torch.randn(2, tokens, 32), state)
    own = mixer.init_state(2, 8)
    mixer(torch.randn(2, 1, 32), own)
    assert all(type(tensor) is torch.Tensor for tensor in tree_leaves(own))


def stack(pattern: str) -> StackSpec:
    return StackSpec(width=32, depth=2, vocab=9, pattern=pattern, mlp="none")


@torch.no_grad()
def test_a_state_of_another_model_is_refused_by_forward_rollback_and_load(tmp_path) -> None:
    model, other = (stack(f"{name}(heads=2, key_width=8, value_width=8)") for name in ("gated_deltanet", "deltanet"))
    model, other = model.build(EAGER), other.build(EAGER)
    state, foreign = model.init_state(1), other.init_state(1)
    assert [x.shape for x in tree_leaves(state)] == [x.shape for x in tree_leaves(foreign)]
    with pytest.raises(StateError, match=r"gated_deltanet\.update"):
        model(torch.zeros(1, 2, dtype=torch.int64), foreign)
    with pytest.raises(StateError, match="of the same kind of model"):
        states.rollback_(state, foreign)
    states.save(foreign, tmp_path / "state")
    with pytest.raises(StateError, match="must hold the state of the same kind of model"):
        states.load_(state, tmp_path / "state")
    _, later = model(torch.ones(1, 2, dtype=torch.int64), state)
    states.save(later, tmp_path / "state")
    loaded = states.load_(model.init_state(1), tmp_path / "state")
    torch.testing.assert_close(tree_leaves(loaded), tree_leaves(later))


@torch.no_grad()
def test_compiled_models_refuse_the_state_too_and_take_their_own() -> None:
    mixer = GatedDeltaNet(**SIZES).build(32, backend=EAGER)
    compiled = torch.compile(mixer, fullgraph=True, backend="eager")
    x, state = torch.randn(2, 3, 32), mixer.init_state(2)
    torch.testing.assert_close(compiled(x, states.snapshot(state))[0], mixer(x, state)[0])
    with pytest.raises(Exception, match=r"deltanet\.update"):
        compiled(x, DeltaNet(**SIZES).build(32, backend=EAGER).init_state(2))


@pytest.mark.parametrize("name", ["gated_deltanet", "log_linear_gdn", "mamba", "attention", "fox", "mom", "titans"])
def test_a_state_a_context_or_a_batch_of_another_type_is_refused(name: str) -> None:
    mixer = config_class(name)().build(64, backend=EAGER)
    x, state = torch.randn(1, 2, 64), mixer.init_state(1, 8)
    with pytest.raises(StateError, match=r"state.* must .*, got int$"):
        mixer(x, 3)
    with pytest.raises(DeltazooError, match=r"context must be a deltazoo\.Context or None, got int"):
        mixer(x, state, 3)
    with pytest.raises(DeltazooError, match="batch must be an integer >= 0, got 'a'"):
        mixer.init_state("a", 8)


@pytest.mark.parametrize(("name", "shape"), [("gated_deltanet", "3, 192"), ("log_linear_gdn", "3, ")])
def test_a_state_of_another_width_is_refused_with_its_key(name: str, shape: str) -> None:
    config = config_class(name)(heads=1)
    mixer, state = config.build(64, backend=EAGER), config.build(128, backend=EAGER).init_state(2)
    for tokens in (1, 2):
        with pytest.raises(StateError, match=rf"state 'project' must have shape \['N', {shape}.*\], got \[2, 3, "):
            mixer(torch.randn(2, tokens, 64), state)


def test_an_input_on_another_device_is_refused_with_the_device_of_the_weights() -> None:
    mixer = GatedDeltaNet(heads=2).build(32, backend=EAGER)
    with pytest.raises(DeviceError, match="x must be on cpu, where the weights are, got meta"):
        mixer(torch.zeros(1, 2, 32, device="meta"))


def test_a_state_or_a_context_of_another_type_is_refused_by_a_model() -> None:
    model, tokens = stack("gated_deltanet(heads=2)").build(EAGER), torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(StateError, match="state must be a StackState, which init_state returns, got NamedTensors"):
        model(tokens, GatedDeltaNet(heads=2).build(32).init_state(1))
    for call in (lambda: model(tokens, None, 3), lambda: model.loss(tokens, tokens, 3)):
        with pytest.raises(DeltazooError, match=r"context must be a deltazoo\.Context or None, got int"):
            call()
