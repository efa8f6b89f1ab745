"""The matrix: every mixer in every use, on the chunked code, with numbers. Run this file to print the table.

Relative errors against the mixer at once in eager float64: training (the gradient of a part of the whole), prefill in
pieces, decoding, a pack, bf16 autocast, torch.compile(fullgraph=True), torch.export, going on after a rollback.
"""

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from deltazoo.backends.compile import CompileBackend
from deltazoo.mixers import Context, MixerConfig
from deltazoo.mixers import state as states
from deltazoo.mixers.base import Mixer

WIDTH, T, CAPACITY = 16, 19, 32
EXACT, ROUNDED = 1e-9, 0.03


def made(config: MixerConfig, dtype: torch.dtype = torch.float64) -> Mixer:
    torch.manual_seed(0)
    return config.build(WIDTH, backend=CompileBackend(chunk=16, compiled=False)).to(dtype)


def draw(rows: int = 2) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(rows, T, WIDTH, dtype=torch.float64)


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float(((ours.double() - theirs.double()).norm() / theirs.double().norm()).detach())


def in_pieces(mixer: Mixer, x: Tensor, pieces: list[int]) -> Tensor:
    state, outputs = mixer.init_state(x.shape[0], CAPACITY), []
    for piece in x.split(pieces, 1):
        y, state = mixer(piece, state)
        outputs.append(y)
    return torch.cat(outputs, 1)


def train(config: MixerConfig) -> float:
    """Gradients of all parameters through the state, in two pieces, against those at once."""
    mixer, x = made(config), draw()
    at_once, pieces = (
        torch.autograd.grad((y * x).sum(), list(mixer.parameters()), allow_unused=True)
        for y in (mixer(x)[0], in_pieces(mixer, x, [7, 12]))
    )
    flat = [torch.cat([g.flatten() for g in grads if g is not None]) for grads in (pieces, at_once)]
    return relative(*flat)


def prefill(config: MixerConfig) -> float:
    mixer, x = made(config), draw()
    with torch.no_grad():
        return relative(in_pieces(mixer, x, [1, 6, 0, 12]), mixer(x)[0])


def decode(config: MixerConfig) -> float:
    mixer, x = made(config), draw()
    with torch.no_grad():
        return relative(in_pieces(mixer, x, [1] * T), mixer(x)[0])


def packed(config: MixerConfig) -> float:
    mixer, x = made(config), draw(1)
    want = torch.cat([mixer(x[:, :5])[0], mixer(x[:, 5:])[0]], 1)
    return relative(mixer(x, None, Context(cu_seqlens=torch.tensor([0, 5, T], dtype=torch.int32)))[0], want)


def autocast(config: MixerConfig) -> float:
    mixer, x = made(config, torch.float32), draw()
    exact = made(config)
    exact.load_state_dict({name: value.double() for name, value in mixer.state_dict().items()})
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        return relative(mixer(x.float())[0], exact(x)[0])


def compiled(config: MixerConfig) -> float:
    torch._dynamo.reset()
    mixer, x = made(config), draw()
    with torch.no_grad():
        return relative(torch.compile(mixer, fullgraph=True, backend="eager")(x)[0], mixer(x)[0])


def exported(config: MixerConfig) -> float:
    mixer, x = made(config), draw()
    with torch.no_grad():
        program = torch.export.export(mixer, (x,), strict=False)
        return relative(program.module()(x)[0], mixer(x)[0])


def rollback(config: MixerConfig) -> float:
    mixer, x = made(config), draw()
    with torch.no_grad():
        _, state = mixer(x[:, :9], mixer.init_state(2, CAPACITY))
        kept = states.snapshot(state)
        _, state = mixer(x[:, :3], state)
        assert any(not torch.equal(a, b) for a, b in zip(tree_leaves(state), tree_leaves(kept), strict=True))
        return relative(mixer(x[:, 9:], states.rollback_(state, kept))[0], mixer(x)[0][:, 9:])


USES: dict[str, tuple[Callable[[MixerConfig], float], float]] = {
    "train": (train, EXACT),
    "prefill in pieces": (prefill, EXACT),
    "decode": (decode, EXACT),
    "packed": (packed, EXACT),
    "bf16 autocast": (autocast, ROUNDED),
    "fullgraph": (compiled, EXACT),
    "export": (exported, EXACT),
    "rollback": (rollback, EXACT),
}


@pytest.mark.parametrize("use", USES)
def test_a_mixer_in_a_use(one_of_each: MixerConfig, use: str) -> None:
    run, bound = USES[use]
    assert run(one_of_each) <= bound


def main() -> None:
    """Print the table as Markdown."""
    import importlib.util
    from pathlib import Path

    spec = importlib.util.spec_from_file_location("conftest", Path(__file__).with_name("conftest.py"))
    assert spec is not None and spec.loader is not None
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    lines = ["| mixer | " + " | ".join(USES) + " |", "| --- " * (1 + len(USES)) + "|"]
    for name, config in conftest.ZOO.items():
        if conftest.ZOO[config.name] is config:
            lines.append(f"| {name} | " + " | ".join(f"{run(config):.0e}" for run, _ in USES.values()) + " |")
            sys.stderr.write(f"{name}\n")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
