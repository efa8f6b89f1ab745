"""Every mixer passes every check of the conformance kit."""

from collections.abc import Iterator

import pytest
import torch
from small_configs import small
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from deltazoo.backends.compile import CompileBackend
from deltazoo.backends.io.errors import UnknownNameError
from deltazoo.backends.update import registry
from deltazoo.blocks.spec.stack_spec import StackSpec
from deltazoo.mixers import MixerConfig
from deltazoo.mixers.core import conformance
from deltazoo.mixers.core.mixer import FIRST_PLACE, Context, Cost, Mixer, Place, State

# Traced on the reference, whose graph of a few tokens is much smaller than that of the chunk-parallel backend.
TRACED = ("fullgraph", "export")
# One mixer of each kind of graph: attention, chunks, real and complex elementwise scan, dplr, token scan, FFT.
KINDS_OF_GRAPHS = ("attention", "gated_deltanet", "mamba", "lru", "rwkv7", "mlstm", "s4d")
# Two steps, or two memories, have every part of a longer loop, in a smaller graph.
SHORT_LOOPS = {"mesa": small("mesa", steps=2), "mom": small("mom", memories=2)}


# a plug-in tests its own mixers
MIXERS = [x for x in registry.names(registry.MIXERS) if registry.owner(registry.MIXERS, x).startswith("deltazoo ")]


def cases() -> Iterator[object]:
    for mixer in MIXERS:
        for name in conformance.PROPERTIES:
            elsewhere = name in TRACED and mixer not in KINDS_OF_GRAPHS
            yield pytest.param(mixer, name, marks=[pytest.mark.graphs] if elsewhere else [])


@pytest.mark.parametrize(("mixer_name", "name"), list(cases()))
def test_mixer_has_property(zoo: dict[str, MixerConfig], mixer_name: str, name: str) -> None:
    config, backend = zoo[mixer_name], None
    if name in TRACED:
        config, backend = SHORT_LOOPS.get(mixer_name, config), "reference"
    assert conformance.error(config, name, backend=backend) <= conformance.PROPERTIES[name][1]


@pytest.mark.parametrize("name", MIXERS)
def test_activation_checkpointing_gives_equal_gradients(zoo: dict[str, MixerConfig], name: str) -> None:
    mixer = conformance.Subject(zoo[name], 16, CompileBackend(chunk=16, compiled=False)).mixer()
    x = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    expected, actual = (
        torch.autograd.grad(y.square().sum(), x)
        for y in (mixer(x).y, checkpoint(lambda x: mixer(x).y, x, use_reentrant=False))
    )
    torch.testing.assert_close(actual, expected)


class Leaky(MixerConfig):
    """Adds the sum over all tokens and rows, which violates causality, isolation and every other property of tokens."""

    name = "leaky"
    source = "none"

    def build(self, width: int, place: Place = FIRST_PLACE, backend: object = None) -> "LeakyMixer":
        return LeakyMixer(width)

    def cost(self, width: int) -> Cost:
        return Cost(0, 0, 0, 0)


class LeakyMixer(Mixer):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(width))

    def reset_parameters(self) -> None:
        torch.nn.init.constant_(self.gain, 2.0)  # differs from the constructor

    def init_state(self, batch: int, capacity: int | None = None) -> State:
        return {"unused": self.gain.new_zeros(batch, 1)}

    def forward(
        self, x: Tensor, state: State | None = None, context: Context | None = None
    ) -> tuple[Tensor, State | None]:
        return self.gain * (x + x.sum((0, 1)) / 10), state


@pytest.mark.parametrize("name", ["train", "prefill in pieces", "decode", "packed", "padded", "causal, isolated"])
def test_kit_detects_a_leak_between_tokens(name: str) -> None:
    assert not conformance.error(Leaky(), name) <= conformance.PROPERTIES[name][1]


def test_a_mixer_may_return_y_and_state_alone() -> None:
    mixer, x = Leaky().build(4), torch.ones(1, 2, 4)
    state = mixer.init_state(1)
    assert isinstance(mixer.forward(x, state), tuple) and len(mixer.forward(x, state)) == 2
    output = mixer(x, state)
    assert output.state is state and output.side is None
    torch.testing.assert_close(output.y, 1.2 * x)
    model = StackSpec(width=4, depth=2, vocab=5, pattern=Leaky()).build("reference")
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    assert model.loss(tokens, tokens).isfinite()


def test_kit_detects_weights_that_differ_from_an_ordinary_build() -> None:
    assert conformance.error(Leaky(), "init_weights") == float("inf")


def test_kit_detects_a_state_that_does_not_depend_on_the_tokens() -> None:
    assert conformance.error(Leaky(), "rollback") == float("inf")


def test_suite_checks_all_properties_except_the_excluded_ones() -> None:
    with pytest.raises(UnknownNameError, match="tranin"):
        conformance.suite(Leaky(), without=["tranin"])
    test = conformance.suite(Leaky(), without=["decode"])
    names = test.pytestmark[0].args[1]
    assert names == [name for name in conformance.PROPERTIES if name != "decode"]
    with pytest.raises(AssertionError, match="packed: the relative error is"):
        test("packed")
