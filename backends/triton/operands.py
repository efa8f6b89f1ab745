"""Operands and gradients of the operators, and the problem that they pose, as NamedTuples; does not import Triton.

B batch, T time, N sequences, H key heads, HV value heads, K key width, V value width, C chunk
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self, TypeVar, get_args, get_type_hints

from torch import Tensor

from deltazoo.backends.torch_ext.devices import DeviceSpec
from deltazoo.backends.triton import problem as problems
from deltazoo.backends.triton.chunk.registry import saves_16_bits
from deltazoo.backends.triton.problem import Decay, Problem
from deltazoo.backends.triton.runtime.precompile import device_of

T_ = TypeVar("T_", bound=tuple[Any, ...])
_DECAY_OF_DIM: dict[int, Decay] = {1: "fixed", 3: "head", 4: "channel"}


class ScanOperands(NamedTuple):
    """The tensors of an update. None: no such operand; with an erase term b and w of None are 1, e of None is k.

    Args:
        q, k, e: [B, T, H, K]; e is the erase key, or with `ScanKind.erase_channels` its strengths.
        v_key: [B, T, HV, K], in DPLR the key that v is written with; k then writes what the erase key read, and H = HV.
        v: [B, T, HV, V].
        log_decay: [B, T, HV], [HV], or per channel [B, T, HV, K].
        b, w: [B, T, HV], strengths of erase and write.
        state: [N, HV, K, V].
        cu_seqlens: [N + 1] int32.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None = None
    b: Tensor | None = None
    w: Tensor | None = None
    e: Tensor | None = None
    v_key: Tensor | None = None
    state: Tensor | None = None
    cu_seqlens: Tensor | None = None

    @property
    def decay(self) -> Decay:
        """The kind of decay; the kernels' constant DECAY."""
        if self.log_decay is None:
            return "none"
        return _DECAY_OF_DIM[self.log_decay.dim()]


class ScanKind(NamedTuple):
    """The traits of an update.

    Args:
        delta: with an erase term.
        erase_from: the erase reads the state "decayed", or "previous": before the decay.
        read: q reads the state "after" or "before" the token's update.
        split_terms: values that feed back into the state are split into two terms (hi + lo).
        tied: w equals b and is passed as None.
        scale: of q.
        config: a LaunchConfig as JSON; "": that of the table, else of the heuristic.
        reparam: "efla" or "longhorn": b is beta, and the kernels compute the strength (device/step_size.py).
        erase_channels: e is the strength of the erase per channel; the erase key is e k.
    """

    delta: bool
    erase_from: str
    read: str
    split_terms: bool
    tied: bool
    scale: float
    config: str = ""
    reparam: str = "none"
    erase_channels: bool = False

    def with_write(self, x: ScanOperands) -> ScanOperands:
        """The operands with the w that the kernels read."""
        return x._replace(w=x.b) if self.tied else x


def problem_of(x: ScanOperands, kind: ScanKind, device: DeviceSpec | None = None) -> Problem:
    """Derive the problem. Sizes may be symbolic.

    Args: device: None is that of the operands.
    """
    B, T, H, K = x.q.shape
    HV, V = x.v.shape[2:]
    problem = Problem(
        dtype=x.q.dtype, N=B if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1, T=T, H=H, HV=HV, K=K, V=V,
        delta=kind.delta, erase_key=x.e is not None, decay=x.decay, packed=x.cu_seqlens is not None,
        split_terms=kind.split_terms, dplr=x.v_key is not None, erase=x.b is not None,
        write=x.w is not None or (kind.tied and x.b is not None), tied=kind.tied, state=x.state is not None,
        read=kind.read, erase_from=kind.erase_from, reparam=kind.reparam, erase_channels=kind.erase_channels,
    )  # fmt: skip
    if not kind.split_terms:
        return problem
    device = problems.device_spec(device_of(x.q).index) if device is None else device
    return problem._replace(saves_16_bits=saves_16_bits(problem, device))


def gradients_of(x: ScanOperands, kind: ScanKind) -> dict[str, bool]:
    """Whether each operand has a gradient, in the order of `Gradients`; as `Problem.gradients`, but runs on every eager
    call."""
    b = kind.delta and x.b is not None
    return problems.existing_gradients(
        x.log_decay is not None, b, x.w is not None and not kind.tied, x.e is not None, x.v_key is not None,
        x.state is not None,
    )  # fmt: skip


class Gradients(NamedTuple):
    """The gradients of the operands of the same names; None if there is no such operand or it has no effect."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    b: Tensor | None
    w: Tensor | None
    e: Tensor | None
    v_key: Tensor | None
    state: Tensor | None

    @classmethod
    def empty(cls, x: ScanOperands, kind: ScanKind) -> Self:
        """Allocate the gradients, in the operands' dtypes."""
        exists = gradients_of(x, kind)
        operands: Iterator[Any] = (getattr(x, name) if exists[name] else None for name in cls._fields)
        gradients: list[Any] = [None if operand is None else operand.new_empty(operand.shape) for operand in operands]
        return cls(*gradients)

    def present(self) -> list[Tensor]:
        """Return the gradients that are not None: an operator cannot return None."""
        return [x for x in self if x is not None]


class ScanCall(NamedTuple):
    """The arguments of the forward operator; save: store what the backward needs."""

    x: ScanOperands
    kind: ScanKind
    save: bool


class BackwardCall(NamedTuple):
    """The arguments of the backward operator; saved: what `Saved` describes."""

    x: ScanOperands
    saved: Tensor
    d_o: Tensor
    d_final: Tensor | None
    kind: ScanKind


class SummaryCall(NamedTuple):
    """The arguments of the operator that computes the segments (carried.py).

    carries: [N] int32, not 0 for the sequences whose contribution and map are wanted.
    """

    x: ScanOperands
    kind: ScanKind
    carries: Tensor


class CarriedCall(NamedTuple):
    """The arguments of the operator that computes outputs after the segments (carried.py).

    prepared: bytes, the results of prepare. ends: the segments' contributions and maps. pieces: those of the pieces of
    all ranks. before: the pieces before each sequence.
    """

    x: ScanOperands
    kind: ScanKind
    prepared: Tensor
    ends: Tensor
    pieces: Tensor
    before: Tensor


class SummaryBackwardCall(NamedTuple):
    """The arguments of the operator that computes the segments' gradients.

    prepared, ends: as in `CarriedCall`. carries: [N] int32, not 0 for the sequences whose gradient is wanted.
    """

    x: ScanOperands
    kind: ScanKind
    prepared: Tensor
    ends: Tensor
    carries: Tensor
    d_o: Tensor
    d_final: Tensor | None


class RecomputeCall(NamedTuple):
    """The arguments of the operator that recomputes states; prepared: as in `CarriedCall`; checkpoints: of S^T."""

    x: ScanOperands
    kind: ScanKind
    prepared: Tensor
    checkpoints: Tensor


class CarriedBackwardCall(NamedTuple):
    """The arguments of the backward operator; prepared, ends, pieces: as in `CarriedCall`.

    checkpoints: [slots, HV, V, K] of S^T. states, v_new: recomputed, or empty. d_ends: the segments' contributions to
    the gradients. d_pieces: those of the pieces of all ranks. after: the pieces after each sequence.
    """

    x: ScanOperands
    kind: ScanKind
    prepared: Tensor
    checkpoints: Tensor
    states: Tensor
    v_new: Tensor
    ends: Tensor
    d_ends: Tensor
    pieces: Tensor
    d_pieces: Tensor
    after: Tensor
    d_o: Tensor
    d_final: Tensor | None


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


def schema(call: type[tuple[Any, ...]], mutated: str = "") -> str:
    """Write the parameters of a flat operator: the fields of a NamedTuple, nested ones in their place."""
    names = {bool: "bool", int: "int", float: "float", str: "str"}
    parameters = []
    for name, hint in get_type_hints(call).items():
        if hasattr(hint, "_fields"):
            parameters.append(schema(hint))
        elif hint in names:
            parameters.append(f"{names[hint]} {name}")
        else:
            optional = "?" if type(None) in get_args(hint) else ""
            parameters.append(f"Tensor{'(a!)' if name == mutated else ''}{optional} {name}")
    return ", ".join(parameters)


def unflatten(call: type[T_], arguments: Sequence[Any]) -> T_:
    """Build a NamedTuple from flat arguments in the order of `schema`."""
    return _take(call, iter(arguments))


def flatten(call: tuple[Any, ...]) -> tuple[Any, ...]:
    """Undo `unflatten`."""
    flat: list[Any] = []
    for field in call:
        flat.extend(flatten(field)) if isinstance(field, tuple) else flat.append(field)
    return tuple(flat)


def _take(call: Any, arguments: Iterator[Any]) -> Any:
    nested = _NESTED.get(call)
    if nested is None:
        return call._make(itertools.islice(arguments, len(call._fields)))
    return call._make([next(arguments) if field is None else _take(field, arguments) for field in nested])


_CARRIED_CALLS = (SummaryCall, CarriedCall, SummaryBackwardCall, RecomputeCall, CarriedBackwardCall)
# the NamedTuple class of each field of a call, or None for one argument
_NESTED = {
    call: tuple(hint if hasattr(hint, "_fields") else None for hint in get_type_hints(call).values())
    for call in (ScanCall, BackwardCall, StepCall, CommitCall, *_CARRIED_CALLS)
}


def ready(x: Tensor) -> Tensor:
    """Make a tensor contiguous, starting at a multiple of 16 bytes, as the kernels' wide loads need."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def all_ready(arguments: Iterable[Any]) -> list[Any]:
    """Apply `ready` to the tensors among the arguments of an operator."""
    return [ready(x) if isinstance(x, Tensor) else x for x in arguments]


def with_token_stride(x: Tensor) -> tuple[Tensor, int]:
    """Return x and its stride from token to token of the whole batch; copied unless there is one that allows 16-byte
    loads."""
    B, T, C = x.shape
    stride = x.stride(1)
    is_regular = x.stride(2) == 1 and stride >= C and (B == 1 or x.stride(0) == T * stride)
    if is_regular and (x.data_ptr() | stride * x.element_size()) % 16 == 0:
        return x, stride
    return ready(x), C
