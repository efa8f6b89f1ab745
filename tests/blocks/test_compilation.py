"""Layer-by-layer compilation: equal results, one graph for each distinct layer and kind of call, modes of torch."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from deltazoo.backends.compile import CompileBackend
from deltazoo.backends.io.errors import ShapeError
from deltazoo.backends.torch_ext.compiled_call import compiled_call
from deltazoo.blocks import compile_layers
from deltazoo.blocks.generation.decoder import Decoder
from deltazoo.blocks.generation.generate import generate_tokens
from deltazoo.blocks.generation.sampling import Sampling
from deltazoo.blocks.model.compilation import CompiledLayers
from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.blocks.spec.stack_spec import StackSpec
from deltazoo.blocks.training.objective import Objective
from deltazoo.mixers import Context

# RetNet normalises groups of channels, and a MoE groups its rows.
SPARSE = StackSpec(
    width=8,
    depth=1,
    vocab=50,
    pattern="retnet(heads=2)",
    mlp={"type": "moe", "experts": 2, "width": 8},
)


@pytest.fixture
def without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile eager calls of the default backend and of decoders with "eager" instead of Inductor."""
    torch_compile = torch.compile

    def compile_function(function, backend="eager", options=None, **settings):
        return torch_compile(function, backend=backend, **settings)

    monkeypatch.setattr(torch, "compile", compile_function)


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("cpu")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def after_a_device() -> Iterator[None]:
    with torch.device("cpu"):
        torch.ones(2)
    yield


class Observer(TorchFunctionMode):
    """A function mode that changes nothing."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


MODES = {"default": default_device, "with": partial(torch.device, "cpu"), "after": after_a_device, "user": Observer}


def build(spec: StackSpec, backend: str | CompileBackend = "reference") -> LanguageModel:
    torch.manual_seed(0)
    return spec.build(backend=backend)


def loss_and_gradients(
    model: LanguageModel, tokens: Tensor, context: Context | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model.loss(tokens, tokens.roll(1, 1), context)
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.graphs
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


@pytest.mark.graphs
def test_ddp_does_not_split_the_graph_of_a_layer(tmp_path):
    tokens, counter = torch.randint(0, 50, (2, 3)), CompileCounterWithBackend("aot_eager")
    spec = StackSpec(width=16, depth=2, vocab=50, pattern="retnet(heads=2)")
    model = compile_layers(spec.build("reference"), counter)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        DistributedDataParallel(Objective(model), bucket_cap_mb=1e-6)(tokens, tokens).backward()
    finally:
        dist.destroy_process_group()
    assert counter.frame_count == 2  # of the layers, of the last norm


def test_layers_are_compiled_only_while_they_are_active():
    model = StackSpec(width=16, depth=2, vocab=50, pattern="2*retnet(heads=2)").build(backend="reference")
    tokens, counter = torch.randint(0, 50, (2, 3)), CompileCounterWithBackend("eager")
    expected, layers = model(tokens)[0], CompiledLayers(model, counter)
    with layers.active():
        torch.testing.assert_close(model(tokens)[0], expected)
    with pytest.raises(ShapeError), layers.active():
        model(tokens[0])
    assert counter.frame_count == 2  # of both layers, of the last norm
    assert torch.equal(model(tokens)[0], expected)
    assert counter.frame_count == 2
    assert not any("forward" in vars(module) for module in model.modules())


def test_dynamic_layers_serve_other_sizes_and_other_models_with_the_same_layers():
    models = [StackSpec(width=16, depth=n, vocab=50, pattern="lfm2_conv").build() for n in (1, 2)]
    counter = CompileCounterWithBackend("eager")
    layers = CompiledLayers(models[0], counter, dynamic=True)
    for model, sizes in ((models[0], (2, 3)), (models[0], (4, 5)), (models[1], (3, 6))):
        tokens = torch.randint(0, 50, sizes)
        expected = model(tokens)[0]
        with layers.of(model).active():
            torch.testing.assert_close(model(tokens)[0], expected)
        assert counter.frame_count == 2  # of all layers, of the last norms


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


def pack(*bounds: int) -> Context:
    return Context(cu_seqlens=torch.tensor(bounds, dtype=torch.int32))


def mask(B: int, T: int) -> Context:
    return Context(mask=torch.arange(T) >= torch.arange(B)[:, None])


# Shape, settings of the call, and graphs of the layer and of the norm that the call compiles.
TRAINING = [
    ((4, 64), "grad", None, 2),
    ((4, 48), "grad", None, 2),
    ((3, 48), "grad", None, 0),
    ((4, 64), "grad", None, 0),
    ((1, 40), "grad", None, 2),  # one row
    ((4, 64), "no_grad", None, 2),
    ((1, 30), "no_grad", None, 2),
    ((2, 30), "no_grad", None, 2),
    ((1, 1), "no_grad", None, 2),
    ((1, 12), "no_grad", pack(0, 5, 12), 2),
    ((5, 96), "no_grad", None, 0),
]
SERVING = [
    ((2, 9), "state", None, 2),
    ((2, 1), "state", None, 2),
    ((2, 1), "state", None, 0),
    ((3, 5), "state", mask(3, 5), 2),
    ((4, 40), "state", mask(4, 40), 1),
    ((4, 1), "state", None, 2),
    ((2, 40), "autocast", None, 2),
    ((1, 20), "grad", pack(0, 20), 2),
    ((1, 90), "grad", pack(0, 3, 70, 90), 2),
    ((1, 33), "grad", pack(0, 3, 10, 20, 33), 0),
]


@pytest.mark.graphs
@pytest.mark.parametrize("name", ["lru", pytest.param("gated_deltanet(heads=2)", marks=pytest.mark.slow)])
@pytest.mark.parametrize("calls", [TRAINING, pytest.param(SERVING, marks=pytest.mark.slow)], ids=["train", "serve"])
def test_each_kind_of_call_has_a_static_and_a_dynamic_graph(calls, name):
    spec = StackSpec(width=8, depth=2, vocab=50, pattern=name, mlp="none")
    counter = CompileCounterWithBackend("eager")
    backend = CompileBackend(compiled=False)
    model, compiled = build(spec, backend).double(), compile_layers(build(spec, backend).double(), counter)
    states = {}
    for shape, kind, context, graphs in calls:
        tokens = torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(shape[1]))
        before = counter.frame_count
        if kind == "grad":
            results = [loss_and_gradients(m, tokens, context) for m in (compiled, model)]
        else:
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
                results = []
                for m in (compiled, model):
                    if kind == "state" and (shape[1] > 1 or (m, shape[0]) not in states):
                        states[m, shape[0]] = m.init_state(shape[0])
                    results.append(m(tokens, states.get((m, shape[0])) if kind == "state" else None, context)[0])
        torch.testing.assert_close(*results, rtol=1e-9, atol=1e-11)
        assert counter.frame_count - before == graphs, (shape, kind)


@pytest.mark.graphs
@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize(
    "mode", ["default", *(pytest.param(name, marks=pytest.mark.slow) for name in ("with", "after", "user"))]
)
def test_layers_and_decoding_compile_under_a_function_mode(mode):
    tokens = torch.randint(0, 50, (2, 2))
    expected = loss_and_gradients(build(SPARSE), tokens)
    expected_tokens = generate_tokens(build(SPARSE), tokens, Sampling(max_tokens=2, temperature=0))
    with MODES[mode]():
        counter = CompileCounterWithBackend("eager")
        actual = loss_and_gradients(compile_layers(build(SPARSE), counter), tokens)
        decoder = Decoder(build(SPARSE), batch=2, capacity=4, compile=True)
        actual_tokens = generate_tokens(decoder, tokens, Sampling(max_tokens=2, temperature=0))
    torch.testing.assert_close(actual, expected)
    assert counter.frame_count == 2  # of the layer, of the last norm
    assert torch.equal(actual_tokens, expected_tokens)


@pytest.mark.graphs
@pytest.mark.usefixtures("without_inductor")
def test_compiled_layers_and_decoding_run_eagerly_while_flops_are_counted():
    tokens = torch.randint(0, 50, (2, 2))
    expected = loss_and_gradients(build(SPARSE), tokens)
    expected_tokens = generate_tokens(build(SPARSE), tokens, Sampling(max_tokens=2, temperature=0))
    counter = CompileCounterWithBackend("eager")
    model = compile_layers(build(SPARSE), counter)
    decoder = Decoder(build(SPARSE), batch=2, capacity=4, compile=True)
    flops = []
    for mode in (FlopCounterMode(display=False), nullcontext(), FlopCounterMode(display=False)):
        with mode:
            torch.testing.assert_close(loss_and_gradients(model, tokens), expected)
            assert torch.equal(generate_tokens(decoder, tokens, Sampling(max_tokens=2, temperature=0)), expected_tokens)
        flops.append(mode.get_total_flops() if isinstance(mode, FlopCounterMode) else 0)
    assert flops[0] == flops[2] > 0
    assert counter.frame_count == 2  # of the layer, of the last norm


@pytest.mark.graphs
def test_the_gradient_of_an_autograd_function_is_cached_for_other_processes():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x @ x

        @staticmethod
        def backward(ctx, dy):
            (x,) = ctx.saved_tensors
            return dy @ x.T + x.T @ dy

    def square(x):
        return Square.apply(x)

    x = torch.randn(3, 3, requires_grad=True)
    with fresh_cache():
        for found in ("autograd_cache_saved", "autograd_cache_hit"):
            torch.compiler.reset()
            counters.clear()
            y = compiled_call(square)(x)
            (dx,) = torch.autograd.grad(y.sum(), x)
            assert counters["aot_autograd"][found] == 1
            torch.testing.assert_close(dx, torch.autograd.grad(square(x).sum(), x)[0])
