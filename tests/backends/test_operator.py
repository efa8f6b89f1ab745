"""An operator's body runs at once where nobody looks at operators, and behind its node wherever somebody does."""

import contextlib
import traceback

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from deltazoo.backends.torch_ext.custom_op import operator


def _body(x, times):
    _behind.append(any(frame.filename.endswith("_ops.py") for frame in traceback.extract_stack()))
    return x * times


_behind = []
first = operator(
    "test_first(Tensor[] xs, int times) -> Tensor",
    lambda xs, times: _body(xs[0], times),
    lambda xs, times: torch.empty_like(xs[0]),
)
twice = operator("test_operator(Tensor x, int times) -> Tensor", _body, lambda x, times: torch.empty_like(x))
NODE = torch.ops.deltazoo.test_operator.default


class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        seen.append(func)
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        seen.append(func)
        return func(*args, **(kwargs or {}))


class Named(torch.Tensor):
    pass


seen = []


@pytest.fixture(autouse=True)
def _fresh():
    seen.clear()
    _behind.clear()


@pytest.mark.parametrize(
    "where", [contextlib.nullcontext, torch.no_grad, torch.inference_mode], ids=lambda w: w.__name__
)
def test_the_body_runs_at_once_where_nobody_looks(where):
    with where():
        assert torch.equal(twice(torch.ones(3), 2), torch.full((3,), 2.0))
    assert _behind == [False]


@pytest.mark.parametrize("mode", [Dispatched, Functions])
def test_a_mode_sees_the_node(mode):
    with mode():
        twice(torch.ones(3), 2)
    assert NODE in seen
    assert _behind == [True]


def test_a_profiler_sees_the_node():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        twice(torch.ones(3), 2)
    assert "deltazoo::test_operator" in {event.key for event in profile.key_averages()}
    assert _behind == [True]


def test_a_tensor_of_another_class_and_a_transform_come_to_the_node():
    twice(torch.ones(3).as_subclass(Named), 2)
    first([torch.ones(3), torch.ones(3).as_subclass(Named)], 2)
    torch.func.functionalize(lambda x: twice(x, 2))(torch.ones(3))
    assert _behind == [True, True, True]
    first([torch.ones(3)], 2)
    assert _behind[3:] == [False]


def test_traces_hold_the_node_alone():
    def f(x):
        return twice(x, 2)

    graph = torch.fx.experimental.proxy_tensor.make_fx(f, tracing_mode="fake")(torch.ones(3)).graph
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [NODE]
    assert "deltazoo::test_operator" in str(torch.jit.trace(f, torch.ones(3)).graph)
    compiled = []

    def look(graph, inputs):
        compiled.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch.compile(f, fullgraph=True, backend=look)(torch.ones(3))
    assert compiled == [NODE]
