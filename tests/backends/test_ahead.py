"""Kernels compile while torch.compile traces: the same that will be launched, and nothing else is done differently."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from triton_cases import DEVICE, GATED, runs

from deltazoo import bind
from deltazoo.backends.conformance import Case, draw
from deltazoo.backends.devices import DeviceSpec
from deltazoo.backends.shapes import Shape
from deltazoo.backends.triton import TritonBackend, op
from deltazoo.backends.triton import plan as plans
from deltazoo.backends.triton import precompile as ahead
from deltazoo.backends.triton import short_conv as conv
from deltazoo.mixers import GatedDeltaNet

HOPPER = DeviceSpec("a Hopper GPU", "cuda", (9, 0), 132, 232448, "3.7.1")


@pytest.fixture
def walked(monkeypatch):
    """The kernels that a walk would compile, by what they are known by, none of which is compiled."""
    found = []
    monkeypatch.setattr(ahead, "_work", ahead._Work())
    monkeypatch.setattr(ahead, "compile_kernel", lambda known, kernel, compile: found.append(known))
    return found


def walk(body, arguments):
    """Walk a body as torch.compile has it walked, and wait."""
    sizes = [ahead._sizes(x) for x in arguments]
    ahead._work.walker.submit(ahead._walk, body, sizes, torch.device("cuda", 0)).result()


def scan_arguments(shape, device="cpu"):
    x = draw(Case(GATED, shape, torch.float16), device)
    operands = (x.q, x.k, x.v, x.log_decay, x.beta, None, None, x.state, x.cu_seqlens)
    kind = (True, False, False, False, True, 1.0, "")
    return operands, kind, (*operands, *kind, True)


@pytest.mark.parametrize(
    ("heads", "lengths", "backward"),
    [
        (128, (), ["hopper_fused_backward_kernel"]),
        (64, (300, 0, 700), ["hopper_scan_kernel", "hopper_backward_sweep_kernel"]),
    ],
    ids=["dense", "packed"],
)
def test_a_walk_on_sizes_alone_comes_to_the_kernels_of_a_device_that_is_not_here(
    monkeypatch, walked, heads, lengths, backward
):
    monkeypatch.setattr(plans, "device_spec", lambda index: HOPPER)
    shape = Shape("shape", B=1, T=1000, H=heads, HV=heads, K=128, V=128, lengths=lengths)
    operands, kind, arguments = scan_arguments(shape)
    walk(op._scan_impl, arguments)
    o, final, *kept = op._scan_fake(*arguments)
    walk(op._backward_impl, (*operands, *kept, o, final, *kind))
    names = [known[0].__name__ for known in walked]
    assert names == ["hopper_prepare_kernel", "hopper_scan_kernel", *backward, "gate_gradients_kernel"]


def conv_arguments():
    x, weight = torch.randn(2, 70, 24, device=DEVICE), torch.randn(24, 4, device=DEVICE)
    return (x, weight, None, None, None), ([16, 8], [True, False], [8, 0], [*conv.FORWARD, *conv.BACKWARD])


@runs
@pytest.mark.parametrize("what", ["dense", "packed", "step", "conv"])
def test_a_walk_comes_to_the_kernels_that_are_launched(monkeypatch, walked, what):
    """By all that they are compiled for, but the device's number."""
    if what == "conv":
        inputs, kind = conv_arguments()
        out = conv._conv_impl(*inputs, *kind)
        calls = [(conv._conv_impl, (*inputs, *kind)), (conv._backward_impl, (*inputs, out, *kind))]
    else:
        lengths, T = ((20, 0, 50), 70) if what == "packed" else ((), 1 if what == "step" else 70)
        shape = Shape(what, B=1, T=T, H=1, HV=2, K=16, V=16, lengths=lengths)
        operands, kind, arguments = scan_arguments(shape, DEVICE)
        if what == "step":
            calls = [(op._step_impl, (*operands[:7], torch.zeros(1, 2, 16, 16, device=DEVICE), None, *kind))]
        else:
            o, final, *kept = op._scan_impl(*arguments)
            calls = [(op._scan_impl, arguments), (op._backward_impl, (*operands, *kept, o, final, *kind))]
    launched = []
    monkeypatch.setattr("deltazoo.backends.triton.launcher._compiled", {})
    monkeypatch.setattr(ahead, "await_kernel", launched.append)
    for body, given in calls:
        body(*given)
        monkeypatch.setattr("deltazoo.backends.triton.launcher._compiled", {})
        walk(body, given)
    assert launched
    assert [known[:-1] for known in walked] == [known[:-1] for known in launched]


@runs
def test_torch_compile_walks_forward_and_backward_and_eager_code_walks_nothing(monkeypatch):
    begun = []
    monkeypatch.setattr(ahead, "begin", lambda body, arguments: begun.append(body))
    x = draw(Case(GATED, Shape("short", B=1, T=20, H=1, HV=1, K=16, V=16), torch.float16), DEVICE)
    x.q.requires_grad_()
    bound = bind(GATED, TritonBackend())
    torch.compile(lambda x: bound(x).o, fullgraph=True, backend="aot_eager")(x).sum().backward()
    assert set(begun) == {op._scan_impl, op._backward_impl}
    begun.clear()
    bound(x).o.sum().backward()
    assert not begun


def test_a_size_that_only_the_run_will_tell_is_no_error(monkeypatch, walked):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ahead, "_hint", lambda size: 1 // 0)
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        x = torch.empty(mode.shape_env.create_unbacked_symint(), device="cuda")
        ahead.begin(op._scan_impl, (x,))
    assert not ahead._work.walked


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_compiled_layer_launches_no_kernel_that_was_not_compiled_ahead(monkeypatch):
    monkeypatch.setattr(ahead, "_work", ahead._Work())
    monkeypatch.setattr("deltazoo.backends.triton.launcher._compiled", {})
    launched = []

    def watched_await(known):
        launched.append(known)
        return await_kernel(known)

    await_kernel = ahead.await_kernel
    monkeypatch.setattr(ahead, "await_kernel", watched_await)
    layer = GatedDeltaNet(heads=2, key_width=128, value_width=128).build(256).to("cuda", torch.bfloat16)
    x = torch.randn(2, 300, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch._dynamo.reset()
    torch.compile(lambda x: layer(x)[0], fullgraph=True)(x).sum().backward()
    assert len(launched) >= 5
    assert set(launched) <= set(ahead._work.kernels)
    assert all(done.result() is None for done in ahead._work.kernels.values())
