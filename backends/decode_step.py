"""One token of a mixer in one step, from its projections to its output map: what a decode kernel may take together.

B batch, C channels of the projection, W taps, H key heads, HV value heads, K key width, V value width, n householders,
S rows of the states
"""

from typing import Literal, NamedTuple

from torch import Tensor

from deltazoo.backends.short_conv import ConvPart
from deltazoo.backends.spec import UpdateSpec


class FusedDecodeStep(NamedTuple):
    """What is computed, line by line, in float32 (float64 in float64); a line without its operands is left out.

        q, k, v = norm(silu(conv(qkv)))                   each as its part says
        q, e = q - correction k, sigmoid(feedback) k      of n keys the last
        beta = min(sigmoid(beta), top)
        log_decay = -exp(A_log) dt, dt = softplus(decay + dt_bias)
                    or bound sigmoid(exp(A_log) (decay + dt_bias)), where there is a bound
        v~ = dt v                                         where it writes
        S, o = the update of the spec, scaled by its scale
        o = o + skip v
        o = norm_weight o / sqrt(mean(o^2) + eps) + norm_bias         over V; "layer": the mean taken off first
        o = o activation(gate)                            before the norm, where gate_first

    Args:
        spec: the update, its decay "none" or "head"; H, HV, K, V: its sizes.
        parts: of q, k and v, in this order: the channels of the projection.
        taps: W of the short convolution; 0: none.
        top: the greatest beta; writes: the values are multiplied by dt; bound: of the decay.
        norm: "" for none; eps: its own; gate: its activation, "" for none.
    """

    spec: UpdateSpec
    H: int
    HV: int
    K: int
    V: int
    parts: tuple[ConvPart, ...]
    taps: int = 0
    top: float = 1.0
    writes: bool = False
    bound: float | None = None
    norm: Literal["", "rms", "layer"] = ""
    eps: float = 0.0
    gate: Literal["", "silu", "sigmoid", "gelu", "none"] = ""
    gate_first: bool = False

    @property
    def channels(self) -> int:
        """C, of the projection to q, k and v."""
        return self.H * self.K + self.spec.householders * (self.H * self.K + self.HV * self.V)

    def operands(self, B: int, S: int, given: "FusedDecodeInputs") -> dict[str, tuple[int, ...]]:
        """Name every operand that the step wants, with its shape; biases, skip and weights of each head are as given.

        Args: B rows; S: of the states.
        """
        C, W, HV = self.channels, self.taps, self.HV
        want: dict[str, tuple[int, ...]] = {"qkv": (B, 1, C)}
        if W:
            want |= {"weight": (C, W), "history": (S, W - 1, C)}
        if W and given.bias is not None:
            want["bias"] = (C,)
        if self.spec.beta == "head":
            want["beta"] = (B, 1, self.spec.householders * HV)
        if self.spec.decay == "head":
            want |= {"decay": (B, 1, HV), "A_log": (HV,), "dt_bias": (HV,)}
        if self.spec.erase_key == "own":
            want |= {"feedback": (self.H,), "correction": (self.H,)}
        if given.skip is not None:
            want["skip"] = (HV,)
        if self.norm:
            each = given.norm_weight is not None and given.norm_weight.numel() == HV * self.V
            want["norm_weight"] = (HV * self.V if each else self.V,)
            if given.norm_bias is not None:
                want["norm_bias"] = want["norm_weight"]
        if self.gate:
            want["gate"] = (B, 1, HV * self.V)
        return want


class FusedDecodeInputs(NamedTuple):
    """The operands of one step; None where the step has no such operand.

    Args:
        qkv: [B, 1, C], with C = H K + n H K + n HV V.
        weight, bias: [C, W] and [C] of the convolution.
        history: [S, W - 1, C], what stood before the token; the token is pushed into it, in place.
        beta: [B, 1, n HV]. decay: [B, 1, HV]; A_log, dt_bias: [HV].
        feedback, correction: [H]. skip: [HV].
        norm_weight, norm_bias: [V], or [HV V].
        gate: [B, 1, HV V].
    """

    qkv: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    history: Tensor | None = None
    beta: Tensor | None = None
    decay: Tensor | None = None
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    feedback: Tensor | None = None
    correction: Tensor | None = None
    skip: Tensor | None = None
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None
    gate: Tensor | None = None


def beyond(spec: UpdateSpec) -> list[str]:
    """Why no step is around a spec; [] where one is."""
    reasons = []
    if spec.decay not in ("none", "head"):
        reasons.append(f"decay must be 'none' or 'head' in a fused step, got {spec.decay!r}.")
    if spec.beta not in ("none", "head"):
        reasons.append(f"beta must be 'none' or 'head' in a fused step, got {spec.beta!r}.")
    if spec.transition == "dplr":
        reasons.append("transition must be 'delta' or 'additive' in a fused step, got 'dplr'.")
    return reasons
