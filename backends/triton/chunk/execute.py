"""Launch the kernels of a plan in order, with tensors, numbers and compile-time traits by name.

A kernel receives those that it declares (kernels/signature.py). A tensor that a pass does not have is `...`; a kernel
that declares one is an error.

B batch, T time, N sequences, H key heads, HV value heads, K key width, V value width, C chunk
"""

import importlib
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from deltazoo.backends.torch_ext.devices import tf32_allowed
from deltazoo.backends.triton.chunk.plan import KernelLaunch, Plan, gate_gradients
from deltazoo.backends.triton.runtime.launcher import group, launcher
from deltazoo.backends.triton.support import Kernel
from deltazoo.backends.triton.tiles import key_tiles, value_tile

_SCANS = ("segment ends", "segment maps", "segment gradients", "scan", "recompute", "reverse")
_TOTALS = ("total", "total backward")
_COMBINATIONS = ("combine", "combine backward", *_TOTALS)
# The tensors of a scan that not every step has: those of each step.
_TENSORS_OF_STEP = {
    "scan": ("o", "final", "checkpoints", "starts"),
    "recompute": ("checkpoints", "states", "v_new"),
    "segment ends": ("ends",),
    "segment maps": ("ends",),
    "segment gradients": ("starts", "ends"),
    "reverse": ("starts",),
}
_OPTIONAL = ("o", "final", "checkpoints", "states", "v_new", "starts", "ends")
_LINKED = ("maps", "pieces", "piece_maps", "chain", "carried")  # of a combination, only in carried.py
_CARRIES = ("segment ends", "segment gradients")
_MODES = {"scan": "output", "recompute": "recompute", "segment ends": "ends", "segment maps": "maps"}


class Tensors(NamedTuple):
    """The tensors of a pass; None: no such tensor.

    Args:
        q, k, e, v_key, v, log_decay, b, w, state, cu: the operands (`ScanOperands`).
        gates, decay_bounds, wy_tiles, scaled, strengths, slopes: the results of prepare (`Prepared`).
        o, final, checkpoints: the output, the final state, and the states that the backward starts from.
        starts, ends: the states of segments (`segment_states`). initial: the state that the combination starts from.
        carries, maps, pieces, piece_maps, chain, carried: only for carried.py. carries: whether another piece needs a
            sequence's end or the gradient of its start. maps: of the segments, unless `ends` holds them. pieces: the
            totals of the pieces of all ranks. piece_maps: those of the forward, which hold the maps. chain: the pieces
            before or after each sequence. carried: the state before each sequence.
        do, dstate: the gradients of o and of the state, before and after the backward.
        states, v_new, dstates, dstates_high, du, partial, spare: scratch (`Scratch`).
        dgates, state_products: partial sums of gate gradients.
        dq to dw: gradients of the operands.
    """

    q: Any = ...
    k: Any = ...
    e: Any = ...
    v_key: Any = ...
    v: Any = ...
    log_decay: Any = ...
    b: Any = ...
    w: Any = ...
    state: Any = ...
    cu: Any = ...
    gates: Any = ...
    decay_bounds: Any = ...
    wy_tiles: Any = ...
    scaled: Any = ...
    strengths: Any = ...
    slopes: Any = ...
    o: Any = ...
    final: Any = ...
    checkpoints: Any = ...
    starts: Any = ...
    ends: Any = ...
    initial: Any = ...
    carries: Any = ...
    maps: Any = ...
    pieces: Any = ...
    piece_maps: Any = ...
    chain: Any = ...
    carried: Any = ...
    do: Any = ...
    dstate: Any = ...
    states: Any = ...
    v_new: Any = ...
    dstates: Any = ...
    dstates_high: Any = ...
    du: Any = ...
    partial: Any = ...
    spare: Any = ...
    dgates: Any = ...
    state_products: Any = ...
    dq: Any = ...
    dk: Any = ...
    de: Any = ...
    dv_key: Any = ...
    dv: Any = ...
    dlog_decay: Any = ...
    db: Any = ...
    dw: Any = ...


class Arguments(NamedTuple):
    """What the kernel of a launch may receive, by name."""

    tensors: dict[str, Any]
    numbers: dict[str, int | float]
    traits: dict[str, Hashable]


def execute(launches: Sequence[KernelLaunch], plan: Plan, scale: float, tensors: Tensors) -> None:
    """Launch kernels. scale: of q."""
    for launch in launches:
        kernel = load(launch.kernel)
        operands, numbers, traits = arguments(plan, launch, scale, tensors)
        if "TILED" in kernel.Traits._fields and traits["TILED"]:
            operands["v"] = descriptor(plan, launch, tensors.v)
        operands["gmem"], constants = group(kernel, operands, traits)
        launcher(kernel, operands, {"traits": constants}, launch.options)(launch.programs, numbers)


def load(kernel: Kernel) -> Any:
    """Import the function of a kernel."""
    return getattr(importlib.import_module(kernel.module), kernel.name)


def arguments(plan: Plan, launch: KernelLaunch, scale: float, tensors: Tensors) -> Arguments:
    """Return the arguments of a launch. scale: of q."""
    if "tail" in launch.step:
        return _of_tail(plan, launch, tensors)
    named = _tensors(plan, launch, tensors)
    return Arguments(named, _numbers(plan, launch, scale), _traits(plan, launch, named))


def _tensors(plan: Plan, launch: KernelLaunch, tensors: Tensors) -> dict[str, Any]:
    """Return the tensors of a step: the scans read the scaled operands of a decay per channel."""
    step, p = launch.step, plan.problem
    if step in _SCANS and p.by_channel:
        q, k, *others = tensors.scaled.unbind()
        e, v_key = (*others, None, None)[:2]
        tensors = tensors._replace(q=q, k=k, e=e, v_key=v_key)
    if (step == "scan" and plan.forward_segment_chunks == 0) or (step == "reverse" and plan.segment_chunks == 0):
        tensors = tensors._replace(starts=None)
    named = {name: x for name, x in tensors._asdict().items() if x is not ...}
    if step in _SCANS and not (plan.carried and step in _CARRIES):
        named["carries"] = None
    if step in _COMBINATIONS:
        named = dict.fromkeys(_LINKED) | named
    if step in _TENSORS_OF_STEP:
        named |= {name: None for name in _OPTIONAL if name not in _TENSORS_OF_STEP[step]}
    return named


def _numbers(plan: Plan, launch: KernelLaunch, scale: float) -> dict[str, int | float]:
    p, span = plan.problem, launch.span
    return {
        "scale": scale, "T": p.T, "N": p.N, "slots": p.slots(plan.config.chunk), "num_scratch_slots": span.slots,
        "window": span.window, "windows": span.windows, "num_segments": span.segments,
        "narrow_tile_min_chunks": span.narrow_tile_min_chunks,
    }  # fmt: skip


def _traits(plan: Plan, launch: KernelLaunch, tensors: dict[str, Any]) -> dict[str, Hashable]:
    """Return the compile-time constants of a launch: heads, widths, tiles and the variant of the update."""
    p, step, span, tiles = plan.problem, launch.step, launch.span, launch.tiles
    C = plan.config.chunk
    K0, K1 = key_tiles(p.K)
    exact = p.terms == 2 or p.dtype == torch.float32
    needed = gate_gradients(p)
    sums, windows = plan.sums, plan.windows
    in_gradients = windows is not None and windows.states_in_gradients and step != "scan"
    BV, chain = value_tile(tiles.values, p.V), tensors.get("chain")
    return {
        "H": p.HV if step in _SCANS and p.by_channel else p.H, "HV": p.HV, "K": p.K, "V": p.V, "C": C,
        "K0": K0, "K1": K1, "BV": BV, "BK": tiles.keys, "BLOCK": min(tiles.values, C), "HEADS": tiles.heads,
        "DECAY": p.decay, "DELTA": p.delta, "ERASE_KEY": _has_erase_key(plan, step), "ERASE_CHANNELS": p.erase_channels,
        "ERASE": p.gradients["b"], "WRITE": p.write, "TIED": p.tied,
        "HAS_STATE": p.state and not (plan.carried and step == "segment ends"),
        "PACKED": p.packed,
        "REPARAM": p.reparam, "ERASE_PREVIOUS": p.erase_from == "previous", "READ_BEFORE": p.read == "before",
        "GATES_BEFORE": p.gates_before, "DU_IS_DV": p.dv_holds_du, "STORED_DU": p.stores_du, "MIN_BETA": p.min_beta,
        "TERMS": p.terms, "MODE": _MODES.get(step), "ENDS": step == "segment gradients",
        "CHECKPOINT_CHUNKS": span.checkpoint_chunks, "UNIT": span.unit, "SEGMENT_CHUNKS": span.chunks,
        "HALVES": tiles.values // tiles.narrow if span.narrow_tile_min_chunks else 1,
        "IN_GRADIENTS": in_gradients, "BOUND_DECAYS": plan.segment_chunks > 0,
        "MARKED": step.startswith("marked"), "INITIAL": tensors["initial"] is not None,
        "REVERSE": step in ("combine backward", "total backward"), "CARRIED": plan.carried, "TOTAL": step in _TOTALS,
        "LINKS": chain.shape[1] if chain is not None else 0,
        "OPERAND": tl.float32 if exact else tl.float16, "PREC_INVERSE": "tf32x3" if exact else "tf32",
        "PREC": "tf32x3" if step in _COMBINATIONS else tf32_precision(p.dtype), "EXACT": p.dtype == torch.float32,
        "STAGES": launch.options.stages, "TILED": _has_descriptor(plan),
        "TILES": sums.tiles if sums else 0, "K_TILES": sums.key_tiles if sums else 0,
        "PROGRAMS": windows.programs if windows else 0,
        "NEEDS_LOG_DECAY": needed["log_decay"], "NEEDS_B": needed["b"], "NEEDS_W": needed["w"],
    }  # fmt: skip


def tf32_precision(dtype: torch.dtype) -> str:
    """Return the precision of float32 products.

    It is tf32 if torch allows that, else three tf32 products, which are as accurate as float32.
    """
    return "tf32" if dtype != torch.float32 or tf32_allowed() else "tf32x3"


def descriptor(plan: Plan, launch: KernelLaunch, v: Tensor) -> TensorDescriptor:
    """Return the descriptor by which the tensor memory accelerator loads tiles of v."""
    p = plan.problem
    # computed from the sizes: a contiguous tensor may have any stride in a dimension of size 1
    strides = [p.T * p.HV * p.V, p.HV * p.V, p.V, 1]
    return TensorDescriptor(v, [*v.shape], strides, [1, plan.config.chunk, 1, value_tile(launch.tiles.values, p.V)])


def _has_descriptor(plan: Plan) -> bool:
    """Whether rows of v are multiples of 16 bytes, as the tensor memory accelerator needs."""
    p = plan.problem
    return bool(p.rows * p.T > 0) and p.V * p.dtype.itemsize % 16 == 0


def _has_erase_key(plan: Plan, step: str) -> bool:
    """Whether a kernel reads an erase key; with a decay per channel the scans read it scaled, even where it is k."""
    p = plan.problem
    return p.delta if step in _SCANS and p.by_channel else p.erase_key


def _of_tail(plan: Plan, launch: KernelLaunch, tensors: Tensors) -> Arguments:
    """Return the output of the forward, or the gradients of the backward, in the place of the operands."""
    p, t, width = plan.problem, tensors, plan.problem.V
    if launch.step == "tail":
        names = {"v": t.o}
    elif launch.step == "gradient tail":
        names = {"v": t.dv, "q": t.dq, "k": t.dk, "e": t.de, "log_decay": t.dlog_decay, "b": t.db, "w": t.dw}
    else:
        names, width = {"v": t.dv_key}, p.K
    named: dict[str, Any] = dict.fromkeys(("v", "q", "k", "e", "log_decay", "b", "w")) | names | {"cu": t.cu}
    decays = p.HV * p.K if p.by_channel and named["log_decay"] is not None else p.HV
    traits: dict[str, Hashable] = {"HK": p.H * p.K, "HV": p.HV, "V": width, "DECAYS": decays, "BLOCK": 1024}
    return Arguments(named, {"N": p.N, "T": p.T}, traits)
