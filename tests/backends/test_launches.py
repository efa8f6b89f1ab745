"""The launches of a plan are those that run: for the same update, one to one and in order."""

import ast
import inspect
import itertools
import sys
from pathlib import Path

import pytest
import torch
from triton_cases import CONFIGS, DEVICE, INTERPRETED, SHAPES, SPECS

import deltazoo
from deltazoo import UpdateMeta, UpdateSpec, bind, explain, update, watch
from deltazoo.backends.conformance import Case, draw
from deltazoo.backends.conformance.pairwise import pairwise_with
from deltazoo.backends.measure.shapes import Shape
from deltazoo.backends.torch_ext.devices import INTERPRETER, DeviceSpec
from deltazoo.backends.triton import LaunchConfig, TritonBackend, backend
from deltazoo.backends.triton import problem as problems
from deltazoo.backends.triton.chunk.execute import Tensors, load
from deltazoo.backends.triton.chunk.plan import Plan
from deltazoo.backends.triton.chunk.registry import COMBINE, GATE_GRADIENTS, KERNELS, SUM_GROUPS
from deltazoo.backends.triton.element.show import element_plans
from deltazoo.backends.triton.limits import limits_of
from deltazoo.backends.triton.lower import route_of
from deltazoo.backends.triton.runtime import launcher
from deltazoo.backends.triton.runtime.table import clear_caches
from deltazoo.backends.triton.show import plan_for

DEVICES = {
    name: DeviceSpec.named(name)._replace(triton="3.7.1")
    for name in ("NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090")
}
DEVICES["few"] = DEVICES["NVIDIA H200"]._replace(name="a GPU of few SMs", processors=4)
SIZES = (
    Shape("two tiles", B=2, T=256, H=2, HV=2, K=128, V=128),
    Shape("grouped", B=1, T=2048, H=2, HV=4, K=64, V=64),
    Shape("pack", B=1, T=300, H=2, HV=4, K=128, V=128, lengths=(100, 0, 200)),
    Shape("segments", B=1, T=4200, H=1, HV=1, K=128, V=64),
    Shape("segments of a pack", B=1, T=4300, H=1, HV=2, K=64, V=256, lengths=(4000, 300)),
    Shape("wide", B=1, T=130, H=1, HV=2, K=200, V=400),
    Shape("odd", B=2, T=70, H=1, HV=2, K=5, V=9),
    Shape("narrow", B=2, T=100, H=2, HV=4, K=16, V=2),
    Shape("one token", B=3, T=1, H=2, HV=4, K=64, V=64),
    Shape("no token", B=2, T=0, H=1, HV=2, K=64, V=64),
)
NUMBERS = {
    "scale", "T", "N", "slots", "num_scratch_slots", "window", "windows", "num_segments", "narrow_tile_min_chunks",
}  # fmt: skip
WINDOWS = LaunchConfig(checkpoint_chunks=2, scratch=2**20)
SETTINGS = list(itertools.product(DEVICES, (None, WINDOWS), ("forward", "with gradients")))
CASES = [] if INTERPRETED else pairwise_with(SETTINGS, SIZES, (torch.bfloat16, torch.float16, torch.float32))


class _Handle:
    """A compiled kernel that computes nothing."""

    def __getitem__(self, grid):
        return lambda *arguments, stream: None


class _Handles(dict):
    def get(self, key, default=None):
        return _Handle()


def stub_launches(monkeypatch, device):
    """Let the triton backend choose kernels for a device, and launch nothing."""
    monkeypatch.setattr(launcher, "_compiled", _Handles())
    monkeypatch.setattr(launcher, "current_stream", lambda index: 0)
    monkeypatch.setattr(problems, "device_spec", lambda index: device)
    monkeypatch.setattr(TritonBackend, "_tensors_unsupported", staticmethod(lambda *_: []))
    monkeypatch.setattr(backend, "current_limits", lambda *traits: limits_of(device, *traits))


def launches_of(spec, meta, shape, device, backend):
    """Name, programs and warps of each planned launch, forward and backward."""
    route = route_of(spec, meta.V, shape.T, packed=bool(shape.lengths), grad=meta.grad)
    if route == "element step":
        return ["element_step_kernel"], []
    if route == "elements":
        plans = element_plans(meta, shape, device, backend.element)
        backward = [step[1:] for plan in reversed(plans) for step in plan.backward]
        return [step[1:] for plan in plans for step in plan.forward], backward
    plan = plan_for(spec, meta, shape, device, backend.config)
    if not isinstance(plan, Plan):
        return [plan.record], []
    return [launch.record for launch in plan.forward], [launch.record for launch in plan.backward]


def run(spec, inputs, backend):
    """Name, programs and warps of the launches of a call, forward and backward."""
    leaves = [x for x in inputs if x is not None and x.requires_grad]
    with watch() as forward:
        out = bind(spec, backend)(inputs)
    with watch() as backward:
        if leaves:
            torch.autograd.grad(out.o.sum(), leaves, allow_unused=True)
    return [
        [(run.name, run.programs, run.warps) for run in log.runs if run.name.endswith("_kernel")]
        for log in (forward, backward)
    ]


@pytest.mark.parametrize(("case", "setting"), CASES, ids=range(len(CASES)))
def test_the_planned_launches_run_one_to_one_and_in_order(monkeypatch, case, setting):
    spec, shape, (device, config, direction) = case.spec, case.shape, setting
    device = DEVICES[device]
    stub_launches(monkeypatch, device)
    inputs = draw(case)
    if direction == "with gradients":
        inputs = inputs._replace(q=inputs.q.requires_grad_(), v=inputs.v.requires_grad_())
    meta, triton = UpdateMeta.of(inputs), TritonBackend(config)
    forward, backward = run(spec, inputs, triton)
    planned = launches_of(spec, meta, shape, device, triton)
    if planned[0] == ["element_step_kernel"]:
        assert [name for name, *_ in forward] == planned[0]
    else:
        assert (forward, backward) == planned
    text = str(explain(spec, meta._replace(device="cuda"), triton, shape=shape, device=device))
    assert [name for name in dict.fromkeys(name for name, *_ in (*forward, *backward)) if name not in text] == []


@pytest.mark.skipif(INTERPRETED, reason="launches are stubbed out")
@pytest.mark.parametrize(
    ("device", "scan"), [("NVIDIA A100-SXM4-80GB", "scan_kernel"), ("NVIDIA H200", "sm90_scan_kernel")]
)
def test_an_update_runs_functions_of_at_most_28_files(monkeypatch, device, scan):
    """Limit the files that a reader opens from `update` to the last launch of the forward, with empty caches."""
    stub_launches(monkeypatch, DEVICES[device])
    spec, shape = UpdateSpec(decay="head", beta="head"), Shape("busy", B=8, T=256, H=16, HV=16, K=128, V=128)
    inputs, triton = draw(Case(spec, shape, torch.bfloat16)), TritonBackend()
    with watch() as log:
        update(spec, inputs, triton)  # imports the modules
    clear_caches()
    limits_of.cache_clear()
    run = set()
    sys.setprofile(lambda frame, event, _: run.add((frame.f_code.co_filename, frame.f_code.co_name)))
    try:
        update(spec, inputs, triton)
    finally:
        sys.setprofile(None)
    root = str(Path(deltazoo.__file__).parent / "backends")
    files = {path.removeprefix(root) for path, function in run if path.startswith(root) and function != "<module>"}
    assert [record.name for record in log.runs if record.name.endswith("_kernel")][-1] == scan
    assert {"/update/dispatch.py", "/triton/chunk/plan.py"} <= files
    assert len(files) <= 28, sorted(files)


@pytest.mark.parametrize(
    ("spec", "kernels"),
    [
        (UpdateSpec(transition="additive"), "sm90_scan_kernel -> sm90_fused_backward_kernel"),
        (UpdateSpec(decay="channel", transition="dplr"), "sm90_dplr_gradients_kernel -> dplr_gradients_kernel"),
    ],
    ids=["linear attention", "RWKV-7"],
)
def test_explain_lists_no_gate_gradients_of_an_update_without_gates(spec, kernels):
    meta = UpdateMeta("cuda", torch.bfloat16, H=16, HV=16, K=64 + 64 * (spec.decay == "none"), V=128, grad=True)
    meta = meta._replace(V=meta.K)
    text = str(explain(spec, meta, "triton", shape=(8, 4096), device="NVIDIA H200"))
    assert "gate_gradients_kernel" not in text
    assert all(kernel in text for kernel in kernels.split(" -> "))


INTERPRETED_CASES = [
    ("gated delta", "pack", "segments and windows"),
    ("linear", "many chunks", "windows"),
    ("dplr", "grouped", "segments"),
    ("retnet", "pack", "one segment"),
]


@pytest.mark.parametrize(("spec", "shape", "config"), INTERPRETED_CASES if INTERPRETED else [])
def test_the_interpreter_runs_the_planned_launches(spec, shape, config):
    spec, shape, triton = SPECS[spec], SHAPES[shape], TritonBackend(CONFIGS[config])
    inputs = draw(Case(spec, shape), DEVICE)
    inputs = inputs._replace(q=inputs.q.requires_grad_())
    meta = UpdateMeta.of(inputs)
    assert tuple(run(spec, inputs, triton)) == launches_of(spec, meta, shape, INTERPRETER, triton)


def test_parameters_of_kernels_are_pointers_then_numbers_then_traits():
    """`launcher` passes the arguments in this order; every name is one that the launch code gives."""
    kernels = {kernel.name: kernel for phase in KERNELS.values() for kernel in phase if "decode" not in kernel.module}
    kernels |= {kernel.name: kernel for kernel in (COMBINE, SUM_GROUPS, GATE_GRADIENTS)}
    for kernel in kernels.values():
        function = load(kernel)
        parameters = inspect.signature(function.fn).parameters
        # a tuple cannot hold the descriptor that may replace v
        pointers = ["gmem", "v"] if "TILED" in function.Traits._fields else ["gmem"]
        numbers = [name for name in parameters if name in NUMBERS]
        assert [*parameters] == [*pointers, *numbers, "traits"], kernel.name
        assert {*function.Pointers._fields} <= {*Tensors._fields}, kernel.name
        annotated = [name for name, x in parameters.items() if x.annotation is not inspect.Parameter.empty]
        assert annotated == ["traits"], kernel.name


def test_launches_have_few_positional_arguments_and_functions_few_parameters():
    package = Path(launcher.__file__).parent
    for path in package.rglob("*.py"):
        if "kernels" in path.relative_to(package).parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("launcher", "execute"):
                assert len(node.args) <= 4, (path.name, node.lineno)
            if isinstance(node, ast.FunctionDef):
                names = [parameter.arg for parameter in (*node.args.args, *node.args.kwonlyargs)]
                assert len([name for name in names if name not in ("self", "cls")]) <= 8, (path.name, node.name)
