"""The weights of a mixer do not depend on the order in which its config creates the parts."""

from typing import ClassVar

import pytest
import torch

from deltazoo import Place
from deltazoo.mixers import GLA, RetNet, conformance
from deltazoo.mixers.parts import HeadNorm, HeadShape, OutputGate, Parts, QKVProjection, SigmoidDecay


class OutputsFirst(GLA):
    """GLA whose config creates the projection last."""

    name: ClassVar[str] = "outputs_first"

    def parts(self, shape: HeadShape, place: Place) -> Parts:
        outputs = {"norm": HeadNorm(shape, self.norm_eps), "gate": OutputGate(shape, bias=True)}
        operands = {"decay": SigmoidDecay(shape, "channel", self.gate_rank, self.temperature)}
        return Parts(QKVProjection(shape), operands, outputs)


def test_weights_do_not_depend_on_the_order_of_creation() -> None:
    weights, next_numbers = [], []
    for config in (GLA(heads=2), OutputsFirst(heads=2)):
        torch.manual_seed(3)
        weights.append(config.build(32).state_dict())
        next_numbers.append(torch.rand(4))
    assert weights[0].keys() == weights[1].keys()
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]), name
    assert torch.equal(*next_numbers)


def test_init_weights_gives_the_weights_of_a_build_in_any_order() -> None:
    assert conformance.error(OutputsFirst(heads=2), "init_weights") == 0


@pytest.mark.parametrize("config", [GLA(heads=2), RetNet(heads=2)])
def test_weights_are_drawn_once_in_the_documented_order(config: GLA | RetNet, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(module: torch.nn.Module) -> None:
        raise AssertionError("drawn again")

    monkeypatch.setattr("deltazoo.mixers.core.initialization.init_weights", fail)
    config.build(32)
