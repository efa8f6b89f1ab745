"""What tokens read, in scan_hopper.py, of the state before their chunk and of one another, in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from deltazoo.backends.triton.kernels.hopper import COLUMNS, ROWS, barrier, narrow


@gluon.jit
def put_reads(
    P_s, P, G_s, before_s, scale,
    DECAY: gl.constexpr, EARLY: gl.constexpr, READ_EARLY: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """P^T of the products k q^T, for both groups alike, to the tile that each has for itself."""
    i = gl.arange(0, 64, COLUMNS)[None, :]
    j = gl.arange(0, 64, ROWS)[:, None]
    if DECAY != "none":
        # where a token is not seen this may be no number
        G_i = before_s.load(COLUMNS) if EARLY else G_s.load(COLUMNS)
        P *= gl.exp2(G_i[None, :] - G_s.load(ROWS)[:, None])
    P_s.index(0).store(narrow(gl.where(j + (1 if READ_EARLY else 0) <= i, P * scale, 0.0), dtype))
    fence_async_shared()
    barrier()


@gluon.jit
def faded_reads(out, G, before_s, stage, scale, DECAY: gl.constexpr, EARLY: gl.constexpr):
    """scale e^G'' of each token, of what it reads of S0."""
    if DECAY != "none":
        G_read = before_s.index(stage).load(COLUMNS) if EARLY else G
        out *= (gl.exp2(G_read) * scale)[None, :]
    else:
        out *= scale
    return out
