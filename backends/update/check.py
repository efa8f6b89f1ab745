"""Checks of operands, shared by all backends, so that no kernel receives a wrong shape, dtype or device.

B batch, T time, H key heads, HV value heads, K key width, V value width, N packed sequences
"""

from math import inf
from types import UnionType
from typing import Any

import torch
from torch import Tensor

from deltazoo.backends.io.errors import (
    DeviceError,
    DtypeError,
    InputError,
    OperandError,
    ShapeError,
    ValueRangeError,
    cut,
)
from deltazoo.backends.ops.decode_step import FusedDecodeInputs, FusedDecodeStep
from deltazoo.backends.torch_ext.modes import values_are_readable
from deltazoo.backends.update.base import Draft, UpdateInputs, state_dtype
from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.backends.update.varlen import packing_problems, sequence_count

FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Operands in `state_dtype`, and operands in either that or the dtype of q.
_STATE_DTYPE_OPERANDS = ("log_decay", "step", "rate", "state")
_EITHER_DTYPE_OPERANDS = ("beta", "erase", "write")
_MAX_CHECKED = 1024
# Layouts that have passed, because the checks take longer than to look up the layout.
_checked: set[tuple[Any, ...]] = set()


def check_integer(name: str, value: object, minimum: int = 1) -> None:
    """Raise ValueRangeError unless `value` is an integer >= `minimum`; bool and Tensor are not accepted."""
    # isinstance first: torch.compile can trace it, but not hasattr.
    is_integer = isinstance(value, int) or hasattr(value, "__index__")
    if not is_integer or isinstance(value, bool | Tensor) or value < minimum:  # type: ignore[operator]
        raise ValueRangeError(f"{name} must be an integer >= {minimum}, got {value!r}")


def check_type(name: str, value: object, types: type | UnionType, rule: str) -> None:
    """Raise InputError unless `value` has one of the types. Args: rule: the types as a phrase, such as "a path"."""
    if not isinstance(value, types):
        raise InputError(f"{name} must be {rule}, got {cut(value)}")


def check(spec: UpdateSpec, inputs: UpdateInputs) -> None:
    """Raise unless the operands match the spec: presence, shapes, dtypes and a common device.

    If the values may be read (CPU tensors, outside torch.compile and torch.func), it also checks that decays have the
    right sign and are finite, and that cu_seqlens rises from 0 to T. `validate` checks values on any device.

    Raises: OperandError, ShapeError, DtypeError, DeviceError, ValueRangeError.
    """
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]
    layout = None if traced else _layout(spec, inputs)
    if layout is None or layout not in _checked:
        shapes = _required_shapes(spec, inputs)
        _check_presence("spec", spec, inputs, shapes, ("state", "cu_seqlens"))
        _check_shapes(spec, inputs, shapes)
        _check_dtypes(inputs)
        if layout is not None:
            if len(_checked) >= _MAX_CHECKED:
                _checked.clear()
            _checked.add(layout)
    if values_are_readable(*inputs):
        problems = _sign_problems(inputs)
        if inputs.cu_seqlens is not None:
            problems += packing_problems(inputs.cu_seqlens, inputs.q.shape[1])
        if problems:
            raise ValueRangeError(" ".join(problems))


def _layout(spec: UpdateSpec, inputs: UpdateInputs) -> tuple[Any, ...] | None:
    """Return what the checks of layouts read; None if an operand is no tensor or has a symbolic size."""
    try:
        operands = [None if x is None else (type(x), x.shape, x.dtype, x.device) for x in inputs]
        layout = (spec, type(inputs), *operands)
        hash(layout)
    except (AttributeError, TypeError):
        return None
    return layout


def check_step(spec: UpdateSpec, inputs: UpdateInputs, states: Tensor, slots: Tensor | None) -> None:
    """Raise unless `states` and `slots` fit the decoding of one token per row; slot values are checked on the CPU."""
    T = inputs.q.shape[1]
    if T != 1:
        raise ShapeError(f"step_ decodes one token per row: q must have T = 1, got T = {T}")
    _check_decode("step_", inputs, states, slots)


def check_verify(spec: UpdateSpec, inputs: UpdateInputs, states: Tensor, slots: Tensor | None) -> None:
    """Raise unless `states` and `slots` fit n >= 1 drafted tokens per row; slot values are checked on the CPU."""
    if inputs.q.shape[1] < 1:
        raise ShapeError("verify_ decodes at least one drafted token per row: q must have T >= 1, got T = 0")
    _check_decode("verify_", inputs, states, slots)


def check_commit(spec: UpdateSpec, draft: Draft, states: Tensor, slots: Tensor | None, accepted: Tensor) -> None:
    """Raise unless the arguments of `commit_` fit each other; the values of `accepted` are not read."""
    if not isinstance(draft, Draft):
        raise OperandError(f"draft must be the Draft that verify_ returned, got {type(draft).__name__}")
    inputs = draft.inputs
    check(spec, inputs)
    check_verify(spec, inputs, states, slots)
    B, n, HV, V = inputs.q.shape[0], inputs.q.shape[1], *inputs.v.shape[-2:]
    required: dict[str, tuple[Tensor, tuple[int, ...], torch.dtype]] = {"accepted": (accepted, (B,), torch.int32)}
    if draft.values is not None:
        required["draft.values"] = (draft.values, (B, n, spec.micro_steps, HV, V), state_dtype(inputs.q.dtype))
    for name, (tensor, shape, dtype) in required.items():
        if not isinstance(tensor, Tensor):
            raise OperandError(f"{name} must be a tensor, got {type(tensor).__name__}")
        _check_shape(name, tensor, shape)
        if tensor.dtype != dtype:
            raise DtypeError(f"{name} must be {dtype}, got {tensor.dtype}")
        if tensor.device != inputs.q.device:
            raise DeviceError(f"{name} must be on {inputs.q.device}, where the operands are, got {tensor.device}")


def check_fused_decode(
    step: FusedDecodeStep, inputs: FusedDecodeInputs, states: Tensor, slots: Tensor | None, tokens: int | None = 1
) -> None:
    """Raise unless operands, `states` and `slots` match a fused decode step; slot values are checked on the CPU.

    Args: tokens: number of tokens per row; None: any.
    """
    _check_sizes(step)
    if not isinstance(inputs.qkv, Tensor) or inputs.qkv.dim() != 3:
        got = list(inputs.qkv.shape) if isinstance(inputs.qkv, Tensor) else type(inputs.qkv).__name__
        raise ShapeError(f"qkv must be a tensor of shape [B, 1, {step.channels}], got {got}")
    _check_states(states, slots, inputs.qkv, (step.HV, step.K, step.V))
    shapes = step.operands(inputs.qkv.shape[0], states.shape[0], inputs, tokens or inputs.qkv.shape[1])
    _check_presence("step", step, inputs, shapes)
    for name, tensor in zip(inputs._fields, inputs, strict=True):
        if tensor is None:
            continue
        _check_shape(name, tensor, shapes[name])
        if tensor.device != inputs.qkv.device:
            raise DeviceError(f"{name} must be on {inputs.qkv.device}, where qkv is, got {tensor.device}")
        if tensor.dtype not in FLOAT_DTYPES:
            raise DtypeError(f"{name} must be float64, float32, bfloat16 or float16, got {tensor.dtype}")


def _check_decode(method: str, inputs: UpdateInputs, states: Tensor, slots: Tensor | None) -> None:
    """Check that a batch of decoded tokens is not packed and has no state, and check `states` and `slots`."""
    if inputs.cu_seqlens is not None:
        raise OperandError(f"{method} does not take cu_seqlens: pass each sequence as a row, with a slot for its state")
    if inputs.state is not None:
        raise OperandError(f"{method} reads `states`; inputs.state must be None")
    _check_states(states, slots, inputs.q, (inputs.v.shape[-2], inputs.q.shape[3], inputs.v.shape[-1]))


def _check_sizes(step: FusedDecodeStep) -> None:
    """Check that the parts, the heads and the options of a step are consistent."""
    keys, values, n = step.H * step.K, step.HV * step.V, step.spec.householders
    got = [part.channels for part in step.parts]
    if got != [keys, n * keys, n * values]:
        raise ShapeError(f"parts must be of q, k and v, of {[keys, n * keys, n * values]} channels, got {got}")
    if step.HV % step.H:
        raise ShapeError(f"the heads of v must be a multiple of the heads of q, got HV={step.HV}, H={step.H}")
    if step.scale_v_by_dt and step.spec.decay != "head":
        raise OperandError(f"scale_v_by_dt must be False with decay={step.spec.decay!r}: there is no dt, got True")
    if step.temperature is not None and (step.scale_v_by_dt or step.decay_bound is not None):
        raise OperandError(f"temperature must be None with scale_v_by_dt or decay_bound, got {step.temperature}")


def _check_states(states: Tensor, slots: Tensor | None, x: Tensor, sizes: tuple[int, int, int]) -> None:
    """Check `states` and `slots` against the batch rows of the operand x. sizes: HV, K, V."""
    B = x.shape[0]
    for name, tensor in (("states", states), ("slots", slots)):
        if tensor is not None and not isinstance(tensor, Tensor):
            raise OperandError(f"{name} must be a tensor, got {type(tensor).__name__}")
    _check_shape("states", states, (states.shape[0] if slots is not None and states.dim() else B, *sizes))
    if states.dtype != state_dtype(x.dtype):
        raise DtypeError(f"states must be {state_dtype(x.dtype)}, got {states.dtype}")
    if states.device != x.device:
        raise DeviceError(f"states must be on {x.device}, where the operands are, got {states.device}")
    if slots is not None:
        _check_shape("slots", slots, (B,))
        if slots.dtype != torch.int64:
            raise DtypeError(f"slots must be int64, got {slots.dtype}")
        if slots.device != x.device:
            raise DeviceError(f"slots must be on {x.device}, where the operands are, got {slots.device}")
        if values_are_readable(slots):
            values: list[int] = slots.tolist()
            rows = [slot for slot in values if slot != -1]
            if len(set(rows)) < len(rows) or any(not 0 <= row < states.shape[0] for row in rows):
                raise ValueRangeError(
                    f"slots must be -1 or distinct rows of the {states.shape[0]} states, got {values}"
                )


def validate(spec: UpdateSpec, inputs: UpdateInputs) -> None:
    """Check operands including their values, on any device. On a GPU this synchronises.

    In addition to the checks of every call: all operands are finite, decays are <= 0, beta (with beta="separate" the
    erase) is in the interval for which the spectrum of the spec is stated, and cu_seqlens rises from 0 to T.

    Raises: InputError or a subclass; ValueRangeError lists every violation.
    """
    check(spec, inputs)
    problems = _sign_problems(inputs) + packing_problems(inputs.cu_seqlens, inputs.q.shape[1])
    for name, tensor in zip(inputs._fields, inputs, strict=True):
        if tensor is None or not tensor.is_floating_point() or not tensor.numel():
            continue
        nonfinite = tensor.numel() - int(torch.isfinite(tensor).sum())
        if nonfinite:
            problems.append(f"{name} must be finite, got {nonfinite} values that are not.")
    name, strength = ("erase", inputs.erase) if spec.beta == "separate" else ("beta", inputs.beta)
    if strength is not None and strength.numel():
        low, high = float(strength.min()), float(strength.max())
        upper = inf if spec.reparam != "none" else 1.0
        if low < 0 or high > upper:
            rule = ">= 0" if spec.reparam != "none" else "in [0, 1] (the lowering doubles it for negative eigenvalues)"
            problems.append(f"{name} must be {rule}, got values from {low:g} to {high:g}.")
    if problems:
        raise ValueRangeError(" ".join(problems))


def _required_shapes(spec: UpdateSpec, inputs: UpdateInputs) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all operands, from the sizes of q and v, which are checked here."""
    if not isinstance(inputs, UpdateInputs):
        raise OperandError(f"inputs must be deltazoo.UpdateInputs, got {type(inputs).__name__}")
    for name in ("q", "k", "v"):
        if not isinstance(getattr(inputs, name), Tensor):
            raise OperandError(f"{name} must be a tensor, got {type(getattr(inputs, name)).__name__}")
    if inputs.q.dim() != 4:
        raise ShapeError(f"q must have shape [B, T, H, K], got {list(inputs.q.shape)}")
    dims = 5 if spec.householders > 1 else 4
    if inputs.v.dim() != dims:
        form = "[B, T, n, HV, V]" if dims == 5 else "[B, T, HV, V]"
        raise ShapeError(f"v must have shape {form} for householders={spec.householders}, got {list(inputs.v.shape)}")
    B, T, H, K = inputs.q.shape
    HV, V = inputs.v.shape[-2:]
    if min(H, K, HV, V) < 1:
        raise ShapeError(f"H, K, HV and V must be at least 1, got H={H}, K={K}, HV={HV}, V={V}")
    if HV % H:
        raise ShapeError(f"the heads of v must be a multiple of the heads of q, got HV={HV}, H={H}")
    return spec.operands(B, T, H, HV, K, V)


def _check_presence(
    kind: str,
    spec: UpdateSpec | FusedDecodeStep,
    inputs: UpdateInputs | FusedDecodeInputs,
    shapes: dict[str, tuple[int, ...]],
    optional: tuple[str, ...] = (),
) -> None:
    """Check that exactly the required operands are present. kind: the name of `spec` in error messages."""
    for name, tensor in zip(inputs._fields, inputs, strict=True):
        if name in shapes and tensor is None:
            raise OperandError(f"{name} is missing: this {kind} needs it with shape {list(shapes[name])} ({spec!r})")
        if tensor is not None and name not in shapes and name not in optional:
            raise OperandError(f"{name} must be None: the operands of this {kind} are {', '.join(shapes)} ({spec!r})")
        if tensor is not None and not isinstance(tensor, Tensor):
            raise OperandError(f"{name} must be a tensor or None, got {type(tensor).__name__}")


def _check_shapes(spec: UpdateSpec, inputs: UpdateInputs, shapes: dict[str, tuple[int, ...]]) -> None:
    B, _, _, K = inputs.q.shape
    HV, V = inputs.v.shape[-2:]
    for name, shape in shapes.items():
        got = tuple(getattr(inputs, name).shape)
        if name == "log_decay" and spec.decay == "fixed" and got == (HV, K):
            continue
        if got != shape:
            other = f" or {[HV, K]}" if name == "log_decay" and spec.decay == "fixed" else ""
            raise ShapeError(f"{name} must have shape {list(shape)}{other}{_cause(spec, name)}, got {list(got)}")
    N = sequence_count(inputs.cu_seqlens, B)
    if inputs.state is not None:
        _check_shape("state", inputs.state, (N, HV, K, V))


def _cause(spec: UpdateSpec, name: str) -> str:
    """Return the fields of the spec that determine the shape of an operand, as part of an error message."""
    field = {
        "log_decay": "decay", "step": "decay", "rate": "decay", "beta": "beta", "erase": "beta", "write": "beta",
        "erase_key": "erase_key", "a": "transition", "b": "transition",
    }.get(name)  # fmt: skip
    fields = [f"{field}={getattr(spec, field)!r}"] if field else []
    if spec.householders > 1 and name in ("k", "v", "beta", "erase", "write", "erase_key"):
        fields.append(f"householders={spec.householders}")
    return f" for {', '.join(fields)}" if fields else ""


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ShapeError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")


def _check_dtypes(inputs: UpdateInputs) -> None:
    dtype, device = inputs.q.dtype, inputs.q.device
    if dtype not in FLOAT_DTYPES:
        raise DtypeError(f"q must be float64, float32, bfloat16 or float16, got {dtype}")
    for name, tensor in zip(inputs._fields, inputs, strict=True):
        if tensor is None:
            continue
        if tensor.device != device:
            raise DeviceError(f"{name} must be on {device}, where q is, got {tensor.device}")
        if name == "cu_seqlens":
            if tensor.dtype != torch.int32:
                raise DtypeError(f"cu_seqlens must be int32, got {tensor.dtype}")
        elif name in _STATE_DTYPE_OPERANDS:
            if tensor.dtype != state_dtype(dtype):
                raise DtypeError(f"{name} must be {state_dtype(dtype)} with q in {dtype}, got {tensor.dtype}")
        elif name in _EITHER_DTYPE_OPERANDS:
            allowed = dict.fromkeys((dtype, state_dtype(dtype)))
            if tensor.dtype not in allowed:
                rule = " or ".join(map(str, allowed))
                raise DtypeError(f"{name} must be {rule} with q in {dtype}, got {tensor.dtype}")
        elif tensor.dtype != dtype:
            raise DtypeError(f"{name} must be {dtype} like q, got {tensor.dtype}")


def _sign_problems(inputs: UpdateInputs) -> list[str]:
    problems = []
    for name, sign, rule in (("log_decay", 1, "<= 0"), ("step", -1, ">= 0"), ("rate", 1, "<= 0")):
        tensor = getattr(inputs, name)
        if tensor is None or not tensor.numel():
            continue
        # NaN passes, as in every other operand: a training run that diverges must not raise here.
        values = torch.nan_to_num(tensor.detach() * sign, nan=0.0, posinf=inf, neginf=-inf)
        low, high = (float(x) for x in values.aminmax())
        if high > 0:
            problems.append(f"{name} must be {rule}, got {high * sign:g}.")
        elif low == -inf:
            problems.append(f"{name} must be finite, got {low * sign:g}.")
    return problems
