"""The matrix: every mixer in every use, on the chunked code, with numbers. Run this file to print the table."""

import sys

import pytest
import torch
from torch import Tensor

from deltazoo.backends.errors import UnknownNameError
from deltazoo.mixers import MixerConfig
from deltazoo.mixers.core import conformance
from deltazoo.mixers.core.mixer import FIRST_PLACE, Context, Cost, Mixer, Place, State


@pytest.mark.parametrize("use", conformance.PROPERTIES)
def test_a_mixer_in_a_use(one_of_each: MixerConfig, use: str) -> None:
    assert conformance.error(one_of_each, use) <= conformance.PROPERTIES[use][1]


class Leaky(MixerConfig):
    """Adds the mean over all tokens and rows: wrong in every way that a mixer can be."""

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

    def init_state(self, batch: int, capacity: int | None = None) -> State:
        return {"nothing": self.gain.new_zeros(batch, 1)}

    def forward(
        self, x: Tensor, state: State | None = None, context: Context | None = None
    ) -> tuple[Tensor, State | None]:
        return self.gain * (x + x.sum((0, 1)) / 10), state


@pytest.mark.parametrize("use", ["train", "prefill in pieces", "decode", "packed", "padded", "causal, isolated"])
def test_a_leak_is_found(use: str) -> None:
    assert not conformance.error(Leaky(), use) <= conformance.PROPERTIES[use][1]


def test_a_state_that_holds_nothing_is_found() -> None:
    assert conformance.error(Leaky(), "rollback") == float("inf")


def test_a_suite_is_a_test_with_the_properties_asked_for() -> None:
    with pytest.raises(UnknownNameError, match="tranin"):
        conformance.suite(Leaky(), without=["tranin"])
    test = conformance.suite(Leaky(), without=["decode"])
    names = test.pytestmark[0].args[1]
    assert names == [name for name in conformance.PROPERTIES if name != "decode"]
    with pytest.raises(AssertionError, match="packed: the relative error is"):
        test("packed")


def main() -> None:
    """Print the table as Markdown."""
    import importlib.util
    from pathlib import Path

    spec = importlib.util.spec_from_file_location("conftest", Path(__file__).with_name("conftest.py"))
    assert spec is not None and spec.loader is not None
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    uses = conformance.PROPERTIES
    lines = ["| mixer | " + " | ".join(uses) + " |", "| --- " * (1 + len(uses)) + "|"]
    for name, config in conftest.ZOO.items():
        if conftest.ZOO[config.name] is config:
            lines.append(f"| {name} | " + " | ".join(f"{conformance.error(config, use):.0e}" for use in uses) + " |")
            sys.stderr.write(f"{name}\n")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
