"""Derive the problem from the operands of a call, and look up its kernel plan and launch config."""

from deltazoo.backends.devices import DeviceSpec
from deltazoo.backends.triton import plan as plans
from deltazoo.backends.triton import table
from deltazoo.backends.triton.config import CHUNK, Launch, LaunchConfig, parse
from deltazoo.backends.triton.operands import ScanKind, ScanOperands, Sizes
from deltazoo.backends.triton.plan import Plan, Problem
from deltazoo.backends.triton.precompile import device_of


def resolve(x: ScanOperands, kind: ScanKind, grad: bool) -> tuple[Plan, LaunchConfig]:
    """Look up plan and launch config. Raises: ConfigError for a kernel that does not take the problem."""
    return table.look_up(kind.config, problem_of(x, kind), _device(x), grad)


def resolve_decode(x: ScanOperands, kind: ScanKind) -> Launch:
    """Look up the launch of a decode step; the other fields of a given config are not checked."""
    if kind.config:
        return parse(kind.config).decode
    return table.launch_config(problem_of(x, kind), _device(x)).decode


def problem_of(x: ScanOperands, kind: ScanKind) -> Problem:
    """Derive the problem from the operands."""
    s = Sizes.of(x, CHUNK)
    return Problem(
        dtype=x.q.dtype, N=s.N, T=s.T, H=s.H, HV=s.HV, K=s.K, V=s.V, delta=kind.delta, erase_key=x.e is not None,
        decay=x.decay, packed=s.packed, split_terms=kind.split_terms,
        saves_16_bits=kind.saves_16_bits,
    )  # fmt: skip


def _device(x: ScanOperands) -> DeviceSpec:
    return plans.device_spec(device_of(x.q).index)
