"""Named shapes: small ones for tests, realistic ones for benchmarks and the tuner.

B batch, T time, H key heads, HV value heads, K key width, V value width
"""

from typing import NamedTuple, Self


class Shape(NamedTuple):
    """The sizes of one update.

    lengths: lengths of the packed sequences, whose sum is T; then B = 1. () means one sequence per row.
    """

    name: str
    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    lengths: tuple[int, ...] = ()

    @property
    def sequences(self) -> int:
        """The number of sequences, and so of initial and final states."""
        return len(self.lengths) if self.lengths else self.B

    def packed(self) -> Self:
        """Return this shape with one row split into four packed sequences of uneven lengths, one of them empty."""
        third = self.T // 3
        return self._replace(
            name=f"{self.name}_packed", B=1, lengths=(third, 0, self.T - third - min(1, self.T), min(1, self.T))
        )


def _pack(name: str, sequences: int, length: int, H: int, HV: int, width: int) -> Shape:
    return Shape(name, 1, sequences * length, H, HV, width, width, (length,) * sequences)


# For correctness: sizes that are not powers of two, T next to a multiple of the chunk, widths of 1, grouped heads.
TINY = (
    Shape("plain", B=2, T=7, H=2, HV=2, K=4, V=4),
    Shape("grouped", B=2, T=37, H=2, HV=4, K=12, V=20),
    Shape("one_token", B=3, T=1, H=1, HV=2, K=8, V=5),
    Shape("chunk_plus_one", B=1, T=65, H=1, HV=2, K=16, V=8),
    Shape("chunks", B=1, T=150, H=1, HV=1, K=8, V=8),
    Shape("column", B=2, T=33, H=1, HV=3, K=6, V=1),
    Shape("row", B=2, T=33, H=4, HV=4, K=1, V=2),
    Shape("scalar", B=1, T=70, H=1, HV=4, K=1, V=1),
    Shape("pack", B=1, T=83, H=2, HV=4, K=5, V=9, lengths=(17, 0, 1, 65)),
)

CPU = (
    Shape("cpu", B=1, T=2048, H=8, HV=8, K=64, V=64),
    Shape("cpu_long", B=1, T=32768, H=8, HV=8, K=64, V=64),
)

GPU = (
    _pack("pack_8x4096", 8, 4096, 16, 16, 128),
    _pack("pack_4x8192", 4, 8192, 16, 64, 128),
    Shape("dense_8x4096", B=8, T=4096, H=16, HV=16, K=128, V=128),
    Shape("dense_1x8192", B=1, T=8192, H=16, HV=32, K=128, V=128),
    Shape("dense_1x32768", B=1, T=32768, H=2, HV=8, K=128, V=128),
    Shape("dense_1x2048", B=1, T=2048, H=16, HV=32, K=128, V=128),
)

DECODE = tuple(Shape(f"decode_{B}", B=B, T=1, H=32, HV=32, K=128, V=128) for B in (1, 64, 256))

# The six shapes in the benchmarks of flash-linear-attention.
FLA = tuple(
    Shape(f"fla_{B}x{T}x{H}x{D}", B=B, T=T, H=H, HV=H, K=D, V=D)
    for B, T, H, D in (
        (1, 8192, 96, 128),
        (2, 16384, 16, 128),
        (4, 2048, 16, 128),
        (4, 4096, 64, 128),
        (8, 2048, 32, 256),
        (8, 1024, 8, 64),
    )
)

SHAPES: dict[str, Shape] = {shape.name: shape for shape in (*TINY, *CPU, *GPU, *DECODE, *FLA)}
