"""Lowering of a spec to canonical operands, in plain torch. The fast backends compute this form:

    S_t = S~_t + k_t (write_t * v_t - R_t^T (erase_t * e_t))^T

`erase` and `write` include the factor 2 for negative eigenvalues and the factors of EFLA and Longhorn.

B batch, T time, H key heads, HV value heads, K key width, V value width; an optional micro-step axis follows T.
"""

import torch
from einops import repeat
from torch import Tensor

from deltazoo.backends.update.base import UpdateInputs, state_dtype
from deltazoo.backends.update.spec import UpdateSpec


def strengths(
    spec: UpdateSpec, inputs: UpdateInputs, dtype: torch.dtype | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the erase and write strengths from beta (or erase and write), negative_eigenvalues and reparam.

    Args: dtype: of the strengths; None: `state_dtype`.
    Returns: erase, write: [B, T, HV], or [B, T, HV, K] and [B, T, HV, V] with beta="channel".
        None means 1. With transition "additive" or "dplr" erase is always None, because there is no such term.
    Source: EFLA 2512.12602 and Longhorn 2407.14207 (their factors), Grazzi 2411.12537 (the factor 2).
    """
    dtype = dtype or state_dtype(inputs.q.dtype)
    if spec.beta in ("separate", "channel"):
        erase, write = _cast(inputs.erase, dtype), _cast(inputs.write, dtype)
    else:
        erase = write = _cast(inputs.beta, dtype)
    if spec.transition != "delta":
        return None, write
    if spec.reparam != "none":
        return _integrator_strengths(spec, inputs, erase, write)
    if spec.negative_eigenvalues == "off":
        return erase, write
    if erase is None:
        erase = inputs.v.new_ones(inputs.v.shape[:-1], dtype=dtype)
    doubled = 2 * erase
    if spec.negative_eigenvalues == "erase":
        return doubled, write
    # the same tensor if both are beta: a kernel then need not compute two gradients
    return doubled, 2 * write if spec.beta in ("separate", "channel") and write is not None else doubled


def log_decay(spec: UpdateSpec, inputs: UpdateInputs) -> Tensor | None:
    """Return the log decay of every token, in `state_dtype`.

    Returns: [B, T, HV] or [B, T, HV, K]; None for decay="none". With decay="fixed" the result is an expanded view.
    """
    if spec.decay == "none":
        return None
    if spec.decay == "rate":
        assert inputs.step is not None and inputs.rate is not None  # checked by check.py
        return inputs.step.unsqueeze(-1) * inputs.rate
    assert inputs.log_decay is not None  # checked by check.py
    if spec.decay == "fixed":
        return inputs.log_decay.expand(*inputs.q.shape[:2], *inputs.log_decay.shape)
    return inputs.log_decay


def _cast(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Convert to a dtype. `to` takes more than 1 us if there is nothing to convert."""
    return x if x is None or x.dtype == dtype else x.to(dtype)


def accumulates_rounding_errors(spec: UpdateSpec) -> bool:
    """Whether the erase may rotate or lengthen the state, or acts several times per token."""
    unbounded = spec.negative_eigenvalues != "off" or spec.erase_key == "own"
    return spec.transition == "delta" and (unbounded or spec.householders > 1)


def exact_factor(x: Tensor) -> Tensor:
    """Compute (1 - exp(-x)) / x for x >= 0, accurate in value and gradient from x = 0 to infinity.

    The gradient of the quotient suffers cancellation near 0, so a Taylor polynomial is used below 1/4. Its remainder
    there, x^13 / 14!, is below 1e-18.
    """
    is_small = x < 0.25
    small = torch.where(is_small, x, torch.zeros_like(x))
    large = torch.where(is_small, torch.ones_like(x), x)
    series = torch.ones_like(x)
    for n in range(13, 1, -1):
        series = 1 - small * series / n
    return torch.where(is_small, series, -torch.expm1(-large) / large)


def _integrator_strengths(
    spec: UpdateSpec, inputs: UpdateInputs, erase: Tensor | None, write: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the strengths of EFLA and Longhorn: beta times a factor of beta |k|^2, the size of the step along k."""
    k = inputs.k.to(state_dtype(inputs.q.dtype))
    groups = inputs.v.shape[-2] // k.shape[-2]
    if spec.beta == "channel":
        assert erase is not None and write is not None
        k = repeat(k, "... h k -> ... (h g) k", g=groups)
        step = (k * erase * k).sum(-1)
    else:
        norm = repeat(k.square().sum(-1), "... h -> ... (h g)", g=groups)
        step = norm if erase is None else erase * norm
    factor = exact_factor(step) if spec.reparam == "efla" else 1 / (1 + step)
    if spec.beta == "channel":
        assert erase is not None and write is not None
        return factor.unsqueeze(-1) * erase, factor.unsqueeze(-1) * write
    strength = factor if erase is None else factor * erase
    if spec.reparam == "efla" and erase is not None:
        # For large steps use (1 - exp(-step)) / |k|^2 directly: its gradient with respect to beta is exp(-step), which
        # the product beta * factor yields as the difference of two nearly equal terms.
        is_large = step >= 0.25
        large, norm = (torch.where(is_large, x, torch.ones_like(x)) for x in (step, norm))
        strength = torch.where(is_large, (1 - torch.exp(-large)) / norm, strength)
    return strength, strength
