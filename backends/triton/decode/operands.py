"""The operands of decoded tokens, their problem, and the launch that a table or the heuristic chooses for it.

B batch, T tokens, H key heads, HV value heads, K key width, V value width
"""

from typing import NamedTuple

from torch import Tensor

from deltazoo.backends.torch_ext.devices import DeviceSpec
from deltazoo.backends.triton import problem as problems
from deltazoo.backends.triton.chunk.plan import KernelLaunch
from deltazoo.backends.triton.chunk.registry import CHUNK, KERNELS
from deltazoo.backends.triton.config import Launch, parse
from deltazoo.backends.triton.problem import Decay, Problem
from deltazoo.backends.triton.runtime import table
from deltazoo.backends.triton.support import Span


class StepOperands(NamedTuple):
    """The operands of decoded tokens, as the spec defines them; n micro-steps make an axis after T if n > 1.

    Args:
        q, k, e: [B, T, H, K], k and e with n; e is the erase key.
        v: [B, T, HV, V] with n.
        log_decay: [B, T, HV], [B, T, HV, K], [HV] or [HV, K].
        erase, write: strengths, each [B, T, HV], or [B, T, HV, K] and [B, T, HV, V], with n; without erase the scalar
            write is both.
        a, b: [B, T, HV, K], of dplr.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    erase: Tensor | None
    write: Tensor | None
    e: Tensor | None
    a: Tensor | None
    b: Tensor | None


class StepKind(NamedTuple):
    """The traits of decoded tokens.

    Args:
        steps: n, micro-steps of a token.
        delta: with an erase term. reparam: "none", "efla" or "longhorn".
        erase_from, read: as in `ScanKind`.
        split_terms: as in `ScanKind`; only for the launch table.
        erase_factor, write_factor: of the strengths.
        scale: of q.
        config: a LaunchConfig as JSON; "": that of the table, else of the heuristic.
    """

    steps: int
    delta: bool
    reparam: str
    erase_from: str
    read: str
    split_terms: bool
    erase_factor: float
    write_factor: float
    scale: float
    config: str = ""


class StepCall(NamedTuple):
    """The arguments of the decode operators; states [S, HV, K, V], slots [B] int64."""

    x: StepOperands
    states: Tensor
    slots: Tensor | None
    kind: StepKind


class CommitCall(NamedTuple):
    """The arguments of the commit operator: values [B, T, m, HV, V] float32, accepted [B] int32, else as `StepCall`."""

    x: StepOperands
    values: Tensor
    states: Tensor
    slots: Tensor | None
    accepted: Tensor
    kind: StepKind


def resolve_decode(x: StepOperands, kind: StepKind) -> Launch:
    """Look up the launch of a decode kernel; the other fields of a given config are not checked."""
    if kind.config:
        return parse(kind.config).decode
    return table.launch_config(decode_problem(x, kind), problems.device_spec_of(x.q)).decode


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
