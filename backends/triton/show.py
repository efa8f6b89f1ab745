"""Print the kernel plan of an update, for `deltazoo.explain`."""

from itertools import accumulate

import torch

from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.measure.shapes import Shape
from deltazoo.backends.torch_ext.devices import DeviceSpec
from deltazoo.backends.triton.chunk.plan import KernelLaunch, Plan
from deltazoo.backends.triton.chunk.registry import KERNELS, PHASES
from deltazoo.backends.triton.decode.op import decode_operands
from deltazoo.backends.triton.decode.operands import decode_plan, decode_problem
from deltazoo.backends.triton.lower import lower, route_of
from deltazoo.backends.triton.operands import problem_of
from deltazoo.backends.triton.problem import Problem, architecture
from deltazoo.backends.triton.runtime.records import describe
from deltazoo.backends.triton.runtime.table import look_up
from deltazoo.backends.update.base import UpdateInputs, UpdateMeta
from deltazoo.backends.update.spec import UpdateSpec


def explain_plan(
    spec: UpdateSpec, meta: UpdateMeta, shape: Shape | None, device: DeviceSpec | None, config: str
) -> str | None:
    """List the kernels of an update in order; without a shape, the conditions under which each version runs.

    Args: device: None is the current GPU; without a GPU there is no plan.
    """
    device = DeviceSpec.current() if device is None else device
    if device.platform == "interpreter":
        return None
    capability = "".join(map(str, device.capability))
    where = f"{device.name} (sm_{capability}, {device.processors} SMs, Triton {device.triton})"
    if shape is None:
        return "\n".join([f"kernel versions on {where}, in order of preference:", *_conditions(device)])
    try:
        plan = plan_for(spec, meta, shape, device, config)
    except ConfigError as error:
        return f"kernel plan: {error}"
    rows = _rows(plan) if isinstance(plan, Plan) else [f"  decode: {plan.kernel.name}"]
    return "\n".join([f"kernel plan on {where} for {shape.name}: B = {shape.B}, T = {shape.T}:", *rows])


def plan_for(spec: UpdateSpec, meta: UpdateMeta, shape: Shape, device: DeviceSpec, config: str) -> Plan | KernelLaunch:
    """Return the plan of the chunked kernels on a shape, or the launch of a decode step. Raises: ConfigError."""
    if route_of(spec, meta.V, shape.T, packed=bool(shape.lengths), grad=meta.grad) == "step":
        x, kind = decode_operands(spec, meta_inputs(spec, meta, shape), config)
        return decode_plan(decode_problem(x, kind), config, device)
    return look_up(config, problem_for(spec, meta, shape, device), device, meta.grad)


def problem_for(spec: UpdateSpec, meta: UpdateMeta, shape: Shape, device: DeviceSpec) -> Problem:
    """Derive the problem of a spec on a shape, without an initial state."""
    lowered = lower(spec, meta_inputs(spec, meta, shape), "")
    return problem_of(lowered.operands, lowered.kind, device)


def meta_inputs(spec: UpdateSpec, meta: UpdateMeta, shape: Shape) -> UpdateInputs:
    """Return the operands of a spec on the meta device, without an initial state."""
    sizes = spec.operands(shape.B, shape.T, meta.H, meta.HV, meta.K, meta.V)
    if meta.decay_channels:
        sizes["log_decay"] = (meta.HV, meta.K)
    in_float32 = ("log_decay", "step", "rate")
    operands = {
        name: torch.empty(size, dtype=torch.float32 if name in in_float32 else meta.dtype, device="meta")
        for name, size in sizes.items()
    }
    if shape.lengths:
        operands["cu_seqlens"] = torch.tensor([0, *accumulate(shape.lengths)], dtype=torch.int32, device="meta")
    return UpdateInputs(**operands)


def _rows(plan: Plan) -> list[str]:
    config = plan.config
    rows = [f"  forward:  {_chain(plan.forward)}"]
    if plan.sums is not None:
        windows = max(launch.span.windows for launch in plan.backward) if plan.backward else 1
        rows.append(f"  backward: {_chain(plan.backward)}")
        rows.append(f"  checkpoints of the state every {plan.checkpoint_chunks} chunks of {config.chunk} tokens")
        if windows > 1:
            rows.append(f"  windows: {windows}, computed one after the other")
    segments = f"{plan.segment_chunks} chunks each, computed in parallel" if plan.segment_chunks else "none"
    rows.append(f"  segments: {segments}")
    for direction, chunks in (("forward", plan.forward_narrow_min_chunks), ("reverse", plan.narrow_min_chunks)):
        if chunks:
            rows.append(f"  {direction} scan: a program for every 64 values of a sequence of {chunks} chunks or more")
    launched = [phase for phase in PHASES if phase in plan.kernels and plan.kernels[phase].name != "gates_kernel"]
    return rows + [f"  {phase}: {describe(getattr(config, phase))}" for phase in launched]


def _chain(launches: tuple[KernelLaunch, ...]) -> str:
    """Return the kernels in order; those of several windows, which are the same, once with their number."""
    windows = {launch.span.window for launch in launches if launch.span.windows > 1}
    once = [launch for launch in launches if launch.span.windows > 1 and launch.span.window == 0]
    others = [launch.kernel.name for launch in launches if launch.span.windows == 1]
    repeated = [f"{len(windows)} x ({' -> '.join(launch.kernel.name for launch in once)})"] if once else []
    return " -> ".join([*repeated, *others]) or "nothing"


def _conditions(device: DeviceSpec) -> list[str]:
    rows = []
    for phase in PHASES:
        for kernel in KERNELS[phase]:
            architectures = kernel.support.architectures
            if not architectures or architecture(device) in architectures:
                rows.append(f"  {phase} {kernel.version} {kernel.name}: {', '.join(kernel.support.needs())}")
    rows.append("  reverse fused: also no segments, and sequences x heads that fill the SMs")
    rows.append("  segments in parallel: sequences x heads x V tiles below 40 % of the SMs, and 32 chunks or more")
    return rows
