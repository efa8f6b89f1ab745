"""The route of an update, and its lowering to the operands of the chunked kernels, which the other routes do not need.

The kernels compute one form, per value head, with the strengths b and w one number per token:

    S_t = S~_t + k_t (w_t v_t - R_t^T (b_t e_t))^T

- For EFLA and Longhorn b is beta: the kernels compute the strength from it and |k|^2 (device/step_size.py).
- Strengths per channel are multiplied into values, v = write * v, and keys of the erase, e = erase * k. With a decay
  per channel the kernels compute the latter.
- Several householders are micro-steps: tokens of their own, of which the first has the decay and the last the read.
- DPLR with a decay per channel has kernels for both of its writes: k is b, the erase key a, and v_key k. With another
  decay it is two micro-steps: the first writes b with the erase key -a, the second writes k and v.

B batch, T time, n micro-steps, H key heads, HV value heads, K key width, V value width
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from deltazoo.backends.triton.operands import ScanKind, ScanOperands
from deltazoo.backends.update.base import UpdateInputs, UpdateOutput
from deltazoo.backends.update.lowering import accumulates_rounding_errors, strengths
from deltazoo.backends.update.spec import UpdateSpec

# The operator that computes an update. chunks: the chunked kernels (chunk/op.py). elements: the elementwise scan
# (element/op.py). step, element step: the kernels of one token without gradients (decode/op.py, element/op.py).
Route = Literal["chunks", "elements", "step", "element step"]
MAX_ELEMENT_VALUES = 2  # value columns that one launch of the elementwise kernels computes


def route_of(spec: UpdateSpec, V: int, T: Any = None, *, packed: bool = False, grad: bool = True) -> Route:
    """Return the route of an update of T tokens per row; None: of more than one.

    The elementwise kernels compute additive updates of one write per token, with narrow values or a rate. For values
    of width 1 or 2 the products of a chunk are more work than the recurrence itself. With a rate, the gradient of the
    log decay is multiplied by the step, and only these kernels compute it without cancellation.
    """
    narrow = V <= MAX_ELEMENT_VALUES
    elementwise = spec.transition == "additive" and spec.householders == 1 and (narrow or spec.decay == "rate")
    if T is not None and T == 1 and not packed and not grad and (narrow or not elementwise):
        return "element step" if elementwise else "step"
    return "elements" if elementwise else "chunks"


class Lowered(NamedTuple):
    """The operands of the chunked kernels, and what undoes the lowering of their results.

    Args:
        steps: micro-steps per token, n. read: the micro-step that has the token's output.
        T, K, V, dtype: of the inputs.
    """

    operands: ScanOperands
    kind: ScanKind
    steps: int
    read: int
    T: Any
    K: int
    V: int
    dtype: torch.dtype

    def restore(self, o: Tensor, state: Tensor) -> UpdateOutput:
        """Return the results of the update: one output per token, without padding, in the dtype of the inputs."""
        if self.steps > 1:
            o = torch.unflatten(o, 1, (self.T, self.steps))[:, :, self.read]
        o, state = _crop(o, self.V), _crop(state, self.V, self.K)
        return UpdateOutput(o if o.dtype == self.dtype else o.to(self.dtype), state)


def _crop(x: Tensor, columns: int, rows: int | None = None) -> Tensor:
    """Remove the padding of the widths."""
    if rows is not None and x.shape[-2] != rows:
        x = x[..., :rows, :]
    return x if x.shape[-1] == columns else x[..., :columns]


def lower(spec: UpdateSpec, inputs: UpdateInputs, config: str) -> Lowered:
    """Build the operands of the chunked kernels: widths padded to multiples of 8, micro-steps flattened into time."""
    T, K, V, dtype = inputs.q.shape[1], inputs.q.shape[-1], inputs.v.shape[-1], inputs.v.dtype
    inputs = with_channel_decay(inputs)
    channel = has_channel_decay(inputs)
    if computes_in_float32(spec, inputs.q.shape[-1], inputs.v.dtype, channel):
        inputs = _in_float32(inputs)
    n = micro_steps(spec, channel)
    x, kind = _lower(spec, inputs, config, channel, n)
    if n > 1:
        x = _by_micro_steps(spec, x, n)
    return Lowered(_padded(x), kind, n, 0 if spec.read == "before" else n - 1, T, K, V, dtype)


def _lower(spec: UpdateSpec, inputs: UpdateInputs, config: str, channel: bool, n: int) -> tuple[ScanOperands, ScanKind]:
    """Build the operands, without padding; the micro-steps of those that have them are an axis after the time."""
    # the kernels for scalar decays and strengths compute the step sizes of EFLA and Longhorn
    in_kernel = spec.reparam != "none" and spec.beta != "channel" and not channel
    erase, write = _strengths(spec, inputs, in_kernel)
    tied = write is erase and write is not None
    q, k, v, e = inputs.q, inputs.k, inputs.v, inputs.erase_key
    erase_channels = False
    if spec.beta == "channel" and write is not None:
        v, write = v * write.to(v.dtype), None
        if erase is not None:
            # the kernels for a decay per channel multiply k by the strengths
            erase_channels = e is None and channel
            q, k, e = (_per_value_head(x, v) for x in (q, k, k if e is None else e))
            erase = erase.to(k.dtype)
            e, erase, tied = erase if erase_channels else e * erase, None, False
    v_key = None
    if spec.transition == "dplr":
        q, k = _per_value_head(q, v), _per_value_head(k, v)
        if n == 1:
            assert inputs.a is not None and inputs.b is not None  # checked by check.py
            k, e, v_key = inputs.b.to(k.dtype), inputs.a.to(k.dtype), k
            v, write = v if write is None else v * write.unsqueeze(-1).to(v.dtype), None
        else:
            k, v, e, write = _dplr_micro_steps(k, v, inputs.a, inputs.b, write)
    log_decay = inputs.log_decay
    if log_decay is not None and log_decay.dim() == 2:
        log_decay = log_decay.expand(*q.shape[:2], *log_decay.shape)
    operands = ScanOperands(
        q=q, k=k, v=v, log_decay=log_decay, b=erase, w=None if tied else write, e=e, v_key=v_key, state=inputs.state,
        cu_seqlens=inputs.cu_seqlens,
    )  # fmt: skip
    K = q.shape[-1]
    return operands, ScanKind(
        delta=spec.transition != "additive",
        erase_from=spec.erase_from,
        read=spec.read,
        split_terms=splits_terms(spec, K, k.dtype),
        tied=tied,
        scale=spec.scale_of(K),
        config=config,
        reparam=spec.reparam if in_kernel else "none",
        erase_channels=erase_channels,
    )


def _strengths(spec: UpdateSpec, inputs: UpdateInputs, in_kernel: bool) -> tuple[Tensor | None, Tensor | None]:
    """Return the strengths of erase and write; with `in_kernel` beta, from which the kernels compute both."""
    if not in_kernel:
        return strengths(spec, inputs, _strength_dtype(spec, inputs))
    beta = inputs.beta
    if beta is None:
        beta = inputs.v.new_ones(inputs.v.shape[:-1], dtype=torch.float32)
    return beta, beta


def _strength_dtype(spec: UpdateSpec, inputs: UpdateInputs) -> torch.dtype | None:
    """Return the dtype in which strengths are computed; None: float32.

    Strengths per channel are multiplied into keys and values in their dtype. Strengths per token keep the dtype of
    beta, which the kernels convert. Where they differ they are float32: the sum of both gradients of beta would be
    rounded twice, and erase and write may have different dtypes. The Hopper gradients kernel for a decay per channel
    has no register to spare for the conversion.
    """
    if spec.reparam != "none":
        return None
    if spec.beta == "channel":
        return inputs.k.dtype
    if inputs.beta is None or spec.negative_eigenvalues == "erase" or has_channel_decay(inputs):
        return None
    return inputs.beta.dtype


def micro_steps(spec: UpdateSpec, channel: bool) -> int:
    """Return the number of micro-steps of a token. channel: the decay is per channel."""
    return (1 if channel else 2) if spec.transition == "dplr" else spec.householders


def has_channel_decay(inputs: UpdateInputs) -> bool:
    """Whether the decay is per channel: log_decay [HV, K] or [B, T, HV, K], or step and rate."""
    return inputs.step is not None or (inputs.log_decay is not None and inputs.log_decay.dim() in (2, 4))


def with_channel_decay(inputs: UpdateInputs) -> UpdateInputs:
    """Replace step and rate by the log decay per channel [B, T, HV, K]."""
    if inputs.step is None or inputs.rate is None:
        return inputs
    log_decay = inputs.step.unsqueeze(-1) * inputs.rate
    if inputs.q.dtype.itemsize == 2:
        # The gradient of a decay below e^-18 is much smaller than the error of 16-bit products, which a large step
        # would carry into d_rate.
        log_decay = torch.where(log_decay > -18, log_decay, log_decay.detach())
    return inputs._replace(log_decay=log_decay, step=None, rate=None)


def splits_terms(spec: UpdateSpec, K: int, dtype: torch.dtype) -> bool:
    """Whether values that feed back into the state are split into two terms."""
    return accumulates_rounding_errors(spec) or (dtype == torch.bfloat16 and _erases_most_of_the_state(spec, K))


def computes_in_float32(spec: UpdateSpec, K: int, dtype: torch.dtype, channel: bool) -> bool:
    """Whether 16-bit operands are converted to float32.

    Instead of splitting terms: in float16 the low term would underflow, and scaled operands of a decay per channel have
    one term.
    """
    if dtype == torch.float16:
        return accumulates_rounding_errors(spec)
    return dtype == torch.bfloat16 and channel and splits_terms(spec, K, dtype)


def _by_micro_steps(spec: UpdateSpec, x: ScanOperands, n: int) -> ScanOperands:
    """Flatten the n micro-steps of a token into time; the first has its decay, the last its read.

    A read before the update is on the first micro-step.
    """
    B, T = x.q.shape[:2]

    def spread(y: Tensor, at: int) -> Tensor:
        """[B, T, ...] -> [B, T n, ...], zero except at micro-step `at`."""
        return pad(y.unsqueeze(2), (0, 0) * (y.dim() - 2) + (at, n - 1 - at)).flatten(1, 2)

    def flat(y: Tensor | None) -> Any:
        """[B, T, n, ...] -> [B, T n, ...]."""
        return None if y is None else y.flatten(1, 2)

    decay = x.log_decay
    if decay is not None:
        decay = spread(decay.expand(B, T, -1) if decay.dim() == 1 else decay, 0)
    return x._replace(
        q=spread(x.q, 0 if spec.read == "before" else n - 1), k=flat(x.k), v=flat(x.v), log_decay=decay,
        b=flat(x.b), w=flat(x.w), e=flat(x.e), v_key=flat(x.v_key),
        cu_seqlens=None if x.cu_seqlens is None else x.cu_seqlens * n,
    )  # fmt: skip


def _padded(x: ScanOperands) -> ScanOperands:
    """Pad the widths with zeros to multiples of 8."""
    to_K, to_V = -x.q.shape[-1] % 8, -x.v.shape[-1] % 8
    if not (to_K or to_V):
        return x

    def keys(y: Tensor | None) -> Any:
        return y if y is None or not to_K else pad(y, (0, to_K))

    return x._replace(
        q=keys(x.q), k=keys(x.k), v=pad(x.v, (0, to_V)) if to_V else x.v,
        log_decay=keys(x.log_decay) if x.decay == "channel" else x.log_decay, e=keys(x.e), v_key=keys(x.v_key),
        state=None if x.state is None else pad(x.state, (0, to_V, 0, to_K)),
    )  # fmt: skip


def _in_float32(inputs: UpdateInputs) -> UpdateInputs:
    """Convert the operands to float32."""
    names = ("q", "k", "v", "erase_key", "a", "b")
    operands = {name: getattr(inputs, name) for name in names}
    return inputs._replace(**{name: x.float() for name, x in operands.items() if x is not None})


def _per_value_head(x: Tensor, v: Tensor) -> Tensor:
    """Repeat the key heads of x [..., H, K] for their value heads: [..., HV, K]."""
    groups = v.shape[-2] // x.shape[-2]
    return x if groups == 1 else x.repeat_interleave(groups, -2)


def _dplr_micro_steps(
    k: Tensor, v: Tensor, a: Tensor | None, b: Tensor | None, write: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return k, v, e and w of the micro-steps [B, T, 2, HV, ..] of S_t = D S_{t-1} + b (a^T S_{t-1}) + k v^T."""
    assert a is not None and b is not None  # checked by check.py
    keys = torch.stack((b.to(k.dtype), k), 2)
    values = torch.stack((torch.zeros_like(v), v), 2)
    erase_keys = torch.stack((-a.to(k.dtype), torch.zeros_like(k)), 2)
    return keys, values, erase_keys, None if write is None else torch.stack((torch.zeros_like(write), write), 2)


def _erases_most_of_the_state(spec: UpdateSpec, K: int) -> bool:
    """Whether one erase removes a large part of the state: one of at most 16 directions without beta or without decay.

    In bfloat16 the rounding of the operands alone then costs o more than 5e-3. Up to 32 directions without both.
    """
    directions = 16 * (spec.beta, spec.decay).count("none")
    return spec.transition == "delta" and directions >= K
