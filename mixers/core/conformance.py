"""The checks that any mixer must pass, ours and theirs; in a plug-in's tests one line runs them:

test_my_mixer = conformance.suite(MyMixer(heads=2))
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from deltazoo.backends.base import Backend
from deltazoo.backends.compile import CompileBackend
from deltazoo.backends.errors import UnknownNameError
from deltazoo.mixers.core.mixer import Context, Mixer, MixerConfig
from deltazoo.mixers.core.state import rollback_, snapshot

T, CAPACITY = 19, 32
EXACT, ROUNDED = 1e-9, 0.03


class Made(NamedTuple):
    """What a property looks at: a mixer in float64 or another dtype, with the same weights, and x [2, T, width]."""

    config: MixerConfig
    width: int
    backend: str | Backend

    def mixer(self, dtype: torch.dtype = torch.float64) -> Mixer:
        torch.manual_seed(0)
        return self.config.build(self.width, backend=self.backend).to(dtype)

    def x(self) -> Tensor:
        torch.manual_seed(1)
        return torch.randn(2, T, self.width, dtype=torch.float64)


def trains(made: Made) -> float:
    """Gradients of all parameters through the state, in two pieces, are those at once."""
    mixer, x = made.mixer(), made.x()
    pieces, at_once = (
        torch.autograd.grad((y * x).sum(), list(mixer.parameters()), allow_unused=True)
        for y in (in_pieces(mixer, x, [7, 12]), mixer(x)[0])
    )
    flat = [torch.cat([g.flatten() for g in grads if g is not None]) for grads in (pieces, at_once)]
    return relative(*flat)


@torch.no_grad()
def prefills_in_pieces(made: Made) -> float:
    """Pieces, an empty one among them, give the numbers of the whole."""
    mixer, x = made.mixer(), made.x()
    return relative(in_pieces(mixer, x, [1, 6, 0, 12]), mixer(x)[0])


@torch.no_grad()
def decodes(made: Made) -> float:
    """Token by token gives the numbers of the whole."""
    mixer, x = made.mixer(), made.x()
    return relative(in_pieces(mixer, x, [1] * T), mixer(x)[0])


@torch.no_grad()
def packs(made: Made) -> float:
    """A pack gives the numbers of its sequences alone."""
    mixer, x = made.mixer(), made.x()[:1]
    want = torch.cat([mixer(x[:, :5])[0], mixer(x[:, 5:])[0]], 1)
    return relative(mixer(x, None, Context(cu_seqlens=torch.tensor([0, 5, T], dtype=torch.int32)))[0], want)


@torch.no_grad()
def pads(made: Made) -> float:
    """Padding on the left of one row and on the right of the other gives the numbers of the rows alone."""
    mixer, x = made.mixer(), made.x()
    time = torch.arange(T)
    y = mixer(x, None, Context(mask=torch.stack([time >= 4, time < 11])))[0]
    left, right = mixer(x[:1, 4:])[0], mixer(x[1:, :11])[0]
    return max(relative(y[:1, 4:], left), relative(y[1:, :11], right))


@torch.no_grad()
def is_causal_and_isolated(made: Made) -> float:
    """No token and no other row changes what came before it."""
    mixer, x = made.mixer(), made.x()
    changed = x.clone()
    changed[0, 8:] = 7 * torch.randn_like(changed[0, 8:])
    changed[1] = torch.nan
    return relative(mixer(changed)[0][0, :8], mixer(x)[0][0, :8])


@torch.no_grad()
def runs_in_bfloat16(made: Made) -> float:
    """Under autocast to bfloat16 the numbers are those of float64, rounded."""
    mixer, exact, x = made.mixer(torch.float32), made.mixer(), made.x()
    exact.load_state_dict({name: value.double() for name, value in mixer.state_dict().items()})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return relative(mixer(x.float())[0], exact(x)[0])


@torch.no_grad()
def is_one_graph(made: Made) -> float:
    """torch.compile(fullgraph=True) gives the same numbers."""
    torch._dynamo.reset()
    mixer, x = made.mixer(), made.x()
    return relative(torch.compile(mixer, fullgraph=True, backend="eager")(x)[0], mixer(x)[0])


@torch.no_grad()
def exports(made: Made) -> float:
    """torch.export gives the same numbers."""
    mixer, x = made.mixer(), made.x()
    program = torch.export.export(mixer, (x,), strict=False)
    return relative(program.module()(x)[0], mixer(x)[0])


@torch.no_grad()
def rolls_back(made: Made) -> float:
    """After a rollback to a snapshot it goes on as if nothing had come between."""
    mixer, x = made.mixer(), made.x()
    _, state = mixer(x[:, :9], mixer.init_state(2, CAPACITY))
    kept = snapshot(state)
    _, state = mixer(x[:, :3], state)
    if all(torch.equal(a, b) for a, b in zip(tree_leaves(state), tree_leaves(kept), strict=True)):
        return float("inf")  # a state that nothing changes holds nothing
    return relative(mixer(x[:, 9:], rollback_(state, kept))[0], mixer(x)[0][:, 9:])


# What is checked: the property, and the relative error that it may have.
PROPERTIES: dict[str, tuple[Callable[[Made], float], float]] = {
    "train": (trains, EXACT),
    "prefill in pieces": (prefills_in_pieces, EXACT),
    "decode": (decodes, EXACT),
    "packed": (packs, EXACT),
    "padded": (pads, EXACT),
    "causal, isolated": (is_causal_and_isolated, EXACT),
    "bf16 autocast": (runs_in_bfloat16, ROUNDED),
    "fullgraph": (is_one_graph, EXACT),
    "export": (exports, EXACT),
    "rollback": (rolls_back, EXACT),
}


def error(config: MixerConfig, name: str, width: int = 16, backend: str | Backend | None = None) -> float:
    """The relative error of one property. backend: None is the chunked code, uncompiled, which is quick to start.

    Raises: UnknownNameError.
    """
    if name not in PROPERTIES:
        raise UnknownNameError("property", name, PROPERTIES)
    chosen = CompileBackend(chunk=16, compiled=False) if backend is None else backend
    return PROPERTIES[name][0](Made(config, width, chosen))


def suite(
    config: MixerConfig, width: int = 16, backend: str | Backend | None = None, without: Sequence[str] = ()
) -> Callable[..., None]:
    """Make a pytest test of a mixer, parametrised by property.

    Args: width: at which the mixer is built; without: the names of properties to leave out.
    Raises: UnknownNameError.
    """
    import pytest

    for name in without:
        if name not in PROPERTIES:
            raise UnknownNameError("property", name, PROPERTIES)

    @pytest.mark.parametrize("name", [name for name in PROPERTIES if name not in without])
    def test_conformance(name: str) -> None:
        got, bound = error(config, name, width, backend), PROPERTIES[name][1]
        assert got <= bound, f"{name}: the relative error is {got:.1e}, more than {bound:.0e}"

    return test_conformance


def relative(ours: Tensor, theirs: Tensor) -> float:
    """|ours - theirs| / |theirs|."""
    return float(((ours.double() - theirs.double()).norm() / theirs.double().norm()).detach())


def in_pieces(mixer: Mixer, x: Tensor, pieces: list[int]) -> Tensor:
    """Run x piece by piece, from a fresh state."""
    state: Any = mixer.init_state(x.shape[0], CAPACITY)
    outputs = []
    for piece in x.split(pieces, 1):
        y, state = mixer(piece, state)
        outputs.append(y)
    return torch.cat(outputs, 1)
