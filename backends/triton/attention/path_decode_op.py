"""Operator and launch of a decode step of PaTH attention. Triton is imported when a kernel first runs.

B batch, S slots, H query heads, G key-value heads, D key width, V value width
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.custom_op import mark_written, operator
from deltazoo.backends.triton.problem import device_spec
from deltazoo.backends.triton.runtime.precompile import compiled_ahead, device_of
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import cdiv, power_of_two

_PROGRAMS_PER_SM = 4
_MIN_SLOTS = 128  # of a program
_NUMBERS = 8192  # of the products of a tile of keys with all query heads


class PathToken(NamedTuple):
    """One token of each row.

    q: [B, 1, H, D]; k, w: [B, 1, G, D]; v: [B, 1, G, V]; beta: [B, 1, G]; real: [B] bool, whether there is a token;
    None: there is.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor
    beta: Tensor
    real: Tensor | None


def path_decode_(x: PathToken, cache_k: Tensor, cache_v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Multiply the cached keys by the token's matrix, append the token in place, and attend. No gradients.

    Args: cache_k: [B, S, G, D]; cache_v: [B, S, G, V]; seen: [B] int64, the slots in use, which does not change.
    Returns: [B, 1, H, V], in the dtype of v.
    """
    return _decode_op(*x, cache_k, cache_v, seen, scale)


def _decode(*arguments: Any) -> Tensor:
    from deltazoo.backends.triton.attention.kernels.path_decode import (
        DecodeTraits,
        path_combine_kernel,
        path_decode_kernel,
    )
    from deltazoo.backends.triton.runtime.launcher import launcher

    x = PathToken(*arguments[: len(PathToken._fields)])
    cache_k, cache_v, seen, scale = arguments[len(x) :]
    (B, _, H, D), (G, V), S = x.q.shape, x.v.shape[2:], cache_k.shape[1]
    keys, values = cache_k.contiguous(), cache_v.contiguous()
    o = x.v.new_empty(B, 1, H, V)
    BR, BD, BV = power_of_two(H // G), max(16, power_of_two(D)), max(16, power_of_two(V))
    BS = max(16, min(64, _NUMBERS // (BR * BD)))
    processors = device_spec(device_of(x.q).index).processors
    splits = power_of_two(max(1, min(_PROGRAMS_PER_SM * processors // max(B * G, 1), cdiv(S, _MIN_SLOTS))))
    partial = None if splits == 1 else o.new_empty(B, H, splits, V + 2, dtype=torch.float32)
    names = x._asdict() | {"seen": seen}
    tensors = {name: None if y is None else y.contiguous() for name, y in names.items()}
    tensors |= {"cache_k": keys, "cache_v": values, "o": o, "partial": partial}
    traits = DecodeTraits(H, G, D, V, BR, BD, BV, BS, scale)
    with torch.cuda.device_of(x.q):
        run = launcher(path_decode_kernel, tensors, {"traits": traits}, Options(4))
        run(B * G * splits, {"S": S, "splits": splits})
        if partial is not None:
            constants = {"V": V, "BV": BV, "MOST": splits}
            run = launcher(path_combine_kernel, {"partial": partial, "o": o}, constants, Options(4))
            run(B * H, {"splits": splits})
    mark_written(cache_k, keys)
    mark_written(cache_v, values)
    return o


def _decode_fake(*arguments: Tensor) -> Tensor:
    q, v = arguments[0], arguments[2]
    return v.new_empty(q.shape[0], 1, q.shape[2], v.shape[-1])


_decode_op = operator(
    "triton_path_decode(Tensor q, Tensor k, Tensor v, Tensor w, Tensor beta, Tensor? real, Tensor(a!) cache_k,"
    " Tensor(b!) cache_v, Tensor seen, float scale) -> Tensor",
    _decode,
    compiled_ahead(_decode, _decode_fake),
)
