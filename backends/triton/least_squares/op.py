"""Operators and launches of the kernels of least squares. Triton is imported when a kernel first runs.

B batch, T time, N sequences, H heads, K key width
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.custom_op import mark_written, operator
from deltazoo.backends.torch_ext.devices import DeviceSpec, tf32_allowed
from deltazoo.backends.torch_ext.trace_constant import constant_in_graphs
from deltazoo.backends.triton.limits import elementwise_refusals
from deltazoo.backends.triton.operands import ready
from deltazoo.backends.triton.runtime.precompile import compiled_ahead
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import cdiv, power_of_two

MAX_WIDTH = 128
_TILE = 64


class Launch(NamedTuple):
    """Launch parameters for a dtype of keys.

    Args:
        chunk: tokens. covariance, solve: of the kernels of these names.
        tolerance: the square of the relative residual at which a chunk stops. Products of 16-bit keys are off by about
            2^-11.
        shared_memory: bytes per block that `solve_kernel` needs for MAX_WIDTH.
    """

    chunk: int
    covariance: Options
    solve: Options
    tolerance: float
    shared_memory: int


_HALF = Launch(64, Options(4, 3), Options(4), 2.0**-32, 81920)
# Three products in tf32 keep two terms of every operand in shared memory.
_FLOAT32 = Launch(16, Options(4), Options(8, 1, 255), 2.0**-46, 180224)
_STEP = Options(4)  # three programs fit on an SM; with 8 warps two


@constant_in_graphs
def device_refusals(device_type: str, index: int | None, dtype: torch.dtype) -> tuple[str, ...]:
    """Return why the kernels do not run on a device, () if they run: it needs enough shared memory.

    Triton 3.7.1 does not compile `solve_kernel` for compute capability 10.0.
    """
    reasons = elementwise_refusals(device_type, index, dtype)
    if reasons:
        return reasons
    device, need = DeviceSpec.current(index), _launch(dtype).shared_memory
    if device.capability[0] == 10:
        return ("Triton does not compile it for compute capability 10.",)
    if device.shared_memory < need:
        has = f"{device.name} has {device.shared_memory}"
        return (f"it needs {need} bytes of shared memory per block, and {has}.",)
    return ()


def _launch(dtype: torch.dtype) -> Launch:
    return _FLOAT32 if dtype == torch.float32 else _HALF


def _traits(k: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> Any:
    import triton.language as tl

    from deltazoo.backends.triton.least_squares.kernels import SolveTraits

    H, K = k.shape[2:]
    exact, launch = k.dtype == torch.float32, _launch(k.dtype)
    BK = max(16, power_of_two(K))
    return SolveTraits(
        H=H, K=K, BK=BK, C=launch.chunk, TILE=min(_TILE, BK), OPERAND=tl.float32 if exact else tl.float16,
        PREC="tf32x3" if exact and not tf32_allowed() else "tf32", TOLERANCE=launch.tolerance,
        HAS_STATE=state is not None, PACKED=cu_seqlens is not None,
    )  # fmt: skip


def _solve(
    b: Tensor, k: Tensor, log_decay: Tensor, beta: Tensor, shift: Tensor, state: Tensor | None,
    cu_seqlens: Tensor | None, steps: int,
) -> Tensor:  # fmt: skip
    from deltazoo.backends.triton.least_squares.kernels import covariance_kernel, solve_kernel
    from deltazoo.backends.triton.runtime.launcher import launcher

    B, T, H, K = k.shape
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    # rows after the last sequence stay 0
    x = _solve_fake(b, k) if cu_seqlens is None else torch.zeros_like(_solve_fake(b, k))
    traits, launch = _traits(k, state, cu_seqlens), _launch(k.dtype)
    slots = N * cdiv(T, traits.C) if cu_seqlens is None else T // traits.C + N
    states = k.new_empty(slots, H, K, K, dtype=torch.float32 if k.dtype == torch.float32 else torch.float16)
    scales = k.new_empty(slots, H, dtype=torch.float32)
    operands = {"b": b, "k": k, "log_decay": log_decay, "beta": beta, "shift": shift, "state": state, "cu": cu_seqlens}
    tensors = {name: None if t is None else ready(t) for name, t in operands.items()}
    tensors |= {"states": states, "scales": scales, "x": x}
    with torch.cuda.device_of(k):
        run = launcher(covariance_kernel, tensors, {"traits": traits}, launch.covariance)
        run(N * H * (traits.BK // traits.TILE), {"T": T})
        run = launcher(solve_kernel, tensors, {"traits": traits}, launch.solve)
        run(slots * H, {"N": N, "T": T, "steps": steps})
    return x


def _step(
    b: Tensor, k: Tensor, log_decay: Tensor, beta: Tensor, shift: Tensor, states: Tensor, steps: int
) -> Tensor:  # fmt: skip
    from deltazoo.backends.triton.least_squares.kernels import solve_step_kernel
    from deltazoo.backends.triton.runtime.launcher import launcher

    x = _solve_fake(b, k)
    operands = {"b": b, "k": k, "log_decay": log_decay, "beta": beta, "shift": shift, "states": states}
    tensors = {name: ready(t) for name, t in operands.items()} | {"x": x}
    with torch.cuda.device_of(k):
        run = launcher(solve_step_kernel, tensors, {"traits": _traits(k, states, None)}, _STEP)
        run(k.shape[0] * k.shape[2], {"steps": steps})
    mark_written(states, states if tensors["states"].data_ptr() == states.data_ptr() else tensors["states"])
    return x


def _solve_fake(b: Tensor, k: Tensor, *rest: Any) -> Tensor:
    return k.new_empty(k.shape)


_OPERANDS = "Tensor b, Tensor k, Tensor log_decay, Tensor beta, Tensor shift"
solve = operator(
    f"triton_least_squares({_OPERANDS}, Tensor? state, Tensor? cu_seqlens, int steps) -> Tensor",
    _solve,
    compiled_ahead(_solve, _solve_fake),
)
step_ = operator(
    f"triton_least_squares_step_({_OPERANDS}, Tensor(a!) states, int steps) -> Tensor",
    _step,
    compiled_ahead(_step, _solve_fake),
)
