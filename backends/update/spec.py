"""UpdateSpec: the recurrence as a frozen value, with its operand shapes, its spectrum and its printed equation."""

from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from deltazoo.backends.io.frozen_config import FrozenConfig

Decay = Literal["none", "fixed", "head", "channel", "rate"]
Transition = Literal["additive", "delta", "dplr"]
Beta = Literal["none", "head", "separate", "channel"]
NegativeEigenvalues = Literal["off", "both", "erase"]
Reparam = Literal["none", "efla", "longhorn"]


class Spectrum(NamedTuple):
    """Interval of the eigenvalue along the erased direction, without the decay.

    Args:
        low, high: bounds of the interval; None if the eigenvalue is unbounded.
        condition: the inputs for which the interval holds, or why there is none.
    """

    low: float | None
    high: float | None
    condition: str

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"unbounded: {self.condition}"
        left = "(" if self.condition.startswith("any") else "["
        return f"{left}{self.low:g}, {self.high:g}] for {self.condition}"


class UpdateSpec(FrozenConfig):
    """Specify the recurrence. Per head, with state S in R^{K x V}:

        S~_t = D_t S_{t-1},    R_t = S~_t, or S_{t-1} with erase_from="previous"
        S_t  = S~_t + k_t (w_t * v_t - R_t^T (b_t * e_t))^T
        o_t  = scale S_t^T q_t, or scale S_{t-1}^T q_t with read="before"

    transition="additive" drops the erase term; "dplr" replaces it by + b_t (S_{t-1}^T a_t)^T, with operands a and b.
    With householders=n each token takes n such steps. The decay applies to the first step, and the output is read
    after the last.

    Args:
        decay: D_t. "none": identity. "fixed": constant in time. "head": one scalar per token and head. "channel": a
            vector over K. "rate": exp(step_t x rate); the product is never materialised.
        transition: "additive", "delta" or "dplr" (diagonal plus low rank).
        beta: the erase strength b and the write strength w. "none": 1. "head": one scalar for both. "separate":
            a scalar for each (Comba). "channel": erase b [K] and write w [V].
        erase_key: e. "key": the write key k. "own": another operand (preconditioned delta rules).
        erase_from: R. "decayed": the state after the decay. "previous": the state before it (Comba; always for dplr).
        negative_eigenvalues: "off"; "both" doubles erase and write; "erase" doubles the erase only. In bf16 rounding
            of a unit key moves an eigenvalue of -1 by about 1e-3: without decay the state may grow by 0.1 % with each
            token while one key with beta = 1 is repeated.
        reparam: integrator of dS/dt = -k k^T S + k v^T over a step of size beta. "none": explicit Euler. "efla":
            exact. "longhorn": implicit Euler.
        householders: number of steps per token.
        read: whether o_t reads the state "after" or "before" the update of token t.
        scale: factor on the output; None is K ** -0.5.
    Raises:
        ConfigError: a field is unknown or invalid, or the combination of fields is undefined; gives the reason.
    Source: DeltaNet 2406.06484, Gated DeltaNet 2412.06464, Kimi Linear 2510.26692, Comba 2506.02475,
        EFLA 2512.12602, Longhorn 2407.14207, DeltaProduct 2502.10297, RWKV-7 2503.14456.
    """

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
    def _set_erase_from_of_dplr(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("transition") == "dplr":
            return {"erase_from": "previous", **data}
        return data

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        if self.transition != "delta":
            reason = "has no erase term" if self.transition == "additive" else "erases with its operands a and b"
            for name, default in (("reparam", "none"), ("erase_key", "key"), ("negative_eigenvalues", "off")):
                if (value := getattr(self, name)) != default:
                    raise ValueError(f"{name}={value!r} needs the delta rule; transition={self.transition!r} {reason}")
            if self.beta == "separate":
                raise ValueError(
                    f"beta='separate' needs the delta rule; transition={self.transition!r} {reason}, and its write "
                    "strength is beta='head'"
                )
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
            if self.beta == "separate":
                raise ValueError(f"beta='separate' with reparam={self.reparam!r}: the size of a step is one beta")
        return self

    def __str__(self) -> str:
        return _equation(self)

    def __repr_args__(self) -> list[tuple[str, Any]]:
        return list(self.changed_fields().items())

    def changed_fields(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        # torch.compile may trace this, and cannot trace an iteration over a pydantic model.
        return {name: getattr(self, name) for name, default in _DEFAULTS.items() if getattr(self, name) != default}

    @property
    def decay_axes(self) -> Literal["none", "head", "channel"]:
        """Axis of the decay of one token. "head" for "fixed", whose tensor may also have the axis K."""
        return "channel" if self.decay in ("channel", "rate") else "none" if self.decay == "none" else "head"

    @property
    def micro_steps(self) -> int:
        """Rank-one writes per token: one for each householder, and two for dplr, with the keys b and k."""
        return 2 if self.transition == "dplr" else self.householders

    def scale_of(self, K: int) -> float:
        """Return the output factor for key width K."""
        return K**-0.5 if self.scale is None else self.scale

    def spectrum(self) -> Spectrum:
        """Return the interval of the eigenvalue along the erased direction, without the decay.

        Returns: `Spectrum(low, high, condition)`; low and high are None if the eigenvalue is unbounded.
        Source: Grazzi 2411.12537 section 4; EFLA 2512.12602; Longhorn 2407.14207 section 3.
        """
        if self.transition == "additive":
            return Spectrum(1.0, 1.0, "all inputs: nothing is erased")
        if self.transition == "dplr":
            return Spectrum(None, None, "a and b are free")
        if self.erase_key == "own":
            return Spectrum(None, None, "the erase key is free")
        strength = {"head": "beta", "separate": "erase", "channel": "erase"}.get(self.beta)
        if self.reparam != "none":
            return Spectrum(0.0, 1.0, f"any k and any {strength} >= 0" if strength else "any k")
        condition = f"|k| <= 1 and {strength} in [0, 1]" if strength else "|k| <= 1"
        return Spectrum(0.0 if self.negative_eigenvalues == "off" else -1.0, 1.0, condition)

    def operands(self, B: int, T: int, H: int, HV: int, K: int, V: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of every required operand. `state` and `cu_seqlens` are optional for every spec.

        With decay="fixed", log_decay may also be [HV, K].

        Args: B batch, T time, H key heads, HV value heads, K key width, V value width.
        Returns: operand name -> shape, in the field order of `UpdateInputs`.
        """
        n = (self.householders,) if self.householders > 1 else ()
        shapes: dict[str, tuple[int, ...]] = {
            "q": (B, T, H, K),
            "k": (B, T, *n, H, K),
            "v": (B, T, *n, HV, V),
        }
        if self.decay == "rate":
            shapes |= {"step": (B, T, HV), "rate": (HV, K)}
        elif self.decay != "none":
            shapes["log_decay"] = {"fixed": (HV,), "head": (B, T, HV), "channel": (B, T, HV, K)}[self.decay]
        if self.beta == "head":
            shapes["beta"] = (B, T, *n, HV)
        if self.beta == "separate":
            shapes |= {"erase": (B, T, *n, HV), "write": (B, T, *n, HV)}
        if self.beta == "channel":
            if self.transition == "delta":
                shapes["erase"] = (B, T, *n, HV, K)
            shapes["write"] = (B, T, *n, HV, V)
        if self.erase_key == "own":
            shapes["erase_key"] = (B, T, *n, H, K)
        if self.transition == "dplr":
            shapes |= {"a": (B, T, HV, K), "b": (B, T, HV, K)}
        return shapes


_SCALAR_DECAY = {"head": "d_t"}
_MATRIX_DECAY = {"fixed": "Diag(d)", "channel": "Diag(d_t)", "rate": "Diag(exp(step_t rate))"}
_DEFAULTS = {name: field.default for name, field in UpdateSpec.model_fields.items()}


def _equation(spec: UpdateSpec) -> str:
    """Print the recurrence in one or two lines. d is the decay exp(log_decay), f the strength computed from k.

    Example: S_t = d_t (I - beta_t k_t k_t^T) S_(t-1) + beta_t k_t v_t^T;  o_t = K^-1/2 S_t^T q_t
    """
    erase, write = _strength_symbols(spec)
    value = "(w_t * v_t)^T" if spec.beta == "channel" else "v_t^T"
    line = f"S_t = {_transition_term(spec, erase)} + {_product(write, 'k_t', value)}"
    if spec.householders > 1:
        line += f"   ({spec.householders} such steps per token, with the decay in the first)"
    scale = "K^-1/2" if spec.scale is None else "" if spec.scale == 1 else f"{spec.scale!r}"
    read = "S_(t-1)^T" if spec.read == "before" else "S_t^T"
    return f"{line};  o_t = {_product(scale, read, 'q_t')}{_strength_definition(spec)}"


def _transition_term(spec: UpdateSpec, erase: str) -> str:
    """Return the term that applies the transition to the previous state."""
    scalar, matrix = _SCALAR_DECAY.get(spec.decay, ""), _MATRIX_DECAY.get(spec.decay, "")
    if spec.transition == "additive":
        return _product(scalar, matrix, "S_(t-1)")
    diagonal = matrix or _product(scalar, "I")
    if spec.transition == "dplr":
        return f"({diagonal} + b_t a_t^T) S_(t-1)"
    key = "e_t" if spec.erase_key == "own" else "k_t"
    reader = f"(b_t * {key})^T" if spec.beta == "channel" else f"{key}^T"
    erased = _product(erase, "k_t", reader)
    if spec.erase_from == "previous":
        return f"({diagonal} - {erased}) S_(t-1)"
    return _product(scalar, f"(I - {erased})", matrix, "S_(t-1)")


def _strength_symbols(spec: UpdateSpec) -> tuple[str, str]:
    """Return the scalar factors of the erase and the write."""
    if spec.reparam != "none":
        return "f_t", "f_t"
    erase, write = {"head": ("beta_t", "beta_t"), "separate": ("b_t", "w_t")}.get(spec.beta, ("", ""))
    doubled = (_product("2", erase), _product("2", write))
    return {"off": (erase, write), "both": doubled, "erase": (doubled[0], write)}[spec.negative_eigenvalues]


def _strength_definition(spec: UpdateSpec) -> str:
    """Return the line that defines f_t; "" without a reparametrisation."""
    if spec.reparam == "none":
        return ""
    norm = "(k_t^T (b_t * k_t))" if spec.beta == "channel" else "|k_t|^2"
    beta = "beta_t" if spec.beta == "head" else ""
    time = _product(beta, norm)
    factor = f"(1 - exp(-{time})) / {norm}" if spec.reparam == "efla" else f"{beta or 1} / (1 + {time})"
    return f"\n  with f_t = {factor}"


def _product(*factors: str) -> str:
    return " ".join(factor for factor in factors if factor)
