"""Derive the problem from the operands of a call, and look up its kernel plan and launch config."""

from deltazoo.backends.devices import DeviceSpec
from deltazoo.backends.triton import plan as plans
from deltazoo.backends.triton import table
from deltazoo.backends.triton.config import CHUNK, Launch, LaunchConfig, parse
from deltazoo.backends.triton.operands import ScanKind, ScanOperands, Sizes, StepKind, StepOperands
from deltazoo.backends.triton.plan import Decay, Plan, Problem
from deltazoo.backends.triton.precompile import device_of


def resolve(x: ScanOperands, kind: ScanKind, grad: bool) -> tuple[Plan, LaunchConfig]:
    """Look up plan and launch config. Raises: ConfigError for a kernel that does not take the problem."""
    return table.look_up(kind.config, problem_of(x, kind), _device(x), grad)


def resolve_decode(x: StepOperands, kind: StepKind) -> Launch:
    """Look up the launch of a decode kernel; the other fields of a given config are not checked."""
    if kind.config:
        return parse(kind.config).decode
    return table.launch_config(decode_problem(x, kind), _device(x)).decode


def decode_problem(x: StepOperands, kind: StepKind) -> Problem:
    """Derive the problem of one token; drafted tokens have the same launches."""
    B, _, H, K = x.q.shape
    HV, V = x.v.shape[-2:]
    erases = kind.delta or x.a is not None
    # an erase strength per channel, and a, are erase keys of each value head
    own = x.a is not None or (kind.delta and x.erase is not None and x.erase.dim() == x.v.dim())
    decays: dict[int, Decay] = {1: "fixed", 2: "channel", 3: "head", 4: "channel"}
    return Problem(
        dtype=x.q.dtype, N=B, T=1, H=HV if own else H, HV=HV, K=K, V=V, delta=erases, erase_key=own or x.e is not None,
        decay="none" if x.log_decay is None else decays[x.log_decay.dim()], packed=False, split_terms=kind.split_terms,
    )  # fmt: skip


def problem_of(x: ScanOperands, kind: ScanKind) -> Problem:
    """Derive the problem from the operands."""
    s = Sizes.of(x, CHUNK)
    return Problem(
        dtype=x.q.dtype, N=s.N, T=s.T, H=s.H, HV=s.HV, K=s.K, V=s.V, delta=kind.delta, erase_key=x.e is not None,
        decay=x.decay, packed=s.packed, split_terms=kind.split_terms,
        saves_16_bits=kind.saves_16_bits, pair=x.v_key is not None,
    )  # fmt: skip


def _device(x: ScanOperands | StepOperands) -> DeviceSpec:
    return plans.device_spec(device_of(x.q).index)
