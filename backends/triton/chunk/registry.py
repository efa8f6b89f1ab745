"""The kernels of an update: phase, supported problems, grid, tiles, warps and registers of each.

A kernel for a new architecture is a `Kernel` in `KERNELS`; plan, heuristic, tuner, launch code and `explain` read this
registry. Kernels are named by strings, so that a plan needs no Triton. README.md has a row for each kernel.

B batch, T time, N sequences, H key heads, HV value heads, K key width, V value width
"""

from typing import Any

import torch

from deltazoo.backends.torch_ext.devices import DeviceSpec
from deltazoo.backends.triton.problem import SCALAR_DECAYS, Problem
from deltazoo.backends.triton.support import (
    Kernel,
    Options,
    Support,
    Tiles,
    fixed_options,
    fixed_tiles,
    per_chunk_and_heads,
    per_chunk_and_key_head,
    per_chunk_and_key_tile,
    per_segment,
    per_segment_of_map,
    per_segment_with_map,
    per_sequence,
    per_sequence_and_value_tile,
)
from deltazoo.backends.triton.tiles import (
    key_tiles,
    limit_warps,
    min_key_tile,
    most_registers,
    power_of_two,
    value_tile,
)

CHUNK = 64  # tokens per chunk by default
_PACKAGE = "deltazoo.backends.triton"
_PORTABLE, _GLUON = f"{_PACKAGE}.chunk.kernels.portable", f"{_PACKAGE}.chunk.kernels.sm90"
_DECODE = f"{_PACKAGE}.decode.kernels"
# Registers per thread at the launch of a warp-specialised kernel. Its three warp groups reallocate them (setmaxnreg):
# 232, 232 and 40 (224, 224 and 56, or 216, 216 and 72, with a decay per channel), or 240, 240 and 24.
_WARP_SPECIALIZED_REGISTERS = 168
_KEY_TILE = 64  # keys per step of the portable preparations for decays per channel; ptxas miscompiled narrower products
_MARKED_HEADS = 8  # heads per program of the portable DPLR kernels that compute marked chunks alone


def _scan_tiles(problem: Problem, launch: Any) -> Tiles:
    return Tiles(values=value_tile(launch.tile, problem.V))


def _prepare_tiles(problem: Problem, launch: Any) -> Tiles:
    return Tiles(values=launch.tile, keys=_KEY_TILE)


def _marked_prepare_tiles(problem: Problem, launch: Any) -> Tiles:
    return Tiles(launch.tile, _KEY_TILE, min(power_of_two(problem.HV), _MARKED_HEADS))


def _gradients_tiles(problem: Problem, launch: Any) -> Tiles:
    widest = key_tiles(problem.K)[0]
    keys = min(max(launch.keys or widest, min_key_tile(problem.saved_dtype)), widest)
    return Tiles(value_tile(launch.tile, problem.V), keys)


def _marked_gradients_tiles(problem: Problem, launch: Any) -> Tiles:
    return _gradients_tiles(problem, launch)._replace(heads=min(power_of_two(problem.HV), _MARKED_HEADS))


def _most_registers(problem: Problem, launch: Any, chunk: int) -> Options:
    return Options(launch.warps, launch.stages, most_registers(launch.warps))


def _prepare_options(problem: Problem, launch: Any, chunk: int) -> Options:
    if problem.terms == 2 or problem.dtype == torch.float32:
        return _most_registers(problem, launch, chunk)
    three_programs_per_sm = not problem.grouped and chunk == 64
    return Options(launch.warps, launch.stages, 160 if three_programs_per_sm else None)


def _sm90_prepare_options(problem: Problem, launch: Any, chunk: int) -> Options:
    """Choose the registers for three programs per SM with grouped heads, else five.

    With one term five need no limit, except with the step sizes of EFLA and Longhorn, which take a few registers more.
    """
    if problem.grouped:
        return Options(registers=168)
    return Options(registers=96 if problem.terms == 2 or problem.reparam != "none" else None)


def _sm90_channel_prepare_options(problem: Problem, launch: Any, chunk: int) -> Options:
    """Choose the registers for three programs per SM, or two if the kernel would spill at that."""
    before = problem.erase_from == "previous" or problem.read == "before"
    three = problem.K <= 128 and not problem.erase_key and not before
    return Options(registers=168 if three else None)


def _gradients_options(problem: Problem, launch: Any, chunk: int) -> Options:
    small = problem.saved_dtype.itemsize == 2 and launch.warps == 4
    small = small and max(_gradients_tiles(problem, launch).keys, launch.tile) <= 64
    three_programs_per_sm = small and not problem.delta
    return Options(launch.warps, launch.stages, 168 if three_programs_per_sm else most_registers(launch.warps))


def _sm90_dplr_gradients_options(problem: Problem, launch: Any, chunk: int) -> Options:
    two_programs_per_sm = problem.V == 64
    return Options(8, 1, 128 if two_programs_per_sm else None)


def _decode_tiles(problem: Problem, launch: Any) -> Tiles:
    return Tiles(values=min(launch.tile, power_of_two(problem.V)))


def _decode_options(problem: Problem, launch: Any, chunk: int) -> Options:
    elements = power_of_two(problem.K) * _decode_tiles(problem, launch).values
    return Options(limit_warps(launch.warps, elements), launch.stages)


_SM90 = Support(
    architectures=frozenset({"sm90"}), dtypes=(torch.float16, torch.bfloat16), aligned=True,
    transitions=("additive", "delta"),
)  # fmt: skip
# with more keys and a decay per channel or an erase key two stages of the ring buffer do not fit
_SM90_SCAN = _SM90._replace(values=range(33, 513), extra_keys=range(1, 129))
_SM90_SWEEP = _SM90._replace(keys=range(65, 129), decays=SCALAR_DECAYS, own_key=False)
_SM90_DPLR = _SM90._replace(transitions=("dplr",), decays=("channel",), keys=(64, 128), values=(64, 128))
_SCALAR = Support(transitions=("additive", "delta"), decays=SCALAR_DECAYS)
_CHANNEL = Support(transitions=("additive", "delta"), decays=("channel",))
_DPLR = Support(transitions=("dplr",), decays=("channel",))
_NARROWED_TILES = fixed_tiles(values=128, narrow=64)

_GATES = Kernel(
    "gates_kernel", f"{_PORTABLE}.prepare", "prepare", "portable",
    support=_SCALAR._replace(transitions=("additive",)), programs=per_chunk_and_heads,
    tiles=lambda problem, launch: Tiles(heads=min(power_of_two(problem.HV), 16)), options=fixed_options(),
)  # fmt: skip
_DPLR_PREPARE = Kernel(
    "dplr_prepare_kernel", f"{_PORTABLE}.channel.dplr_prepare", "prepare", "portable",
    support=_DPLR, programs=per_chunk_and_heads, tiles=_prepare_tiles, options=_most_registers,
)  # fmt: skip
_DPLR_GRADIENTS = Kernel(
    "dplr_gradients_kernel", f"{_PORTABLE}.channel.dplr_gradients", "gradients", "portable",
    support=_DPLR, programs=per_chunk_and_key_tile, tiles=_gradients_tiles, options=_most_registers,
)  # fmt: skip
_SCAN = Kernel(
    "scan_kernel", f"{_PORTABLE}.scan", "scan", "portable",
    support=Support(), programs=per_segment, tiles=_scan_tiles, options=_most_registers,
)  # fmt: skip
_SM90_SCAN_KERNEL = Kernel(
    "sm90_scan_kernel", f"{_GLUON}.scan", "scan", "sm90",
    support=_SM90_SCAN, programs=per_segment, tiles=_NARROWED_TILES,
    options=fixed_options(registers=_WARP_SPECIALIZED_REGISTERS), takes_rows=True,
)  # fmt: skip
_REVERSE = Kernel(
    "reverse_kernel", f"{_PORTABLE}.reverse", "reverse", "portable",
    support=Support(), programs=per_segment, tiles=_scan_tiles, options=_most_registers,
)  # fmt: skip

# The versions of each phase, in the order of preference.
KERNELS: dict[str, list[Kernel]] = {
    "prepare": [
        _GATES._replace(version="sm90", support=_SM90._replace(transitions=("additive",), decays=SCALAR_DECAYS)),
        Kernel(
            "sm90_prepare_kernel", f"{_GLUON}.prepare", "prepare", "sm90",
            support=_SM90._replace(transitions=("delta",), decays=SCALAR_DECAYS), programs=per_chunk_and_key_head,
            tiles=fixed_tiles(), options=_sm90_prepare_options,
        ),
        Kernel(
            "sm90_channel_prepare_kernel", f"{_GLUON}.channel_prepare", "prepare", "sm90",
            support=_SM90._replace(decays=("channel",)), programs=per_chunk_and_heads, tiles=fixed_tiles(),
            options=_sm90_channel_prepare_options,
        ),
        Kernel(
            "sm90_dplr_prepare_kernel", f"{_GLUON}.dplr_prepare", "prepare", "sm90",
            support=_SM90_DPLR, programs=per_chunk_and_heads, tiles=fixed_tiles(), options=fixed_options(),
            marked=_DPLR_PREPARE._replace(tiles=_marked_prepare_tiles),
        ),
        _GATES,
        Kernel(
            "prepare_kernel", f"{_PORTABLE}.prepare", "prepare", "portable",
            support=_SCALAR._replace(transitions=("delta",)), programs=per_chunk_and_key_head, tiles=_prepare_tiles,
            options=_prepare_options,
        ),
        Kernel(
            "channel_prepare_kernel", f"{_PORTABLE}.channel.prepare", "prepare", "portable",
            support=_CHANNEL, programs=per_chunk_and_heads, tiles=_prepare_tiles, options=_most_registers,
        ),
        _DPLR_PREPARE,
    ],
    "scan": [_SM90_SCAN_KERNEL, _SCAN],
    "recompute": [_SM90_SCAN_KERNEL._replace(phase="recompute"), _SCAN._replace(phase="recompute")],
    "reverse": [
        # one program per sequence and head, 128 values, and no other program adds to its key gradients
        Kernel(
            "sm90_fused_backward_kernel", f"{_GLUON}.fused_backward", "reverse", "fused",
            support=_SM90_SWEEP._replace(values=range(33, 129), grouped=False), programs=per_sequence,
            tiles=fixed_tiles(128, 64), options=fixed_options(8, _WARP_SPECIALIZED_REGISTERS),
            replaces=("recompute", "gradients"),
        ),
        Kernel(
            "sm90_backward_sweep_kernel", f"{_GLUON}.sweep", "reverse", "sm90",
            support=_SM90_SWEEP._replace(values=(*range(33, 129), 256, 384, 512)), programs=per_segment,
            tiles=fixed_tiles(128, 64), options=fixed_options(8, _WARP_SPECIALIZED_REGISTERS), replaces=("gradients",),
        ),
        Kernel(
            "sm90_reverse_kernel", f"{_GLUON}.reverse", "reverse", "sm90",
            support=_SM90_SCAN, programs=per_segment, tiles=_NARROWED_TILES,
            options=fixed_options(registers=_WARP_SPECIALIZED_REGISTERS), takes_rows=True,
        ),
        _REVERSE,
    ],
    "gradients": [
        Kernel(
            "sm90_gradients_kernel", f"{_GLUON}.gradients", "gradients", "sm90",
            support=_SM90._replace(decays=SCALAR_DECAYS, values=range(1, 513)), programs=per_chunk_and_key_tile,
            tiles=fixed_tiles(0, 64), options=fixed_options(),
        ),
        Kernel(
            "sm90_channel_gradients_kernel", f"{_GLUON}.channel_gradients", "gradients", "sm90",
            support=_SM90._replace(transitions=("delta",), decays=("channel",), values=range(1, 513)),
            programs=per_chunk_and_key_tile, tiles=fixed_tiles(0, 64), options=fixed_options(), takes_rows=True,
        ),
        Kernel(
            "sm90_additive_gradients_kernel", f"{_GLUON}.additive_gradients", "gradients", "sm90",
            support=_SM90._replace(transitions=("additive",), decays=("channel",), values=range(1, 513)),
            programs=per_chunk_and_key_tile, tiles=fixed_tiles(0, 64), options=fixed_options(), takes_rows=True,
        ),
        Kernel(
            "sm90_dplr_gradients_kernel", f"{_GLUON}.dplr_gradients", "gradients", "sm90",
            # factors of up to 2^60 exceed the range of float16
            support=_SM90_DPLR._replace(dtypes=(torch.bfloat16,)), programs=per_chunk_and_key_tile,
            tiles=fixed_tiles(0, 64), options=_sm90_dplr_gradients_options,
            marked=_DPLR_GRADIENTS._replace(tiles=_marked_gradients_tiles),
        ),
        Kernel(
            "gradients_kernel", f"{_PORTABLE}.gradients", "gradients", "portable",
            support=_SCALAR, programs=per_chunk_and_key_tile, tiles=_gradients_tiles, options=_gradients_options,
        ),
        Kernel(
            "channel_gradients_kernel", f"{_PORTABLE}.channel.gradients", "gradients", "portable",
            support=_CHANNEL, programs=per_chunk_and_key_tile, tiles=_gradients_tiles, options=_most_registers,
        ),
        _DPLR_GRADIENTS,
    ],
    "decode": [
        Kernel(
            "decode_kernel", f"{_DECODE}.step", "decode", "portable",
            support=Support(), programs=per_sequence_and_value_tile, tiles=_decode_tiles, options=_decode_options,
        )
    ],
    "fused_step": [
        Kernel(
            "fused_step_kernel", f"{_DECODE}.fused_step", "fused_step", "portable",
            support=Support(), programs=per_sequence, tiles=_decode_tiles, options=_decode_options,
        )
    ],
}  # fmt: skip
PHASES = ("prepare", "scan", "recompute", "reverse", "gradients")  # of one update; the others are of one token
STEPS = ("decode", "fused_step")  # of one token: of the update, of a mixer

# Kernels that have one version, and follow from the others.
SEGMENT_ENDS = _SCAN._replace(programs=per_segment_with_map)
SEGMENT_MAPS = _SCAN._replace(programs=per_segment_of_map)
SEGMENT_GRADIENTS = _REVERSE
COMBINE = Kernel(
    "combine_kernel", f"{_PORTABLE}.combine", "combine", "portable",
    support=Support(), programs=per_sequence_and_value_tile,
    tiles=lambda problem, launch: Tiles(values=value_tile(64, problem.V)), options=fixed_options(),
)  # fmt: skip
SUM_GROUPS = Kernel(
    "sum_groups_kernel", f"{_PORTABLE}.gradients", "group sums", "portable",
    support=Support(), programs=per_chunk_and_key_head, tiles=fixed_tiles(keys=128), options=fixed_options(warps=8),
)  # fmt: skip
GATE_GRADIENTS = Kernel(
    "gate_gradients_kernel", f"{_PORTABLE}.gradients", "gate gradients", "portable",
    support=Support(), programs=per_chunk_and_heads, tiles=fixed_tiles(), options=fixed_options(warps=1),
)  # fmt: skip
TAIL = Kernel(
    "zero_tail_kernel", f"{_PORTABLE}.zero_tail", "tail", "portable",
    support=Support(), programs=lambda problem, span, tiles: 64, tiles=fixed_tiles(), options=fixed_options(),
)  # fmt: skip


def versions(phase: str) -> tuple[str, ...]:
    """Return the versions of a phase that a launch config may ask for."""
    return tuple(dict.fromkeys(kernel.version for kernel in KERNELS.get(phase, ())))


def choose(phase: str, version: str, problem: Problem, device: DeviceSpec, chunk: int = CHUNK) -> Kernel | None:
    """Return the kernel of a version that takes a problem on a device; None if there is none."""
    return next((k for k in KERNELS[phase] if k.version == version and k.support.takes(problem, device, chunk)), None)


def takes(phase: str, version: str, problem: Problem, device: DeviceSpec, chunk: int = CHUNK) -> bool:
    """Whether a version of a phase takes a problem on a device."""
    return choose(phase, version, problem, device, chunk) is not None


def saves_16_bits(problem: Problem, device: DeviceSpec) -> bool:
    """Whether an update with split terms saves 16 bits: if kernels that need it take it then.

    They have P in one term, which with few keys costs o more than it may: 5.1e-3 with 8 keys, no beta and no decay.
    """
    many_keys = problem.K > 32 if problem.erase_key else sweeps(problem.K, problem.V)
    if not problem.split_terms or problem.dtype != torch.bfloat16 or problem.by_channel or not many_keys:
        return False
    saved = problem._replace(saves_16_bits=True)
    return any(kernel.support.aligned and kernel.support.takes(saved, device, CHUNK) for kernel in KERNELS["scan"])


def sweeps(K: int, V: int) -> bool:
    """Whether the sm90 reverse scan computes the gradients, too.

    More keys do not fit its registers, with fewer keys half of its work would be padding, and a program has 128 values.
    """
    return 64 < K <= 128 and (V <= 128 or V % 128 == 0)
