"""Every tiny preset learns, decodes as it computes in parallel, and compiles to one graph."""

import functools
import operator

import pytest
import torch
import wrapping
from torch._dynamo.testing import CompileCounterWithBackend

from deltazoo.blocks import preset
from deltazoo.blocks.model.layer import LayerSpec
from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.blocks.spec import presets
from deltazoo.blocks.spec.stack_spec import StackSpec

pytestmark = pytest.mark.runs
TINY = [name for name in presets.names() if name.endswith("-tiny")]
TEXT = torch.tensor([list(b"the quick brown fox jumps over the lazy dog")])


def build(name: str) -> LanguageModel:
    torch.manual_seed(0)
    return preset(name).build("reference")


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_preset_learns(name: str) -> None:
    model = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        loss = model.loss(TEXT[:, :-1], TEXT[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    assert model.loss(TEXT[:, :0], TEXT[:, :0]) == 0  # no tokens


@pytest.mark.parametrize("name", TINY)
def test_decoding_of_a_tiny_preset_equals_the_parallel_form(name: str) -> None:
    model = build(name).double()
    with torch.no_grad():
        for parameter in model.parameters():  # larger weights, so that every layer affects the logits
            parameter.add_(0.1 * torch.randn_like(parameter))
        tokens = TEXT[:, :20]  # more than the windows of 16 tokens
        expected, _ = model(tokens)
        state, logits = model.init_state(1, capacity=20), []
        for piece in tokens.split([3, *[1] * 17], 1):
            out, state = model(piece, state)
            logits.append(out)
    torch.testing.assert_close(torch.cat(logits, 1), expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", TINY)
def test_wrapped_maps_of_a_tiny_preset_are_called_on_a_gpu(name: str) -> None:
    """A decode step, whose launch code runs on meta tensors."""
    pytest.importorskip("triton", reason="the kernels need the package triton")
    with torch.device("meta"):
        model = preset(name).build().bfloat16()
        maps = {*wrapping.replace(model, wrapping.Wrapped).values()}
        token = torch.empty(2, 1, dtype=torch.int64)
    state = model.init_state(2, capacity=20)
    assert wrapping.called_on_a_gpu(maps, lambda: model(token, state)) == maps


def options(layer: LayerSpec) -> set[object]:
    """Return the kinds of a layer's modules, and their options that are not sizes."""
    mlp = layer.mlp if layer.mlp == "none" else type(layer.mlp).__name__
    found: set[object] = {("mlp", mlp), ("norm", layer.norm_position), ("parallel", len(layer.mixers))}
    for part in (*layer.mixers, *([] if layer.mlp == "none" else [layer.mlp])):
        fields = part.model_dump()
        found |= {(type(part).__name__, *item) for item in fields.items() if isinstance(item[1], str | bool | None)}
    return found


def layers_with_new_options() -> list[tuple[str, list[LayerSpec]]]:
    """Return for each preset those of its layers that have an option which no earlier layer has."""
    seen: set[object] = set()
    chosen: list[tuple[str, list[LayerSpec]]] = []
    for name in TINY:
        layers: list[LayerSpec] = []
        distinct = dict.fromkeys(preset(name).expand())
        for layer in sorted(distinct, key=lambda layer: len(options(layer) - seen), reverse=True):
            if not options(layer) <= seen:
                layers.append(layer)
                seen |= options(layer)
        chosen.append((name, layers))
    return chosen


# Tracing a layer takes seconds, and the presets have many layers of the same kind.
@pytest.mark.graphs
@pytest.mark.parametrize(("name", "layers"), [pytest.param(*x, id=x[0]) for x in layers_with_new_options() if x[1]])
def test_training_of_a_tiny_preset_is_one_graph(name: str, layers: list[LayerSpec]) -> None:
    torch._dynamo.reset()
    pattern = functools.reduce(operator.add, layers)
    fields = dict(preset(name)) | {"layers": {}, "depth": len(layers), "pattern": pattern}
    with torch.device("meta"):  # traces the operators of the compile backend without compiling their bodies
        model, tokens = StackSpec(**fields).build("compile"), TEXT.to("meta")
    counter = CompileCounterWithBackend("eager")
    torch.compile(model.loss, fullgraph=True, backend=counter)(tokens, tokens).backward()
    assert counter.frame_count == 1
    assert all(parameter.grad is not None for parameter in model.parameters())
