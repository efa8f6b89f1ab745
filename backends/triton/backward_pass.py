"""The buffers of a backward pass, and its division into windows of chunks.

B batch, T time, N sequences, H key heads, HV value heads, K key width, V value width, C chunk
"""

from typing import NamedTuple

from torch import Tensor

from deltazoo.backends.triton.config import LaunchConfig
from deltazoo.backends.triton.forward import empty
from deltazoo.backends.triton.operands import Gradients, ScanKind, ScanOperands, Sizes
from deltazoo.backends.triton.plan import Plan
from deltazoo.backends.triton.saved import Prepared
from deltazoo.backends.triton.tiles import cdiv, key_tiles, min_key_tile


class Scratch(NamedTuple):
    """The scratch buffers of a window, in `saved_dtype`.

    Args:
        in_gradients: a chunk's states are stored in the rows of its gradients, which the gradients kernel writes last
            (hopper/channel_gradients.py): states is d_log_decay as 16-bit elements, dstates is d_q, continued in d_k.
        slots: chunk slots of a window.
        states: [slots, HV, V, K], the state before each chunk. xs: [slots, C, HV, V], x of the delta rule.
        dstates: [slots, HV, V, K], the gradient of the state after each chunk; None in the sweep.
        du: [slots, C, HV, V], or dv where du is recovered from dv.
        programs: programs per chunk and sequence that add to key gradients: HV times the V tiles of the sweep.
        partial: [2 or 3, slots, C, programs, K], the key gradients of each program, if several share a key head.
    """

    in_gradients: bool
    slots: int
    states: Tensor
    xs: Tensor | None
    dstates: Tensor | None
    du: Tensor
    programs: int
    partial: Tensor | None

    @classmethod
    def empty(
        cls, x: ScanOperands, kind: ScanKind, s: Sizes, slots: int, d: Gradients, sweep: bool, in_gradients: bool
    ) -> "Scratch":
        dtype = kind.saved_dtype(x.q.dtype)
        rows = d.log_decay.view(dtype) if in_gradients and d.log_decay is not None else None
        states, values = (slots, s.HV, s.V, s.K), (slots, s.C, s.HV, s.V)
        programs = s.HV * value_tiles_of(s, sweep)
        partial = (3 if x.e is not None else 2, slots, s.C, programs, s.K)
        return cls(
            in_gradients=in_gradients,
            slots=slots,
            states=empty(x.q, *states, dtype=dtype) if rows is None else rows,
            xs=empty(x.q, *values, dtype=dtype) if kind.delta else None,
            dstates=None if sweep else d.q if in_gradients else empty(x.q, *states, dtype=dtype),
            du=empty(x.q, *values, dtype=dtype) if kind.stores_du(x) and not sweep else d.v,
            programs=programs,
            partial=empty(x.q, *partial, dtype=dtype) if programs > s.H else None,
        )


def keeps_states_in_gradients(s: Sizes, plan: Plan) -> bool:
    """Whether states and their gradients are stored in the rows of d_log_decay, d_q and d_k of their chunk.

    For a decay per channel and 128 values these rows have exactly as many bytes. Each chunk needs all of its rows.
    """
    takes_rows = plan.gradients in ("hopper channel", "hopper additive")
    on_hopper = plan.recompute == plan.reverse == "hopper" and takes_rows and not plan.split
    fits = s.V == 128 and s.K % 64 == 0 and s.H == s.HV and not s.packed and s.T % s.C == 0
    return on_hopper and fits


def value_tiles_of(s: Sizes, sweep: bool) -> int:
    """The V tiles whose gradients separate programs compute."""
    return cdiv(s.V, 128) if sweep else 1


def bytes_per_slot(x: ScanOperands, kind: ScanKind, s: Sizes, sweep: bool, in_gradients: bool) -> int:
    """The scratch of one chunk slot, without the key gradients of grouped heads."""
    numbers = kind.delta * s.C
    if not in_gradients:
        numbers += s.K * (1 if sweep else 2)
    if not sweep:
        numbers += kind.stores_du(x) * s.C
    return s.HV * s.V * numbers * kind.saved_dtype(x.q.dtype).itemsize


class GateSums(NamedTuple):
    """The partial sums of each tile, from which gate_gradients_kernel computes the gate gradients.

    Args:
        keys: key columns per tile. key_tiles: number of K tiles. tiles: key_tiles times the V tiles of the sweep.
        early: with an early read or erase, which adds a row.
        dgates: [tiles, slots, HV, 3 or 4, C]. state_products: [tiles, slots, HV], <dS, S>.
    """

    keys: int
    key_tiles: int
    tiles: int
    early: bool
    dgates: Tensor
    state_products: Tensor

    @classmethod
    def empty(cls, x: ScanOperands, kind: ScanKind, s: Sizes, plan: Plan, config: LaunchConfig) -> "GateSums":
        on_hopper = plan.backward != "reverse+gradients" or plan.gradients in (
            "hopper",
            "hopper channel",
            "hopper additive",
            "hopper pair",
        )
        K0 = key_tiles(s.K)[0]
        requested = 64 if on_hopper else config.gradients.keys or K0
        keys = min(max(requested, min_key_tile(kind.saved_dtype(x.q.dtype))), K0)
        tiles_of_K = cdiv(s.K, keys)
        tiles = tiles_of_K * value_tiles_of(s, plan.backward != "reverse+gradients")
        early = (kind.erase_early or kind.read_early) and x.decay != "channel"
        slots = 0 if x.v_key is not None else s.slots  # DPLR has no gradients of gates
        dgates = empty(x.q, tiles, slots, s.HV, 4 if early else 3, s.C)
        return cls(keys, tiles_of_K, tiles, early, dgates, empty(x.q, tiles, slots, s.HV))


class Pass(NamedTuple):
    """Operands and results that the launches of one backward pass share.

    Args:
        d_state: [N, HV, K, V], the gradient of the state: of the final one at first, of the initial one at the end.
        d: the gradients that they compute.
    """

    x: ScanOperands
    kind: ScanKind
    s: Sizes
    plan: Plan
    config: LaunchConfig
    prepared: Prepared
    checkpoints: Tensor
    d_o: Tensor
    d_state: Tensor
    sums: GateSums
    d: Gradients

    @property
    def slopes(self) -> Tensor | None:
        """The derivatives of the strengths of EFLA and Longhorn."""
        return self.prepared.derivatives()[1]


def set_state(d_state: Tensor, d_final: Tensor | None) -> None:
    """Set the gradient of the state to that of the final state; None is zero."""
    d_state.zero_() if d_final is None else d_state.copy_(d_final)


def tensors_of_pairs(run: Pass, scratch: Scratch) -> tuple[Tensor | None, ...]:
    """The tensors of both gradients kernels of DPLR."""
    x, d = run.x, run.d
    return (
        x.q, x.k, x.e, x.v_key, x.v, x.log_decay, run.d_o, run.prepared.gates, scratch.states, scratch.dstates,
        scratch.xs, scratch.du, d.q, d.k, d.e, d.v_key, d.log_decay, x.cu_seqlens,
    )  # fmt: skip


def windows_of(s: Sizes, every: int, split: int, max_slots: int) -> tuple[int, int, int]:
    """Divide the chunks into windows that fit `max_slots` chunk slots of scratch.

    A window has at least one unit of each sequence: a segment, or the chunks between two checkpoints. Lengths of packed
    sequences are unknown on the host, so that one unit of each may be unused. If that exceeds a sixteenth of the slots,
    the units of a pack are smaller, and the recomputation starts from the checkpoint before the window.

    Returns: the unit that windows end at, the number of windows, the slots of a window.
    """
    unit = max(every, split)
    if max_slots >= s.slots:
        return unit, 1, s.slots
    if s.packed:
        if not split and max_slots >= 8 * s.N:
            unit = min(every, 1 << (max(max_slots // (16 * s.N), 1).bit_length() - 1))
        units = cdiv(cdiv(s.T, s.C), unit)
        # beside one unit of each sequence: the slots that are left, or as many again if none are left
        windows = min(max(units, 1), cdiv(s.slots + 1, max(max_slots - s.N * unit, s.N * unit)))
        slots = (s.slots + 1) // windows + s.N * unit
    else:
        units = cdiv(cdiv(s.T, s.C), unit)
        windows = cdiv(units, max(max_slots // (s.N * unit), 1))
        slots = s.N * cdiv(units, windows) * unit
    return (unit, windows, slots) if slots < s.slots else (unit, 1, s.slots)
