"""Custom operators: the body runs directly in plain eager calls, and through the dispatcher if anything observes it.

`custom_op` and `trace_constant` use private torch state for speed; the tests also run their public fallbacks.
"""

import contextlib
import importlib
import traceback

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from deltazoo.backends.torch_ext import custom_op, trace_constant
from deltazoo.backends.torch_ext.custom_op import operator

dispatched_calls = []  # for each run of a body: whether the dispatcher is on the stack
observed = []  # functions that a mode has seen


def _body(x, factor):
    dispatched_calls.append(any(frame.filename.endswith("_ops.py") for frame in traceback.extract_stack()))
    return x * factor


scale = operator("test_operator(Tensor x, int factor) -> Tensor", _body, lambda x, factor: torch.empty_like(x))
scale_first = operator(
    "test_first(Tensor[] xs, int factor) -> Tensor",
    lambda xs, factor: _body(xs[0], factor),
    lambda xs, factor: torch.empty_like(xs[0]),
)
OVERLOAD = torch.ops.deltazoo.test_operator.default


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        observed.append(func)
        return func(*args, **(kwargs or {}))


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        observed.append(func)
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


@pytest.fixture(autouse=True)
def clear_records():
    observed.clear()
    dispatched_calls.clear()


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(
    "context", [contextlib.nullcontext, torch.no_grad, torch.inference_mode], ids=lambda context: context.__name__
)
def test_plain_eager_call_skips_the_dispatcher_unless_switched_off(context, direct, monkeypatch):
    monkeypatch.setattr(custom_op, "DIRECT_CALLS", direct)
    with context():
        assert torch.equal(scale(torch.ones(3), 2), torch.full((3,), 2.0))
    assert dispatched_calls == [not direct]


@pytest.mark.parametrize("mode", [DispatchMode, FunctionMode])
def test_mode_observes_the_operator(mode):
    with mode():
        scale(torch.ones(3), 2)
    assert OVERLOAD in observed
    assert dispatched_calls == [True]


def test_profiler_observes_the_operator():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        scale(torch.ones(3), 2)
    assert "deltazoo::test_operator" in {event.key for event in profile.key_averages()}
    assert dispatched_calls == [True]


def test_tensor_subclasses_and_transforms_use_the_dispatcher():
    scale(torch.ones(3).as_subclass(Subclass), 2)
    scale_first([torch.ones(3), torch.ones(3).as_subclass(Subclass)], 2)
    torch.func.functionalize(lambda x: scale(x, 2))(torch.ones(3))
    assert dispatched_calls == [True, True, True]
    scale_first([torch.ones(3)], 2)
    assert dispatched_calls[3:] == [False]


@pytest.mark.parametrize("direct", [True, False])
def test_traces_contain_the_operator_as_one_node(direct, monkeypatch):
    monkeypatch.setattr(custom_op, "DIRECT_CALLS", direct)

    def f(x):
        return scale(x, 2)

    graph = torch.fx.experimental.proxy_tensor.make_fx(f, tracing_mode="fake")(torch.ones(3)).graph
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [OVERLOAD]
    assert "deltazoo::test_operator" in str(torch.jit.trace(f, torch.ones(3)).graph)
    targets = []

    def inspect_graph(graph, inputs):
        targets.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch.compile(f, fullgraph=True, backend=inspect_graph)(torch.ones(3))
    assert targets == [OVERLOAD]


@pytest.mark.parametrize("cached", [True, False])
def test_autograd_function_is_the_same_with_and_without_cached_signature(cached, monkeypatch):
    monkeypatch.setattr(custom_op, "CACHE_SIGNATURES", cached)

    @custom_op.cache_forward_signature
    class Triple(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, factor=3):
            return x * factor

        @staticmethod
        def backward(ctx, grad):
            return 3 * grad, None

    x = torch.ones(2, requires_grad=True)
    y = Triple.apply(x)
    assert torch.equal(y, 3 * torch.ones(2))
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], 3 * torch.ones(2))
    assert hasattr(Triple.forward, "__signature__") == cached


@pytest.mark.parametrize("public", [True, False])
def test_function_marked_constant_is_evaluated_while_tracing(public, monkeypatch):
    torch.compiler.reset()
    monkeypatch.setattr(trace_constant, "IMPORT_COMPILER", public)
    calls = []

    @trace_constant.constant_in_graphs
    def factor():
        calls.append(importlib.import_module("math").pi)  # not traceable
        return 2

    compiled = torch.compile(lambda x: x * factor(), fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
    compiled(torch.ones(3))
    assert len(calls) == 1
