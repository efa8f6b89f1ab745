"""Operator and launch of the Triton kernel of the fused decode step.

B batch, C channels of the projection, W taps, H key heads, HV value heads, K key width, V value width
"""

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.ops.decode_step import FusedDecodeInputs, FusedDecodeStep, fused_decode_spec_reasons
from deltazoo.backends.ops.short_conv import EPS
from deltazoo.backends.torch_ext.custom_op import mark_written, operator
from deltazoo.backends.torch_ext.devices import DeviceSpec
from deltazoo.backends.torch_ext.symbolic_sizes import is_known
from deltazoo.backends.triton.chunk.heuristic import heuristic
from deltazoo.backends.triton.config import Launch, LaunchConfig, parse
from deltazoo.backends.triton.conv.op import too_many_taps
from deltazoo.backends.triton.problem import Problem, architecture, device_spec
from deltazoo.backends.triton.runtime.precompile import begin, compiled_ahead, device_of
from deltazoo.backends.triton.runtime.table import launch_config
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import cdiv, limit_warps, power_of_two

if TYPE_CHECKING:
    from deltazoo.backends.triton.decode.kernels.fused_step import StepTraits

WIDEST_VALUE = 512
_MANY_HOUSEHOLDERS = 4  # whose keys take as many registers as a tile of 64 columns
_SPLIT_TILE, _SPLIT_WARPS, _SPLIT_TILES, _FINISH_WARPS = 32, 4, 1, 4
# Of the convolution. For wider heads a warp computes 32 channels: with 256 of 400, the 16 convolutions of one row of
# gated-deltanet-1.3b on an H200 take 120 us in place of 50. Each layer waits for the code, of which there is more.
_CONVOLVE_WARPS, _CONVOLVED = 2, 128
_WIDE_VALUES = 256  # from which a program with all columns of a head leaves most of a device idle
ROW_STRIDED = ("qkv", "beta", "decay", "gate", "erase", "write")  # slices of one projection: their rows may be apart
_USUAL_PROCESSORS = 132  # of an H100 and an H200
_MAX_UNROLLED = 16  # micro-steps times tiles: the kernel unrolls both loops, and compiles for seconds beyond that


def _widest_tile(householders: int) -> int:
    """Return the most state columns that fit in registers beside the keys of so many householders."""
    return 64 if householders < _MANY_HOUSEHOLDERS else 32


def _tile(launch: Launch, V: int, householders: int) -> int:
    """Return the state columns that a program processes at a time.

    At most as many as there are and as fit in registers; at least as many as keep the unrolled loops short.
    """
    tile = launch.tile
    if householders >= _MANY_HOUSEHOLDERS:
        tile = min(tile, _widest_tile(householders))
    return max(min(tile, power_of_two(V)), power_of_two(cdiv(householders * V, _MAX_UNROLLED)))


def _split_tile(device: DeviceSpec, heads: int, V: int, householders: int) -> int:
    """Return the state columns of a program of a split step; 0: a program computes all columns of a head.

    A head's programs each compute its keys again, so that a split pays for few heads and for wide values. H100, us,
    split and not: 9 heads of 200 x 400 6.4 and 25.2 with one row, 83 and 103 with 32; 16 heads of 128 x 128 5.2 and
    5.6 with one row, 8.2 and 7.8 with four, 35 and 29 with 32.
    """
    if V <= _SPLIT_TILE or householders > 2:
        return 0
    return _SPLIT_TILE if 4 * heads <= device.processors or V > _WIDE_VALUES else 0


def reads_convolved(step: FusedDecodeStep, rows: int) -> bool:
    """Whether the product before a step of so many rows should convolve q, k and v: not before one that is split.

    Each program of a split step would compute the norms of its head's keys again. Captured steps on an H200, us,
    without and with the convolution in the product: not split mamba2 1125 and 1104 with one row, 3031 and 3024 with 32,
    kda 1630 and 1602 with 32; split kda 969 and 1010 with one row, gated-deltanet-h1-1.3b 1800 and 1818 with 32.
    """
    if step.V <= _SPLIT_TILE or step.spec.householders > 2:
        return True
    return step.V <= _WIDE_VALUES and is_known(4 * rows * step.HV > _USUAL_PROCESSORS)


def unsupported(step: FusedDecodeStep) -> list[str]:
    """Return why the kernel does not support a step, beyond the limits of the update's spec; [] if it does."""
    reasons = fused_decode_spec_reasons(step.spec) + too_many_taps(step.taps)
    if step.V > WIDEST_VALUE:
        reasons.append(f"V must be at most {WIDEST_VALUE} in a fused step, got {step.V}.")
    n = step.spec.householders
    most = max(m for m in range(n + 1) if m * cdiv(step.V, _widest_tile(m)) <= _MAX_UNROLLED)
    if n > most > 0:
        reasons.append(f"householders must be at most {most} in a fused step with V = {step.V}, got {n}.")
    units = [part.unit for part in step.parts]
    if any(size not in (0, step.K) for size in units[:2]) or any(units[2:]):
        reasons.append(f"heads of q and k alone, of K = {step.K} channels, may have a norm, got {units}.")
    return reasons


class StepOptions(NamedTuple):
    """Static arguments of the operator: a `FusedDecodeStep` and its spec, without sizes.

    Args:
        silu: of q, k and v.
        l2_norm: of q and k.
        erase_factor, write_factor: erase and write strengths divided by beta.
    """

    heads: int
    silu: list[bool]
    l2_norm: list[bool]
    delta: bool
    erase_from: str
    read: str
    scale_v_by_dt: bool
    gate_before_norm: bool
    reparam: str
    norm: str
    activation: str
    scale: float
    erase_factor: float
    write_factor: float
    eps: float
    decay_bound: float | None
    temperature: float | None

    @classmethod
    def of(cls, step: FusedDecodeStep) -> "StepOptions":
        """Read the options off a step."""
        spec = step.spec
        return cls(
            heads=step.H,
            silu=[part.silu for part in step.parts],
            l2_norm=[part.unit > 0 for part in step.parts[:2]],
            delta=spec.transition == "delta",
            erase_from=spec.erase_from,
            read=spec.read,
            scale_v_by_dt=step.scale_v_by_dt,
            gate_before_norm=step.gate_first,
            reparam=spec.reparam,
            norm=step.norm,
            activation=step.gate,
            scale=spec.scale_of(step.K),
            erase_factor=1.0 if spec.negative_eigenvalues == "off" else 2.0,
            write_factor=2.0 if spec.negative_eigenvalues == "both" else 1.0,
            eps=step.eps,
            decay_bound=step.decay_bound,
            temperature=step.temperature,
        )


def fused_decode_step_(
    step: FusedDecodeStep, inputs: FusedDecodeInputs, states: Tensor, slots: Tensor | None, config: str = ""
) -> Tensor:
    """Run the kernel; `inputs.history` and `states` change in place.

    A slot outside the pool (-1, say) accesses neither, and its output row is zero. Slots must be distinct.

    Args:
        config: launch config as JSON; "": that of the table, else of the heuristic.
    Returns: o [B, 1, HV, V].
    """
    return _fused_op(*inputs, states, slots, *StepOptions.of(step), config)


def begin_fused_step(
    step: FusedDecodeStep, inputs: FusedDecodeInputs, states: Tensor, slots: Tensor | None, config: str
) -> None:
    """Start to compile the kernels of `fused_decode_step_` in threads."""
    begin(_fused_impl, (*inputs, states, slots, *StepOptions.of(step), config))


def _fused_impl(*arguments: Any) -> Tensor:
    inputs, states, slots, options, config = _named(arguments)
    x = strided_rows(inputs)
    pool = states.contiguous()
    o = x.qkv.new_empty(x.qkv.shape[0], 1, states.shape[1], states.shape[3])
    with torch.cuda.device_of(x.qkv):
        _launch(x, pool, None if slots is None else slots.contiguous(), o, options, config)
    mark_written(states, pool)
    if inputs.history is not None and x.history is not None:
        mark_written(inputs.history, x.history)
    return o


def strided_rows(inputs: FusedDecodeInputs) -> FusedDecodeInputs:
    """Make the operands contiguous; the rows of those that are slices of one projection may be apart."""
    return FusedDecodeInputs(**{
        name: t if t is None or (name in ROW_STRIDED and t.stride(2) == 1) else t.contiguous()
        for name, t in inputs._asdict().items()
    })  # fmt: skip


def _named(arguments: tuple[Any, ...]) -> tuple[FusedDecodeInputs, Tensor, Tensor | None, StepOptions, str]:
    """Return the operator's arguments by name: inputs, states, slots, options, config."""
    n = len(FusedDecodeInputs._fields)
    inputs, (states, slots, *options, config) = arguments[:n], arguments[n:]
    return FusedDecodeInputs(*inputs), states, slots, StepOptions(*options), config


def _launch(
    x: FusedDecodeInputs, states: Tensor, slots: Tensor | None, o: Tensor, options: StepOptions, config: str
) -> None:
    """Launch the fused step, and before it the convolution if several programs read the same channels."""
    from deltazoo.backends.triton.decode.kernels.fused_step import (
        convolve_step_kernel,
        finish_step_kernel,
        fused_step_kernel,
    )
    from deltazoo.backends.triton.runtime.launcher import launcher

    (B, _, C), (rows, HV, K, V), H = x.qkv.shape, states.shape, options.heads
    n = (C - H * K) // (H * K + HV * V)
    launch = _resolve(x, states, options, n, config)
    device = device_spec(device_of(x.qkv).index)
    split = _split_tile(device, B * HV, V, n) if not config else 0
    BK, BV = power_of_two(K), split or _tile(launch, V, n)
    tiling = StepTiling(BV, _SPLIT_TILES if split else 0, architecture(device) == "sm90")
    numbers = {"scale": options.scale, "pool_rows": rows}
    given = {"states": states, "slots": slots}
    if x.weight is not None and (split or H < HV):
        y = torch.empty_like(x.qkv, dtype=torch.float32, memory_format=torch.contiguous_format)
        traits = step_traits(x, (H, HV, K, V), options, tiling, slots is not None)
        tensors = x._asdict() | given | {"x": x.qkv, "y": y}
        lanes = max(traits.BK, traits.PV)
        options_of_convolution = Options(
            _CONVOLVE_WARPS if lanes <= _CONVOLVED else lanes // 32, overlap=tiling.overlap
        )
        convolve = launcher(convolve_step_kernel, tensors, {"traits": traits}, options_of_convolution)
        convolve(B * ((1 + n) * H + n * HV), numbers)
        x = x._replace(qkv=y, weight=None, bias=None, history=None)
        options = options._replace(silu=[False] * 3, l2_norm=[False] * 2)
    traits = step_traits(x, (H, HV, K, V), options, tiling, slots is not None)
    tensors = x._asdict() | given | {"x": x.qkv, "o": o}
    finishes = split > 0 and (options.norm != "" or options.activation != "")
    if finishes:
        tensors["o"] = tensors["raw"] = o.new_empty(o.shape, dtype=torch.float32)
    warps = limit_warps(_SPLIT_WARPS if split else launch.warps, BK * BV)
    step = launcher(fused_step_kernel, tensors, {"traits": traits}, Options(warps, overlap=tiling.overlap))
    step(B * HV * (cdiv(V, BV * _SPLIT_TILES) if split else 1), numbers)
    if finishes:
        tensors["o"] = o
        run = launcher(finish_step_kernel, tensors, {"traits": traits}, Options(_FINISH_WARPS, overlap=tiling.overlap))
        run(B * HV, numbers)


class StepTiling(NamedTuple):
    """State columns of a tile, tiles of a program (0: all), and whether the kernel overlaps the one before."""

    columns: int
    split: int
    overlap: bool


def step_traits(
    x: FusedDecodeInputs, sizes: tuple[int, int, int, int], options: StepOptions, tiling: StepTiling, has_slots: bool
) -> "StepTraits":
    """Return the compile-time properties of a step with one token per row of x. Args: sizes: H, HV, K, V."""
    from deltazoo.backends.triton.decode.kernels.fused_step import StepTraits

    H, HV, K, V = sizes
    n = (x.qkv.shape[2] - H * K) // (H * K + HV * V)
    silu_q, silu_k, silu_v = options.silu
    norm_q, norm_k = options.l2_norm
    return StepTraits(
        X_STRIDE=x.qkv.stride(0), BETA_STRIDE=_row_stride(x.beta), DECAY_STRIDE=_row_stride(x.decay),
        ERASE_STRIDE=_row_stride(x.erase), WRITE_STRIDE=_row_stride(x.write), GATE_STRIDE=_row_stride(x.gate),
        H=H, HV=HV, K=K, V=V, BK=power_of_two(K), PV=power_of_two(V), BV=tiling.columns, STEPS=n,
        W=0 if x.weight is None else x.weight.shape[1],
        BIAS=x.bias is not None, SILU_Q=silu_q, SILU_K=silu_k, SILU_V=silu_v, NORM_Q=norm_q, NORM_K=norm_k,
        NORM_QK_EPS=EPS, BETA=x.beta is not None, BETA_CHANNELS=x.write is not None,
        DECAY=x.decay is not None or x.log_decay is not None, DECAY_CHANNELS=has_channel_decay(x, HV),
        DECAY_BOUND=options.decay_bound, TEMPERATURE=options.temperature, FIXED=x.log_decay is not None,
        SCALE_V_BY_DT=options.scale_v_by_dt, DELTA=options.delta,
        REPARAM=options.reparam, ERASE_FACTOR=options.erase_factor, WRITE_FACTOR=options.write_factor,
        FEEDBACK=x.feedback is not None, ERASE_PREVIOUS=options.erase_from == "previous",
        READ_BEFORE=options.read == "before", SKIP=x.skip is not None, NORM=options.norm,
        NORM_PER_HEAD=x.norm_weight is not None and x.norm_weight.numel() != V, NORM_BIAS=x.norm_bias is not None,
        NORM_EPS=options.eps, GATE=options.activation, GATE_BEFORE_NORM=options.gate_before_norm,
        SLOTS=has_slots, SPLIT=tiling.split, OVERLAP=tiling.overlap,
    )  # fmt: skip


def _resolve(x: FusedDecodeInputs, states: Tensor, options: StepOptions, n: int, config: str) -> Launch:
    """Return the launch of the given config, else that of the table (one key per token only) or the heuristic."""
    requested = parse(config).fused_step if config else None
    if requested is not None:
        return requested
    B, (_, HV, K, V), device = x.qkv.shape[0], states.shape, device_of(x.qkv)
    problem = Problem(
        x.qkv.dtype, B, 1, options.heads, HV, K, V, options.delta, erase_key=False,
        decay="fixed" if x.log_decay is not None else "none" if x.decay is None
        else "channel" if has_channel_decay(x, HV) else "head", packed=False,
    )  # fmt: skip
    select = launch_config if n == 1 and not config else _heuristic
    launch = select(problem, device_spec(device.index)).fused_step
    assert launch is not None
    return launch


@functools.lru_cache(maxsize=1024)
def _heuristic(problem: Problem, device: DeviceSpec) -> LaunchConfig:
    return heuristic(problem, device)


def has_channel_decay(x: FusedDecodeInputs, HV: int) -> bool:
    """Whether the decay is per channel. For K = 1 both kinds are the same."""
    return x.decay is not None and x.decay.shape[2] != HV


def _row_stride(x: Tensor | None) -> int:
    return 0 if x is None else x.stride(0)


def _fused_fake(*arguments: Any) -> Tensor:
    inputs, states, *_ = _named(arguments)
    return inputs.qkv.new_empty(inputs.qkv.shape[0], 1, states.shape[1], states.shape[3])


INPUTS = (
    "Tensor qkv, Tensor? weight, Tensor? bias, Tensor(a!)? history, Tensor? beta, Tensor? decay, Tensor? A_log, "
    "Tensor? dt_bias, Tensor? feedback, Tensor? correction, Tensor? skip, Tensor? norm_weight, Tensor? norm_bias, "
    "Tensor? gate, Tensor? log_decay, Tensor? erase, Tensor? write"
)
OPTIONS = (
    "int heads, bool[] silu, bool[] l2_norm, bool delta, str erase_from, str read, bool scale_v_by_dt, "
    "bool gate_before_norm, str reparam, str norm, str activation, float scale, float erase_factor, "
    "float write_factor, float eps, float? decay_bound, float? temperature"
)
_fused_op = operator(
    f"triton_fused_step_({INPUTS}, Tensor(b!) states, Tensor? slots, {OPTIONS}, str config) -> Tensor",
    _fused_impl,
    compiled_ahead(_fused_impl, _fused_fake),
)
