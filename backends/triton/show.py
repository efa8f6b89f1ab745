"""Print the kernel plan of an update, for `deltazoo.explain`."""

import torch

from deltazoo.backends.base import UpdateMeta
from deltazoo.backends.devices import DeviceSpec
from deltazoo.backends.errors import ConfigError
from deltazoo.backends.shapes import Shape
from deltazoo.backends.spec import UpdateSpec
from deltazoo.backends.triton.config import LaunchConfig
from deltazoo.backends.triton.lower import computes_in_float32, micro_steps, splits_terms
from deltazoo.backends.triton.plan import (
    KERNELS,
    Decay,
    Plan,
    Problem,
    backward_kernels,
    forward_kernels,
    interval,
    on_device,
)
from deltazoo.backends.triton.table import describe, look_up


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
    problem = on_device(problem_for(spec, meta, shape), device)
    try:
        plan, launches = look_up(config, problem, device, meta.grad)
    except ConfigError as error:
        return f"kernel plan: {error}"
    return "\n".join(
        [f"kernel plan on {where} for {shape.name}: B = {shape.B}, T = {shape.T}:", *_rows(plan, problem, launches)]
    )


def problem_for(spec: UpdateSpec, meta: UpdateMeta, shape: Shape) -> Problem:
    """The problem of a spec on a shape, with widths padded to multiples of 8 as the backend pads them."""
    channel = spec.decay in ("channel", "rate") or meta.decay_channels
    n = micro_steps(spec, channel)
    decay: Decay = "none" if spec.decay == "none" else "channel" if channel else "head"
    if spec.decay == "fixed" and not channel and n == 1:  # else it is spread over the micro-steps
        decay = "fixed"
    delta, per_value_head = spec.transition != "additive", spec.transition == "dplr" or spec.beta == "channel"
    return Problem(
        dtype=torch.float32 if computes_in_float32(spec, meta.K, meta.dtype, channel) else meta.dtype,
        N=shape.sequences, T=shape.T * n, H=meta.HV if delta and per_value_head else meta.H, HV=meta.HV,
        K=meta.K + -meta.K % 8, V=meta.V + -meta.V % 8, delta=delta,
        erase_key=spec.erase_key == "own" or (delta and per_value_head), decay=decay, packed=bool(shape.lengths),
        split_terms=splits_terms(spec, meta.K, meta.dtype), pair=spec.transition == "dplr" and channel,
    )  # fmt: skip


def _rows(plan: Plan, problem: Problem, config: LaunchConfig) -> list[str]:
    rows = [f"  forward:  {' -> '.join(forward_kernels(plan, problem))}"]
    if plan.backward != "none":
        rows.append(f"  backward: {' -> '.join(backward_kernels(plan, problem))}  ({plan.backward})")
        rows.append(f"  checkpoints of the state every {plan.every} chunks of {config.chunk} tokens")
    segments = f"{plan.split} chunks each, computed in parallel" if plan.split else "none"
    rows.append(f"  segments: {segments}")
    for direction, chunks in (("forward", plan.forward_halved_from), ("reverse", plan.halved_from)):
        if chunks:
            rows.append(f"  {direction} scan: a program for every 64 values of a sequence of {chunks} chunks or more")
    launched = {
        "prepare": plan.prepare != "gates",
        "scan": True,
        "recompute": plan.recompute is not None,
        "reverse": plan.backward != "none",
        "gradients": plan.gradients is not None,
    }
    return rows + [f"  {phase}: {describe(getattr(config, phase))}" for phase in KERNELS if launched[phase]]


def _conditions(device: DeviceSpec) -> list[str]:
    rows = []
    for phase, versions in KERNELS.items():
        for kernel, limits in versions.items():
            if limits.hopper and not device.is_hopper:
                continue
            needs = [f"K {interval(limits.keys)}", f"V {interval(limits.values)}"]
            if "channel" in limits.decays and limits.channel_keys != limits.keys:
                needs.append(f"K {interval(limits.channel_keys)} with a decay per channel or an erase key")
            needs += [] if limits.grouped else ["H = HV", "no segments", "sequences x heads that fill the SMs"]
            needs += [] if limits.own_key else ["no erase key unless the decay is per channel"]
            if limits.hopper:
                needs += [
                    "16-bit (split terms: bfloat16, widths of the sweep or an erase key, no decay per channel)",
                    "multiples of 8",
                ]
            rows.append(f"  {phase} {kernel}: {', '.join(needs)}")
    rows.append("  segments in parallel: sequences x heads x V tiles below 40 % of the SMs, and 32 chunks or more")
    return rows
