"""Buffers and launches of the kernels of log-linear attention; imported when a kernel first runs.

B batch, T tokens in a row, N sequences, H key heads, HV value heads, K key width, V value width, L levels, J levels of
chunks
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from deltazoo.backends.triton.chunk.execute import tf32_precision
from deltazoo.backends.triton.levels.kernels.gradients import level_gradients_kernel
from deltazoo.backends.triton.levels.kernels.prepare import level_prepare_kernel
from deltazoo.backends.triton.levels.kernels.reverse import level_reverse_kernel
from deltazoo.backends.triton.levels.kernels.scan import level_scan_kernel
from deltazoo.backends.triton.levels.kernels.state_gradients import level_state_gradients_kernel
from deltazoo.backends.triton.levels.kernels.step import level_step_kernel
from deltazoo.backends.triton.levels.kernels.tree import LevelTraits
from deltazoo.backends.triton.levels.operands import CHUNK, LevelOperands
from deltazoo.backends.triton.problem import device_spec
from deltazoo.backends.triton.runtime.launcher import launcher
from deltazoo.backends.triton.runtime.precompile import device_of
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import cdiv, limit_warps, most_registers, power_of_two

_IN_CHUNK = CHUNK.bit_length()  # levels within a chunk


class LevelLaunch(NamedTuple):
    """Launch parameters.

    Args:
        scan, reverse, gradients, step: value columns of a tile. Each *_warps: warps of a program.
        stages, states_stages: of the software pipeline of the scans, and of the gradients of states.
        group: the most value heads that a program of the gradients processes.
        scratch: bytes of the states and their gradients that the backward keeps at once.
    """

    scan: int = 16
    scan_warps: int = 8
    reverse: int = 16
    reverse_warps: int = 8
    gradients: int = 64
    gradients_warps: int = 8
    states_warps: int = 8
    states_stages: int = 2
    prepare_warps: int = 4
    stages: int = 2
    step: int = 32
    step_warps: int = 4
    group: int = 16
    scratch: int = 704 * 2**20


LAUNCH = LevelLaunch()
# Tiles of float32 take twice the shared memory. An earlier run in float32, with the launch for 16 bits, ended with "an
# illegal memory access" on an H200; on an H100 compute-sanitizer finds none with this one (both Triton 3.6).
FLOAT32 = LevelLaunch(gradients=32, states_stages=1, stages=1)
_PIPELINED = 160 * 1024  # bytes of shared memory per block that the scans need with two stages


def choose_launch(x: LevelOperands) -> LevelLaunch:
    """Return the launch parameters for the dtype and the device's shared memory."""
    if x.q.dtype == torch.float32:
        return FLOAT32
    fits = device_spec(device_of(x.q).index).shared_memory >= _PIPELINED
    return LAUNCH if fits else LAUNCH._replace(stages=1)


class Prepared(NamedTuple):
    """The results of `level_prepare_kernel` by the names of its parameters. None: not needed."""

    gates: Tensor
    mixed: Tensor
    plain: Tensor | None
    inverse: Tensor | None
    reads: Tensor | None
    writes: Tensor | None


class _Call(NamedTuple):
    """What every launch of one call shares. J: levels of chunks that any sequence reaches."""

    x: LevelOperands
    J: int
    N: int
    T: int
    slots: int

    @classmethod
    def of(cls, x: LevelOperands) -> "_Call":
        B, T = x.q.shape[:2]
        N = B if x.cu is None else x.cu.shape[0] - 1
        slots = B * cdiv(T, CHUNK) if x.cu is None else (T // CHUNK + N) * (N > 0)
        most = x.weights.shape[-1] - _IN_CHUNK
        J = most if x.state is not None else max(1, min(most, (cdiv(T, CHUNK) - 1).bit_length()))
        return cls(x, J, N, T, slots)

    def traits(self, BV: int, group: int = 1) -> LevelTraits:
        """Tiles of values are not clipped to V: ptxas 12.8 miscompiled narrow ones (docs/compiler-bugs.md)."""
        (H, K), (HV, V) = self.x.q.shape[2:], self.x.v.shape[2:]
        return LevelTraits(
            H=H, HV=HV, K=K, V=V, L=self.x.weights.shape[-1], C=CHUNK, KP=max(64, power_of_two(K)),
            JP=8 if self.J <= 8 else 16, BV=BV, GROUP=group, DELTA=self.x.erase is not None,
            PACKED=self.x.cu is not None, POSITIONED=self.x.state is not None, PREC=tf32_precision(self.x.q.dtype),
        )  # fmt: skip

    def run(
        self, kernel: Any, programs: int, tensors: dict[str, Tensor | None], traits: LevelTraits, options: Options,
        **numbers: int,
    ) -> None:  # fmt: skip
        exact = self.x.q.dtype == torch.float32
        constants = {
            "traits": traits, "OPERAND": tl.float32 if exact else tl.float16,
            "PREC_INVERSE": "tf32x3" if exact else "tf32",
        }  # fmt: skip
        run = launcher(kernel, self.x._asdict() | tensors, constants, options)
        run(programs, {"N": self.N, "T": self.T, "J": self.J, **numbers})


def forward(x: LevelOperands, launch: LevelLaunch) -> tuple[Tensor, Tensor]:
    """Return o [B, T, HV, V] and the final states [N, J, HV, K, V], which are empty without initial ones."""
    call = _Call.of(x)
    prepared = _prepare(call, False, launch)
    o = _per_token(x, x.v.shape, x.v.dtype)
    final = None if x.state is None else torch.empty_like(x.state)
    results = {"o": o, "final": final, "states": None, "offsets": None}
    _scan(call, prepared, results, launch, range(x.v.shape[2]), 0)
    return o, x.q.new_empty(0, dtype=torch.float32) if final is None else final


def backward(x: LevelOperands, d_o: Tensor, d_final: Tensor | None, launch: LevelLaunch) -> LevelOperands:
    """Return the gradients; None where an operand has none."""
    call = _Call.of(x)
    (H, K), (HV, V) = x.q.shape[2:], x.v.shape[2:]
    prepared = _prepare(call, True, launch)
    group = math.gcd(HV // H, launch.group)
    offsets, entries = _entries(call)
    keys = 2 if x.erase is None else 3  # tiles of gradients
    per_head = (2 * entries * V + keys * call.slots * CHUNK) * K * x.q.dtype.itemsize
    heads = max(1, min(HV // group, launch.scratch // max(per_head, 1) // group)) * group
    heads = cdiv(HV, cdiv(HV, heads) * group) * group  # as many windows, of equal size
    states, d_states = (x.q.new_empty(heads, entries, V, K) for _ in range(2))
    tiles = [x.q.new_empty(call.slots, heads, CHUNK, K) for _ in range(keys)]
    kept = x.q.new_empty(call.slots, heads, dtype=torch.float32)
    parts = HV // group
    gradients = x._replace(
        v=_per_token(x, x.v.shape, x.v.dtype),
        log_decay=_per_token(x, x.log_decay.shape, x.log_decay.dtype),
        erase=None if x.erase is None else _per_token(x, x.erase.shape, x.erase.dtype),
        weights=torch.zeros_like(x.weights),
        state=None if x.state is None else torch.empty_like(x.state),
        first=None, counts=None, cu=None,
    )  # fmt: skip
    shape, dtype = (*x.q.shape[:2], parts, K), x.q.dtype if parts == H else torch.float32
    dq, dk = _per_token(x, shape, dtype), _per_token(x, shape, dtype)
    results = {
        "dq": dq, "dk": dk, "dv": gradients.v, "d_log_decay": gradients.log_decay, "d_erase": gradients.erase,
        "d_weights": gradients.weights, "d_state": gradients.state, "d_o": d_o, "d_final": d_final, "states": states,
        "d_states": d_states, "offsets": offsets, "o": None, "final": None, "d_reads": tiles[0], "d_writes": tiles[1],
        "d_erases": None if x.erase is None else tiles[2], "kept": kept,
    }  # fmt: skip
    for head in range(0, HV, heads):
        window = range(head, min(head + heads, HV))
        _scan(call, prepared, results, launch, window, entries)
        tensors = prepared._asdict() | results
        numbers = {"head": head, "heads": len(window), "entries": entries}
        traits = call.traits(launch.reverse)
        programs, options = call.N * len(window) * cdiv(V, traits.BV), _options(launch.reverse_warps, launch.stages)
        call.run(level_reverse_kernel, programs, tensors, traits, options, **numbers)
        traits, options = call.traits(launch.gradients), _options(launch.states_warps, launch.states_stages)
        call.run(level_state_gradients_kernel, call.slots * len(window), tensors, traits, options, **numbers)
        traits, options = call.traits(launch.gradients, group), _options(launch.gradients_warps)
        numbers = {"head": head, "blocks": len(window) // group}
        call.run(level_gradients_kernel, call.slots * (len(window) // group), tensors, traits, options, **numbers)
    if parts != H:
        dq, dk = (torch.unflatten(y, 2, (H, parts // H)).sum(3).to(x.q.dtype) for y in (dq, dk))
    return gradients._replace(q=dq, k=dk)


def step_(x: LevelOperands, states: Tensor, seen: Tensor, counts: Tensor) -> Tensor:
    """Decode one token per row, updating the states [B, L - 1, HV, K, V] in place. Returns o [B, 1, HV, V]."""
    (H, K), (HV, V) = x.q.shape[2:], x.v.shape[2:]
    o = torch.empty_like(x.v)
    BV = min(LAUNCH.step, power_of_two(V))
    KP = power_of_two(K)
    constants = {"H": H, "HV": HV, "K": K, "V": V, "L": x.weights.shape[-1], "KP": KP, "BV": BV}
    tensors = x._asdict() | {"states": states, "seen": seen, "counts": counts, "o": o}
    run = launcher(level_step_kernel, tensors, constants, Options(limit_warps(LAUNCH.step_warps, KP * BV)))
    run(x.q.shape[0] * HV * cdiv(V, BV), {})
    return o


def _prepare(call: _Call, grad: bool, launch: LevelLaunch) -> Prepared:
    """Run the preparation. grad: with what the backward reads."""
    x = call.x
    (_, K), HV = x.q.shape[2:], x.v.shape[2]
    delta = x.erase is not None
    square, keys = (call.slots, HV, CHUNK, CHUNK), (call.slots, HV, CHUNK, K)
    prepared = Prepared(
        gates=x.q.new_empty(call.slots, HV, 2, CHUNK, dtype=torch.float32),
        mixed=x.q.new_empty(square),
        plain=x.q.new_empty(square) if delta and grad else None,
        inverse=x.q.new_empty(square) if delta and grad else None,
        reads=x.q.new_empty(keys) if delta else None,
        writes=x.q.new_empty(keys) if delta else None,
    )
    traits = call.traits(16)
    call.run(level_prepare_kernel, call.slots * HV, prepared._asdict(), traits, _options(launch.prepare_warps))
    return prepared


def _scan(
    call: _Call, prepared: Prepared, results: dict[str, Tensor | None], launch: LevelLaunch, window: range, entries: int
) -> None:
    """Run the scan on a window of value heads."""
    traits = call.traits(launch.scan)
    programs = call.N * len(window) * cdiv(traits.V, traits.BV)
    numbers = {"head": window.start, "heads": len(window), "entries": entries}
    tensors, options = prepared._asdict() | results, _options(launch.scan_warps, launch.stages)
    call.run(level_scan_kernel, programs, tensors, traits, options, **numbers)


def _options(warps: int, stages: int = 1) -> Options:
    return Options(warps, stages, most_registers(warps))


def _entries(call: _Call) -> tuple[Tensor, int]:
    """Return the first entry of each chunk slot in the buffers of states, [slots] int32, and the number of entries.

    A chunk has one for each level that holds tokens before it, and one more: after it there is at most one more.
    """
    x, chunks = call.x, cdiv(call.T, CHUNK)
    slot = torch.arange(call.slots, device=x.q.device)
    if x.cu is None:
        number = slot % max(chunks, 1)
        if x.first is not None:
            number = number + x.first.long().repeat_interleave(chunks)
        most = call.slots * (call.J + 1) if x.first is not None else call.N * _count_entries(chunks, call.J)
    else:
        bounds = x.cu.long()[:-1] // CHUNK + torch.arange(call.N, device=slot.device)
        number = slot - bounds[torch.searchsorted(bounds, slot, right=True) - 1]
        most = call.slots * (call.J + 3) // 2
    levels = (number[:, None] >> torch.arange(call.J - 1, device=slot.device) & 1).sum(1)
    counts = levels + (number >> (call.J - 1) > 0) + 1
    return (counts.cumsum(0) - counts).int(), most


@functools.lru_cache(maxsize=256)
def _count_entries(chunks: int, J: int) -> int:
    top = 1 << (J - 1)
    return sum((c & (top - 1)).bit_count() + (c >= top) + 1 for c in range(chunks))


def _per_token(x: LevelOperands, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate a result per token. It is zero where a token may belong to no chunk, which no kernel writes."""
    allocate = x.q.new_empty if x.cu is None and x.counts is None else x.q.new_zeros
    return allocate(tuple(shape), dtype=dtype)
