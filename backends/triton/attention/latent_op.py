"""Operator and launch of one token of multi-head latent attention. Triton is imported when a kernel first runs.

B batch, S slots, H heads, C latent width, R rotary width
"""

from typing import Any

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.custom_op import operator
from deltazoo.backends.torch_ext.devices import tf32_allowed
from deltazoo.backends.triton.operands import is_ready, ready
from deltazoo.backends.triton.problem import architecture, device_spec
from deltazoo.backends.triton.runtime.precompile import compiled_ahead, device_of
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import cdiv, power_of_two

MAX_LATENT, MAX_ROTARY = 512, 128
# `latent_attention_kernel` with 64 rows, 513 of 577 slots, 16 heads, C = 512 and R = 64 on an H200, us, with the heads
# as rows of the products: 19.9 with this launch, 21.0 with 8 warps, 25.5 with 8 warps and half the tile and one more
# stage, 23.8 with half the tile and two programs per SM. With `latent_attention_sm90_kernel` a layer takes 7 us less.
_ROWS, _WARPS = 16, 4  # heads of a program
_BUFFERS = 2  # tiles in shared memory
_RESERVED = 2048  # bytes of shared memory of a program beside its tiles
_TILE_BYTES = 65536  # of c of a tile of slots
_WGMMA_ROWS = 64  # least rows of a product of `latent_attention_sm90_kernel`: slots of a tile, or channels
_MAX_PARTS = 16  # for combine_parts_kernel, which loads all parts of a head at once
# Tiles that a program of `latent_attention_kernel` prefetches: those of 64 rows request 19 MB while the kernel before
# them runs. The kernel of sm_90 is 0.5 to 1.6 us faster without.
_PREFETCHED = 2


def _attend(q: Tensor, latent: Tensor, ends: Tensor, width: int, scale: float) -> Tensor:
    from deltazoo.backends.triton.attention.kernels.decode import combine_parts_kernel
    from deltazoo.backends.triton.runtime.launcher import launcher

    o = _fake(q, latent, ends, width, scale)
    with torch.cuda.device_of(q):
        partial, lse, traits = attend_parts(ready(q), ready(latent), ready(ends), width, scale, _MAX_PARTS)
        tensors = {"partial": partial, "lse": lse, "o": o}
        combine = launcher(combine_parts_kernel, tensors, {"traits": traits}, Options(4, overlap=traits.OVERLAP))
        combine(lse.shape[0] * lse.shape[1], {})
    return o


def attend_parts(
    q: Tensor, latent: Tensor, ends: Tensor, width: int, scale: float, most_parts: int
) -> tuple[Tensor, Tensor, Any]:
    """Attend to parts of the slots.

    Args: contiguous tensors, of the sizes of `latent_attention_kernel`; width: C; scale: factor on the scores.

    Returns: partial and lse, as of the kernel, and its traits.
    """
    from deltazoo.backends.triton.attention.kernels.latent import LatentTraits, latent_attention_kernel
    from deltazoo.backends.triton.attention.kernels.latent_sm90 import latent_attention_sm90_kernel
    from deltazoo.backends.triton.runtime.launcher import launcher

    (B, H, E), S = q.shape, latent.shape[1]
    device, groups = device_spec(device_of(q).index), cdiv(H, _ROWS)
    overlap, (BV, BR) = architecture(device) == "sm90", (max(16, power_of_two(x)) for x in (width, E - width))
    row_bytes, tile = (BV + BR) * q.dtype.itemsize, max(16, min(64, _TILE_BYTES // (BV * q.dtype.itemsize)))
    available = device.shared_memory - _RESERVED - _ROWS * row_bytes
    while tile > 16 and _BUFFERS * tile * row_bytes > available:
        tile //= 2
    # at most one program per SM: the results of the parts are as large as many slots
    most = min(most_parts, device.processors // (B * groups), cdiv(S, tile))
    traits = LatentTraits(
        H=H, V=width, R=E - width, BV=BV, BR=BR, ROWS=_ROWS, BN=tile,
        PARTS=1 << max(0, most.bit_length() - 1), SCALE=scale, PREC="tf32" if tf32_allowed() else "tf32x3",
        OVERLAP=overlap, PREFETCHED=_PREFETCHED,
    )  # fmt: skip
    partial, lse = (q.new_empty(B, H, traits.PARTS, *shape, dtype=torch.float32) for shape in ((width,), ()))
    tensors = {"q": q, "latent": latent, "ends": ends, "partial": partial, "lse": lse}
    fits_wgmma = width == BV >= _WGMMA_ROWS and E - width == BR >= _WGMMA_ROWS and tile == _WGMMA_ROWS
    copies = is_ready(q) and is_ready(latent) and q.dtype.itemsize == 2  # asynchronously, 16 bytes each
    kernel = latent_attention_sm90_kernel if overlap and fits_wgmma and copies else latent_attention_kernel
    # products of sm_90 read a tile from shared memory while later ones arrive: the compiler adds a buffer for them
    options = Options(_WARPS, _BUFFERS if overlap else _BUFFERS + 1, overlap=overlap)
    attend = launcher(kernel, tensors, {"traits": traits}, options)
    attend(B * groups * traits.PARTS, {"S": S})
    return partial, lse, traits


def _fake(q: Tensor, latent: Tensor, ends: Tensor, width: int, scale: float) -> Tensor:
    return q.new_empty(*q.shape[:2], width)


latent_attention = operator(
    "triton_latent_attention(Tensor q, Tensor latent, Tensor ends, int width, float scale) -> Tensor",
    _attend,
    compiled_ahead(_attend, _fake),
    any_layout=True,
)
