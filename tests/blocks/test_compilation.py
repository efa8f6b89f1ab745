"""Layer-by-layer compilation: equal results, and one graph for each distinct layer."""

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from deltazoo.blocks import compile_layers
from deltazoo.blocks.spec import StackSpec
from deltazoo.blocks.stack import LanguageModel


def loss_and_gradients(model: LanguageModel, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model.loss(tokens, tokens.roll(1, 1))
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_equal_layers_share_a_graph_with_equal_results():
    torch.manual_seed(0)
    tokens = torch.randint(0, 50, (2, 3))
    pattern = "2*retnet(heads=2) + sliding_window(heads=2, window=2)"
    model = StackSpec(width=16, depth=6, vocab=50, pattern=pattern, mlp={"width": 16}).build(backend="reference")
    expected = loss_and_gradients(model, tokens)
    names = list(model.state_dict())
    counter = CompileCounterWithBackend("aot_eager")
    torch.testing.assert_close(loss_and_gradients(compile_layers(model, counter), tokens), expected)
    assert counter.frame_count == 3  # of both layers and of the last norm
    assert list(model.state_dict()) == names


def test_input_sizes_stay_static_after_other_models_were_compiled():
    tokens = torch.randint(0, 50, (2, 4))
    for heads, width in ((1, 8), (2, 16), (2, 32)):
        pattern = f"sliding_window(heads={heads}, window=3)"
        model = StackSpec(width=width, depth=2, vocab=50, pattern=pattern, mlp={"width": 16}).build()
        counter = CompileCounterWithBackend("eager")
        compile_layers(model, counter).loss(tokens, tokens)
        graph, _ = counter.graphs  # of the layers, of the last norm
        sizes = [size for node in graph.graph.find_nodes(op="placeholder") for size in node.meta["example_value"].shape]
        assert all(isinstance(size, int) for size in sizes)
