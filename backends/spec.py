"""UpdateSpec: what the recurrence is, as one frozen value."""

from typing import Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Decay = Literal["none", "fixed", "head", "channel", "rate"]
Transition = Literal["additive", "delta", "dplr"]
Beta = Literal["none", "head", "channel"]
NegativeEigenvalues = Literal["off", "both", "erase"]
Reparam = Literal["none", "efla", "longhorn"]


class Spectrum(NamedTuple):
    """The eigenvalue of the direction that a step erases, decay left out.

    low, high: the interval, or None where nothing bounds it; condition: when the interval holds, in words.
    """

    low: float | None
    high: float | None
    condition: str

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"unbounded: {self.condition}"
        left = "(" if self.condition.startswith("any") else "["
        return f"{left}{self.low:g}, {self.high:g}] for {self.condition}"


class UpdateSpec(BaseModel):
    """Say what the recurrence is. Per head, with state S in R^{K x V}:

        S~_t = D_t S_{t-1},    R_t = S~_t, or S_{t-1} with erase_from="previous"
        S_t  = S~_t + k_t (w_t * v_t - R_t^T (b_t * e_t))^T
        o_t  = scale S_t^T q_t, or scale S_{t-1}^T q_t with read="before"

    transition="additive" drops the erase term; "dplr" is S_t = D_t S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T.
    With householders=n a token makes n such steps: the decay on the first, the read after the last.

    Args:
        decay: D_t. "none"; "fixed", constant in time; "head", a scalar; "channel", a vector over K;
            "rate", step_t x rate, the product never stored.
        transition: "additive", "delta" or "dplr".
        beta: the strengths b, w. "none", 1; "head", a scalar; "channel", erase b [K] and write w [V].
        erase_key: e. "key", the write key; "own", a key of its own (Comba).
        erase_from: R. "decayed", after the decay; "previous", before it (Comba; dplr always).
        negative_eigenvalues: "both", erase and write doubled; "erase", only the erase doubled.
        reparam: how dS/dt = -k k^T S + k v^T is stepped over the time beta. "none", explicit Euler; "efla",
            exactly; "longhorn", implicit Euler.
        householders: steps a token.
        read: "after" or "before" the token's own update.
        scale: factor on the output; None is K ** -0.5.
    Raises:
        pydantic.ValidationError: a combination that means nothing; the sentence says why.
    Source: DeltaNet 2406.06484, Gated DeltaNet 2412.06464, Kimi Linear 2510.26692, Comba 2506.02475,
        EFLA 2512.12602, Longhorn 2407.14207, DeltaProduct 2502.10297, RWKV-7 2503.14456.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    decay: Decay = "none"
    transition: Transition = "delta"
    beta: Beta = "none"
    erase_key: Literal["key", "own"] = "key"
    erase_from: Literal["decayed", "previous"] = "decayed"
    negative_eigenvalues: NegativeEigenvalues = "off"
    reparam: Reparam = "none"
    householders: int = Field(default=1, ge=1)
    read: Literal["after", "before"] = "after"
    scale: float | None = Field(default=None, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _dplr_erases_from_the_previous_state(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("transition") == "dplr":
            return {"erase_from": "previous", **data}
        return data

    @model_validator(mode="after")
    def _means_something(self) -> Self:
        if self.transition != "delta":
            where = f"transition={self.transition!r}"
            why = "has no erase term" if self.transition == "additive" else "erases with its operands a and b"
            if self.reparam != "none":
                raise ValueError(f"reparam={self.reparam!r} steps the delta rule; {where} {why}")
            if self.erase_key == "own":
                raise ValueError(f"erase_key='own' is a key of the delta rule; {where} {why}")
            if self.negative_eigenvalues != "off":
                raise ValueError(f"negative_eigenvalues={self.negative_eigenvalues!r}: {where} {why}")
        if self.transition == "additive" and self.erase_from == "previous":
            raise ValueError("erase_from='previous' needs an erase term; transition='additive' has none")
        if self.transition == "dplr" and self.erase_from == "decayed":
            raise ValueError("erase_from='decayed': transition='dplr' always reads the previous state")
        if self.transition == "dplr" and self.householders > 1:
            raise ValueError(f"householders={self.householders} needs transition 'delta' or 'additive', got 'dplr'")
        if self.reparam != "none":
            if self.negative_eigenvalues != "off":
                raise ValueError(
                    f"negative_eigenvalues={self.negative_eigenvalues!r} with reparam={self.reparam!r}: "
                    "its eigenvalue is positive by construction"
                )
            if self.erase_key == "own":
                raise ValueError(f"erase_key='own' with reparam={self.reparam!r}: the step is exact only for e = k")
        return self

    def __str__(self) -> str:
        from deltazoo.backends.papers import equation

        return equation(self)

    @property
    def decay_axes(self) -> Literal["none", "head", "channel"]:
        """What the lowered decay varies over in one token; "fixed" may be either and is told by its tensor."""
        return "channel" if self.decay in ("channel", "rate") else "none" if self.decay == "none" else "head"

    def scale_of(self, K: int) -> float:
        """The factor on the output, as a number, of keys of width K."""
        return K**-0.5 if self.scale is None else self.scale

    def spectrum(self) -> Spectrum:
        """State the interval of the erased direction's eigenvalue, decay left out, and when it holds.

        Returns: `Spectrum(low, high, condition)`; low and high are None where nothing bounds it.
        Source: Grazzi 2411.12537 section 4; EFLA 2512.12602; Longhorn 2407.14207 section 3.
        """
        if self.transition == "additive":
            return Spectrum(1.0, 1.0, "all inputs: nothing is erased")
        if self.transition == "dplr":
            return Spectrum(None, None, "a and b are free")
        if self.erase_key == "own":
            return Spectrum(None, None, "the erase key is free")
        if self.beta == "channel":
            return Spectrum(None, None, "the erase strength differs over channels")
        if self.reparam != "none":
            return Spectrum(0.0, 1.0, "any k and any beta >= 0")
        condition = "|k| <= 1" if self.beta == "none" else "|k| <= 1 and beta in [0, 1]"
        return Spectrum(0.0 if self.negative_eigenvalues == "off" else -1.0, 1.0, condition)

    def operands(self, B: int, T: int, H: int, HV: int, K: int, V: int) -> dict[str, tuple[int, ...]]:
        """Name every operand that the spec wants, with its shape; `state` and `cu_seqlens` are always optional.

        With decay="fixed", log_decay may also be [HV, K].

        Args: B batch, T time, H key heads, HV value heads, K key width, V value width.
        Returns: operand name -> shape, in the order of `UpdateInputs`.
        """
        n = (self.householders,) if self.householders > 1 else ()
        want: dict[str, tuple[int, ...]] = {
            "q": (B, T, H, K),
            "k": (B, T, *n, H, K),
            "v": (B, T, *n, HV, V),
        }
        if self.decay == "rate":
            want |= {"step": (B, T, HV), "rate": (HV, K)}
        elif self.decay != "none":
            want["log_decay"] = {"fixed": (HV,), "head": (B, T, HV), "channel": (B, T, HV, K)}[self.decay]
        if self.beta == "head":
            want["beta"] = (B, T, *n, HV)
        if self.beta == "channel":
            if self.transition == "delta":
                want["erase"] = (B, T, *n, HV, K)
            want["write"] = (B, T, *n, HV, V)
        if self.erase_key == "own":
            want["erase_key"] = (B, T, *n, H, K)
        if self.transition == "dplr":
            want |= {"a": (B, T, HV, K), "b": (B, T, HV, K)}
        return want
