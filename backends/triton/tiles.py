"""Sizes of tiles, and the warps and registers that suit them."""

from typing import Any

import torch
from torch import Tensor


def power_of_two(n: int) -> int:
    """Return the smallest power of two >= n."""
    return 1 << max(n - 1, 0).bit_length()


def cdiv(n: int, divisor: int) -> int:
    """Divide and round up."""
    return -(-n // divisor)


def chunk_slots(B: Any, T: Any, chunk: int, cu_seqlens: Tensor | None) -> Any:
    """Return the number of chunks of all sequences, an upper bound if packed. Sizes may be symbolic."""
    return B * ((T + chunk - 1) // chunk) if cu_seqlens is None else T // chunk + cu_seqlens.shape[0] - 1


def value_tile(tile: int, V: int) -> int:
    """Clip a tile of value columns to the width; a matrix product needs at least 16."""
    return min(tile, max(16, power_of_two(V)))


def min_key_tile(dtype: torch.dtype) -> int:
    """Return the smallest key tile of the gradients kernel: 128 bytes of the saved states.

    ptxas 12.8 miscompiled address arithmetic of narrower tiles (docs/compiler-bugs.md).
    """
    return 128 // dtype.itemsize


def key_tiles(K: int) -> tuple[int, int]:
    """Split K into one or two power-of-two tiles: 64 -> (64, 0), 128 -> (128, 0), 192 -> (128, 64), 200 -> (128, 128).

    No tile is narrower than 64: ptxas 12.8 miscompiled products of 16 and 32 columns (docs/compiler-bugs.md).
    """
    narrowest, widest = 64, 128
    first = min(widest, max(narrowest, power_of_two(K)))
    rest = K - first
    return first, 0 if rest <= 0 else max(narrowest, power_of_two(rest))


def most_registers(warps: int) -> int:
    """Return the most registers per thread of a program of `warps` warps.

    Kernels with many live values ask for them: by default ptxas 12.8 and 12.9 used 32 or 40 registers for some, and
    spilled 13 to 92 KB per thread (docs/compiler-bugs.md).
    """
    return min(255, 2048 // warps)


def limit_warps(warps: int, elements: int) -> int:
    """Limit warps so that each thread owns at least 16 bytes of a float32 tile that is updated in place.

    With more warps several threads own the same element, and one could load it after another has stored it.
    """
    return max(1, min(warps, elements // 128))
