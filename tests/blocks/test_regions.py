"""Compiling layer by layer: the same numbers, one graph for each kind of layer."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from deltazoo.blocks.compilation import compile_layers
from deltazoo.blocks.spec import StackSpec

MIX = "gated_deltanet(heads=2) + sliding_window(heads=2, window=3)"


def _gradients(model, tokens):
    loss = model.loss(tokens, tokens.roll(1, 1))
    loss.backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return loss.detach(), found


@pytest.mark.parametrize(("pattern", "kinds"), [(MIX, 2), ("retnet(heads=2)", 1)])
def test_each_kind_of_layer_is_compiled_once_and_computes_the_same(pattern, kinds):
    torch.manual_seed(0)
    tokens = torch.randint(0, 50, (2, 4))
    model = StackSpec(width=16, depth=4, vocab=50, pattern=pattern, mlp={"width": 16}).build(backend="reference")
    loss, gradients = _gradients(model, tokens)
    names = list(model.state_dict())
    counter = CompileCounterWithBackend("aot_eager")
    compiled_loss, compiled_gradients = _gradients(compile_layers(model, counter), tokens)
    assert counter.frame_count == kinds
    torch.testing.assert_close(compiled_loss, loss)
    torch.testing.assert_close(compiled_gradients, gradients)
    assert list(model.state_dict()) == names


def test_other_models_before_leave_the_graphs_specialised():
    tokens = torch.randint(0, 50, (2, 4))
    for heads, width in ((1, 8), (2, 16), (2, 32)):
        pattern = f"sliding_window(heads={heads}, window=3)"
        model = StackSpec(width=width, depth=2, vocab=50, pattern=pattern, mlp={"width": 16}).build()
        counter = CompileCounterWithBackend("aot_eager")
        compile_layers(model, counter).loss(tokens, tokens)
        (graph,) = counter.graphs
        sizes = [size for node in graph.graph.find_nodes(op="placeholder") for size in node.meta["example_value"].shape]
        assert all(isinstance(size, int) for size in sizes)
