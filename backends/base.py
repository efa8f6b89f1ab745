"""What goes into an update, what comes out, and what a backend is.

B batch, T time, H key heads, HV value heads, K key width, V value width, N packed sequences
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from deltazoo.backends.decode_step import FusedDecodeInputs, FusedDecodeStep
from deltazoo.backends.errors import UnsupportedError
from deltazoo.backends.short_conv import ConvInputs, ConvMeta, ConvPart, short_conv
from deltazoo.backends.spec import UpdateSpec


class UpdateInputs(NamedTuple):
    """The operands of one update; None where the spec has no such operand.

    With householders=n > 1 the operands k, v, beta, erase, write and erase_key carry a micro-step axis of
    size n after T. Value head j uses key head j // (HV / H). q and k are used as given: L2 norms are the caller's.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, HV, V].
        log_decay: natural logarithm, <= 0. [HV] or [HV, K] (decay="fixed"), [B, T, HV] ("head"),
            [B, T, HV, K] ("channel"). float32, or float64 with float64 inputs.
        step, rate: decay="rate": log_decay = step * rate. [B, T, HV] >= 0 and [HV, K] <= 0, dtype as log_decay.
        beta: [B, T, HV]. beta="head": in (0, 1), the lowering doubles it; with EFLA or Longhorn any time > 0.
        erase, write: [B, T, HV, K] and [B, T, HV, V]. beta="channel".
        erase_key: [B, T, H, K]. erase_key="own".
        a, b: [B, T, HV, K]. transition="dplr": a reads, b writes.
        state: initial state [B, HV, K, V], or [N, HV, K, V] when packed; zeros where None. dtype as log_decay.
        cu_seqlens: [N + 1] int32, the bounds of N packed sequences in T; then B = 1.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None = None
    step: Tensor | None = None
    rate: Tensor | None = None
    beta: Tensor | None = None
    erase: Tensor | None = None
    write: Tensor | None = None
    erase_key: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None
    state: Tensor | None = None
    cu_seqlens: Tensor | None = None


class UpdateOutput(NamedTuple):
    """o: [B, T, HV, V] in the dtype of v; state: [B, HV, K, V] ([N, HV, K, V] when packed) in `state_dtype`."""

    o: Tensor
    state: Tensor


class UpdateMeta(NamedTuple):
    """What a backend may know before it says whether it can; never T or B.

    device: the device type, as "cuda"; packed: with cu_seqlens; grad: a gradient is wanted; decay_channels: a fixed
    decay is [HV, K], which the spec does not tell.
    """

    device: str
    dtype: torch.dtype
    H: int
    HV: int
    K: int
    V: int
    packed: bool = False
    grad: bool = False
    decay_channels: bool = False

    @staticmethod
    def of(inputs: UpdateInputs) -> "UpdateMeta":
        """Read the meta off checked inputs."""
        grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
        return UpdateMeta(
            device=inputs.q.device.type,
            dtype=inputs.q.dtype,
            H=inputs.q.shape[2],
            HV=inputs.v.shape[-2],
            K=inputs.q.shape[3],
            V=inputs.v.shape[-1],
            packed=inputs.cu_seqlens is not None,
            grad=grad,
            decay_channels=inputs.log_decay is not None and inputs.log_decay.dim() == 2,
        )


class Backend(ABC):
    """Compute the update of a spec. Subclass, name it, register it as an entry point in `deltazoo.backends`.

    A backend holds no tensors and no settings that change while it is bound; its methods are traced by
    torch.compile, so they look nothing up by name, log nothing and read no tensor's values.
    """

    name: str

    @abstractmethod
    def unsupported(self, spec: UpdateSpec, meta: UpdateMeta) -> list[str]:
        """Say why not: one sentence a reason, naming the argument, the rule and what was got; [] means it can."""

    @abstractmethod
    def forward(self, spec: UpdateSpec, inputs: UpdateInputs) -> UpdateOutput:
        """Compute the update; differentiable and compilable. The inputs are checked."""

    def step_(self, spec: UpdateSpec, inputs: UpdateInputs, states: Tensor, slots: Tensor | None) -> Tensor:
        """Take one token (T = 1) a row from `states`, in place, without gradients; return o [B, 1, HV, V].

        Args:
            states: [S, HV, K, V], updated in place.
            slots: [B] int64, the row of `states` that each batch row uses; None means row i uses state i.
                Two rows may not share a slot.
        """
        with torch.no_grad():
            state = states if slots is None else states.index_select(0, slots)
            out = self.forward(spec, inputs._replace(state=state))
            if slots is None:
                states.copy_(out.state)
            else:
                states.index_copy_(0, slots, out.state)
        return out.o

    def fused_decode_unsupported(self, step: FusedDecodeStep, dtype: torch.dtype) -> list[str]:
        """Say why it does not compute this decode step of a mixer in one; [] means it does.

        That is no error: such a step is taken part by part, the update by `step_`. Asked where `unsupported` has no
        reasons against the spec. Args: dtype: of the projection.
        """
        return ["it takes no decode step in one: the mixer takes it part by part."]

    def fused_decode_step_(
        self, step: FusedDecodeStep, inputs: FusedDecodeInputs, states: Tensor, slots: Tensor | None
    ) -> Tensor:
        """Take one token a row, `inputs.history` and `states` in place, without gradients; return o [B, 1, HV, V].

        Called where `fused_decode_unsupported` has no reasons. The inputs are checked.

        Args: states, slots: as of `step_`; the rows of the history are those of the states.
        """
        raise NotImplementedError(f"backend {self.name!r} says that it takes a decode step in one, and does not")

    def short_conv_unsupported(self, meta: ConvMeta) -> list[str]:
        """Say why it has no kernel for a mixer's short convolution; [] means it has one.

        That is no error: a convolution without a kernel is plain torch (`deltazoo.backends.short_conv`), whatever the
        backend, and Inductor fuses it.
        """
        return ["it has no kernel for the short convolution: plain torch computes it."]

    def short_conv(self, inputs: ConvInputs, parts: tuple[ConvPart, ...]) -> tuple[Tensor, ...]:
        """Compute the short convolution with what follows it; differentiable and compilable. The inputs are checked.

        Called where `short_conv_unsupported` has no reasons. Returns a tensor [B, T, channels] for each part.
        """
        return short_conv(inputs, parts)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Compute in the dtypes at hand on the device of x; the meta device knows no autocast."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def refuse_forward_mode(backend: str, inputs: Iterable[Tensor | None]) -> None:
    """Raise where an operand carries a forward-mode tangent, which an operator with a hand-written backward would drop.

    Raises: UnsupportedError.
    """
    if forward_ad._current_level < 0:
        return
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in inputs):
        raise UnsupportedError(
            f"backend {backend!r} has no forward-mode derivative (torch.func.jvp, jacfwd): take torch.func.grad "
            "or vjp, or backend='reference'"
        )


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states, decays and steps: float64 with float64 inputs, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
