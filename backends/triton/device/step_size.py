"""Step sizes of EFLA and Longhorn: the strength b of erase and write, from beta and n = |k|^2, and its derivatives.

With s = beta n:

    EFLA      b = (1 - exp(-s)) / n    db/dbeta = exp(-s)         m = -2 (1 - (1 + s) exp(-s)) / (1 - exp(-s))^2
    Longhorn  b = beta / (1 + s)       db/dbeta = 1 / (1 + s)^2   m = -2

m is 2 / b^2 db/dn. With u and x = (I + A)^-1 u of chunk/kernels/portable/gradients.py and x_i = b_i z_i, dL/db_i is
du_i . z_i, and the key of token i gains the gradient
2 dL/db db/dn k = m b (du . x) k. With dv = b du that is m (dv . x) k, without a division by b.
Source: EFLA 2512.12602, Longhorn 2407.14207.
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.device.layout import LOG2E


@triton.jit
def step_size(beta, n, EXACT: tl.constexpr):
    """Return b, db/dbeta and m for beta >= 0 and n = |k|^2. EXACT: of EFLA, else of Longhorn.

    For s < 1/4 b and m of EFLA are computed by their Taylor series, whose relative error there is below 1e-8; the
    quotients would cancel.
    """
    s = beta * n
    if EXACT:
        rest = tl.exp2(s * -LOG2E)
        small = tl.minimum(s, 0.25)
        factor = small * 0.0 + 1.0  # (1 - exp(-s)) / s
        slope = factor  # -2 times its derivative
        for j in tl.static_range(8):
            factor = 1.0 - small * factor / (9 - j)
            slope = 1.0 - small * slope * ((9 - j) / ((8 - j) * (10 - j)))
        large = tl.maximum(s, 0.25)
        erased = tl.where(s < 0.25, 1.0, 1.0 - rest)
        b = tl.where(s < 0.25, beta * factor, erased / tl.where(s < 0.25, 1.0, n))
        m = -2.0 * (erased - tl.minimum(large, 256.0) * rest) / (erased * erased)
        m = tl.where(s < 0.25, -slope / (factor * factor), m)
        db_dbeta = rest
    else:
        reciprocal = 1.0 / (1.0 + s)
        b = beta * reciprocal
        m = s * 0.0 - 2.0
        db_dbeta = reciprocal * reciprocal
    return b, db_dbeta, m


@triton.jit
def store_step_size(
    strengths, slopes, token, chunk, i, beta, n, mask, C: tl.constexpr, EXACT: tl.constexpr, DU_IS_DV: tl.constexpr
):  # fmt: skip
    """Return b [C] of a chunk; store it in strengths and its derivatives in slopes, unless these are None.

    strengths [B, T, HV]; slopes [slots, HV, 2, C]: the factor of (du . x) k in dk, where du is dv with DU_IS_DV; and
    db/dbeta. token: offsets in strengths. chunk: index slot * HV + hv.
    """
    b, db_dbeta, m = step_size(beta, n, EXACT)
    if slopes is not None:
        tl.store(strengths + token, b, mask=mask)
        tl.store(slopes + chunk * 2 * C + i, m if DU_IS_DV else m * b)
        tl.store(slopes + (chunk * 2 + 1) * C + i, db_dbeta)
    return b
