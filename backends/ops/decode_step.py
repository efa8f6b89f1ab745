"""The fused decode step of a mixer: all operations of one token between its input and output projections.

B batch, C channels of the projection, W taps, H key heads, HV value heads, K key width, V value width, n householders,
S rows of the states
"""

from typing import Literal, NamedTuple

from torch import Tensor

from deltazoo.backends.ops.short_conv import ConvPart
from deltazoo.backends.update.spec import UpdateSpec


class FusedDecodeStep(NamedTuple):
    """Specify the operations of one decoded token, computed in float32 (float64 for float64 operands).

    A line whose operands are absent is skipped:

        q, k, v = norm(silu(conv(qkv)))                   SiLU and norm of each part
        q = q - correction k                              with the last of the n keys
        beta = sigmoid(beta)
        erase, write = sigmoid(feedback) beta, beta
                       sigmoid(erase), sigmoid(write) per channel, with beta "channel"
        log_decay = -exp(A_log) dt, with dt = softplus(decay + dt_bias); per head, or per head and key channel
                    decay_bound sigmoid(exp(A_log) (decay + dt_bias)) if `decay_bound` is set
                    log(sigmoid(decay)) / temperature if `temperature` is set
                    an operand, with decay "fixed"
        v~ = dt v                                         if `scale_v_by_dt`
        S, o = the update of `spec`, including its output scale
        o = o + skip v
        o = norm_weight o / sqrt(mean(o^2) + eps) + norm_bias         over V; norm="layer" subtracts the mean first
        o = o activation(gate)                            before the norm if `gate_first`

    Args:
        spec: the update, with any decay but "rate"; "fixed" is per head.
        H, HV, K, V: its sizes.
        parts: q, k and v, in this order, as consecutive channels of the projection.
        taps: W of the short convolution; 0 means none.
        scale_v_by_dt: multiply the values by dt; needs decay "head".
        decay_bound: lower bound of the log decay (negative); None means none.
        temperature: root of the sigmoid that is the decay; None: another form of the decay. Not with `decay_bound`.
        norm: norm of the output; "" means none.
        eps: of the norm.
        gate: activation of the output gate; "" means no gate.
        gate_first: apply the gate before the norm.
    """

    spec: UpdateSpec
    H: int
    HV: int
    K: int
    V: int
    parts: tuple[ConvPart, ...]
    taps: int = 0
    scale_v_by_dt: bool = False
    decay_bound: float | None = None
    temperature: float | None = None
    norm: Literal["", "rms", "layer"] = ""
    eps: float = 0.0
    gate: Literal["", "silu", "sigmoid", "gelu", "none"] = ""
    gate_first: bool = False

    @property
    def channels(self) -> int:
        """C, the channels of the projection to q, k and v."""
        return self.H * self.K + self.spec.householders * (self.H * self.K + self.HV * self.V)

    @property
    def decays(self) -> int:
        """Decays of a token: HV, or HV K with a decay per channel."""
        return self.HV * (self.K if self.spec.decay == "channel" else 1)

    def operands(self, B: int, S: int, inputs: "FusedDecodeInputs", T: int = 1) -> dict[str, tuple[int, ...]]:
        """Return the shape of every operand, for T tokens per row.

        `inputs` determines which of the optional biases and skip exist, and whether norm_weight is [V] or [HV V].

        Args: B: batch rows. S: rows of the states.
        """
        C, W, HV = self.channels, self.taps, self.HV
        shapes: dict[str, tuple[int, ...]] = {"qkv": (B, T, C)}
        if W:
            shapes |= {"weight": (C, W), "history": (S, W - 1, C)}
        if W and inputs.bias is not None:
            shapes["bias"] = (C,)
        if self.spec.beta in ("head", "separate"):
            shapes["beta"] = (B, T, self.spec.householders * HV)
        if self.spec.beta == "channel":
            n = self.spec.householders
            shapes |= {"erase": (B, T, n * HV * self.K), "write": (B, T, n * HV * self.V)}
        if self.spec.decay == "fixed":
            shapes["log_decay"] = (HV,)
        elif self.spec.decay in ("head", "channel"):
            shapes["decay"] = (B, T, self.decays)
            if self.temperature is None:
                shapes |= {"A_log": (HV,), "dt_bias": (self.decays,)}
        if self.spec.beta == "separate":
            shapes |= {"feedback": (self.H,), "correction": (self.H,)}
        if inputs.skip is not None:
            shapes["skip"] = (HV,)
        if self.norm:
            per_head = inputs.norm_weight is not None and inputs.norm_weight.numel() == HV * self.V
            shapes["norm_weight"] = (HV * self.V if per_head else self.V,)
            if inputs.norm_bias is not None:
                shapes["norm_bias"] = shapes["norm_weight"]
        if self.gate:
            shapes["gate"] = (B, T, HV * self.V)
        return shapes


class FusedDecodeInputs(NamedTuple):
    """The operands of a fused decode step; None for an operand that the step does not have.

    With drafted tokens, T of them in place of 1.

    Args:
        qkv: [B, 1, C], with C = H K + n H K + n HV V.
        weight, bias: of the convolution, [C, W] and [C].
        history: [S, W - 1, C], the previous inputs of the convolution; the token is appended in place.
        beta: [B, 1, n HV], before the sigmoid.
        decay: [B, 1, HV] or [B, 1, HV K], before the softplus or sigmoid.
        A_log: [HV].
        dt_bias: [HV] or [HV K], as `decay`.
        feedback, correction: [H].
        skip: [HV].
        norm_weight, norm_bias: [V], or [HV V].
        gate: [B, 1, HV V], before its activation.
        log_decay: [HV], of a fixed decay.
        erase, write: [B, 1, n HV K] and [B, 1, n HV V], before the sigmoid.
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
    log_decay: Tensor | None = None
    erase: Tensor | None = None
    write: Tensor | None = None


def fused_decode_spec_reasons(spec: UpdateSpec) -> list[str]:
    """Return the reasons why decode steps with this spec cannot be fused; [] if they can."""
    reasons = []
    if spec.decay == "rate":
        reasons.append("decay must be 'none', 'fixed', 'head' or 'channel' in a fused step, got 'rate'.")
    if spec.erase_key == "own":
        reasons.append("erase_key must be 'key' in a fused step, got 'own'.")
    if spec.transition == "dplr":
        reasons.append("transition must be 'delta' or 'additive' in a fused step, got 'dplr'.")
    return reasons
