"""Launch the decode kernel: one token per row, states updated in place.

B batch, n micro-steps, H key heads, HV value heads, K key width, V value width
"""

from torch import Tensor

from deltazoo.backends.triton.config import Launch, cdiv, limit_warps, power_of_two
from deltazoo.backends.triton.kernels.decode.step import decode_kernel
from deltazoo.backends.triton.launcher import launcher
from deltazoo.backends.triton.operands import ScanKind, ScanOperands


def step_(x: ScanOperands, states: Tensor, slots: Tensor | None, kind: ScanKind, launch: Launch) -> Tensor:
    """Decode one token per row. Returns o [B, HV, V].

    Args: x: q [B, H, K]; k, e [B, n, H, K]; v [B, n, HV, V]; log_decay [B, HV], [B, HV, K] or [HV]; b, w [B, n, HV].
    """
    B, n, H, K = x.k.shape
    HV, V = x.v.shape[2:]
    BV = min(launch.tile, power_of_two(V))
    decay = "none" if x.log_decay is None else ("fixed", "head", "channel")[x.log_decay.dim() - 1]
    o = x.v.new_empty(B, HV, V)
    decode = launcher(
        decode_kernel,
        (x.q, x.k, x.e, x.v, x.log_decay, x.b, x.w, states, slots, o),
        (
            H, HV, K, V, power_of_two(K), BV, n, decay, kind.delta, x.e is not None, x.b is not None,
            x.w is not None, kind.erase_early, kind.read_early, slots is not None, kind.reparam,
        ),
        limit_warps(launch.warps, power_of_two(K) * BV),
        launch.stages,
    )  # fmt: skip
    decode(B * HV * cdiv(V, BV), kind.scale, states.shape[0])
    return o
