"""Inputs and outputs of an update, and the interface of a backend.

B batch, T time, H key heads, HV value heads, K key width, V value width, N packed sequences
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.context_parallel.plan import Links
from deltazoo.backends.io.errors import UnsupportedError
from deltazoo.backends.measure.shapes import Shape
from deltazoo.backends.ops.decode_step import FusedDecodeInputs, FusedDecodeStep
from deltazoo.backends.ops.short_conv import ConvInputs, ConvMeta, ConvPart, short_conv
from deltazoo.backends.torch_ext.devices import DeviceSpec, device_type
from deltazoo.backends.torch_ext.modes import have_tangents
from deltazoo.backends.update.slots import gather_states, step_in_slots, zero_without_state
from deltazoo.backends.update.spec import UpdateSpec


class UpdateInputs(NamedTuple):
    """The operands of one update; None for an operand that the spec does not have.

    With householders=n > 1, the operands k, v, beta, erase, write and erase_key have a micro-step axis of size n
    after T. Value head j uses key head j // (HV / H). q and k are not normalised; the caller does that.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, HV, V].
        log_decay: natural logarithm, <= 0. [HV] or [HV, K] (decay="fixed"), [B, T, HV] ("head"),
            [B, T, HV, K] ("channel"). float32, or float64 with float64 inputs.
        step, rate: [B, T, HV] >= 0 and [HV, K] <= 0 with decay="rate", where log_decay = step * rate. dtype as
            log_decay.
        beta: [B, T, HV] with beta="head". In (0, 1), also for negative eigenvalues, where the lowering doubles it.
            With EFLA or Longhorn any step size > 0.
        erase, write: [B, T, HV] each with beta="separate", in the range of beta; [B, T, HV, K] and [B, T, HV, V] with
            beta="channel", where only the delta rule has an erase.
        erase_key: [B, T, H, K] with erase_key="own".
        a, b: [B, T, HV, K] with transition="dplr", which adds b_t (a_t^T S_{t-1}).
        state: initial state [B, HV, K, V], or [N, HV, K, V] for packed sequences; None means zeros. dtype as
            log_decay.
        cu_seqlens: [N + 1] int32, the boundaries of N sequences packed along T; then B = 1. Rows after cu_seqlens[-1]
            get zeros in o and in every gradient. (`update` on a CPU outside torch.compile demands that
            cu_seqlens[-1] is T; a backend must not rely on it.)
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
    """o: [B, T, HV, V] in the dtype of v. state: final state [B, HV, K, V] ([N, HV, K, V] if packed), `state_dtype`."""

    o: Tensor
    state: Tensor


class Draft(NamedTuple):
    """Drafted tokens that `verify_` has computed, for `commit_`. Only the backend that made it can commit it.

    Args:
        inputs: the operands of the n drafted tokens.
        values: [B, n, m, HV, V] in `state_dtype`, the written values x: each token makes m rank-one writes,
            S_t = D_t S_{t-1} + sum_i key_ti x_ti^T, with m = `UpdateSpec.micro_steps`. None: `commit_` computes them.
    """

    inputs: UpdateInputs
    values: Tensor | None = None


class UpdateMeta(NamedTuple):
    """Description of the operands from which a backend decides whether it supports them. It excludes B and T.

    Args:
        device: the device type, such as "cuda".
        dtype: of q.
        H, HV, K, V: key heads, value heads, key width, value width.
        packed: whether there are cu_seqlens.
        grad: whether a gradient is required.
        decay_channels: whether a fixed decay has shape [HV, K] instead of [HV], which the spec does not determine.
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
        """Describe inputs that have been checked."""
        grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
        return UpdateMeta(
            device=device_type(inputs.q),
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
    """Interface of a backend, which computes the update of a spec.

    To add one, subclass it, set `name`, and register the class as an entry point in the group `deltazoo.backends`.
    An instance holds no tensors, and its settings do not change. torch.compile traces its methods, so they must not
    look up names, write logs or read the values of tensors.
    """

    name: str

    @abstractmethod
    def unsupported(self, spec: UpdateSpec, meta: UpdateMeta) -> list[str]:
        """Return the reasons not to support these operands, one sentence each; [] means that it supports them.

        A reason names the argument, the rule and the value.
        """

    def unsupported_on(self, spec: UpdateSpec, meta: UpdateMeta, device: DeviceSpec | None) -> list[str]:
        """Like `unsupported`, for another device than this machine's; None means this machine's. Ignored by default."""
        return self.unsupported(spec, meta)

    def plan(self, spec: UpdateSpec, meta: UpdateMeta, shape: Shape | None, device: DeviceSpec | None) -> str | None:
        """Describe the kernels that would run, for `explain`.

        Args:
            shape: for the exact plan; None: the condition of each kernel.
        Returns: None if the backend has no plan to describe.
        """
        return None

    @abstractmethod
    def forward(self, spec: UpdateSpec, inputs: UpdateInputs) -> UpdateOutput:
        """Compute the update, differentiably and compilably. The inputs have been checked."""

    def step_(self, spec: UpdateSpec, inputs: UpdateInputs, states: Tensor, slots: Tensor | None) -> Tensor:
        """Decode one token (T = 1) per row without gradients and update `states` in place. Returns o [B, 1, HV, V].

        Args:
            states: [S, HV, K, V], updated in place.
            slots: [B] int64, the row of `states` that each batch row uses, -1 for none (`backends.update.slots`).
        """
        with torch.no_grad():
            return step_in_slots(lambda state: self.forward(spec, inputs._replace(state=state)), states, slots)

    def verify_(
        self, spec: UpdateSpec, inputs: UpdateInputs, states: Tensor, slots: Tensor | None
    ) -> tuple[Tensor, Draft]:
        """Decode n drafted tokens (T = n) per row without gradients; `states` do not change.

        By default `forward` of all tokens, and a draft without written values.

        Args: states, slots: as for `step_`.
        Returns: o [B, n, HV, V], zero in rows without a state, and what `commit_` needs.
        """
        with torch.no_grad():
            o = self.forward(spec, inputs._replace(state=gather_states(states, slots))).o
            return zero_without_state(o, slots), Draft(inputs)

    def commit_(self, spec: UpdateSpec, draft: Draft, states: Tensor, slots: Tensor | None, accepted: Tensor) -> None:
        """Advance each row's state in place by its first `accepted` drafted tokens, without gradients.

        By default `forward` token by token. Rejected tokens must have no effect, even if they are NaN.

        Args:
            draft: of `verify_` on the same states.
            states, slots: as for `step_`.
            accepted: [B] int32; values outside of 0 to n count as the nearest of them.
        """

        def advance(state: Tensor) -> tuple[Tensor, Tensor]:
            for t in range(draft.inputs.q.shape[1]):
                token = slice_tokens(draft.inputs, t, t + 1)
                o, after = self.forward(spec, token._replace(state=state))
                state = torch.where((accepted > t)[:, None, None, None], after, state)
            return o, state

        with torch.no_grad():
            step_in_slots(advance, states, slots)

    def carried_unsupported(self, spec: UpdateSpec, meta: UpdateMeta) -> list[str]:
        """Return the reasons not to compute `carried`; [] means that it does. The same on all ranks: not from T.

        Without it, `deltazoo.backends.context_parallel.update` computes the maps by further values of `forward`.
        """
        return ["it has no operator between whose steps ranks exchange their states."]

    def carried(self, spec: UpdateSpec, inputs: UpdateInputs, links: Links) -> UpdateOutput:
        """Compute the update of this rank's segments from the states of the ranks before, as `forward` otherwise.

        Called only if `carried_unsupported` returns no reasons.

        Args:
            inputs: packed segments; `state` holds that of the segments that begin a document, else zero.
            links: how the segments of the ranks continue each other.
        """
        raise NotImplementedError(f"backend {self.name!r} supports carried states but does not implement them")

    def fused_decode_unsupported(self, step: FusedDecodeStep, dtype: torch.dtype) -> list[str]:
        """Return the reasons not to fuse this decode step of a mixer; [] means that `fused_decode_step_` does.

        Without fusion the mixer computes its parts one by one, and the update with `step_`. Called only if
        `unsupported` returns no reasons for the spec.

        Args: dtype: of `FusedDecodeInputs.qkv`.
        """
        return ["it has no fused decode step; the mixer computes its parts one by one."]

    def fused_decode_step_(
        self, step: FusedDecodeStep, inputs: FusedDecodeInputs, states: Tensor, slots: Tensor | None
    ) -> Tensor:
        """Decode one token per row without gradients, as `FusedDecodeStep` specifies. Returns o [B, 1, HV, V].

        `inputs.history` and `states` are updated in place. Called only if `fused_decode_unsupported` returns no
        reasons. The inputs have been checked.

        Args: states, slots: as for `step_`; `slots` also selects the rows of the history.
        """
        raise NotImplementedError(f"backend {self.name!r} supports fused decode steps but does not implement them")

    def fused_verify_unsupported(self, step: FusedDecodeStep, dtype: torch.dtype) -> list[str]:
        """Return the reasons not to compute drafted tokens of a step by `fused_verify_`; [] means that it does."""
        return ["it does not fuse the operations of drafted tokens."]

    def fused_verify_(self, step: FusedDecodeStep, inputs: FusedDecodeInputs, states: Tensor) -> tuple[Tensor, Draft]:
        """Decode drafted tokens without gradients, as `FusedDecodeStep` specifies; history and states do not change.

        Called only if `fused_verify_unsupported` returns no reasons. The inputs have been checked.

        Returns: o [B, T, HV, V], and the draft for `commit_`.
        """
        raise NotImplementedError(f"backend {self.name!r} supports fused drafts but does not implement them")

    def short_conv_unsupported(self, meta: ConvMeta) -> list[str]:
        """Return the reasons not to compute a short convolution with a kernel; [] means that `short_conv` has one.

        Without a kernel the convolution runs in plain torch (`deltazoo.backends.ops.short_conv`), which Inductor fuses.
        """
        return ["it has no kernel for the short convolution: plain torch computes it."]

    def short_conv(self, inputs: ConvInputs, parts: tuple[ConvPart, ...]) -> tuple[Tensor, ...]:
        """Compute the short convolution with its SiLU and norm, differentiably and compilably.

        Called only if `short_conv_unsupported` returns no reasons. The inputs have been checked.

        Returns: [B, T, channels] for each part.
        """
        return short_conv(inputs, parts)

    def short_conv_step_(self, inputs: ConvInputs, parts: tuple[ConvPart, ...]) -> tuple[Tensor, ...] | None:
        """Compute `short_conv` of one token per row without gradients, and append it to `inputs.history` in place.

        Called only if `short_conv_unsupported` returns no reasons for several tokens. The inputs have been checked.

        Returns: None, with the history as it was, if there is no kernel for these operands.
        """
        return None


def slice_tokens(inputs: UpdateInputs, start: int, stop: int) -> UpdateInputs:
    """Return the operands of tokens start to stop; operands without a time axis are unchanged."""
    sliced = {name: getattr(inputs, name)[:, start:stop] for name in inputs._fields if has_time_axis(inputs, name)}
    return inputs._replace(**sliced)


def has_time_axis(inputs: UpdateInputs, name: str) -> bool:
    """Return whether an operand is present and varies over time."""
    tensor = getattr(inputs, name)
    if tensor is None or name in ("state", "cu_seqlens", "rate"):
        return False
    return name != "log_decay" or tensor.dim() > 2


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context that disables autocast on the device of x. The meta device does not support autocast."""
    if x.is_meta or not (torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type)):
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def refuse_forward_mode(backend: str, inputs: Iterable[Tensor | None]) -> None:
    """Raise if an operand has a forward-mode tangent, which an operator with a hand-written backward would discard.

    Raises: UnsupportedError.
    """
    if have_tangents(inputs):
        raise UnsupportedError(
            f"backend {backend!r} has no forward-mode derivative (torch.func.jvp, jacfwd): use torch.func.grad "
            "or vjp, or backend='reference'"
        )


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of states, decays and steps: float64 for float64 inputs, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
