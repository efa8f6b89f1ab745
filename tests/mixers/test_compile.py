"""Mixers under torch.compile(fullgraph=True): cases beyond the conformance kit.

Serving (padded prefill, then decoding), many lengths, packed sequences, Inductor.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._pytree import tree_leaves

from deltazoo.backends.compile import CompileBackend
from deltazoo.backends.update import registry
from deltazoo.backends.update.base import Backend
from deltazoo.backends.update.reference import ReferenceBackend
from deltazoo.mixers import Context, MixerConfig, RetNet
from deltazoo.mixers.core.mixer import Mixer, State
from deltazoo.mixers.core.update import Update

WIDTH, T = 16, 2
CHUNKED = CompileBackend(chunk=16, compiled=False)  # graphs grow with the chunk
OURS = [x for x in registry.names(registry.MIXERS) if registry.owner(registry.MIXERS, x).startswith("deltazoo ")]

graphs, slow = pytest.mark.graphs, pytest.mark.slow
# Kinds of states, and ways to handle padding.
STATE_KINDS = (
    "attention", "sliding_window", "gated_deltanet", "mamba", "rwkv7", "mlstm", "s4d", "titans", "log_linear_gdn",
    "mom of rwkv4, one active", "mla", "fox, pro", "path_attention, forget gate, grouped heads", "mamba3", "lru", "gsa",
    "hyena",
)  # fmt: skip
# AOTAutograd functionalises the writes of a cache, of a state that a scan returns, and of states chosen by a router.
FUNCTIONALISED = ("attention", "gated_deltanet", "mom of rwkv4, one active")
# A mixer with chunks and one with a window; the rest of the zoo is slow.
EXPORTED = [pytest.param(x, marks=graphs) for x in ("gated_deltanet", "sliding_window")]
OTHERS = [x for x in OURS if x not in ("gated_deltanet", "sliding_window")]
# elementwise scan, token scan, chunks
INDUCTOR_CASES = [pytest.param("mamba", marks=graphs), *(pytest.param(x, marks=slow) for x in ("titans", "mlstm"))]


def build(config: MixerConfig, backend: str | Backend) -> Mixer:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return config.build(WIDTH, backend=backend).double()


def compiled(module: nn.Module, compiler: str = "aot_eager") -> tuple[nn.Module, CompileCounterWithBackend]:
    counter = CompileCounterWithBackend(compiler)
    return torch.compile(module, fullgraph=True, backend=counter), counter


def draw(time: int) -> Tensor:
    return torch.randn(2, time, WIDTH, dtype=torch.float64, requires_grad=True)


def assert_same(values: object, expected: object) -> None:
    for left, right in zip(tree_leaves(values), tree_leaves(expected), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12)


class Serve(nn.Module):
    """Prefill a padded batch, then decode a token."""

    def __init__(self, mixer: Mixer) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, x: Tensor, mask: Tensor, token: Tensor, state: State) -> tuple[Tensor, Tensor, State]:
        y, state, _ = self.mixer(x, state, Context(mask=mask))
        next_y, state, _ = self.mixer(token, state)
        return y, next_y, state


@graphs
@torch.no_grad()
@pytest.mark.parametrize("name", STATE_KINDS)
def test_padded_prefill_and_decoding_are_one_graph_and_update_the_state_in_place(
    zoo: dict[str, MixerConfig], name: str
) -> None:
    mixer = build(zoo[name], "reference")
    module, counter = compiled(Serve(mixer), "aot_eager" if name in FUNCTIONALISED else "eager")
    mask = torch.tensor([[False, True], [True, False]])
    for _ in range(2):  # the second call reuses the graph
        x, token = draw(T).detach(), draw(1).detach()
        state = mixer.init_state(2, 8)
        addresses = [leaf.data_ptr() for leaf in tree_leaves(state)]
        outputs = module(x, mask, token, state)
        assert_same(outputs, Serve(mixer)(x, mask, token, mixer.init_state(2, 8)))
        assert [leaf.data_ptr() for leaf in tree_leaves(outputs[2])] == addresses
    assert counter.frame_count == 1


@torch.no_grad()
def test_an_exported_program_is_saved_and_loaded(tmp_path: Path) -> None:
    mixer, x = build(RetNet(heads=2), "reference"), draw(T).detach()
    torch.export.save(torch.export.export(mixer, (x,), strict=False), tmp_path / "program.pt2")
    assert_same(torch.export.load(tmp_path / "program.pt2").module()(x), mixer(x))


@graphs
@torch.no_grad()
@pytest.mark.parametrize("name", ["sliding_window", "gated_deltanet"])
def test_packed_prefill_is_one_graph(zoo: dict[str, MixerConfig], name: str) -> None:
    mixer = build(zoo[name], CHUNKED)
    module, counter = compiled(mixer)
    x = draw(3).detach()[:1]
    context = Context(cu_seqlens=torch.tensor([0, 2, 3], dtype=torch.int32))
    expected = mixer(x, mixer.init_state(2, 8), context)
    assert_same(module(x, mixer.init_state(2, 8), context), expected)
    assert counter.frame_count == 1


@graphs
@torch.no_grad()
@pytest.mark.parametrize("name", ["retnet", "gated_deltanet", "sliding_window", "attention"])
def test_at_most_three_graphs_serve_all_lengths(zoo: dict[str, MixerConfig], name: str) -> None:
    """One graph for the first length, one for multiples of the chunk or window, one for all other lengths."""
    mixer = build(zoo[name], CHUNKED)
    module, counter = compiled(mixer, "eager")
    for time in (70, 130, 192, 200, 256, 75):
        x = draw(time).detach()
        assert_same(module(x), mixer(x))
    assert counter.frame_count <= 3


def export(mixer: Mixer) -> nn.Module:
    """Export a mixer with a dynamic T."""
    dynamic = ({1: torch.export.Dim.DYNAMIC},)
    return torch.export.export(mixer, (draw(40).detach(),), dynamic_shapes=dynamic, strict=False).module()


@pytest.mark.parametrize("name", [*EXPORTED, *(pytest.param(x, marks=slow) for x in OTHERS)])
def test_one_exported_program_takes_every_length_and_has_gradients(zoo: dict[str, MixerConfig], name: str) -> None:
    mixer = build(zoo[name], CHUNKED)
    program = export(mixer)
    for time in (40, 5, 32, 75):  # on both sides of the chunks and of the windows
        x = draw(time)
        outputs = program(x)[0], mixer(x)[0]
        torch.testing.assert_close(*outputs, rtol=1e-9, atol=1e-11)
    leaves = dict(mixer.named_parameters())
    for actual, expected in zip(
        torch.autograd.grad(outputs[0].square().sum(), [x, *map(dict(program.named_parameters()).get, leaves)]),
        torch.autograd.grad(outputs[1].square().sum(), [x, *leaves.values()]),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("name", INDUCTOR_CASES)
def test_inductor_output_and_gradients_equal_eager(zoo: dict[str, MixerConfig], name: str) -> None:
    mixer = build(zoo[name], CHUNKED)
    x = draw(20)
    outputs = torch.compile(mixer, fullgraph=True)(x)[0], mixer(x)[0]
    torch.testing.assert_close(*outputs, rtol=1e-9, atol=1e-11)
    leaves = [x, *mixer.parameters()]
    gradients = (torch.autograd.grad((y * y.cos()).sum(), leaves) for y in outputs)
    for left, right in zip(*gradients, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-7, atol=1e-10)


def test_masked_fixed_decay_runs_on_a_backend_without_channel_decay() -> None:
    """With a mask the constant decay per head is passed per token, which needs only the spec with a decay per head."""

    class HeadDecayOnly(ReferenceBackend):
        name = "head-decay-only"

        def unsupported(self, spec, meta):
            return ["decay must not be 'channel'."] if spec.decay == "channel" else []

    mixer = RetNet(heads=2).build(16, backend=HeadDecayOnly())
    update = next(part for part in mixer.modules() if isinstance(part, Update))
    update.rebind(HeadDecayOnly(), SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32))
    x = torch.randn(2, 5, 16)
    y = mixer(x).y
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    masked = mixer(x, mixer.init_state(2), Context(mask=mask)).y
    torch.testing.assert_close(masked[0], y[0])
    torch.testing.assert_close(masked[1, :3], y[1, :3])
