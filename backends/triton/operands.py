"""Operands, results and gradients of the chunked operators as NamedTuples, and the problem; does not import Triton.

B batch, T time, N sequences, H key heads, HV value heads, K key width, V value width, C chunk
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from string import ascii_lowercase
from typing import Any, NamedTuple, Self, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.devices import DeviceSpec
from deltazoo.backends.triton import problem as problems
from deltazoo.backends.triton.chunk.registry import saves_16_bits
from deltazoo.backends.triton.problem import Decay, Problem

T_ = TypeVar("T_", bound=tuple[Any, ...])
Layout = tuple[tuple[Any, ...], torch.dtype]  # the shape, with sizes that may be symbolic, and dtype of a tensor
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
        """Return the operands with the w that the kernels read."""
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
    device = problems.device_spec_of(x.q) if device is None else device
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


class Prepared(NamedTuple):
    """The results of prepare, each computed from a single chunk.

    Args:
        gates: [slots, HV, 3, C], cumulative log2 decay, scaled erase strength, write strength; for a decay per channel
            [slots, HV, K + C], the decay over the chunk and the write strength; DPLR has no
            write strength: the first element in its place is 1 for a chunk of strong decays, which the
            portable kernels compute.
        decay_bounds: [slots, HV], upper bound of the log2 decay over the chunk.
        wy_tiles: [slots, HV, terms, C, C + 8], T and P (kernels/portable/wy_tiles.py); empty without an erase term,
            unless the decay is per channel. DPLR: two tiles (kernels/portable/channel/dplr_prepare.py).
        scaled: [2, 3 or 4, B, T, HV, K], for a decay per channel the scaled operands
            (kernels/portable/channel/prepare.py); else empty.
        strengths: [B, T, HV], with `reparam` the strength of erase and write, for the backward; else empty.
        slopes: [slots, HV, 2, C], with `reparam` its derivatives (device/step_size.py), for the backward; else empty.
    """

    gates: Tensor
    decay_bounds: Tensor
    wy_tiles: Tensor
    scaled: Tensor
    strengths: Tensor
    slopes: Tensor

    @classmethod
    def empty(cls, like: Tensor, problem: Problem, C: int, save: bool) -> Self:
        """Allocate the results on the device of a tensor. save: the backward reads them, too."""
        return cls(*(like.new_empty(shape, dtype=dtype) for shape, dtype in cls.layout(problem, C, save)))

    @staticmethod
    def layout(p: Problem, C: int, save: bool) -> list[Layout]:
        """Return the shapes and dtypes of the results."""
        slots = p.slots(C)
        half = p.saves_16_bits or (save and p.terms == 1 and p.dtype == torch.bfloat16)
        derivatives = save and p.reparam != "none"
        tiles = (slots if p.delta or p.by_channel else 0, p.HV, p.terms + p.dplr, C, C + 8)
        scaled = (2 + p.delta + p.dplr, p.rows, p.T, p.HV, p.K)
        return [
            ((slots, p.HV, p.K + C) if p.by_channel else (slots, p.HV, 3, C), torch.float32),
            ((slots, p.HV), torch.float32),
            (tiles, torch.float16 if half else p.dtype),
            (scaled if p.by_channel else (0,), p.dtype),
            ((p.rows, p.T, p.HV) if derivatives else (0,), torch.float32),
            ((slots, p.HV, 2, C) if derivatives else (0,), torch.float32),
        ]

    def derivatives(self) -> tuple[Tensor | None, Tensor | None]:
        """Return strengths and slopes; None if empty."""
        return (self.strengths, self.slopes) if self.slopes.dim() > 1 else (None, None)


class Saved(NamedTuple):
    """What the forward stores for the backward: the fields of `Prepared`, and checkpoints [slots, HV, V, K] of S^T.

    They are views of one tensor of bytes, because in eager calls each tensor that is returned, saved and passed to the
    backward costs host time.
    """

    prepared: Prepared
    checkpoints: Tensor

    @classmethod
    def of(cls, saved: Tensor, problem: Problem, C: int, distance: int) -> Self:
        """Return the views of a tensor that `empty` allocated. distance: chunks between two checkpoints."""
        *prepared, checkpoints = views(saved, cls._layout(problem, C, distance))
        return cls(Prepared(*prepared), checkpoints)

    @classmethod
    def empty(cls, like: Tensor, problem: Problem, C: int, distance: int) -> Tensor:
        """Allocate one tensor of bytes for all of them, on the device of a tensor."""
        return allocate(like, cls._layout(problem, C, distance))

    @staticmethod
    def _layout(p: Problem, C: int, distance: int) -> list[Layout]:
        checkpoints = (p.checkpoint_slots(C, distance), p.HV, p.V, p.K)
        return [*Prepared.layout(p, C, True), (checkpoints, p.saved_dtype)]


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


def schema(call: type[tuple[Any, ...]], *mutated: str) -> str:
    """Write the parameters of a flat operator: the fields of a NamedTuple, nested ones in their place.

    Args: mutated: the names of tensors that the operator changes in place.
    """
    names = {bool: "bool", int: "int", float: "float", str: "str"}
    parameters, hints = [], get_type_hints(call)
    nested = tuple(hint if hasattr(hint, "_fields") else None for hint in hints.values())
    # An attribute of the class, because torch.compile cannot trace `get_type_hints`, and would compile again when a
    # dict of all calls grows.
    call.nested = nested if any(nested) else None  # type: ignore[attr-defined]
    for name, hint in hints.items():
        if hasattr(hint, "_fields"):
            parameters.append(schema(hint))
        elif hint in names:
            parameters.append(f"{names[hint]} {name}")
        else:
            optional = "?" if type(None) in get_args(hint) else ""
            alias = f"({ascii_lowercase[mutated.index(name)]}!)" if name in mutated else ""
            parameters.append(f"Tensor{alias}{optional} {name}")
    return ", ".join(parameters)


def unflatten(call: type[T_], arguments: Sequence[Any]) -> T_:
    """Build a NamedTuple, whose `schema` has been written, from flat arguments in its order."""
    return _take(call, iter(arguments))


def flatten(call: tuple[Any, ...]) -> tuple[Any, ...]:
    """Undo `unflatten`."""
    flat: list[Any] = []
    for field in call:
        flat.extend(flatten(field)) if isinstance(field, tuple) else flat.append(field)
    return tuple(flat)


def _take(call: Any, arguments: Iterator[Any]) -> Any:
    nested = call.nested
    if nested is None:
        return call._make(itertools.islice(arguments, len(call._fields)))
    return call._make([next(arguments) if field is None else _take(field, arguments) for field in nested])


def allocate(like: Tensor, layout: list[Layout]) -> Tensor:
    """Allocate one tensor of bytes for several tensors, on the device of a tensor."""
    return like.new_empty(
        sum(_aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in layout), dtype=torch.uint8
    )


def views(buffer: Tensor, layout: list[Layout]) -> list[Tensor]:
    """Return the tensors in a buffer that `allocate` returned."""
    result, start = [], 0
    for shape, dtype in layout:
        size = math.prod(shape) * dtype.itemsize
        result.append(buffer[start : start + size].view(dtype).view(shape))
        start += _aligned(size)
    return result


def _aligned(size: Any) -> Any:
    """Round bytes up to a multiple of 512, as the caching allocator of torch does."""
    return (size + 511) // 512 * 512


def ready(x: Tensor) -> Tensor:
    """Make a tensor contiguous, starting at a multiple of 16 bytes, as the kernels' wide loads need."""
    return x if is_ready(x) else x.clone(memory_format=torch.contiguous_format)


def is_ready(x: Tensor) -> bool:
    """Whether `ready` returns the tensor itself."""
    return x.is_contiguous() and x.data_ptr() % 16 == 0


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
