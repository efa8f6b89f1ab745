"""Launch parameters and launches of the attention kernels; imports Triton at the first launch.

B batch, T time, S slots of a cache, H query heads, G key-value heads, E head width, N sequences, R rows of the keys
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.devices import tf32_allowed
from deltazoo.backends.triton.operands import with_token_stride
from deltazoo.backends.triton.problem import device_spec, overlaps
from deltazoo.backends.triton.runtime.precompile import device_of
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import cdiv, power_of_two

Phase = Literal["forward", "queries", "keys", "pages"]

SUM_ROWS = 1024  # tokens that a program of the sums adds at once
_MIN_TILE = 16
_PROGRAMS_PER_PROCESSOR = 4  # of a decode step; twice as many if heads are narrow
_NARROW = 128  # bytes of a row
_MAX_PARTS = 32
# Programs of few parts are long, and leave SMs idle at the end. Captured steps of gated-deltanet-h1-1.3b, H200, us,
# with 1 and 2 parts: 32 rows 1882 and 1842, 64 rows 2708 and 2680; with 2 and 4: 16 rows 1419 and 1394.
_FEW_PARTS = 2
_PROGRAMS_BY_ROWS, _BYTES_BY_ROWS = 8, 8192


class AttentionLaunch(NamedTuple):
    """Tile of a program, queries x keys, and its options."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None


# phase: by the head width up to 64, 128 and 256, in 16 bits
_TUNED = {
    "forward": (AttentionLaunch(64, 64, 4, 2, 128), AttentionLaunch(64, 64, 4, 2), AttentionLaunch(128, 64, 8, 2)),
    "queries": (AttentionLaunch(64, 64, 4, 2, 168), AttentionLaunch(64, 64, 4, 2), AttentionLaunch(128, 32, 8, 2)),
    "keys": (AttentionLaunch(64, 64, 4, 2), AttentionLaunch(32, 64, 4, 3), AttentionLaunch(32, 32, 4, 2)),
    "pages": (AttentionLaunch(64, 64, 4, 3), AttentionLaunch(64, 64, 4, 3), AttentionLaunch(128, 64, 8, 2)),
}
_FLOAT32 = AttentionLaunch(32, 32, 4, 2)


@functools.cache
def launch_of(phase: Phase, E: int, dtype: torch.dtype, shared_memory: int) -> AttentionLaunch:
    """Return the launch of a phase: the tuned one, with fewer stages and smaller tiles where that does not fit."""
    launch = _FLOAT32 if dtype == torch.float32 else _TUNED[phase][0 if E <= 64 else 1 if E <= 128 else 2]
    while _shared_memory(phase, launch, E, dtype) > shared_memory:
        if launch.stages > 2:
            launch = launch._replace(stages=launch.stages - 1)
        elif launch.keys > launch.queries:
            launch = launch._replace(keys=launch.keys // 2)
        elif launch.queries > _MIN_TILE:
            launch = launch._replace(queries=launch.queries // 2)
        else:
            break
    rows = launch.keys if phase == "keys" else launch.queries  # of its products; 16 per warp
    return launch._replace(warps=max(4, min(launch.warps, rows // 16)))


def _shared_memory(phase: Phase, launch: AttentionLaunch, E: int, dtype: torch.dtype) -> int:
    """Return an upper bound of the shared memory of a program in bytes: tiles that stay, and two per stage."""
    queries, keys = launch.queries, launch.keys
    tiles = {"queries": (2 * queries, keys), "keys": (2 * keys, queries)}
    staying, moving = tiles.get(phase, (queries, keys))
    row = max(16, power_of_two(E)) * dtype.itemsize + 16  # with the numbers per token, in float32
    return (staying + 2 * launch.stages * moving) * row


class Operands(NamedTuple):
    """q, k, v [.., T, heads x width] with a stride from token to token, the bounds of packed sequences, and H, G, E."""

    q: Tensor
    k: Tensor
    v: Tensor
    strides: tuple[int, int, int]
    cu: Tensor | None
    heads: tuple[int, int, int]

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, cu: Tensor | None) -> "Operands":
        """Copy operands whose tokens have no constant stride.

        Args: q: [B, T, H, E]; k: [B, T, G, E or more]; v: [B, T, G, E].
        """
        heads = (q.shape[2], k.shape[2], q.shape[3])
        (q, q_stride), (k, k_stride), (v, v_stride) = (with_token_stride(x.flatten(2)) for x in (q, k, v))
        return cls(q, k, v, (q_stride, k_stride, v_stride), cu, heads)

    @property
    def sequences(self) -> int:
        """N."""
        return self.q.shape[0] if self.cu is None else self.cu.shape[0] - 1

    def slots(self, tile: int) -> int:
        """Return the number of tiles of `tile` queries or keys of all sequences."""
        return slots_of(tile, self.q.shape[1], self.sequences, self.cu is not None)

    def unit(self) -> int:
        """Return a number by which all strides are divisible."""
        return math.gcd(8, self.heads[2], self.k.shape[2] // self.heads[1], *self.strides)


def sum_block(dtype: torch.dtype) -> int:
    """Return the keys of a block to whose end stored sums are relative; no tile of forward and queries has more."""
    return 32 if dtype == torch.float32 else 64


def slots_of(tile: int, T: int, N: int, packed: bool) -> int:
    """Return the number of tiles of all sequences, an upper bound for a pack."""
    return T // tile + N if packed else N * cdiv(T, tile)


def launch(phase: Phase, kernel: Any, x: Operands, tensors: Mapping[str, Tensor | None], scale: float) -> None:
    """Launch a kernel of a phase. Args: tensors: by its parameters, beside the operands."""
    config = _launch_of(phase, x)
    tile, heads = (config.keys, x.heads[1]) if phase == "keys" else (config.queries, x.heads[0])
    slots = x.slots(tile)
    _run(kernel, x, tensors, config, scale, slots)(heads * slots)


def launch_norms(kernel: Any, x: Operands, norms: Tensor) -> None:
    """Launch the kernel that computes the norms of the keys."""
    slots = x.slots(sum_block(x.q.dtype))
    config = _launch_of("forward", x)._replace(warps=4, stages=1, registers=None)
    _run(kernel, x, {"norms": norms}, config, 1.0, slots)(x.heads[1] * slots)


def query_slots(x: Operands) -> int:
    """Return the number of tiles of the gradients of the queries."""
    return x.slots(_launch_of("queries", x).queries)


def launch_sums(kernel: Any, x: Operands, tensors: dict[str, Tensor]) -> None:
    """Launch a kernel that sums the gates or their gradients over each sequence."""
    from deltazoo.backends.triton.runtime.launcher import launcher

    (B, T), H = x.q.shape[:2], x.heads[0]
    traits = {"H": H, "ROWS": SUM_ROWS, "SUM_BLOCK": sum_block(x.q.dtype), "PACKED": x.cu is not None}
    launcher(kernel, tensors | {"cu": x.cu}, traits, Options(4))(x.sequences * H, {"T": T, "R": B * T})


def parts_of(
    heads: int, slots: int, row_bytes: int, processors: int, page: int = 0, by_rows: bool = False
) -> tuple[int, int]:
    """Return the keys of a tile of a decode step, and the parts of the keys of a head.

    Args: heads: key heads of all sequences. row_bytes: of the tile of a head's channels. page: largest
        tile in slots; 0: no limit. by_rows: whether programs work without tensor cores.
    """
    if by_rows:
        tile = max(16, min(64, page or 64, _BYTES_BY_ROWS // row_bytes))
        parts = min(_MAX_PARTS, cdiv(_PROGRAMS_BY_ROWS * processors, heads), cdiv(slots, 2 * tile))
        return tile, power_of_two(max(1, parts))
    tile = max(16, min(64, page or 64, 16384 // row_bytes))
    programs = _PROGRAMS_PER_PROCESSOR * (2 if row_bytes <= _NARROW else 1) * processors
    parts = cdiv(programs, heads)
    parts *= 2 if parts <= _FEW_PARTS else 1
    return tile, power_of_two(max(1, min(_MAX_PARTS, parts, cdiv(slots, 2 * tile))))


def decode(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, o: Tensor, scale: float) -> None:
    """Attend with one query per sequence. Args: contiguous q [B, H, E], k [B, S, G, E], v [B, S, G, V], o [B, H, V]."""
    from deltazoo.backends.triton.attention.kernels.decode import (
        DecodeTraits,
        combine_parts_kernel,
        decode_attention_kernel,
    )
    from deltazoo.backends.triton.runtime.launcher import launcher

    (B, H, E), (S, G, V) = q.shape, v.shape[1:]
    BE, BV = (max(16, power_of_two(width)) for width in (E, V))
    overlap = overlaps(q)
    tile, parts = parts_of(B * G, S, max(BE, BV) * q.dtype.itemsize, device_spec(device_of(q).index).processors)
    rows = max(16, power_of_two(H // G))
    precision = "tf32" if tf32_allowed() else "tf32x3"
    traits = {"traits": DecodeTraits(H, G, E, V, BE, BV, rows, tile, parts, scale, precision, overlap)}
    partial, lse = (q.new_empty(B, H, parts, *shape, dtype=torch.float32) for shape in ((V,), ()))
    tensors = {"q": q, "k": k, "v": v, "ends": ends, "partial": partial, "lse": lse, "o": o}
    launcher(decode_attention_kernel, tensors, traits, Options(4, 3, overlap=overlap))(B * G * parts, {"S": S})
    launcher(combine_parts_kernel, tensors, traits, Options(1, overlap=overlap))(B * H, {})


def _launch_of(phase: Phase, x: Operands) -> AttentionLaunch:
    return launch_of(phase, x.heads[2], x.q.dtype, device_spec(device_of(x.q).index).shared_memory)


def _run(
    kernel: Any, x: Operands, tensors: Mapping[str, Tensor | None], config: AttentionLaunch, scale: float, slots: int
) -> Callable[[int], None]:
    """Prepare a launch; the result takes the number of programs. Args: slots: of the tiles of the programs."""
    from deltazoo.backends.triton.attention.kernels.tiles import AttentionTraits
    from deltazoo.backends.triton.runtime.launcher import launcher

    H, G, E = x.heads
    unit = x.unit()
    traits = AttentionTraits(
        H=H, G=G, E=E, KEY=x.k.shape[2] // G, BLOCK=max(16, power_of_two(E)), BM=config.queries, BN=config.keys,
        SUM_BLOCK=sum_block(x.q.dtype), ROW_BLOCK=_launch_of("keys", x).queries,
        QUERY_TILE=_launch_of("queries", x).queries, SCALE=scale, UNIT=unit, PACKED=x.cu is not None,
        PREC="tf32" if tf32_allowed() else "tf32x3",
    )  # fmt: skip
    tensors = {"q": x.q, "k": x.k, "v": x.v, "cu": x.cu, **tensors}
    run = launcher(kernel, tensors, {"traits": traits}, Options(config.warps, config.stages, config.registers))
    q_stride, k_stride, v_stride = (stride // unit for stride in x.strides)
    numbers = {
        "T": x.q.shape[1], "S": x.k.shape[1], "N": x.sequences, "R": x.k.shape[0] * x.k.shape[1], "slots": slots,
        "sum_slots": x.slots(sum_block(x.q.dtype)), "query_slots": query_slots(x), "q_stride": q_stride,
        "k_stride": k_stride, "v_stride": v_stride,
    }  # fmt: skip
    return lambda programs: run(programs, numbers)
