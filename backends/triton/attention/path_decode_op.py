"""Operator and launch of a decode step of PaTH attention. Triton is imported when a kernel first runs.

C the most pending matrices, B batch, S slots, H query heads, G key-value heads, D key width, V value width
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.custom_op import operator
from deltazoo.backends.triton.element.step_tensors import finish, step_tensors
from deltazoo.backends.triton.operands import schema
from deltazoo.backends.triton.problem import device_spec, overlaps
from deltazoo.backends.triton.runtime.precompile import compiled_ahead, device_of
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import cdiv, limit_warps, power_of_two

_PROGRAMS_PER_SM = 4
_WARPS, _STAGES = 4, 4  # of a program; of its pipeline, which holds one tile less
_PREFETCHED = 3  # tiles of a program that are prefetched before the kernel waits
_MIN_SLOTS = 128  # of a program
_NUMBERS = 8192  # of the products of a tile of keys with all query heads, of which at least 4 count
_MIN_TILE = 16  # slots, at least those of the pending tokens
_COUNTED = 128  # rows of a program that counts tokens


class PathToken(NamedTuple):
    """One token of each row.

    q: [B, 1, H, D]; k, w: [B, 1, G, D]; v: [B, 1, G, V]; logit: [B, 1, G], with beta = 2 sigmoid(logit); their rows
    may be apart. real: [B] bool, whether there is a token; None: there is.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor
    logit: Tensor
    real: Tensor | None


class PathCache(NamedTuple):
    """The tokens so far.

    Args:
        k: [B, S, G, D], multiplied by the matrices of all later tokens that are not pending. v: [B, S, G, V].
        moves: [B, C, G, 2, D] float32, w and beta w of the pending tokens, which are the last ones; C <= 16.
        pending: [B] int64, their number, below C. seen: [B] int64, the slots in use.
    """

    k: Tensor
    v: Tensor
    moves: Tensor
    pending: Tensor
    seen: Tensor


def path_decode_(x: PathToken, cache: PathCache, scale: float) -> Tensor:
    """Append the token to the cache in place, and attend. No gradients.

    The token's matrix is then pending, or with C of them all keys have been multiplied. Counts the token in `pending`
    and `seen`, too.

    Returns: [B, 1, H, V], in the dtype of v.
    """
    return _decode_op(*x, *cache, scale)


def settled_keys(cache: PathCache) -> Tensor:
    """Return the keys multiplied by the pending matrices, [B, S, G, D]; differentiable.

    k_s - sum over pending j of a_sj beta_j w_j with a_sj = k_s . w_j - sum over pending i < j of a_si beta_i w_i . w_j,
    and a_sj = 0 unless token j is later than s.
    """
    k, _, moves, pending, seen = cache
    j = torch.arange(moves.shape[1], device=k.device)
    is_pending = j < pending[:, None]
    w, erase = torch.where(is_pending[:, :, None, None, None], moves, 0.0).to(k.dtype).unbind(3)
    first = (seen - pending)[:, None, None]
    later = torch.arange(k.shape[1], device=k.device)[:, None] < first + j
    reads = torch.where(later[:, None], torch.einsum("bsgd,bcgd->bgsc", k, w), 0.0)
    upper = torch.einsum("bigd,bjgd->bgij", erase, w).triu(1) + torch.eye(len(j), device=k.device, dtype=k.dtype)
    a = torch.linalg.solve_triangular(upper, reads, upper=True, left=False, unitriangular=True)
    return k - torch.einsum("bgsc,bcgd->bsgd", a, erase)


class _Call(NamedTuple):
    """The operator's arguments: those of `PathToken` and `PathCache`, and the factor of the scores."""

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor
    logit: Tensor
    real: Tensor | None
    cache_k: Tensor
    cache_v: Tensor
    moves: Tensor
    pending: Tensor
    seen: Tensor
    scale: float


_ROWS = ("q", "k", "v", "w", "logit")
_IN_PLACE = ("cache_k", "cache_v", "moves", "pending", "seen")


def _decode(*arguments: Any) -> Tensor:
    from deltazoo.backends.triton.attention.kernels.path_decode import (
        DecodeTraits,
        path_combine_kernel,
        path_count_kernel,
        path_decode_kernel,
    )
    from deltazoo.backends.triton.runtime.launcher import launcher

    call, o = _Call(*arguments), _decode_fake(*arguments)
    (B, _, H, D), (G, V), (S, C) = call.q.shape, call.v.shape[2:], (call.cache_k.shape[1], call.moves.shape[1])
    BR, BD, BV = power_of_two(H // G), max(16, power_of_two(D)), max(16, power_of_two(V))
    BS = max(_MIN_TILE, min(64, _NUMBERS // (max(4, BR) * max(BD, BV))))
    assert C <= _MIN_TILE
    processors = device_spec(device_of(call.q).index).processors
    splits = power_of_two(max(1, min(_PROGRAMS_PER_SM * processors // max(B * G, 1), cdiv(S, _MIN_SLOTS))))
    partial = None if splits == 1 else o.new_empty(B, H, splits, V + 2, dtype=torch.float32)
    call = call._replace(**{name: getattr(call, name).flatten(1) for name in _ROWS})
    tensors = step_tensors(call, _ROWS, _IN_PLACE) | {"o": o, "partial": partial}
    Q, K, VALUES, W, LOGIT = (tensors[name].stride(0) for name in _ROWS)
    overlap = overlaps(call.q)
    traits = DecodeTraits(
        H, G, D, V, BR, BD, BV, BS, C, _STAGES, _PREFETCHED, Q, K, VALUES, W, LOGIT, call.scale, overlap
    )
    with torch.cuda.device_of(call.q):
        decode = Options(limit_warps(_WARPS, BS * BD), overlap=overlap)
        launcher(path_decode_kernel, tensors, {"traits": traits}, decode)(B * G * splits, {"S": S, "splits": splits})
        options = Options(_WARPS, overlap=overlap)
        if partial is not None:
            constants = {"V": V, "BV": BV, "MOST": splits, "OVERLAP": overlap}
            launcher(path_combine_kernel, tensors, constants, options)(B * H, {"splits": splits})
        constants = {"C": C, "ROWS": _COUNTED, "OVERLAP": overlap}
        launcher(path_count_kernel, tensors, constants, options)(cdiv(B, _COUNTED), {"B": B})
    finish(call, tensors, _IN_PLACE)
    return o


def _decode_fake(*arguments: Any) -> Tensor:
    q, v = arguments[0], arguments[2]
    return v.new_empty(q.shape[0], 1, q.shape[2], v.shape[-1])


_decode_op = operator(
    f"triton_path_decode({schema(_Call, *_IN_PLACE)}) -> Tensor",
    _decode,
    compiled_ahead(_decode, _decode_fake),
    any_layout=True,
)
