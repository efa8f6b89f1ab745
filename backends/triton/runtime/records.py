"""Measured launches: one choice for each class of problems, and of launches of the kernels outside the update.

H key heads, HV value heads, K key width, V value width
"""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from deltazoo.backends.triton.chunk.registry import KERNELS, STEPS
from deltazoo.backends.triton.config import Launch, LaunchConfig
from deltazoo.backends.triton.problem import Decay, Problem
from deltazoo.backends.triton.tiles import cdiv

# The tuner measures these in order: chunks per segment, then the launches of the registry's phases. The reverse scan
# decides whether the two kernels after it are launched.
TUNED = ("segment_chunks", *dict.fromkeys(("prepare", "scan", "reverse", *KERNELS)))

_MAX_PROGRAMS, _MAX_CHUNKS = 256, 1024  # a device is full beyond these


class Key(BaseModel):
    """The class of problems that a record holds for.

    Args:
        groups: value heads per key head.
        segments: the segments of a sequence are computed in parallel.
        programs: programs that can run at once, tiles aside, rounded down to a power of two, at most 256.
        chunks: chunks of a sequence, rounded likewise, at most 1024; 0 except for kernel="segment_chunks".
        The other fields are those of `Problem`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kernel: str
    dtype: Literal["float32", "bfloat16", "float16"]
    K: int = Field(ge=1)
    V: int = Field(ge=1)
    groups: int = Field(ge=1)
    delta: bool
    erase_key: bool
    decay: Decay
    packed: bool
    split_terms: bool
    segments: bool
    dplr: bool = False
    programs: int = Field(ge=1)
    chunks: int = Field(ge=0)

    @field_validator("kernel")
    @classmethod
    def _is_tuned(cls, kernel: str) -> str:
        if kernel not in TUNED:
            raise ValueError(f"kernel must be one of {', '.join(TUNED)}, got {kernel!r}")
        return kernel

    @property
    def code(self) -> "Key":
        """The key without the fields that do not change the compiled kernel: one numeric check covers them all."""
        return self.model_copy(update={"programs": 0, "chunks": 0})

    def __str__(self) -> str:
        traits = ["delta" if self.delta else "additive", f"decay={self.decay}"]
        traits += [name for name in ("erase_key", "packed", "split_terms", "segments", "dplr") if getattr(self, name)]
        sizes = f"K={self.K} V={self.V} groups={self.groups} programs={self.programs}"
        return f"{self.dtype} {' '.join(traits)} {sizes}" + (f" chunks={self.chunks}" if self.chunks else "")


def key_of(kernel: str, problem: Problem, segment_chunks: int) -> Key:
    """Classify a problem for one kernel. segment_chunks: chunks per segment; 0: no segments."""
    chunks = max(1, cdiv(problem.T, 64) // (max(1, problem.N) if problem.packed else 1))
    rows = problem.N * problem.HV
    programs = {
        "prepare": problem.N * problem.H * chunks,
        "gradients": problem.N * problem.H * chunks,
        "recompute": rows * cdiv(chunks, LaunchConfig().checkpoint_chunks),
        "scan": rows * (cdiv(chunks, segment_chunks) if segment_chunks else 1),
        "reverse": rows * (cdiv(chunks, segment_chunks) if segment_chunks else 1),
    }.get(kernel, rows)
    return Key(
        kernel=kernel, dtype=str(problem.dtype).removeprefix("torch."), K=problem.K, V=problem.V,
        groups=problem.HV // problem.H, delta=problem.delta, erase_key=problem.erase_key, decay=problem.decay,
        packed=problem.packed, split_terms=problem.split_terms,
        segments=bool(segment_chunks) and kernel not in ("segment_chunks", *STEPS), dplr=problem.dplr,
        programs=_rounded(programs, _MAX_PROGRAMS),
        chunks=_rounded(chunks, _MAX_CHUNKS) if kernel == "segment_chunks" else 0,
    )  # fmt: skip


class Record(BaseModel):
    """One measured choice.

    Args:
        key: the problems it holds for.
        triton, revision: the Triton version and the kernel revision it was measured with; `holds_for` says for which
            versions it holds.
        launch, segment_chunks: the choice: a launch, or for kernel="segment_chunks" the chunks per segment.
        shape: the measured shape. ms: its median time with the choice. heuristic_ms: its median time with the
            heuristic's choice, other kernels equal; None if that does not run or fails the check.
        tried: number of candidates. rejected: those that failed to run or failed the numeric check.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: Key
    triton: str
    revision: int
    launch: Launch | None = None
    segment_chunks: int | None = Field(default=None, ge=0)
    shape: str
    ms: float = Field(gt=0, allow_inf_nan=False)
    heuristic_ms: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    tried: int = Field(ge=1)
    rejected: int = Field(ge=0)

    @model_validator(mode="after")
    def _has_one_choice(self) -> Self:
        kernel = self.key.kernel
        of_segments = kernel == "segment_chunks"
        if (self.segment_chunks is not None) != of_segments or (self.launch is None) != of_segments:
            raise ValueError(f"kernel={kernel!r} needs {kernel if of_segments else 'launch'} alone")
        if self.segment_chunks is not None:
            LaunchConfig(segment_chunks=self.segment_chunks)
        if self.launch is not None:
            if self.launch.kernel == "fused" and self.key.segments:
                raise ValueError("launch.kernel must not be 'fused' with segments")
            LaunchConfig(**{kernel: self.launch})
        return self

    @property
    def gain(self) -> float | None:
        """The heuristic's time over this one; None if the heuristic's choice does not run or fails the check."""
        return None if self.heuristic_ms is None else self.heuristic_ms / self.ms

    def cells(self) -> list[str]:
        """Return the record as a table row under `COLUMNS`."""
        gain = "" if self.gain is None else f"{self.gain:.2f}"
        choice = describe(self.launch if self.segment_chunks is None else self.segment_chunks)
        return [
            self.key.kernel, self.shape, str(self.key), choice, f"{self.ms:.3f}", gain, f"{self.tried}",
            f"{self.rejected}",
        ]  # fmt: skip


def describe(choice: Launch | int | None) -> str:
    """Print a launch, or chunks per segment, on one line."""
    if not isinstance(choice, Launch):
        return f"segment_chunks={choice}"
    return " ".join(f"{name}={value}" for name, value in choice if value and value != "portable")


COLUMNS = ("kernel", "shape", "class", "chosen", ">ms", ">gain", ">tried", ">rejected")


class OperatorKey(BaseModel):
    """A class of launches, of a kernel outside the update, to which a record applies.

    Args: dtypes: of the kernel's tensors. traits: its constants.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kernel: str
    dtypes: str
    traits: str

    def __str__(self) -> str:
        return f"{self.dtypes} {self.traits}"


class OperatorRecord(BaseModel):
    """One measured choice of warps and stages of a kernel outside the update.

    Args:
        key: the launches to which it applies.
        triton: the Triton version it was measured with. revision: of the kernel (revisions.py).
        warps, stages: the choice.
        ms, heuristic_ms: median times of the operator's call with the choice and with the launch's own numbers.
        tried, rejected: numbers of candidates, and of those that failed to run or changed the results.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: OperatorKey
    triton: str
    revision: int
    warps: int = Field(ge=1, le=32)
    stages: int = Field(ge=1, le=8)
    ms: float = Field(gt=0, allow_inf_nan=False)
    heuristic_ms: float = Field(gt=0, allow_inf_nan=False)
    tried: int = Field(ge=1)
    rejected: int = Field(ge=0)

    @property
    def gain(self) -> float:
        """The time with the launch's own numbers over this one."""
        return self.heuristic_ms / self.ms

    def cells(self) -> list[str]:
        """Return the record as a table row under `OPERATOR_COLUMNS`."""
        choice = f"warps={self.warps} stages={self.stages}"
        times = f"{self.ms:.3f}", f"{self.gain:.2f}"
        return [self.key.kernel, str(self.key), choice, *times, f"{self.tried}", f"{self.rejected}"]


OPERATOR_COLUMNS = ("kernel", "class", "chosen", ">ms", ">gain", ">tried", ">rejected")


def _rounded(n: int, largest: int) -> int:
    """Round down to a power of two."""
    return min(largest, 1 << (max(n, 1).bit_length() - 1))
