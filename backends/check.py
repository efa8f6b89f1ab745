"""The tensor checks that hold for every backend; a shape error never reaches a kernel.

B batch, T time, H key heads, HV value heads, K key width, V value width, N packed sequences
"""

from math import inf

import torch
from torch import Tensor

from deltazoo.backends.base import UpdateInputs, state_dtype
from deltazoo.backends.decode_step import FusedDecodeInputs, FusedDecodeStep
from deltazoo.backends.errors import DeviceError, DtypeError, InputError, OperandError, ShapeError, ValueRangeError
from deltazoo.backends.spec import UpdateSpec
from deltazoo.backends.torch_ext.modes import values_are_readable
from deltazoo.backends.varlen import packing_problems, sequence_count

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_STATE_LIKE = ("log_decay", "step", "rate", "state")
_STRENGTHS = ("beta", "erase", "write")


def check_integer(name: str, value: object, least: int = 1) -> None:
    """Raise ValueRangeError unless a value is a whole number of at least `least`."""
    whole = isinstance(value, int) or hasattr(value, "__index__")  # torch.compile traces the first alone
    if not whole or isinstance(value, bool | Tensor) or value < least:  # type: ignore[operator]
        raise ValueRangeError(f"{name} must be at least {least}, a whole number, got {value!r}")


def check(spec: UpdateSpec, inputs: UpdateInputs) -> None:
    """Raise unless the operands are those of the spec, with its shapes, dtypes and one device.

    Of CPU tensors outside torch.compile and torch.func's transforms it is checked, too, that the decay has its
    sign and is not infinite, and that cu_seqlens rises; `validate` checks them on any device.

    Raises: OperandError, ShapeError, DtypeError, DeviceError, ValueRangeError.
    """
    want = _wanted(spec, inputs)
    _check_presence("spec", spec, inputs, want, ("state", "cu_seqlens"))
    _check_shapes(spec, inputs, want)
    _check_dtypes(inputs)
    if values_are_readable(*inputs):
        problems = _sign_problems(inputs) + packing_problems(inputs.cu_seqlens, inputs.q.shape[1])
        if problems:
            raise ValueRangeError(" ".join(problems))


def check_step(spec: UpdateSpec, inputs: UpdateInputs, states: Tensor, slots: Tensor | None) -> None:
    """Raise unless `states` and `slots` fit one decoded token a row; the values of slots are checked on the CPU."""
    T = inputs.q.shape[1]
    if T != 1:
        raise ShapeError(f"step_ takes one token a row: q must have T = 1, got T = {T}")
    if inputs.cu_seqlens is not None:
        raise OperandError("step_ takes no cu_seqlens: give each sequence a row, and its state a slot")
    if inputs.state is not None:
        raise OperandError("step_ reads `states`; inputs.state must be None")
    _check_states(states, slots, inputs.q, (inputs.v.shape[-2], inputs.q.shape[3], inputs.v.shape[-1]))


def check_fused_decode(step: FusedDecodeStep, inputs: FusedDecodeInputs, states: Tensor, slots: Tensor | None) -> None:
    """Raise unless operands, `states` and `slots` are those of a fused step; values as in `check_step`."""
    _check_parts(step)
    if not isinstance(inputs.qkv, Tensor) or inputs.qkv.dim() != 3:
        got = list(inputs.qkv.shape) if isinstance(inputs.qkv, Tensor) else type(inputs.qkv).__name__
        raise ShapeError(f"qkv must be a tensor of shape [B, 1, {step.channels}], got {got}")
    _check_states(states, slots, inputs.qkv, (step.HV, step.K, step.V))
    want = step.operands(inputs.qkv.shape[0], states.shape[0], inputs)
    _check_presence("step", step, inputs, want)
    for name, tensor in zip(inputs._fields, inputs, strict=True):
        if tensor is None:
            continue
        _same(name, tensor, want[name])
        if tensor.device != inputs.qkv.device:
            raise DeviceError(f"{name} must be on {inputs.qkv.device}, where qkv is, got {tensor.device}")
        if tensor.dtype not in _FLOATS:
            raise DtypeError(f"{name} must be float64, float32, bfloat16 or float16, got {tensor.dtype}")


def _check_parts(step: FusedDecodeStep) -> None:
    """Whether a step's parts and sizes fit one another."""
    keys, values, n = step.H * step.K, step.HV * step.V, step.spec.householders
    got = [part.channels for part in step.parts]
    if got != [keys, n * keys, n * values]:
        raise ShapeError(f"parts must be of q, k and v, of {[keys, n * keys, n * values]} channels, got {got}")
    if step.HV % step.H:
        raise ShapeError(f"the heads of v must be a multiple of the heads of q, got HV={step.HV}, H={step.H}")
    if step.writes and step.spec.decay != "head":
        raise OperandError(f"writes must be False with decay={step.spec.decay!r}: there is no dt, got True")


def _check_states(states: Tensor, slots: Tensor | None, x: Tensor, sizes: tuple[int, int, int]) -> None:
    """Whether they fit the rows of x, an operand."""
    B = x.shape[0]
    for name, tensor in (("states", states), ("slots", slots)):
        if tensor is not None and not isinstance(tensor, Tensor):
            raise OperandError(f"{name} must be a tensor, got {type(tensor).__name__}")
    _same("states", states, (states.shape[0] if slots is not None and states.dim() else B, *sizes))
    if states.dtype != state_dtype(x.dtype):
        raise DtypeError(f"states must be {state_dtype(x.dtype)}, got {states.dtype}")
    if states.device != x.device:
        raise DeviceError(f"states must be on {x.device}, where the operands are, got {states.device}")
    if slots is not None:
        _same("slots", slots, (B,))
        if slots.dtype != torch.int64:
            raise DtypeError(f"slots must be int64, got {slots.dtype}")
        if slots.device != x.device:
            raise DeviceError(f"slots must be on {x.device}, where the operands are, got {slots.device}")
        if values_are_readable(slots):
            taken: list[int] = slots.tolist()
            if len(set(taken)) < B or any(not 0 <= slot < states.shape[0] for slot in taken):
                raise ValueRangeError(f"slots must be distinct rows of the {states.shape[0]} states, got {taken}")


def validate(spec: UpdateSpec, inputs: UpdateInputs) -> None:
    """Check everything, values included, on any device; on a GPU this waits for the device.

    Beyond what every call checks: all operands finite, decays <= 0, beta inside the interval that the spec's
    spectrum is stated for, cu_seqlens rising from 0 to T.

    Raises: InputError or a subclass; ValueRangeError lists every value rule that is broken.
    """
    check(spec, inputs)
    problems = _sign_problems(inputs) + packing_problems(inputs.cu_seqlens, inputs.q.shape[1])
    for name, tensor in zip(inputs._fields, inputs, strict=True):
        if tensor is None or not tensor.is_floating_point() or not tensor.numel():
            continue
        bad = tensor.numel() - int(torch.isfinite(tensor).sum())
        if bad:
            problems.append(f"{name} must be finite, got {bad} values that are not.")
    if inputs.beta is not None and inputs.beta.numel():
        low, high = float(inputs.beta.min()), float(inputs.beta.max())
        top = float("inf") if spec.reparam != "none" else 1.0
        if low < 0 or high > top:
            rule = ">= 0" if spec.reparam != "none" else "in [0, 1] (negative eigenvalues double it inside)"
            problems.append(f"beta must be {rule}, got values from {low:g} to {high:g}.")
    if problems:
        raise ValueRangeError(" ".join(problems))


def _wanted(spec: UpdateSpec, inputs: UpdateInputs) -> dict[str, tuple[int, ...]]:
    """The operands' shapes, read off q and v; raises where those two cannot be read."""
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
    whole: UpdateSpec | FusedDecodeStep,
    inputs: UpdateInputs | FusedDecodeInputs,
    want: dict[str, tuple[int, ...]],
    optional: tuple[str, ...] = (),
) -> None:
    """Whether there is every operand that is wanted, and no other. kind: what to call the whole in an error."""
    for name, tensor in zip(inputs._fields, inputs, strict=True):
        if name in want and tensor is None:
            raise OperandError(f"{name} is missing: this {kind} wants it with shape {list(want[name])} ({whole!r})")
        if tensor is not None and name not in want and name not in optional:
            raise OperandError(f"{name} must be None: this {kind} wants {', '.join(want)} ({whole!r})")
        if tensor is not None and not isinstance(tensor, Tensor):
            raise OperandError(f"{name} must be a tensor or None, got {type(tensor).__name__}")


def _check_shapes(spec: UpdateSpec, inputs: UpdateInputs, want: dict[str, tuple[int, ...]]) -> None:
    B, _, _, K = inputs.q.shape
    HV, V = inputs.v.shape[-2:]
    for name, shape in want.items():
        got = tuple(getattr(inputs, name).shape)
        if name == "log_decay" and spec.decay == "fixed" and got == (HV, K):
            continue
        if got != shape:
            also = f" or {[HV, K]}" if name == "log_decay" and spec.decay == "fixed" else ""
            why = _why(spec, name)
            raise ShapeError(f"{name} must have shape {list(shape)}{also}{why}, got {list(got)}")
    sequences = sequence_count(inputs.cu_seqlens, B)
    if inputs.state is not None:
        _same("state", inputs.state, (sequences, HV, K, V))


def _why(spec: UpdateSpec, name: str) -> str:
    axis = {
        "log_decay": "decay", "step": "decay", "rate": "decay", "beta": "beta", "erase": "beta", "write": "beta",
        "erase_key": "erase_key", "a": "transition", "b": "transition",
    }.get(name)  # fmt: skip
    reasons = [f"{axis}={getattr(spec, axis)!r}"] if axis else []
    if spec.householders > 1 and name in ("k", "v", "beta", "erase", "write", "erase_key"):
        reasons.append(f"householders={spec.householders}")
    return f" for {', '.join(reasons)}" if reasons else ""


def _same(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ShapeError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")


def _check_dtypes(inputs: UpdateInputs) -> None:
    dtype, device = inputs.q.dtype, inputs.q.device
    if dtype not in _FLOATS:
        raise DtypeError(f"q must be float64, float32, bfloat16 or float16, got {dtype}")
    for name, tensor in zip(inputs._fields, inputs, strict=True):
        if tensor is None:
            continue
        if tensor.device != device:
            raise DeviceError(f"{name} must be on {device}, where q is, got {tensor.device}")
        if name == "cu_seqlens":
            if tensor.dtype != torch.int32:
                raise DtypeError(f"cu_seqlens must be int32, got {tensor.dtype}")
        elif name in _STATE_LIKE:
            if tensor.dtype != state_dtype(dtype):
                raise DtypeError(f"{name} must be {state_dtype(dtype)} with q in {dtype}, got {tensor.dtype}")
        elif name in _STRENGTHS:
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
        # one that is no number, as of a training that diverges, is no more wrong here than in any other operand
        known = torch.nan_to_num(tensor.detach() * sign, nan=0.0, posinf=inf, neginf=-inf)
        least, most = (float(x) for x in known.aminmax())
        if most > 0:
            problems.append(f"{name} must be {rule}, got {most * sign:g}.")
        elif least == -inf:
            problems.append(f"{name} must be finite, got {least * sign:g}.")
    return problems


__all__ = ["InputError", "check", "check_fused_decode", "check_step", "validate"]
