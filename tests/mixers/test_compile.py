"""Every mixer under torch.compile(fullgraph=True): one graph, the numbers of eager, forward, backward and decoding."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._pytree import tree_leaves

from deltazoo.backends.base import Backend
from deltazoo.backends.compile import CompileBackend
from deltazoo.backends.reference import ReferenceBackend
from deltazoo.mixers import Context, MixerConfig, RetNet
from deltazoo.mixers.core.delta_mixer import Update
from deltazoo.mixers.core.mixer import Mixer

WIDTH, T = 16, 3


# One of each kind of state, and of each way to treat padding.
KINDS = (
    "attention", "sliding_window", "gated_deltanet", "mamba", "mlstm", "rwkv7", "lru", "gsa", "s4d", "hyena", "titans",
    "mom",
)  # fmt: skip


@pytest.fixture
def mixer(one_of_each: MixerConfig) -> Mixer:
    """Every mixer of the zoo, on the reference: its loop over three tokens is short."""
    return fresh(one_of_each, "reference")


@pytest.fixture(params=["attention", "sliding_window", "retnet", "gated_deltanet"])
def chunked_mixer(request: pytest.FixtureRequest, zoo: dict[str, MixerConfig]) -> Mixer:
    """On the chunked code, whose graphs do not depend on the length."""
    return fresh(zoo[request.param], CompileBackend(compiled=False))


def fresh(config: MixerConfig, backend: str | Backend) -> Mixer:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return config.build(WIDTH, backend=backend).double()


def compiled(mixer: Mixer) -> tuple[nn.Module, CompileCounterWithBackend]:
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(mixer, fullgraph=True, backend=counter), counter


def draw(time: int) -> Tensor:
    return torch.randn(2, time, WIDTH, dtype=torch.float64, requires_grad=True)


def same(got: object, want: object) -> None:
    for left, right in zip(tree_leaves(got), tree_leaves(want), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12)


def test_training_is_one_graph(mixer: Mixer) -> None:
    module, counter = compiled(mixer)
    x = draw(T)
    weight = torch.randn(2, T, WIDTH, dtype=torch.float64)
    leaves = [x, *mixer.parameters()]
    got, want = module(x)[0], mixer(x)[0]
    same(got, want)
    same(torch.autograd.grad((got * weight).sum(), leaves), torch.autograd.grad((want * weight).sum(), leaves))
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", KINDS)
def test_decoding_is_one_graph_and_in_place(zoo: dict[str, MixerConfig], name: str) -> None:
    mixer = fresh(zoo[name], "reference")
    module, counter = compiled(mixer)
    with torch.no_grad():
        state, eager = mixer.init_state(2, 8), mixer.init_state(2, 8)
        before = [leaf.data_ptr() for leaf in tree_leaves(state)]
        for _ in range(4):
            x = draw(1).detach()
            (got, state), (want, eager) = module(x, state), mixer(x, eager)
            same(got, want)
            same(state, eager)
    assert [leaf.data_ptr() for leaf in tree_leaves(state)] == before
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", KINDS)
def test_a_padded_prefill_is_one_graph(zoo: dict[str, MixerConfig], name: str) -> None:
    mixer = fresh(zoo[name], "reference")
    module, counter = compiled(mixer)
    x = draw(T)
    context = Context(mask=torch.tensor([[False, True, True], [True, True, False]]))
    same(module(x, mixer.init_state(2, 8), context), mixer(x, mixer.init_state(2, 8), context))
    assert counter.frame_count == 1


def test_a_packed_prefill_is_one_graph(chunked_mixer: Mixer) -> None:
    module, counter = compiled(chunked_mixer)
    x = draw(T)[:1]
    context = Context(cu_seqlens=torch.tensor([0, 2, 3], dtype=torch.int32))
    want = chunked_mixer(x, chunked_mixer.init_state(2, 8), context)
    same(module(x, chunked_mixer.init_state(2, 8), context), want)
    assert counter.frame_count == 1


def test_lengths_share_graphs(chunked_mixer: Mixer) -> None:
    """The first length has its own; then one of whole chunks or windows, one of others, at most."""
    module, counter = compiled(chunked_mixer)
    with torch.no_grad():
        for time in (70, 130, 192, 200, 256, 75):
            x = draw(time).detach()
            same(module(x), chunked_mixer(x))
    assert counter.frame_count <= 3


@pytest.mark.parametrize("name", ["mamba", "mlstm", "titans"])
def test_inductor_gives_the_same_numbers(zoo: dict[str, MixerConfig], name: str) -> None:
    """One of each operator: elementwise scan, scan over chunks, loop."""
    mixer = fresh(zoo[name], CompileBackend(compiled=False))
    x = draw(20)
    got, want = torch.compile(mixer, fullgraph=True)(x)[0], mixer(x)[0]
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
    leaves = [x, *mixer.parameters()]
    for ours, theirs in zip(*(torch.autograd.grad((y * y.cos()).sum(), leaves) for y in (got, want)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-10)


def test_a_fixed_decay_asks_nothing_of_the_backend_that_only_a_mask_would_need():
    """With a mask a decay that is constant in time is given token by token: another spec, which few ever run."""

    class HeadsAlone(ReferenceBackend):
        name = "heads-alone"

        def unsupported(self, spec, meta):
            return ["decay must not be 'channel'."] if spec.decay == "channel" else []

    mixer = RetNet(heads=2).build(16, backend=HeadsAlone())
    update = next(part for part in mixer.modules() if isinstance(part, Update))
    update.rebind(HeadsAlone(), SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32))
    x = torch.randn(2, 5, 16)
    y, _ = mixer(x)
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    state = mixer.init_state(2)
    masked, _ = mixer(x, state, Context(mask=mask))
    torch.testing.assert_close(masked[0], y[0])
    torch.testing.assert_close(masked[1, :3], y[1, :3])
