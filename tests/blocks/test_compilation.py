"""Layer-by-layer compilation: equal results, and one graph for each distinct layer."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from deltazoo.blocks.compilation import compile_layers
from deltazoo.blocks.spec import StackSpec

MIX = "gated_deltanet(heads=2) + sliding_window(heads=2, window=3)"


def _gradients(model, tokens):
    loss = model.loss(tokens, tokens.roll(1, 1))
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return loss.detach(), gradients


@pytest.mark.parametrize(("pattern", "distinct"), [(MIX, 2), ("retnet(heads=2)", 1)])
def test_equal_layers_share_a_graph_with_equal_results(pattern, distinct):
    torch.manual_seed(0)
    tokens = torch.randint(0, 50, (2, 4))
    model = StackSpec(width=16, depth=4, vocab=50, pattern=pattern, mlp={"width": 16}).build(backend="reference")
    loss, gradients = _gradients(model, tokens)
    names = list(model.state_dict())
    counter = CompileCounterWithBackend("aot_eager")
    compiled_loss, compiled_gradients = _gradients(compile_layers(model, counter), tokens)
    assert counter.frame_count == distinct
    torch.testing.assert_close(compiled_loss, loss)
    torch.testing.assert_close(compiled_gradients, gradients)
    assert list(model.state_dict()) == names


def test_graphs_stay_static_after_other_models_were_compiled():
    tokens = torch.randint(0, 50, (2, 4))
    for heads, width in ((1, 8), (2, 16), (2, 32)):
        pattern = f"sliding_window(heads={heads}, window=3)"
        model = StackSpec(width=width, depth=2, vocab=50, pattern=pattern, mlp={"width": 16}).build()
        counter = CompileCounterWithBackend("aot_eager")
        compile_layers(model, counter).loss(tokens, tokens)
        (graph,) = counter.graphs
        sizes = [size for node in graph.graph.find_nodes(op="placeholder") for size in node.meta["example_value"].shape]
        assert all(isinstance(size, int) for size in sizes)
