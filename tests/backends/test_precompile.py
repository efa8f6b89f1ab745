"""Precompiling: torch.compile compiles, while it traces, exactly the kernels that are launched later."""

import contextlib
import threading
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import triton
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from triton_cases import DEVICE, GATED, INTERPRETED, needs_triton

from deltazoo import bind
from deltazoo.backends.conformance import Case, draw
from deltazoo.backends.conformance.decode_step import draw_step, typical_step
from deltazoo.backends.measure.shapes import Shape
from deltazoo.backends.ops.short_conv import ConvInputs
from deltazoo.backends.torch_ext.devices import INTERPRETER, DeviceSpec
from deltazoo.backends.triton import TritonBackend
from deltazoo.backends.triton import problem as problems
from deltazoo.backends.triton.chunk import op
from deltazoo.backends.triton.conv import op as conv
from deltazoo.backends.triton.decode import fused
from deltazoo.backends.triton.decode import op as decode_op
from deltazoo.backends.triton.operands import ScanKind, schema
from deltazoo.backends.triton.runtime import precompile
from deltazoo.mixers import GatedDeltaNet

HOPPER = DeviceSpec("a Hopper GPU", "cuda", (9, 0), 132, 232448, "3.7.1")


@pytest.fixture
def traced(monkeypatch):
    """The cache keys of the kernels that tracing would compile; none is compiled."""
    keys = []
    monkeypatch.setattr(precompile, "_pool", precompile._Pool())
    monkeypatch.setattr(precompile, "compile_kernel", lambda key, kernel, warm_up: keys.append(key))
    return keys


def trace(body, arguments):
    """Trace the body of an operator as torch.compile does, and wait for the result."""
    layouts = [precompile._layout(x) for x in arguments]
    precompile._pool.tracer.submit(precompile._trace, body, layouts, torch.device("cuda", 0)).result()


def scan_arguments(shape, device="cpu"):
    x = draw(Case(GATED, shape, torch.float16), device)
    operands = (x.q, x.k, x.v, x.log_decay, x.beta, None, None, None, x.state, x.cu_seqlens)
    kind = tuple(ScanKind(True, "decayed", "after", False, True, 1.0))
    return operands, kind, (*operands, *kind, True)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("heads", "lengths", "backward"),
    [
        (128, (), ["sm90_fused_backward_kernel"]),
        (64, (300, 0, 700), ["sm90_scan_kernel", "sm90_backward_sweep_kernel"]),
    ],
    ids=["dense", "packed"],
)
def test_tracing_on_meta_tensors_compiles_the_kernels_of_another_device(monkeypatch, traced, heads, lengths, backward):
    monkeypatch.setattr(problems, "device_spec", lambda index: HOPPER)
    shape = Shape("shape", B=1, T=1000, H=heads, HV=heads, K=128, V=128, lengths=lengths)
    operands, kind, arguments = scan_arguments(shape)
    trace(op._scan_impl, arguments)
    o, final, saved = op._scan_fake(*arguments)
    trace(op._backward_impl, (*operands, saved, o, final, *kind))
    names = [key[0].__name__ for key in traced]
    tail = ["zero_tail_kernel"] if lengths else []
    forward = ["sm90_prepare_kernel", "sm90_scan_kernel", *tail]
    assert names == [*forward, *backward, "gate_gradients_kernel", *tail]


def conv_arguments():
    x, weight = torch.randn(2, 70, 24, device=DEVICE), torch.randn(24, 4, device=DEVICE)
    return ConvInputs(x, weight), ([16, 8], [True, False], [8, 0], [*conv.FORWARD, *conv.BACKWARD])


@needs_triton
@pytest.mark.parametrize("what", ["dense", "packed", "step", "fused step", "conv"])
def test_tracing_compiles_the_kernels_that_are_launched(monkeypatch, traced, what):
    """Equal cache keys, except for the device index."""
    if INTERPRETED:
        for module in (problems, fused, conv):
            monkeypatch.setattr(module, "device_spec", lambda index: INTERPRETER)
    if what == "conv":
        inputs, kind = conv_arguments()
        out = conv._forward(*inputs, *kind)
        calls = [(conv._forward, (*inputs, *kind)), (conv._backward, (*inputs, out, *kind))]
    elif what == "fused step":
        # beta and decay are slices of one tensor, and the pointer of the decay is not aligned
        step = typical_step(GATED, Shape(what, B=1, T=1, H=1, HV=2, K=16, V=16))
        x = draw_step(step, B=2, dtype=torch.float16, device=DEVICE)
        calls = [(fused._fused_impl, (*x.inputs, x.states, x.slots, *fused.StepOptions.of(step), ""))]
    else:
        lengths, T = ((20, 0, 50), 70) if what == "packed" else ((), 1 if what == "step" else 70)
        shape = Shape(what, B=1, T=T, H=1, HV=2, K=16, V=16, lengths=lengths)
        operands, kind, arguments = scan_arguments(shape, DEVICE)
        if what == "step":
            x, step_kind = decode_op.decode_operands(GATED, draw(Case(GATED, shape, torch.float16), DEVICE), "")
            calls = [(decode_op._step_impl, (*x, torch.zeros(1, 2, 16, 16, device=DEVICE), None, *step_kind))]
        else:
            o, final, saved = op._scan_impl(*arguments)
            calls = [(op._scan_impl, arguments), (op._backward_impl, (*operands, saved, o, final, *kind))]
    launched = []
    monkeypatch.setattr("deltazoo.backends.triton.runtime.launcher._compiled", {})
    monkeypatch.setattr(precompile, "await_kernel", launched.append)
    for body, arguments in calls:
        body(*arguments)
        monkeypatch.setattr("deltazoo.backends.triton.runtime.launcher._compiled", {})
        trace(body, arguments)
    assert launched
    assert [key[:-1] for key in traced] == [key[:-1] for key in launched]


@needs_triton
def test_torch_compile_traces_forward_and_backward_and_eager_code_traces_nothing(monkeypatch):
    begun = []
    monkeypatch.setattr(precompile, "begin", lambda body, arguments: begun.append(body))
    x = draw(Case(GATED, Shape("short", B=1, T=20, H=1, HV=1, K=16, V=16), torch.float16), DEVICE)
    x.q.requires_grad_()
    bound = bind(GATED, TritonBackend())
    torch.compile(lambda x: bound(x).o, fullgraph=True, backend="aot_eager")(x).sum().backward()
    assert set(begun) == {op._scan_impl, op._backward_impl}
    begun.clear()
    bound(x).o.sum().backward()
    assert not begun


@needs_triton
def test_an_operator_that_is_defined_later_does_not_compile_callers_again():
    class Inner(NamedTuple):
        x: torch.Tensor

    class Later(NamedTuple):
        inner: Inner

    counter = CompileCounter()
    x = draw(Case(GATED, Shape("short", B=1, T=20, H=1, HV=1, K=16, V=16), torch.float16), DEVICE)
    bound = bind(GATED, TritonBackend())
    compiled = torch.compile(lambda x: bound(x).o, fullgraph=True, backend=counter)
    compiled(x)
    schema(Later)
    compiled(x)
    assert counter.frame_count == 1


def test_unbacked_size_is_not_traced(monkeypatch, traced):
    monkeypatch.setattr(precompile, "_hint", lambda size: 1 // 0)
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        x = torch.empty(mode.shape_env.create_unbacked_symint(), device="cuda")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        precompile.begin(op._scan_impl, (x,))
    assert not precompile._pool.traced


def test_a_thread_that_compiles_a_kernel_compiles_its_launcher(monkeypatch):
    launchers = []
    active = SimpleNamespace(launcher_cls=lambda src, metadata: launchers.append((src, metadata)))
    monkeypatch.setattr("triton.runtime.driver", SimpleNamespace(active=active))
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    kernel = SimpleNamespace(device_caches=[None], compile=None)
    compiled = SimpleNamespace(src="source", metadata="metadata")
    precompile._compile(torch.device("cuda", 0), kernel, lambda: compiled, None)
    assert launchers == [("source", "metadata")]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled_layer_launches_only_precompiled_kernels(monkeypatch, tmp_path):
    def watched_build(name, *arguments):
        built.append((name, threading.current_thread().name))
        return build(name, *arguments)

    built = []
    build = triton.runtime.build._build
    monkeypatch.setattr(triton.runtime.build, "_build", watched_build)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(precompile, "_pool", precompile._Pool())
    monkeypatch.setattr("deltazoo.backends.triton.runtime.launcher._compiled", {})
    launched = []

    def watched_await(key):
        launched.append(key)
        return await_kernel(key)

    await_kernel = precompile.await_kernel
    monkeypatch.setattr(precompile, "await_kernel", watched_await)
    layer = GatedDeltaNet(heads=2, key_width=128, value_width=128).build(256).to("cuda", torch.bfloat16)
    x = torch.randn(2, 300, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch._dynamo.reset()
    torch.compile(lambda x: layer(x)[0], fullgraph=True)(x).sum().backward()
    assert len(launched) >= 5
    assert set(launched) <= set(precompile._pool.kernels)
    assert all(done.result() is None for done in precompile._pool.kernels.values())
    assert all(thread.startswith("deltazoo-compile") for name, thread in built if name == "__triton_launcher")


@needs_triton
def test_without_precompile_tracing_compiles_nothing(monkeypatch):
    monkeypatch.setattr(precompile, "PRECOMPILE", False)
    monkeypatch.setattr(precompile, "begin", lambda body, arguments: pytest.fail("traced"))
    x = draw(Case(GATED, Shape("short", B=1, T=20, H=1, HV=1, K=16, V=16), torch.float16), DEVICE)
    bound = bind(GATED, TritonBackend())
    torch.compile(lambda x: bound(x).o, fullgraph=True, backend="aot_eager")(x)
