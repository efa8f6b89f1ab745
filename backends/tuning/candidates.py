"""Candidate launch configs of each kernel, and the problem and the operands of a tuning target.

B batch, T time, H key heads, HV value heads, K key width, V value width
"""

import itertools
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from deltazoo.backends.measure.shapes import Shape
from deltazoo.backends.torch_ext.devices import DeviceSpec
from deltazoo.backends.triton.chunk.heuristic import heuristic, in_version
from deltazoo.backends.triton.chunk.plan import make_plan
from deltazoo.backends.triton.chunk.registry import STEPS, choose, takes, versions
from deltazoo.backends.triton.config import Launch, LaunchConfig
from deltazoo.backends.triton.decode.op import decode_operands
from deltazoo.backends.triton.decode.operands import decode_problem
from deltazoo.backends.triton.lower import lower
from deltazoo.backends.triton.operands import problem_of as problem_of_operands
from deltazoo.backends.triton.problem import Problem
from deltazoo.backends.triton.tiles import cdiv, min_key_tile, value_tile
from deltazoo.backends.update.base import UpdateInputs, state_dtype
from deltazoo.backends.update.spec import UpdateSpec

_IN_STATE_DTYPE = ("log_decay", "step", "rate")
# Values of these fields of `Launch` to try: as whole launches, and for each field, to be combined.
_FIELDS = ("tile", "warps", "stages", "keys")
_QUICK: dict[str, list[tuple[int, ...]]] = {
    "prepare": [(16, 4, 1), (32, 4, 1), (16, 8, 1)],
    "scan": [(32, 4, 2), (64, 4, 1), (64, 4, 2), (64, 4, 3), (128, 8, 1), (128, 8, 2), (128, 8, 3)],
    "gradients": [(64, 4, 1, 64), (64, 4, 2, 64), (64, 4, 3, 64), (32, 4, 2, 64), (128, 4, 1, 64), (64, 8, 2, 128)],
    "decode": [(16, 1, 1), (16, 2, 1), (32, 2, 1), (32, 4, 1), (64, 4, 1), (64, 8, 1), (128, 8, 1)],
    "fused_step": [(32, 2, 1), (32, 4, 1), (64, 2, 1), (64, 4, 1), (64, 8, 1), (128, 4, 1)],
}  # fmt: skip
_FULL: dict[str, tuple[tuple[int, ...], ...]] = {
    "prepare": ((16, 32, 64), (2, 4, 8), (1, 2)),
    "scan": ((16, 32, 64, 128), (4, 8), (1, 2, 3, 4)),
    "gradients": ((32, 64, 128), (4, 8), (1, 2, 3), (32, 64, 128)),
    "decode": ((16, 32, 64, 128), (1, 2, 4, 8), (1,)),
    "fused_step": ((16, 32, 64, 128), (1, 2, 4, 8), (1,)),
}


class Target(NamedTuple):
    """An update to tune: spec, shape and dtype."""

    spec: UpdateSpec
    shape: Shape
    dtype: torch.dtype


def problem_of(target: Target, kernel: str, device: DeviceSpec) -> Problem:
    """Return the problem by which the backend looks up the launch of a kernel in the tables."""
    spec, step = target.spec, kernel in STEPS
    inputs = zero_operands(target, kernel, torch.device("meta"))
    if not step:
        lowered = lower(spec, inputs, "")
        return problem_of_operands(lowered.operands, lowered.kind, device)
    problem = decode_problem(*decode_operands(spec, inputs, ""))
    return problem if kernel == "decode" else problem._replace(split_terms=False)


def zero_operands(target: Target, kernel: str, device: torch.device) -> UpdateInputs:
    """Return zeros for the operands and the initial state of a target.

    For the kernels of a decode step each sequence is a row of one token.
    """
    spec, shape, dtype = target
    B, T, lengths = (shape.sequences, 1, ()) if kernel in STEPS else (shape.B, shape.T, shape.lengths)
    operands = {
        name: torch.zeros(sizes, dtype=state_dtype(dtype) if name in _IN_STATE_DTYPE else dtype, device=device)
        for name, sizes in spec.operands(B, T, *shape[3:7]).items()
    }
    operands["state"] = torch.zeros(shape.sequences, shape.HV, shape.K, shape.V, device=device)
    if lengths:
        operands["cu_seqlens"] = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    return UpdateInputs(**operands)


def candidates(
    kernel: str, problem: Problem, base: LaunchConfig, device: DeviceSpec, effort: str = "quick"
) -> list[LaunchConfig]:
    """Return the configs to try for a kernel, `base` first.

    Only `base` if the plan does not launch the kernel, or if its launch has no parameters.
    """
    if kernel == "segment_chunks":
        return _segment_lengths(problem, base, device, effort)
    if kernel not in STEPS:
        kernels = make_plan(problem, device, base, grad=True).names()
        if kernels.get(kernel, "gates_kernel") == "gates_kernel":  # which has no parameters
            return [base]
    # kernels without the last fields of _FIELDS keep their defaults
    launches = [Launch(**dict(zip(_FIELDS, numbers, strict=False))) for numbers in _grid(kernel, effort)]
    if kernel != "prepare":
        launches = [launch for launch in launches if launch.tile == value_tile(launch.tile, problem.V)]
    if kernel == "gradients":
        widest = max(64, value_tile(2**30, problem.K))
        launches = [launch for launch in launches if min_key_tile(problem.saved_dtype) <= launch.keys <= widest]
    default = getattr(heuristic(problem, device, base.segment_chunks), kernel)
    if version := specialized_version(kernel, problem, device, base.chunk):
        if effort == "quick":  # of the portable launches, which are rarely faster, only the heuristic's
            launches = [default.model_copy(update={"kernel": "portable"})]
        launches.append(default if default.kernel != "portable" else in_version(version, kernel, default))
        if kernel == "reverse" and not base.segment_chunks and takes("reverse", "fused", problem, device, base.chunk):
            other = version if default.kernel == "fused" else "fused"
            launches.append(default.model_copy(update={"kernel": other}))
    return _unique(base, [{kernel: launch} for launch in launches])


def specialized_version(kernel: str, problem: Problem, device: DeviceSpec, chunk: int) -> str | None:
    """Return the version of a kernel for the device's architecture that supports a problem; None if there is none."""
    others = [version for version in versions(kernel) if version not in ("portable", "fused")]
    return next((version for version in others if choose(kernel, version, problem, device, chunk)), None)


def _segment_lengths(problem: Problem, base: LaunchConfig, device: DeviceSpec, effort: str) -> list[LaunchConfig]:
    """Return configs with other segment lengths; only `base` if sequences x heads fill half of the SMs."""
    if device.processors < 2 * problem.N * problem.HV:
        return [base]
    chunks = cdiv(problem.T, base.chunk) // (max(1, problem.N) if problem.packed else 1)
    changes = []
    for segment_chunks in (0, *(1 << n for n in range(4, 7 if effort == "quick" else 10) if 2 << n <= chunks)):
        fused = base.reverse.kernel == "fused"
        other = specialized_version("reverse", problem, device, base.chunk)
        reverse = base.reverse.model_copy(update={"kernel": other}) if segment_chunks and fused else base.reverse
        scratch = 2**29 if segment_chunks else LaunchConfig().scratch
        changes.append({"segment_chunks": segment_chunks, "scratch": scratch, "reverse": reverse})
    return _unique(base, changes)


def _grid(kernel: str, effort: str) -> list[tuple[int, ...]]:
    """Return the values of `_FIELDS` to try. The scans have the same values."""
    name = "scan" if kernel in ("recompute", "reverse") else kernel
    return _QUICK[name] if effort == "quick" else list(itertools.product(*_FULL[name]))


def _unique(base: LaunchConfig, changes: list[dict[str, Any]]) -> list[LaunchConfig]:
    """Return the base and its changed copies, without duplicates."""
    return list(dict.fromkeys([base, *(base.changed(**change) for change in changes)]))
