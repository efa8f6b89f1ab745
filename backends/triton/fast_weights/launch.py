"""Launch the kernels of TTT-Linear and of the neural memory, one program per sequence and head.

N sequences, H heads, M tokens per chunk, E head width
"""

from typing import Any

import torch
from torch import Tensor

from deltazoo.backends.ops.fast_weights.neural_memory_chunks import (
    MemoryGradients,
    MemoryOperands,
    checkpoint_slots,
)
from deltazoo.backends.ops.fast_weights.ttt_linear_chunks import TTTGradients, TTTOperands, TTTResult, TTTState
from deltazoo.backends.triton import problem as problems
from deltazoo.backends.triton.fast_weights.kernels.gates import (
    MemoryTraits,
    memory_gates_backward_kernel,
    memory_gates_kernel,
)
from deltazoo.backends.triton.fast_weights.kernels.neural_memory import neural_memory_kernel
from deltazoo.backends.triton.fast_weights.kernels.neural_memory_backward import neural_memory_backward_kernel
from deltazoo.backends.triton.fast_weights.kernels.step import neural_memory_step_kernel, ttt_linear_step_kernel
from deltazoo.backends.triton.fast_weights.kernels.ttt_linear import (
    TTTTraits,
    ttt_linear_backward_kernel,
    ttt_linear_kernel,
)
from deltazoo.backends.triton.operands import with_token_stride
from deltazoo.backends.triton.runtime.launcher import launcher
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import power_of_two

TTT_FORWARD, TTT_BACKWARD = Options(warps=4), Options(warps=8)
MEMORY_FORWARD, MEMORY_BACKWARD = Options(warps=8), Options(warps=8)
STEP = Options(warps=4)
GATES = Options(warps=1)
_GATE_PARTS = 16  # programs that share the chunks of a sequence and head
_MIN_TILE = 16  # of a product


def ttt_forward(x: TTTOperands, out: TTTResult) -> None:
    """Compute the results into `out`; an empty D is not saved. The state of `out` may be that of x."""
    tensors = x._asdict() | {
        "o": out.o, "new_W": out.W, "new_G": out.G, "new_b": out.b, "new_g": out.g,
        "D": out.D if out.D.numel() else None,
    }  # fmt: skip
    _launch_ttt(ttt_linear_kernel, x, tensors, options=TTT_FORWARD, precision=_forward_precision(x))


def ttt_step(x: TTTOperands, o: Tensor) -> None:
    """Compute o of at most one token of each sequence, and update the state of x in place."""
    v, stride = with_token_stride(x.v.flatten(2))
    tensors = x._asdict() | {"v": v, "o": o}
    _launch_ttt(
        ttt_linear_step_kernel, x, tensors, options=STEP, precision=_forward_precision(x), v_stride=stride
    )  # fmt: skip


def ttt_backward(x: TTTOperands, saved: TTTResult, d_o: Tensor, d: TTTState, *, out: TTTGradients) -> None:
    """Compute the gradients into `out`, whose rate, gain and bias are set to the sums over the sequences."""
    N, H = x.spans.shape[0], x.q.shape[2]
    partial = {name: x.gain.new_empty(N, H, getattr(x, name).shape[-1]) for name in ("rate", "gain", "bias")}
    tensors = x._asdict() | {
        "D": saved.D, "d_o": d_o, "new_W": saved.W, "new_b": saved.b, "d_new_W": d.W, "d_new_G": d.G, "d_new_b": d.b,
        "d_new_g": d.g, "d_q": out.q, "d_k": out.k, "d_v": out.v, "d_eta": out.eta, "d_W": out.start_W,
        "d_G": out.start_G, "d_b": out.start_b, "d_g": out.start_g,
    }  # fmt: skip
    tensors |= {f"d_{name}": values for name, values in partial.items()}
    _launch_ttt(ttt_linear_backward_kernel, x, tensors, options=TTT_BACKWARD, precision=_precision(x.q.dtype))
    out.rate.copy_(partial["rate"].sum((0, 1)))
    out.gain.copy_(partial["gain"].sum(0))
    out.bias.copy_(partial["bias"].sum(0))


def memory_forward(
    x: MemoryOperands, size: int, segment: int, *, o: Tensor, state: list[Tensor], checkpoints: Tensor | None
) -> None:
    """Compute o, the new state and the checkpoints, if any. The state may be that of x."""
    results = _layers(("new_M", "new_P", "new_S"), state, len(x.first))
    coefficients = _coefficients(x, size)
    tensors = _memory_operands(x) | results | {"o": o, "coefficients": coefficients, "checkpoints": checkpoints}
    slots = 0 if checkpoints is None else checkpoints.shape[0]
    numbers = {"slots": slots, "chunk_slots": coefficients.shape[0]}
    _launch_memory(
        neural_memory_kernel, x, tensors, size, segment=segment if slots else 0, numbers=numbers,
        options=MEMORY_FORWARD,
    )  # fmt: skip


def memory_step(x: MemoryOperands, size: int, o: Tensor) -> None:
    """Compute o of at most one token of each sequence, and update the state of x in place."""
    tensors = _memory_operands(x) | {"o": o}
    _launch_memory(neural_memory_step_kernel, x, tensors, size, segment=0, numbers={}, options=STEP)


def memory_backward(
    x: MemoryOperands, checkpoints: Tensor, d_o: Tensor, *, size: int, segment: int, out: MemoryGradients
) -> None:
    """Compute the gradients into `out`, whose `start` holds the gradients of the new state."""
    items = x.spans.shape[0] * x.q.shape[2]
    programs = min(items, problems.device_spec_of(x.q).processors)
    scratch = checkpoints.new_empty(programs, segment, *checkpoints.shape[2:])
    tensors = _memory_operands(x) | _layers(("d_M", "d_P", "d_S"), out.start, len(x.first))
    coefficients = _coefficients(x, size)
    d_coefficients = torch.empty_like(coefficients)
    tensors |= {"checkpoints": checkpoints, "d_o": d_o, "scratch": scratch}
    tensors |= {"coefficients": coefficients, "d_coefficients": d_coefficients}
    tensors |= {f"d_{name}": getattr(out, name) for name in MemoryGradients._fields[:6]}
    numbers = {"slots": checkpoints.shape[0], "chunk_slots": coefficients.shape[0], "items": items}
    _launch_memory(
        neural_memory_backward_kernel, x, tensors, size, segment=segment, numbers=numbers, options=MEMORY_BACKWARD,
        programs=programs,
    )  # fmt: skip
    _launch_gates(memory_gates_backward_kernel, x, tensors, size, coefficients.shape[0])


def _coefficients(x: MemoryOperands, size: int) -> Tensor:
    """Compute the coefficients of all chunks, [slots, H, M + 5, M] with M rounded up to a tile."""
    (B, T, H), N, M = x.eta.shape, x.spans.shape[0], _tile(size)
    coefficients = x.eta.new_empty(checkpoint_slots(B * T, N, size, 1), H, M + 5, M)
    tensors = _memory_operands(x) | {"coefficients": coefficients}
    _launch_gates(memory_gates_kernel, x, tensors, size, coefficients.shape[0])
    return coefficients


def _launch_gates(kernel: Any, x: MemoryOperands, tensors: dict[str, Tensor | None], size: int, slots: int) -> None:
    programs = x.spans.shape[0] * x.q.shape[2] * _GATE_PARTS
    numbers = {"slots": slots, "parts": _GATE_PARTS}
    _launch_memory(kernel, x, tensors, size, segment=0, numbers=numbers, options=GATES, programs=programs)


def _memory_operands(x: MemoryOperands) -> dict[str, Tensor | None]:
    tensors: dict[str, Tensor | None] = {name: getattr(x, name) for name in (*x._fields[:6], "spans")}
    tensors |= _layers(("first",), x.first, len(x.first))
    return tensors | _layers(("M", "P", "S"), x.state, len(x.first))


def _layers(names: tuple[str, ...], tensors: list[Tensor], depth: int) -> dict[str, Tensor | None]:
    """Name the layers of these parts, which follow each other: M1, M2, P1, ...; None for a missing one."""
    named: dict[str, Tensor | None] = {f"{name}{j}": None for name in names for j in (1, 2)}
    keys = [f"{name}{j + 1}" for name in names for j in range(depth)]
    return named | dict(zip(keys, tensors, strict=False))


def _launch_memory(
    kernel: Any, x: MemoryOperands, tensors: dict[str, Tensor | None], size: int, segment: int, numbers: dict[str, int],
    options: Options, programs: int | None = None,
) -> None:  # fmt: skip
    B, T, H, E = x.q.shape
    F = x.first[0].shape[2]
    traits = MemoryTraits(
        H=H, E=E, F=F, M=size, BLOCK_E=_tile(E), BLOCK_F=_tile(F), BLOCK_M=_tile(size), DEPTH=len(x.first),
        HAS_STATE=bool(x.state), SEGMENT=segment, PRECISION=_precision(x.q.dtype),
    )  # fmt: skip
    with torch.cuda.device_of(x.q):
        run = launcher(kernel, tensors, {"traits": traits}, options)
        run(
            x.spans.shape[0] * H if programs is None else programs,
            numbers | {"rows": B * T},
        )


def _launch_ttt(
    kernel: Any, x: TTTOperands, tensors: dict[str, Tensor | None], options: Options, precision: str, **numbers: int
) -> None:
    B, T, H, E = x.q.shape
    M = x.rate.shape[0]
    traits = TTTTraits(
        H=H, E=E, M=M, BLOCK_E=_tile(E), BLOCK_M=_tile(M), HAS_STATE=x.W is not None, PRECISION=precision,
        STEP_PRECISION=_forward_precision(x),
    )  # fmt: skip
    with torch.cuda.device_of(x.q):
        launcher(kernel, tensors, {"traits": traits}, options)(x.spans.shape[0] * H, {"rows": B * T, **numbers})


def _forward_precision(x: TTTOperands) -> str:
    """Precision of the products that the state depends on: operands in two or three terms."""
    return "tf32x3" if x.q.dtype == torch.float32 else "bf16x3"


def _precision(dtype: torch.dtype) -> str:
    return "tf32x3" if dtype == torch.float32 else "tf32"


def _tile(size: int) -> int:
    return max(_MIN_TILE, power_of_two(size))
