"""Properties of known GPUs, by the driver's name. Imports no torch, so that a shell can complete the names."""

from typing import Literal

# name -> platform, compute capability, streaming multiprocessors, bytes of shared memory of a block (the opt-in maximum
# of the table of capabilities in the CUDA programming guide)
KNOWN_GPUS: dict[str, tuple[Literal["cuda", "hip"], tuple[int, int], int, int]] = {
    "NVIDIA H200": ("cuda", (9, 0), 132, 227 * 1024),
    "NVIDIA H100 80GB HBM3": ("cuda", (9, 0), 132, 227 * 1024),
    "NVIDIA A100-SXM4-80GB": ("cuda", (8, 0), 108, 163 * 1024),
    "NVIDIA GeForce RTX 4090": ("cuda", (8, 9), 128, 99 * 1024),
    "NVIDIA B200": ("cuda", (10, 0), 148, 227 * 1024),
    "NVIDIA GeForce RTX 5090": ("cuda", (12, 0), 170, 99 * 1024),
    "AMD Instinct MI300X": ("hip", (9, 4), 304, 64 * 1024),  # gfx942
}
