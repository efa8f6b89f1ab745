"""Look up the plan of a call, and the launch of a decode step."""

from deltazoo.backends.torch_ext.devices import DeviceSpec
from deltazoo.backends.triton import problem as problems
from deltazoo.backends.triton.chunk.plan import KernelLaunch, Plan
from deltazoo.backends.triton.chunk.registry import CHUNK, KERNELS
from deltazoo.backends.triton.config import Launch, parse
from deltazoo.backends.triton.operands import ScanKind, ScanOperands, StepKind, StepOperands, problem_of
from deltazoo.backends.triton.problem import Decay, Problem
from deltazoo.backends.triton.runtime import table
from deltazoo.backends.triton.runtime.precompile import device_of
from deltazoo.backends.triton.support import Span


def resolve(x: ScanOperands, kind: ScanKind, grad: bool) -> Plan:
    """Look up the plan. Raises: ConfigError for a kernel that does not take the problem."""
    device = _device(x)
    return table.look_up(kind.config, problem_of(x, kind, device), device, grad)


def resolve_decode(x: StepOperands, kind: StepKind) -> Launch:
    """Look up the launch of a decode kernel; the other fields of a given config are not checked."""
    if kind.config:
        return parse(kind.config).decode
    return table.launch_config(decode_problem(x, kind), _device(x)).decode


def decode_plan(problem: Problem, config: str, device: DeviceSpec) -> KernelLaunch:
    """Return the launch of a decode step. Raises: ConfigError for an invalid table."""
    launch = parse(config).decode if config else table.launch_config(problem, device).decode
    (kernel,) = KERNELS["decode"]
    tiles = kernel.tiles(problem, launch)
    options = kernel.options(problem, launch, CHUNK)
    return KernelLaunch("decode", kernel, kernel.programs(problem, Span(), tiles), Span(), tiles, options)


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


def _device(x: ScanOperands | StepOperands) -> DeviceSpec:
    return problems.device_spec(device_of(x.q).index)
