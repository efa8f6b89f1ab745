"""Replay: repeated launches equal those of an operator's body; bodies that cannot be repeated run in every call."""

import ctypes
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
import triton
from triton_cases import CONFIGS, INTERPRETED, SHAPES, SPECS

from deltazoo import bind, watch
from deltazoo.backends.conformance import Case, draw
from deltazoo.backends.measure.shapes import Shape
from deltazoo.backends.torch_ext.devices import DeviceSpec
from deltazoo.backends.triton import TritonBackend, backend
from deltazoo.backends.triton import problem as problems
from deltazoo.backends.triton.limits import limits_of
from deltazoo.backends.triton.runtime import launcher, replay
from deltazoo.backends.triton.runtime.table import use_table

HOPPER = DeviceSpec("a Hopper GPU", "cuda", (9, 0), 132, 232448, "3.7.1")


class Handle:
    """Imitates a compiled kernel: records launches."""

    function, packed_metadata = 1, (4, 1, 0)

    def __init__(self, key):
        self.key = key
        self.launches = []

    def __getitem__(self, grid):
        return lambda *arguments, stream: self.launch(grid[0], arguments)

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *arguments):
        self.launch(x, arguments)

    def launch(self, programs, arguments):
        self.launches.append((programs, arguments))


class InterpretedHandle(Handle):
    """Runs the kernel in Triton's interpreter on the memory that its pointers name."""

    def launch(self, programs, arguments):
        function = self.key[0]
        kernel = getattr(sys.modules[function.__module__], function.__name__)
        dtypes = [x for x in self.key[4:] if isinstance(x, torch.dtype)]
        rest = list(arguments)
        for i, x in enumerate(rest):
            if not dtypes:
                break
            if isinstance(x, tuple):
                rest[i] = kernel.Pointers(*[self.tensor(y, dtypes) for y in x])
            else:
                rest[i] = self.tensor(x, dtypes)
        triton.jit(function)[(programs,)](*rest)

    @staticmethod
    def tensor(x, dtypes):
        """The memory at an address, as a tensor of the next dtype."""
        if not isinstance(x, int):
            return x
        memory = (ctypes.c_uint8 * 64).from_address(x) if x else bytearray(64)
        return torch.frombuffer(memory, dtype=dtypes.pop(0))


class Handles(dict):
    """The compiled kernels of `launcher`, by their keys without the device: made when they are looked up."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def get(self, key, default=None):
        return self.setdefault(key[:-1], self.make(key))


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    """Bodies are replayed on the CPU, too."""
    monkeypatch.setattr(replay, "_runs_on_gpu", lambda x: not x.is_meta)
    monkeypatch.setattr(launcher, "current_stream", lambda device: 0)
    replay.clear()
    yield
    replay.clear()


@pytest.fixture
def handles(monkeypatch):
    made = Handles(InterpretedHandle if INTERPRETED else Handle)
    monkeypatch.setattr(launcher, "_compiled", made)
    return made


def results(bound, inputs, number):
    """The outputs and gradients of an update; for odd numbers with a gradient of the final state."""
    leaves = [x.requires_grad_() for x in inputs if x is not None and x.is_floating_point()]
    out = bound(inputs)
    generator = torch.Generator().manual_seed(number)
    cotangents = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in out]
    outputs, cotangents = (out, cotangents) if number % 2 else ([out.o], cotangents[:1])
    return [*out, *torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)]


def recordings(monkeypatch):
    made = []
    record = replay._record
    monkeypatch.setattr(replay, "_record", lambda body, arguments: made.append(record(body, arguments)) or made[-1])
    return made


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize(
    ("spec", "shape", "config"),
    [
        pytest.param("gated delta", "grouped", "segments", marks=pytest.mark.kernel_smoke),
        ("gated delta", "pack", "windows"),
        ("both before", "two key tiles", "one segment"),
        ("own", "grouped", "segments and windows"),
        ("retnet", "pack", "segments"),
        ("efla", "grouped", "one segment"),
        ("householders", "odd widths", "segments"),
        ("dplr", "grouped", "segments"),
    ],
)
def test_replayed_results_and_gradients_equal_those_of_the_body(monkeypatch, handles, spec, shape, config):
    bound, made = bind(SPECS[spec], TritonBackend(CONFIGS[config])), recordings(monkeypatch)
    for number in range(4):
        inputs = draw(Case(SPECS[spec], SHAPES[shape], torch.float16, seed=2 * number))
        replayed = results(bound, inputs, number)
        monkeypatch.setattr(replay, "REPLAY", False)
        expected = results(bound, inputs, number)
        monkeypatch.setattr(replay, "REPLAY", True)
        assert all(x is y or torch.equal(x, y) for x, y in zip(replayed, expected, strict=True))
    assert len(made) == 3  # a forward, and backwards with and without a gradient of the final state
    assert all(made)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(problems, "device_spec", lambda index: HOPPER)
    monkeypatch.setattr(TritonBackend, "_tensors_unsupported", staticmethod(lambda *_: []))
    monkeypatch.setattr(backend, "current_limits", lambda *traits: limits_of(HOPPER, *traits))


@pytest.mark.skipif(INTERPRETED, reason="launches are only recorded")
@pytest.mark.parametrize("lengths", [(), (1000, 0, 1048)], ids=["dense", "packed"])
@pytest.mark.parametrize("spec", SPECS)
def test_every_plan_on_a_hopper_gpu_is_repeated(monkeypatch, handles, hopper, spec, lengths):
    shape = Shape("long", B=1, T=2048, H=2, HV=4, K=64, V=64, lengths=lengths)
    bound, made = bind(SPECS[spec], TritonBackend()), recordings(monkeypatch)
    logs = []
    for number in range(3):
        inputs = draw(Case(SPECS[spec], shape, torch.bfloat16, seed=2 * number))
        with watch() as log:
            results(bound, inputs, 0)
        logs.append(log.runs)
    assert len(made) == 2
    assert all(made)
    assert len(logs[0]) > 3
    assert logs[0] == logs[1] == logs[2]


@pytest.mark.skipif(INTERPRETED, reason="launches are only recorded")
def test_a_change_of_the_launch_tables_forgets_the_recordings(monkeypatch, handles, hopper):
    bound, made = bind(SPECS["gated delta"], TritonBackend()), recordings(monkeypatch)
    inputs = draw(Case(SPECS["gated delta"], Shape("small", B=1, T=128, H=1, HV=1, K=64, V=64), torch.bfloat16))
    for calls in (3, 3):
        for _ in range(calls):
            bound(inputs)
        use_table(None)
    assert len(made) == 2


@pytest.mark.skipif(INTERPRETED, reason="launches are only recorded")
def test_a_key_that_is_also_the_query_is_not_confused_with_it(handles, hopper):
    def pointers(q, k):
        x = draw(Case(SPECS["gated delta"], Shape("small", B=1, T=128, H=1, HV=1, K=64, V=64), torch.bfloat16))
        bind(SPECS["gated delta"], TritonBackend())(x._replace(q=x.q if q is None else q, k=x.k if k is None else k))
        (prepare,) = (handle for key, handle in handles.items() if "prepare" in key[0].__name__)
        return prepare.launches[-1][1][0][:2]

    q, k = torch.zeros(2, 1, 128, 1, 64, dtype=torch.bfloat16)
    for a, b in [(q, q), (q, q), (q, k), (k, q)]:
        assert pointers(a, b) == (a.data_ptr(), b.data_ptr())


class Kernel:
    """A kernel of some tensors, of which the first is named 0, a number, and a constant."""

    __name__ = "kernel"

    def __init__(self, tensors, numbers=0):
        self.fn = Kernel  # kernels of any signature are one
        self.arg_names = [*map(str, range(tensors)), *["number"] * numbers, "constant"]


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor | None


def launch(tensors, *numbers):
    named = {str(n): x for n, x in enumerate(tensors)}
    values = dict(zip(["number"], numbers, strict=False))
    launcher.launcher(Kernel(len(tensors), len(numbers)), named, {"constant": "constant"})(2, values)


def last_launch(handles):
    (handle,) = handles.values()
    return handle.launches[-1]


def test_repeated_call_allocates_again_and_passes_views_and_numbers(monkeypatch, handles):
    monkeypatch.setattr(launcher, "_compiled", handles := Handles(Handle))
    calls = []

    @replay.replayed
    def body(x, y, factor):
        calls.append(x.device.type)
        out, scratch = x.new_empty(x.shape), torch.empty(2, 64, device=x.device)
        out.zero_()
        launch((out, x, scratch.unbind()[1], scratch.view(torch.int32), y, None), factor)
        return (out,)

    results = []
    for _ in range(4):
        x, y = torch.ones(8), torch.ones(5)[1:]  # y does not start at a multiple of 16 bytes
        results.append(body(x, y, 7)[0])
        programs, (out, first, view, scratch, aligned, none, *values) = last_launch(handles)
        assert (programs, none, values) == (2, None, [7, "constant"])
        assert (out, first) == (results[-1].data_ptr(), x.data_ptr())
        assert view - scratch == 64 * 4
        assert aligned % 16 == 0
        assert not results[-1].any()
    assert calls == ["cpu", "meta"]
    assert len({x.data_ptr() for x in results}) == 4


def test_a_kernel_of_one_tensor_is_repeated(monkeypatch):
    monkeypatch.setattr(launcher, "_compiled", handles := Handles(Handle))

    @replay.replayed
    def body(x):
        out = x.new_empty(x.shape)
        launch((out,))
        return (out,)

    for _ in range(3):
        (out,) = body(torch.ones(3))
        assert last_launch(handles) == (2, (out.data_ptr(), "constant"))


def test_a_named_tuple_of_tensors_is_passed_as_a_tuple(monkeypatch):
    monkeypatch.setattr(launcher, "_compiled", handles := Handles(Handle))

    @replay.replayed
    def body(x):
        out = x.new_empty(x.shape)
        launch((Pair(out, None), x[4:], Pair(x, out)), 5)
        return (out,)

    for _ in range(3):
        x = torch.ones(8)
        (out,) = body(x)
        pair, again = (out.data_ptr(), None), (x.data_ptr(), out.data_ptr())
        assert last_launch(handles) == (2, (pair, x.data_ptr() + 16, again, 5, "constant"))


@pytest.mark.skipif(INTERPRETED, reason="launches are only recorded")
@pytest.mark.parametrize(("B", "T"), [(1, 0), (0, 64)])
@pytest.mark.parametrize("spec", ["gated delta", "dplr"])
def test_inputs_without_tokens_or_rows_are_repeated(handles, hopper, spec, B, T):
    shape = Shape("empty", B=B, T=T, H=1, HV=2, K=64, V=64)
    bound = bind(SPECS[spec], TritonBackend())
    for _ in range(3):
        o, *_ = results(bound, draw(Case(SPECS[spec], shape, torch.bfloat16)), 0)
        assert o.shape == (B, T, 2, 64)


def test_calls_with_other_dtypes_sizes_or_traits_are_recorded_anew():
    calls = []

    @replay.replayed
    def body(x, trait):
        calls.append((x.dtype, x.shape, trait, x.device.type))
        return (x.new_empty(x.shape),)

    for x, trait in [(torch.ones(3), 1.0), (torch.ones(4), 1.0), (torch.ones(3).double(), 1.0), (torch.ones(3), 2.0)]:
        for _ in range(3):
            (out,) = body(x, trait)
            assert (out.dtype, out.shape) == (x.dtype, x.shape)
        assert [call[-1] for call in calls[-2:]] == ["cpu", "meta"]
        assert calls[-1][:-1] == (x.dtype, x.shape, trait)
    assert len(calls) == 8


def test_float32_products_are_recorded_for_each_precision(monkeypatch):
    calls = []

    @replay.replayed
    def body(x):
        calls.append(x.device.type)
        return (x.new_empty(x.shape),)

    for allowed in (True, False):
        monkeypatch.setattr(replay, "tf32_allowed", lambda allowed=allowed: allowed)
        for _ in range(3):
            body(torch.ones(3))
    assert calls == ["cpu", "meta"] * 2


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x + 1,
        lambda x: x.new_empty(4).view(2, 2),
        lambda x: x.new_empty(x.shape).copy_(x.new_empty(2, 3).t()[0, :1].expand(3)),
        lambda x: x.new_empty(int(x.sum())),
        lambda x: launch((x.new_empty(8)[1:], x)) or x,
        lambda x: torch._foreach_zero_([y := x.new_empty(3)]) or y,
        lambda x: torch.empty(2, 3, 4, 5, device=x.device, memory_format=torch.channels_last),
    ],
    ids=["computes", "returns a view", "copies a view", "reads values", "unaligned view", "list", "other strides"],
)
def test_other_bodies_run_in_every_call(monkeypatch, compute):
    monkeypatch.setattr(launcher, "_compiled", Handles(Handle))
    calls = []

    @replay.replayed
    def body(x):
        if x.device.type == "cpu":
            calls.append(x)
        return (compute(x),)

    for _ in range(4):
        body(torch.ones(3))
    assert len(calls) == 4


def test_a_kernel_that_is_not_compiled_is_not_replayed(monkeypatch):
    monkeypatch.setattr(launcher, "_compiled", {})
    monkeypatch.setattr(Kernel, "__getitem__", lambda self, grid: lambda *_, **__: None, raising=False)
    calls = []

    @replay.replayed
    def body(x):
        calls.append(x.device.type)
        launch((x,))
        return (x.new_empty(1),)

    for _ in range(3):
        body(torch.ones(3))
    assert calls.count("cpu") == 3


def test_hooks_of_triton_observe_replayed_launches(monkeypatch):
    monkeypatch.setattr(launcher, "_compiled", handles := Handles(Handle))
    indexed = []
    monkeypatch.setattr(Handle, "__getitem__", lambda self, grid: lambda *_, stream: indexed.append(grid))

    @replay.replayed
    def body(x):
        launch((x, None))
        return (x.new_empty(1),)

    body(torch.ones(3))
    body(torch.ones(3))
    assert len(indexed) == 1
    assert len(last_launch(handles)) == 2
    hook = lambda metadata: None  # noqa: E731
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        body(torch.ones(3))
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert indexed == [(2, 1, 1)] * 2


def test_recording_does_not_import_the_compiler():
    code = """
import sys, torch
from deltazoo.backends.torch_ext.recording import RecordingMode
x = torch.empty(3, device="meta")
with RecordingMode([x]) as mode:
    x.new_empty(3).copy_(x)
    torch.empty(3, device="meta").zero_()
assert len(mode.buffers) == 3 and len(mode.steps) == 2
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
