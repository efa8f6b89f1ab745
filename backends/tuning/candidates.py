"""What the tuner may try: the problem that a target will be to the backend, and the candidates of each kernel.

B batch, T time, H key heads, HV value heads, K key width, V value width
"""

import itertools
from itertools import accumulate
from typing import NamedTuple

import torch

from deltazoo.backends.base import UpdateInputs, state_dtype
from deltazoo.backends.shapes import Shape
from deltazoo.backends.spec import UpdateSpec
from deltazoo.backends.triton.backend import TritonBackend
from deltazoo.backends.triton.config import (
    Device,
    Launch,
    LaunchConfig,
    Problem,
    by_hopper,
    for_hopper,
    heuristic,
    least_keys,
    may_replay,
    power_of_two,
)
from deltazoo.backends.triton.table import STEPS, Kernel

_STATE_LIKE = ("log_decay", "step", "rate")


class Target(NamedTuple):
    """What to tune for: the update of a spec on a shape."""

    spec: UpdateSpec
    shape: Shape
    dtype: torch.dtype


def problem_of(target: Target, kernel: Kernel, device: str = "cuda") -> Problem:
    """The problem that the backend will look up for a target."""
    spec, shape, dtype = target
    x, kind = TritonBackend()._operands(spec, blank(target, kernel, torch.device("meta")), padded=kernel not in STEPS)
    if kernel in STEPS:
        return Problem(
            device, dtype, shape.sequences, 1, shape.H, shape.HV, shape.K, shape.V, kind.delta, x.e is not None,
            spec.decay != "none", False, kind.precise and kernel == "decode",
        )  # fmt: skip
    if kind.precise and dtype == torch.float16:  # which the backend then widens
        dtype = torch.float32
    return Problem(
        device, dtype, shape.sequences, x.v.shape[1], shape.H, shape.HV, x.q.shape[-1], x.v.shape[-1], kind.delta,
        x.e is not None, spec.decay != "none", bool(shape.lengths), kind.precise,
    )  # fmt: skip


def blank(target: Target, kernel: Kernel, device: torch.device) -> UpdateInputs:
    """The operands of a target, all zero, with an initial state; each sequence a row of one token for a step."""
    spec, shape, dtype = target
    B, T, lengths = (shape.sequences, 1, ()) if kernel in STEPS else (shape.B, shape.T, shape.lengths)
    operands = {
        name: torch.zeros(sizes, dtype=state_dtype(dtype) if name in _STATE_LIKE else dtype, device=device)
        for name, sizes in spec.operands(B, T, *shape[3:7]).items()
    }
    operands["state"] = torch.zeros(shape.sequences, shape.HV, shape.K, shape.V, device=device)
    if lengths:
        operands["cu_seqlens"] = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    return UpdateInputs(**operands)


def candidates(
    kernel: Kernel, problem: Problem, base: LaunchConfig, device: Device, effort: str = "quick"
) -> list[LaunchConfig]:
    """The configs to try for a kernel, `base` first; tiles wider than the problem are left out.

    Where half the device has work without parts, none are tried.
    """
    if kernel == "split":
        if device.processors < 2 * problem.N * problem.HV:
            return [base]
        chunks = -(-problem.T // base.chunk) // (max(1, problem.N) if problem.packed else 1)
        steps = [0, *(1 << n for n in range(4, 7 if effort == "quick" else 10) if 2 << n <= chunks)]
        scratch = {0: LaunchConfig().scratch}
        replays = {s: base.reverse.model_copy(update={"replays": base.reverse.replays and not s}) for s in steps}
        return _unique(base, [{"split": s, "scratch": scratch.get(s, 2**29), "reverse": replays[s]} for s in steps])
    together = base.together(problem.K, problem.V)
    if {"gradients": together, "replay": base.reverse.replays, "prepare": not problem.delta}.get(kernel):
        return [base]  # whose reverse scan does that, too, or where there are gates alone to prepare
    wide_V, wide_K = max(16, power_of_two(problem.V)), max(64, power_of_two(problem.K))
    tried = [Launch(**dict(zip(_FIELDS, numbers, strict=False))) for numbers in _launches(kernel, effort)]
    if kernel == "gradients":
        tried = [x for x in tried if least_keys(problem.kept) <= x.keys <= wide_K]
    narrow = [x for x in tried if kernel == "prepare" or x.tile <= wide_V]
    best = getattr(heuristic(problem, device, base.split), kernel)
    if for_hopper(kernel, device, problem, base.chunk):  # where the heuristic does not take it, too
        narrow.append(best if best.hopper else by_hopper(kernel, best))
    if kernel == "reverse" and best.hopper and not base.split and may_replay(problem):
        narrow.append(best.model_copy(update={"replays": not best.replays}))
    return _unique(base, [{kernel: launch} for launch in narrow])


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


def _launches(kernel: Kernel, effort: str) -> list[tuple[int, ...]]:
    name = "scan" if kernel in ("replay", "reverse") else kernel
    return _QUICK[name] if effort == "quick" else list(itertools.product(*_FULL[name]))


def _unique(base: LaunchConfig, changes: list[dict[str, object]]) -> list[LaunchConfig]:
    """The base, and the base with each change, once each; a config that is none is left out."""
    found = [base]
    for change in changes:
        config = base.changed(**change)
        if config not in found:
            found.append(config)
    return found
