"""The reference backend: the recurrence token by token, which defines the semantics of an update.

B batch, T time, H key heads, HV value heads, K key width, V value width, N packed sequences
"""

import itertools

import torch
from einops import repeat
from torch import Tensor

from deltazoo.backends.update.base import Backend, UpdateInputs, UpdateMeta, UpdateOutput, state_dtype
from deltazoo.backends.update.spec import UpdateSpec


class ReferenceBackend(Backend):
    """Compute the update token by token, with gradients by autograd.

    It supports every spec, float dtype and device, and computes in float32 (float64 for float64 inputs). It is slow.
    torch.compile cannot trace packed sequences here.
    """

    name = "reference"

    def unsupported(self, spec: UpdateSpec, meta: UpdateMeta) -> list[str]:
        if meta.packed and torch.compiler.is_compiling():
            return [
                "cu_seqlens must be None under torch.compile: this backend reads its values to loop over sequences."
            ]
        return []

    def forward(self, spec: UpdateSpec, inputs: UpdateInputs) -> UpdateOutput:
        if inputs.cu_seqlens is None:
            return _run_sequence(spec, inputs)
        bounds = inputs.cu_seqlens.tolist()
        outputs = [
            _run_sequence(spec, _slice(inputs, n, start, stop))
            for n, (start, stop) in enumerate(itertools.pairwise(bounds))
        ]
        T, K, (HV, V) = inputs.q.shape[1], inputs.q.shape[-1], inputs.v.shape[-2:]
        padding = inputs.v.new_zeros(1, T - bounds[-1], HV, V)  # rows after the last sequence
        no_state = inputs.q.new_zeros(0, HV, K, V, dtype=state_dtype(inputs.q.dtype))
        return UpdateOutput(
            torch.cat([*(out.o for out in outputs), padding], 1), torch.cat([no_state, *(out.state for out in outputs)])
        )


def _slice(inputs: UpdateInputs, n: int, start: int, stop: int) -> UpdateInputs:
    """Return the inputs of sequence n of a pack: tokens start to stop."""
    without_time = {"state", "cu_seqlens", "rate"}
    if inputs.log_decay is not None and inputs.log_decay.dim() < 3:
        without_time.add("log_decay")
    sliced = {
        name: tensor[:, start:stop]
        for name, tensor in inputs._asdict().items()
        if tensor is not None and name not in without_time
    }
    state = None if inputs.state is None else inputs.state[n : n + 1]
    return inputs._replace(**sliced, state=state, cu_seqlens=None)


def _run_sequence(spec: UpdateSpec, inputs: UpdateInputs) -> UpdateOutput:
    B, T, H, K = inputs.q.shape
    HV, V = inputs.v.shape[-2:]
    dtype = state_dtype(inputs.q.dtype)
    x = inputs._replace(**{name: tensor.to(dtype) for name, tensor in inputs._asdict().items() if tensor is not None})
    S = x.q.new_zeros(B, HV, K, V) if x.state is None else x.state
    scale = K**-0.5 if spec.scale is None else spec.scale
    outputs = []
    for t in range(T):
        q = repeat(x.q[:, t], "b h k -> b (h g) k", g=HV // H)
        previous = S
        for m in range(spec.householders):
            S = _step(spec, x, S, t, m)
        outputs.append(scale * _read(previous if spec.read == "before" else S, q))
    o = torch.stack(outputs, 1) if outputs else x.v.new_zeros(B, 0, HV, V)
    return UpdateOutput(o.to(inputs.v.dtype), S if T else S.clone())


def _step(spec: UpdateSpec, x: UpdateInputs, S: Tensor, t: int, m: int) -> Tensor:
    """Apply micro-step m of token t to S [B, HV, K, V]."""
    decayed = S if m else _apply_decay(spec, x, S, t)
    k, v = _heads(spec, x, x.k, t, m), _at(spec, x.v, t, m)
    if spec.transition == "dplr":
        assert x.a is not None and x.b is not None
        if spec.beta != "none":
            v = (_at(spec, x.write, t, m) if spec.beta == "channel" else _at(spec, x.beta, t, m)[..., None]) * v
        return decayed + _outer(x.b[:, t], _read(S, x.a[:, t])) + _outer(k, v)
    erase, write = _strengths(spec, x, k, t, m)
    if spec.transition == "additive":
        return decayed + _outer(k, write * v)
    e = _heads(spec, x, x.erase_key, t, m) if spec.erase_key == "own" else k
    R = S if spec.erase_from == "previous" else decayed
    return decayed + _outer(k, write * v - _read(R, erase * e))


def _apply_decay(spec: UpdateSpec, x: UpdateInputs, S: Tensor, t: int) -> Tensor:
    if spec.decay == "none":
        return S
    if spec.decay == "rate":
        assert x.step is not None and x.rate is not None
        return torch.exp(x.step[:, t, :, None] * x.rate)[..., None] * S
    assert x.log_decay is not None
    log_decay = x.log_decay if spec.decay == "fixed" else x.log_decay[:, t]
    per_channel = log_decay.dim() == (2 if spec.decay == "fixed" else 3)
    decay = torch.exp(log_decay)
    return (decay[..., None] if per_channel else decay[..., None, None]) * S


def _strengths(spec: UpdateSpec, x: UpdateInputs, k: Tensor, t: int, m: int) -> tuple[Tensor, Tensor]:
    """b and w of the equation, broadcastable to [B, HV, K] and [B, HV, V]. k: [B, HV, K]."""
    if spec.beta == "channel":
        write = _at(spec, x.write, t, m)
        erase = _at(spec, x.erase, t, m) if spec.transition == "delta" else write[..., :1]
    elif spec.beta == "separate":
        erase, write = _at(spec, x.erase, t, m)[..., None], _at(spec, x.write, t, m)[..., None]
    elif spec.beta == "head":
        erase = write = _at(spec, x.beta, t, m)[..., None]
    else:
        erase = write = torch.ones_like(k[..., :1])
    if spec.negative_eigenvalues != "off":
        return 2 * erase, 2 * write if spec.negative_eigenvalues == "both" else write
    if spec.reparam == "none":
        return erase, write
    n = (k * erase * k).sum(-1, keepdim=True)  # beta |k|^2, or k^T (b * k)
    if spec.reparam == "longhorn":
        return erase / (1 + n), write / (1 + n)
    tiny = n < 1e-3  # avoids cancellation in the gradient of the quotient; the series is accurate to 1e-14
    safe, small = torch.where(tiny, torch.ones_like(n), n), torch.where(tiny, n, torch.zeros_like(n))
    series = 1 - small / 2 + small**2 / 6 - small**3 / 24 + small**4 / 120
    factor = torch.where(tiny, series, -torch.expm1(-safe) / safe)
    return erase * factor, write * factor


def _at(spec: UpdateSpec, tensor: Tensor | None, t: int, m: int) -> Tensor:
    assert tensor is not None
    return tensor[:, t, m] if spec.householders > 1 else tensor[:, t]


def _heads(spec: UpdateSpec, x: UpdateInputs, key: Tensor | None, t: int, m: int) -> Tensor:
    """Return the key of token t, repeated for each value head: [B, HV, K]."""
    key_BHK = _at(spec, key, t, m)
    return repeat(key_BHK, "b h k -> b (h g) k", g=x.v.shape[-2] // key_BHK.shape[1])


def _read(S: Tensor, key: Tensor) -> Tensor:
    """S^T key: [B, HV, V]."""
    return torch.einsum("bhkv,bhk->bhv", S, key)


def _outer(key: Tensor, value: Tensor) -> Tensor:
    """key value^T: [B, HV, K, V]."""
    return key[..., :, None] * value[..., None, :]
