"""From a spec to canonical operands, in plain torch: what the fast backends compute.

    S_t = S~_t + k_t (write_t * v_t - R_t^T (erase_t * e_t))^T

with the doubling of negative eigenvalues, EFLA and Longhorn already inside `erase` and `write`.
B batch, T time, H key heads, HV value heads, K key width, V value width; an optional micro-step axis follows T.
"""

import torch
from einops import repeat
from torch import Tensor

from deltazoo.backends.base import UpdateInputs, state_dtype
from deltazoo.backends.spec import UpdateSpec


def strengths(spec: UpdateSpec, inputs: UpdateInputs) -> tuple[Tensor | None, Tensor | None]:
    """Lower beta, negative eigenvalues and the reparametrisation to the strengths of erase and write.

    Returns: erase, write: [B, T, HV], or [B, T, HV, K] and [B, T, HV, V] with beta="channel", in `state_dtype`;
        None means 1 (and for erase also: nothing is erased, or dplr's own operands do it).
    Source: EFLA 2512.12602 and Longhorn 2407.14207 (the factor), Grazzi 2411.12537 (the doubling).
    """
    dtype = state_dtype(inputs.q.dtype)
    if spec.beta == "channel":
        erase = None if inputs.erase is None else inputs.erase.to(dtype)
        write = None if inputs.write is None else inputs.write.to(dtype)
    else:
        erase = write = None if inputs.beta is None else inputs.beta.to(dtype)
    if spec.transition != "delta":
        return None, write
    if spec.reparam != "none":
        return _reparametrised(spec, inputs, erase, write)
    if spec.negative_eigenvalues == "off":
        return erase, write
    if erase is None:
        erase = inputs.v.new_ones(inputs.v.shape[:-1], dtype=dtype)
    return 2 * erase, write if spec.negative_eigenvalues == "erase" else 2 * (erase if write is None else write)


def log_decay(spec: UpdateSpec, inputs: UpdateInputs) -> Tensor | None:
    """The logarithm of the decay of each token, in `state_dtype`.

    Returns: [B, T, HV] or [B, T, HV, K]; None for decay="none". With decay="fixed" it is an expanded view.
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


def exact_factor(x: Tensor) -> Tensor:
    """(1 - exp(-x)) / x for x >= 0, right in value and in gradient from x = 0 to infinity.

    Near 0 the quotient's gradient cancels, so a Taylor polynomial takes over below 1/4; its remainder there,
    x^13 / 14!, is under 1e-18.
    """
    near = x < 0.25
    small = torch.where(near, x, torch.zeros_like(x))
    large = torch.where(near, torch.ones_like(x), x)
    series = torch.ones_like(x)
    for n in range(13, 1, -1):
        series = 1 - small * series / n
    return torch.where(near, series, -torch.expm1(-large) / large)


def _reparametrised(
    spec: UpdateSpec, inputs: UpdateInputs, erase: Tensor | None, write: Tensor | None
) -> tuple[Tensor, Tensor]:
    dtype = state_dtype(inputs.q.dtype)
    k = inputs.k.to(dtype)
    groups = inputs.v.shape[-2] // k.shape[-2]
    if spec.beta == "channel":
        assert erase is not None and write is not None
        k = repeat(k, "... h k -> ... (h g) k", g=groups)
        time = (k * erase * k).sum(-1)
    else:
        norm = repeat(k.square().sum(-1), "... h -> ... (h g)", g=groups)
        time = norm if erase is None else erase * norm
    factor = exact_factor(time) if spec.reparam == "efla" else 1 / (1 + time)
    if spec.beta == "channel":
        assert erase is not None and write is not None
        return factor.unsqueeze(-1) * erase, factor.unsqueeze(-1) * write
    strength = factor if erase is None else factor * erase
    if spec.reparam == "efla" and erase is not None:
        # far from 0 as it stands, for there the product's gradient by erase, exp(-time), would be what two terms leave
        far = time >= 0.25
        long, norm = (torch.where(far, x, torch.ones_like(x)) for x in (time, norm))
        strength = torch.where(far, (1 - torch.exp(-long)) / norm, strength)
    return strength, strength
