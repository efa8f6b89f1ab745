"""`describe` counts the parameters, bytes and FLOPs of the built model."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import deltazoo
from deltazoo.blocks.inspect.describe import describe
from deltazoo.blocks.spec import StackSpec
from deltazoo.mixers import Attention, GatedDeltaNet
from deltazoo.mixers.core.state import nbytes


def test_parameter_counts_equal_those_of_the_built_model(spec):
    for stack in (spec, StackSpec(**dict(spec) | {"tied": False})):
        model, description = stack.build(), stack.describe()
        assert description.parameters == sum(parameter.numel() for parameter in model.parameters())
        for row, layer in zip(description.layers, model.stack.layers, strict=True):
            assert row.parameters == sum(parameter.numel() for parameter in layer.parameters())
        rest = description.parameters - sum(row.parameters for row in description.layers) - stack.width
        assert description.embedding_parameters == rest == stack.vocab * stack.width * (1 if stack.tied else 2)
        assert description == describe(model)


@pytest.mark.parametrize("capacity", [2048, 2053])  # the window, and more
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_byte_counts_equal_those_of_a_state(spec, capacity, dtype):
    model = spec.build().to(dtype)
    description = describe(model)
    assert description.dtype == str(dtype).split(".")[1]
    assert description.state_bytes + capacity * description.cache_bytes == nbytes(model.init_state(1, capacity))
    assert [row.cache_bytes > 0 for row in description.layers] == [False, False, True]


def test_flops_equal_those_that_torch_counts():
    stack = StackSpec(width=32, depth=2, vocab=50, pattern=Attention(heads=2))
    with FlopCounterMode(display=False) as counter:  # on the CPU it counts the projections, not the attention scores
        stack.build()(torch.zeros(1, 40, dtype=torch.int64))
    description = stack.describe()
    assert counter.get_total_flops() == 40 * description.flops
    assert description.flops_context == 2 * 4 * 32


def test_a_row_lists_mixers_equations_and_backends(spec):
    rows = spec.describe().layers
    assert [row.mixer for row in rows] == ["gated_deltanet", "sliding_window", "attention | gated_deltanet"]
    assert rows[2].equation.split("\n") == [Attention().equation(), GatedDeltaNet().equation()]
    assert [row.backends.get("cpu") for row in rows] == ["compile", None, "compile"]
    assert spec.describe(backend="reference").layers[0].backends == {"cpu": "reference", "cuda": "reference"}
    with deltazoo.use_backend("reference"):
        assert spec.describe().layers[0].backends == {"cpu": "reference", "cuda": "reference"}
