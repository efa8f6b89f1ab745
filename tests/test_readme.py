"""The README is true: its Python runs, its YAML builds, its commands exist."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import deltazoo
from deltazoo.blocks.spec import StackSpec
from deltazoo.mixers import GatedDeltaNet, SlidingWindow

README = (Path(deltazoo.__file__).resolve().parent / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def run(block: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(block, "README.md", "exec"), names)
    return names


def test_the_updates_example_runs_and_gives_the_shapes_it_says() -> None:
    torch.manual_seed(0)
    names = run(blocks("python")[0])
    out, inputs, spec = names["out"], names["inputs"], names["spec"]
    assert out.o.shape == (2, 100, 4, 32)
    assert out.state.shape == (2, 4, 16, 32)
    S = torch.zeros(2, 4, 16, 32)
    for t in range(100):
        k, v = inputs.k[:, t].repeat_interleave(2, 1), inputs.v[:, t]
        S = inputs.log_decay[:, t].exp()[..., None, None] * S
        S = S + k[..., None] * (inputs.beta[:, t, :, None] * (v - (k[..., None] * S).sum(-2)))[..., None, :]
    torch.testing.assert_close(out.state, S, rtol=1e-4, atol=1e-5)
    assert str(spec).startswith("S_t = d_t")


def test_the_mixers_example_runs_and_its_pieces_equal_the_whole() -> None:
    torch.manual_seed(0)
    with deltazoo.use_backend("reference"):
        names = run(blocks("python")[1])
    pieces = torch.cat([names["first"], names["rest"]], 1)
    torch.testing.assert_close(pieces, names["y"], rtol=1e-4, atol=1e-5)
    assert names["logits"].shape == (1, 16, 256)


def test_the_yaml_is_the_same_stack_as_the_python() -> None:
    (text,) = blocks("yaml")
    data = yaml.safe_load(text)
    python = StackSpec(width=64, depth=4, vocab=256, pattern=3 * GatedDeltaNet(heads=2) + SlidingWindow(window=32))
    assert StackSpec.model_validate(data) == python


def test_the_kit_finds_the_examples_mistake() -> None:
    wrong = run(blocks("python")[2])["Doubled"]()
    spec = deltazoo.UpdateSpec(decay="head", beta="head")
    kit = deltazoo.conformance
    report = kit.compare(wrong, kit.Case(spec, kit.SHAPES["plain"]))
    assert {error.tensor for error in report.errors if not error.ok} >= {"o", "d_q", "d_v"}


@pytest.mark.parametrize("line", re.findall(r"^    deltazoo (\w+)", README, flags=re.MULTILINE))
def test_every_command_shown_exists(line: str) -> None:
    from deltazoo.cli import app

    assert line in {command.name for command in app.registered_commands}


@pytest.mark.parametrize("target", sorted(set(re.findall(r"make ([a-z-]+)", README))))
def test_every_make_target_shown_exists(target: str) -> None:
    makefile = (Path(deltazoo.__file__).resolve().parent / "Makefile").read_text()
    assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)
