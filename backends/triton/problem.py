"""The problem of one update: sizes and traits from which kernels, launch configs and stored tensors follow.

It is derived once, from the operands of the kernels; `explain` and the tuner derive it from operands on the meta
device. B batch, T time, N sequences, H key heads, HV value heads, K key width, V value width, C tokens per chunk
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.devices import INTERPRETER, DeviceSpec, is_simulated
from deltazoo.backends.triton.runtime.precompile import device_of, tracing

Decay = Literal["none", "fixed", "head", "channel"]
Transition = Literal["additive", "delta", "dplr"]
SCALAR_DECAYS: tuple[Decay, ...] = ("none", "fixed", "head")


class Problem(NamedTuple):
    """The sizes and traits of one update; in a traced graph N and T may be symbolic.

    Args:
        N: sequences. T: tokens per row of the batch.
        delta: with an erase term. erase_key: the erase key is an operand, not k.
        decay: none, one number per head ("fixed"), one per token and head ("head"), or also per key ("channel").
        packed: several sequences in one row (cu_seqlens).
        split_terms: values that feed back into the state are split into two terms (hi + lo).
        saves_16_bits: with split_terms the states that the backward reads have 16 bits.
        dplr: DPLR with a decay per channel, which has a key for v and another for what the erase key reads.
        erase, write: strengths are operands. tied: one operand is both.
        state: there is an initial state.
        read: q reads the state after or before the token's update. erase_from: the state that the erase reads.
        reparam: "efla" or "longhorn": the kernels compute the strength from beta (device/step_size.py).
        erase_channels: the erase key is k times an operand per channel.
    """

    dtype: torch.dtype
    N: Any
    T: Any
    H: int
    HV: int
    K: int
    V: int
    delta: bool
    erase_key: bool
    decay: Decay
    packed: bool
    split_terms: bool = False
    saves_16_bits: bool = False
    dplr: bool = False
    erase: bool = False
    write: bool = False
    tied: bool = False
    state: bool = False
    read: str = "after"
    erase_from: str = "decayed"
    reparam: str = "none"
    erase_channels: bool = False

    @property
    def transition(self) -> Transition:
        """The transition that the kernels compute: DPLR with another decay than per channel is two delta steps."""
        return "dplr" if self.dplr else "delta" if self.delta else "additive"

    @property
    def by_channel(self) -> bool:
        """Whether the decay is per channel."""
        return self.decay == "channel"

    @property
    def terms(self) -> int:
        """The number of terms into which values that feed back into the state are split."""
        return 2 if self.split_terms and self.dtype != torch.float32 else 1

    @property
    def saved_dtype(self) -> torch.dtype:
        """The dtype in which the backward stores states and their gradients."""
        return self.dtype if self.terms == 1 or self.saves_16_bits else torch.float32

    @property
    def extra_keys(self) -> bool:
        """Whether the kernels read keys beside q and k: an erase key, or with a decay per channel keys with decays."""
        return self.erase_key or self.by_channel

    @property
    def grouped(self) -> bool:
        """Whether several value heads share a key head."""
        return self.HV != self.H

    @property
    def gates_before(self) -> bool:
        """Whether a read or an erase before the decay adds gradients of the gates of the token before."""
        return (self.erase_from == "previous" or self.read == "before") and not self.by_channel

    @property
    def dv_holds_du(self) -> bool:
        """Whether du is recovered from dv = w du: w is b, clamped away from 0, or there is no w.

        Not in float16, where a b near 0 would round du to 0.
        """
        recoverable = not self.write or (self.tied and self.dtype != torch.float16)
        return self.delta and not self.dplr and recoverable and self.saved_dtype == self.dtype

    @property
    def stores_du(self) -> bool:
        """Whether the backward stores du beside dv."""
        return (self.delta or self.write) and not self.dv_holds_du

    @property
    def min_beta(self) -> float:
        """The lower bound to which the backward clamps b: below the b that EFLA and Longhorn give for long keys."""
        return 2.0**-12 if self.saved_dtype == torch.float16 else 2.0**-60

    @property
    def gradients(self) -> dict[str, bool]:
        """Whether each operand has a gradient."""
        erase, write = self.delta and self.erase, self.write and not self.tied
        return existing_gradients(self.decay != "none", erase, write, self.erase_key, self.dplr, self.state)

    @property
    def rows(self) -> Any:
        """The rows of the batch."""
        return 1 if self.packed else self.N

    def slots(self, C: int) -> Any:
        """Chunk slots: the number of chunks of all sequences, an upper bound if packed."""
        return self.T // C + self.N if self.packed else self.N * ((self.T + C - 1) // C)

    def checkpoint_slots(self, C: int, distance: int) -> Any:
        """Slots for checkpoints, one per `distance` chunks of each sequence except at its start.

        Two more than needed: torch.compile would specialise on a size of 0 or 1.
        """
        if self.packed:
            return self.slots(C) // distance + 2
        empty = isinstance(self.T, int) and self.T == 0  # comparing a symbolic T would add a guard
        return 2 if empty else self.N * ((self.T - 1) // (C * distance)) + 2


def existing_gradients(log_decay: bool, b: bool, w: bool, erase_key: bool, v_key: bool, state: bool) -> dict[str, bool]:
    """Whether each operand has a gradient, by its name, from whether there is such an operand."""
    return {
        "q": True, "k": True, "v": True, "log_decay": log_decay, "b": b, "w": w, "e": erase_key, "v_key": v_key,
        "state": state,
    }  # fmt: skip


def architecture(device: DeviceSpec) -> str:
    """Return the name of a device's architecture, such as "sm90"; without CUDA that of the platform."""
    return "sm{}{}".format(*device.capability) if device.platform == "cuda" else device.platform


def overlaps(x: Tensor) -> bool:
    """Whether a kernel on the device of x may start before the preceding one has ended: see device/overlap.py."""
    return architecture(device_spec(device_of(x).index)) == "sm90"


def device_spec_of(x: Tensor) -> DeviceSpec:
    """Return the device of a tensor; while a body is traced on meta tensors, that for which it is traced."""
    return device_spec((tracing.device or x.device).index)


def device_spec(index: int | None) -> DeviceSpec:
    """Return the device of tensors with this CUDA index; None: CPU tensors, which Triton's interpreter computes on."""
    if index is None and not is_simulated():
        return INTERPRETER
    return DeviceSpec.current(index)
