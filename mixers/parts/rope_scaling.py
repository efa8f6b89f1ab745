"""Scaled rotary frequencies, with which models trained on short texts read longer ones: linear, Llama 3 and YaRN.

    f_i = theta^(-i / R),    f'_i = (kept_i + (1 - kept_i) / factor) f_i    for channel pair i of R

    linear    kept_i = 0
    yarn      kept_i = 1 up to the pair that turns beta_fast times within L tokens, 0 from that which turns beta_slow
              times, linear in i between them; cosine and sine are multiplied by `attention_factor`
    llama3    kept_i = 1 for pairs that turn more than high_freq_factor times within L tokens, 0 below low_freq_factor
              turns, linear in f_i between them

L is `original_max_position_embeddings`. All fields have the names of transformers' `rope_scaling`.
"""

import math
from typing import ClassVar, Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from deltazoo.backends.io.frozen_config import FrozenConfig, changed_fields


class ScaledFrequencies(NamedTuple):
    """Scaling for R channel pairs, as numbers that an operator takes.

    kept_i = min(max(constant + per_pair i + per_frequency f_i, 0), 1). amplitude: factor on cosine and sine.
    """

    factor: float
    constant: float
    per_pair: float
    per_frequency: float
    amplitude: float

    def apply(self, frequency_R: Tensor) -> Tensor:
        """Return f' for f."""
        pair_R = torch.arange(len(frequency_R), device=frequency_R.device, dtype=frequency_R.dtype)
        kept_R = (self.constant + self.per_pair * pair_R + self.per_frequency * frequency_R).clamp(0, 1)
        return (kept_R + (1 - kept_R) / self.factor) * frequency_R


class RopeScaling(FrozenConfig):
    """How the rotary frequencies of an attention layer are scaled. Fields that `rope_type` does not use are refused.

    Source: YaRN, Peng 2023, arXiv 2309.00071, section 3; Llama 3, arXiv 2407.21783; transformers' modeling_rope_utils.
    """

    rope_type: Literal["linear", "llama3", "yarn"] = Field(description="formula of the frequencies")
    factor: float = Field(ge=1, allow_inf_nan=False, description="by which low frequencies are divided")
    original_max_position_embeddings: int | None = Field(
        default=None, ge=1, description="L, tokens of the texts before the scaling; llama3 and yarn need it"
    )
    low_freq_factor: float = Field(
        default=1.0, gt=0, allow_inf_nan=False, description="llama3: turns below which the factor divides"
    )
    high_freq_factor: float = Field(
        default=4.0, gt=0, allow_inf_nan=False, description="llama3: turns above which a frequency stays"
    )
    beta_fast: float = Field(default=32.0, gt=0, allow_inf_nan=False, description="yarn: turns from which it stays")
    beta_slow: float = Field(
        default=1.0, gt=0, allow_inf_nan=False, description="yarn: turns up to which the factor divides"
    )
    attention_factor: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="yarn: factor on cosine and sine; None: m(mscale) / m(mscale_all_dim) with "
        "m(x) = 0.1 x ln(factor) + 1, or m(1) without both",
    )
    mscale: float | None = Field(default=None, ge=0, allow_inf_nan=False, description="yarn: see attention_factor")
    mscale_all_dim: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="yarn: see attention_factor; mla multiplies its default scale by m(mscale_all_dim)^2",
    )
    truncate: bool = Field(default=True, description="yarn: round the bounds of the ramp outwards to whole pairs")

    _used: ClassVar[dict[str, frozenset[str]]] = {
        "linear": frozenset(),
        "llama3": frozenset(("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")),
        "yarn": frozenset((
            "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale",
            "mscale_all_dim", "truncate",
        )),
    }  # fmt: skip

    @model_validator(mode="after")
    def _fields_belong_to_the_type(self) -> Self:
        used = self._used[self.rope_type]
        unused = [name for name in changed_fields(self) if name not in used | {"rope_type", "factor"}]
        if unused:
            raise ValueError(f"{unused[0]} must not be set with rope_type={self.rope_type!r}")
        if used and self.original_max_position_embeddings is None:
            raise ValueError(f"original_max_position_embeddings must be set with rope_type={self.rope_type!r}")
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"high_freq_factor must be larger than low_freq_factor = {self.low_freq_factor}, got "
                f"{self.high_freq_factor}"
            )
        if self.beta_slow > self.beta_fast:
            raise ValueError(f"beta_fast must be at least beta_slow = {self.beta_slow}, got {self.beta_fast}")
        return self

    def frequencies(self, theta: float, half: int) -> ScaledFrequencies:
        """Return the scaling for `half` channel pairs with the base `theta`."""
        L = self.original_max_position_embeddings
        if self.rope_type == "linear" or L is None:
            return ScaledFrequencies(self.factor, 0.0, 0.0, 0.0, 1.0)
        if self.rope_type == "llama3":
            span = self.high_freq_factor - self.low_freq_factor
            return ScaledFrequencies(self.factor, -self.low_freq_factor / span, 0.0, L / (2 * math.pi * span), 1.0)

        def pair_with_turns(turns: float) -> float:
            return half * math.log(L / (2 * math.pi * turns)) / math.log(theta)

        low, high = pair_with_turns(self.beta_fast), pair_with_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * half - 1)
        span = high - low or 0.001
        return ScaledFrequencies(self.factor, 1 + low / span, -1 / span, 0.0, self._amplitude())

    def score_factor(self) -> float:
        """Return the factor on the scores by which DeepSeek's attention corrects for long texts."""
        return self._attention_scale(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._attention_scale(self.mscale) / self._attention_scale(self.mscale_all_dim)
        return self._attention_scale(1.0)

    def _attention_scale(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0


def check_rope_scaling(theta: float | None, scaling: RopeScaling | None) -> None:
    """Refuse a scaling without rotary embeddings. Raises: ValueError."""
    if theta is None and scaling is not None:
        raise ValueError("rope_scaling must be None without rotary_theta, whose frequencies it scales")
