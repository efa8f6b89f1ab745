"""Operator and launches of the attention of new tokens over a paged cache.

B batch, T time, H query heads, G key-value heads, E key width, V value width, N sequences, M pages of a sequence,
S slots of a page
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.custom_op import mark_written, operator
from deltazoo.backends.torch_ext.devices import tf32_allowed
from deltazoo.backends.triton.attention.launch import Operands, launch_of
from deltazoo.backends.triton.operands import schema
from deltazoo.backends.triton.problem import architecture, device_spec
from deltazoo.backends.triton.runtime.precompile import compiled_ahead, device_of
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import power_of_two

_MAX_PARTS = 32


class PagedCall(NamedTuple):
    """The operator's arguments.

    Args:
        q: [B, T, H, E]; k: [B, T, G, E]; v: [B, T, G, V], of the new tokens. k_pages: [P, S, G, E]; v_pages:
            [P, S, G, V], which change in place.
        table: [N, M] int32, the pages of each sequence; 0: none.
        before: [N] int64, its tokens before. counts: [N] int64, its real new tokens, without packs; None: T.
        cu_seqlens: [N + 1] int32, bounds of packed sequences; then B = 1.
        scale: factor on the scores.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    k_pages: Tensor
    v_pages: Tensor
    table: Tensor
    before: Tensor
    counts: Tensor | None
    cu_seqlens: Tensor | None
    scale: float


def schema_of(name: str) -> str:
    """Return the schema of an operator with these arguments."""
    parameters = schema(PagedCall).replace("Tensor k_pages", "Tensor(a!) k_pages")
    return f"{name}({parameters.replace('Tensor v_pages', 'Tensor(b!) v_pages')}) -> Tensor"


def fake(*arguments: object) -> Tensor:
    """Return an empty result."""
    call = PagedCall(*arguments)  # type: ignore[arg-type]
    return call.q.new_empty(*call.q.shape[:3], call.v.shape[3])


def _attend(*arguments: object) -> Tensor:
    call = PagedCall(*arguments)  # type: ignore[arg-type]
    pages = call.k_pages.contiguous(), call.v_pages.contiguous()
    with torch.cuda.device_of(call.q):
        o = _launch(call._replace(k_pages=pages[0], v_pages=pages[1], table=call.table.contiguous()))
    for given, written in zip((call.k_pages, call.v_pages), pages, strict=True):
        mark_written(given, written)
    return o


def _launch(call: PagedCall) -> Tensor:
    from deltazoo.backends.triton.attention.kernels.decode import combine_parts_kernel
    from deltazoo.backends.triton.attention.kernels.paged import (
        PagedTraits,
        paged_attention_kernel,
        store_pages_kernel,
    )
    from deltazoo.backends.triton.runtime.launcher import launcher

    x, (B, T), S = Operands.of(call.q, call.k, call.v, call.cu_seqlens), call.q.shape[:2], call.k_pages.shape[1]
    (H, G, E), V, packed = x.heads, call.v.shape[3], call.cu_seqlens is not None
    device = device_spec(device_of(call.q).index)
    config = launch_of("pages", max(E, V), call.q.dtype, device.shared_memory)
    group = power_of_two(H // G)
    rows = min(config.queries, max(16, power_of_two(T * group)))
    tokens, keys = max(1, rows // group), max(16, min(config.keys, S))
    slots = x.slots(tokens)
    parts = _parts(slots * G, call.table.shape[1] * S // (2 * keys), device.processors)
    unit = math.gcd(x.unit(), V)
    traits = PagedTraits(
        H=H, G=G, E=E, V=V, BE=max(16, power_of_two(E)), BV=max(16, power_of_two(V)), GROUP=group, TOKENS=tokens,
        BN=keys, PAGE=S, PARTS=parts, SCALE=call.scale, UNIT=unit, PACKED=packed,
        PREC="tf32" if tf32_allowed() else "tf32x3", OVERLAP=architecture(device) == "sm90",
    )  # fmt: skip
    # zeros, because no program writes tokens after the last packed sequence or padded ones
    new = call.q.new_zeros if packed or call.counts is not None else call.q.new_empty
    o, partial, lse = new(B, T, H, V), None, None
    if parts > 1:
        partial = new(B, T, H, parts, V, dtype=torch.float32)
        lse = call.q.new_full((B, T, H, parts), -torch.inf, dtype=torch.float32)
    tensors = {
        **call._asdict(), "q": x.q, "k": x.k, "v": x.v, "cu": call.cu_seqlens, "o": o, "partial": partial, "lse": lse,
    }  # fmt: skip
    strides = dict(zip(("q_stride", "k_stride", "v_stride"), (stride // unit for stride in x.strides), strict=True))
    numbers = {"T": T, "N": x.sequences, "M": call.table.shape[1], "slots": slots, **strides}
    launcher(store_pages_kernel, tensors, {"traits": traits}, Options(4))(G * slots, numbers)
    options = Options(config.warps, config.stages, config.registers)
    if tokens * group < config.queries:
        options = Options(4, 3)  # as for one token: the keys are the larger operand
    launcher(paged_attention_kernel, tensors, {"traits": traits}, options)(slots * G * parts, numbers)
    if parts > 1:
        combine = launcher(combine_parts_kernel, tensors, {"traits": traits}, Options(1, overlap=traits.OVERLAP))
        combine(B * T * H, {})
    return o


def _parts(programs: int, tiles: int, processors: int) -> int:
    """Return the number of parts of the keys, so that few query tiles still occupy the device."""
    return power_of_two(max(1, min(_MAX_PARTS, 2 * processors // max(1, programs), tiles)))


attend_pages = operator(schema_of("triton_attend_pages_"), _attend, compiled_ahead(_attend, fake), any_layout=True)
