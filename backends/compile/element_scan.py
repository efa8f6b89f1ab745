"""The scan for small values: elementwise over the state, token by token, a chunk of tokens at a time.

    S_t = exp(g_t) * S_{t-1} + k_t v_t^T,   o_t = S_t^T q_t, or S_{t-1}^T q_t

Where V is 1 or 2 (Mamba, HGRN, RG-LRU, RWKV-4, LRU) a product of C x C matrices a head is more work than the
recurrence itself. Here everything of one chunk is made at once, and one fused multiply-add a token is sequential.
What has the size of the state times time exists for one chunk only, forward and backward: the decay step x rate is
never laid out over time, and the backward keeps the chunks' first states and makes the others again.

B batch, N chunks, C tokens, H key heads, G value heads a key head, HV = H G, K key width, V value width, Y sequences
"""

from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable

from deltazoo.backends.base import UpdateInputs, state_dtype
from deltazoo.backends.lowering import log_decay, strengths
from deltazoo.backends.spec import UpdateSpec

WIDEST_VALUE = 2


class ElementOperands(NamedTuple):
    """What the scan takes: q, k [N, C, B, H, K]; v [N, C, B, HV, V]; state [Y, HV, K, V]; decay [N, C, B, HV, 1 or K],
    a logarithm; or step [N, C, B, HV] and rate [HV, K]; sequence [N] int64: the row of `state` that each chunk goes on
    with (then B = 1); None: row b of the batch has row b."""

    q: Tensor
    k: Tensor
    v: Tensor
    state: Tensor
    decay: Tensor | None = None
    step: Tensor | None = None
    rate: Tensor | None = None
    sequence: Tensor | None = None


def suits(spec: UpdateSpec, x: UpdateInputs) -> bool:
    """Whether the elementwise scan is less work than products of matrices: additive, one step a token, narrow V."""
    narrow = x.v.shape[-1] <= WIDEST_VALUE
    return narrow and spec.transition == "additive" and spec.householders == 1


def element_update(spec: UpdateSpec, x: UpdateInputs, sequence: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the update of operands cut into chunks; arguments and results as for `chunked_update`."""
    dtype = state_dtype(x.q.dtype)
    B, _, _, _, K = x.q.shape
    HV, V = x.v.shape[-2:]
    _, write = strengths(spec, x)
    v = x.v.to(dtype)
    if write is not None:
        v = v * (write if write.dim() == v.dim() else write.unsqueeze(-1))
    scale = K**-0.5 if spec.scale is None else spec.scale
    decay = None
    if spec.decay not in ("none", "rate"):
        decay = x.log_decay if spec.decay == "fixed" else log_decay(spec, x)
        assert decay is not None
        decay = _by_chunk(decay.unsqueeze(-1) if decay.dim() == 4 else decay)
    operands = ElementOperands(
        q=_by_chunk(scale * x.q.to(dtype)),
        k=_by_chunk(x.k.to(dtype)),
        v=_by_chunk(v),
        state=x.q.new_zeros(B, HV, K, V, dtype=dtype) if x.state is None else x.state,
        decay=decay,
        step=None if x.step is None else _by_chunk(x.step),
        rate=x.rate,
        sequence=sequence,
    )
    o, last = element_scan(operands, spec.read == "before")
    return rearrange(o, "n c b h v -> b n c h v").to(x.v.dtype), last


def element_scan(operands: ElementOperands, before: bool) -> tuple[Tensor, Tensor]:
    """Run the scan; differentiable once. Returns o [N, C, B, HV, V] and the last states [Y, HV, K, V]."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands):
        out = _ElementScan.apply(before, *operands)
    else:
        out = _forward_op(*operands, before, False)
    return out[0], out[1]


def _by_chunk(x: Tensor) -> Tensor:
    return rearrange(x, "b n c ... -> n c b ...")


def _forward(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, decay: Tensor | None, step: Tensor | None, rate: Tensor | None,
    sequence: Tensor | None, before: bool, keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns o, the last states, and for the backward the chunks' first states (empty without `keep`)."""
    N, C, B = q.shape[:3]
    o, last = torch.empty_like(v), state.clone()
    firsts = v.new_empty(N if keep else 0, B, *state.shape[1:])
    history = v.new_empty(C + 1, B, *state.shape[1:])
    for n in range(N):
        history[0] = last if sequence is None else last.index_select(0, sequence[n : n + 1])
        if keep:
            firsts[n] = history[0]
        a = _decays(n, decay, step, rate)
        _run(history, a, k[n], v[n])
        o[n] = _read(history[:-1] if before else history[1:], q[n])
        if sequence is None:
            last.copy_(history[-1])
        else:
            last.index_copy_(0, sequence[n : n + 1], history[-1])
    return o, last, firsts


def _backward(
    d_o: Tensor, d_last: Tensor, q: Tensor, k: Tensor, v: Tensor, firsts: Tensor, decay: Tensor | None,
    step: Tensor | None, rate: Tensor | None, sequence: Tensor | None, before: bool,
) -> list[Tensor]:  # fmt: skip
    """The reverse scan; the states of a chunk are made again from its first."""
    N, C = q.shape[:2]
    d_q, d_k, d_v, d_state = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), d_last.clone()
    d_decay, d_step = (q.new_empty(0) if x is None else torch.empty_like(x) for x in (decay, step))
    d_rate = q.new_empty(0) if rate is None else torch.zeros_like(rate)
    history = firsts.new_empty(C + 1, *firsts.shape[1:])
    d_S = history.new_empty(history.shape[0] - 1, *history.shape[1:])
    for n in reversed(range(N)):
        history[0] = firsts[n]
        a = _decays(n, decay, step, rate)
        _run(history, a, k[n], v[n])
        after = d_state if sequence is None else d_state.index_select(0, sequence[n : n + 1])
        first = _run_back(d_S, after, a, _outer(q[n], d_o[n]), before)
        d_q[n] = _contract_values(history[:-1] if before else history[1:], d_o[n], q.shape[3])
        d_k[n] = _contract_values(d_S, v[n], k.shape[3])
        d_v[n] = _read(d_S, k[n])
        if a is not None:
            d_log = history[:-1].mul_(d_S).sum(-1) if v.shape[-1] > 1 else history[:-1].mul_(d_S).squeeze(-1)
            d_log = d_log.mul_(a.squeeze(-1))
            if step is not None and rate is not None:
                flat = d_log.flatten(0, 1)  # [C B, HV, K]
                d_rate += torch.einsum("lhk,lh->hk", flat, step[n].flatten(0, 1))
                d_step[n] = torch.einsum("lhk,hk->lh", flat, rate).view_as(step[n])
            else:
                d_decay[n] = d_log if decay is None or decay.shape[-1] > 1 else d_log.sum(-1, keepdim=True)
        if sequence is None:
            d_state.copy_(first)
        else:
            d_state.index_copy_(0, sequence[n : n + 1], first)
    return [d_q, d_k, d_v, d_state, d_decay, d_step, d_rate]


def _decays(n: int, decay: Tensor | None, step: Tensor | None, rate: Tensor | None) -> Tensor | None:
    """exp of the log decays of chunk n: [C, B, HV, 1 or K, 1]."""
    if step is not None and rate is not None:
        return (step[n].unsqueeze(-1) * rate).exp_().unsqueeze(-1)
    return None if decay is None else decay[n].exp().unsqueeze(-1)


def _run(history: Tensor, a: Tensor | None, k: Tensor, v: Tensor) -> None:
    """Fill history [C + 1, B, HV, K, V] from its first state."""
    writes = _outer(k, v)
    for t in range(k.shape[0]):
        if a is None:
            torch.add(history[t], writes[t], out=history[t + 1])
        else:
            torch.addcmul(writes[t], history[t], a[t], out=history[t + 1])


def _run_back(d_S: Tensor, after: Tensor, a: Tensor | None, reads: Tensor, before: bool) -> Tensor:
    """Fill d_S [C, B, HV, K, V], the gradient of the state after each token; returns that of the first state.

    Args: after: of the state after the chunk, from later ones; reads: q d_o^T, from each token's own read.
    """
    carried = after
    for t in reversed(range(d_S.shape[0])):
        d_t = d_S[t]
        if before:
            d_t.copy_(carried)
        else:
            torch.add(carried, reads[t], out=d_t)
        carried = d_t if a is None else d_t * a[t]
        if before:
            carried = carried + reads[t]
    return carried


def _outer(k: Tensor, v: Tensor) -> Tensor:
    """k [C, B, H, K] and v [C, B, HV, V] -> [C, B, HV, K, V]."""
    H = k.shape[2]
    product = k[:, :, :, None, :, None] * v.unflatten(2, (H, -1)).unsqueeze(4)
    return product.flatten(2, 3)


def _read(S: Tensor, q: Tensor) -> Tensor:
    """S [C, B, HV, K, V] and q [C, B, H, K] -> S^T q [C, B, HV, V]."""
    C, B, HV, K, V = S.shape
    H = q.shape[2]
    if V == 1:
        return torch.bmm(S.reshape(C * B * H, HV // H, K), q.reshape(C * B * H, K, 1)).view(C, B, HV, 1)
    wide = S.unflatten(2, (H, -1))
    return (wide * q[:, :, :, None, :, None]).sum(4).flatten(2, 3)


def _contract_values(S: Tensor, v: Tensor, H: int) -> Tensor:
    """S [C, B, HV, K, V] and v [C, B, HV, V] -> sum over V and the value heads of a key head [C, B, H, K]."""
    C, B, HV, K, V = S.shape
    if V == 1:
        columns = S.reshape(C * B * H, HV // H, K).transpose(1, 2)
        return torch.bmm(columns, v.reshape(C * B * H, HV // H, 1)).view(C, B, H, K)
    return (S * v.unsqueeze(3)).sum(4).unflatten(2, (H, -1)).sum(3)


_LIBRARY = torch.library.Library("deltazoo", "FRAGMENT")
_LIBRARY.define(
    "element_scan(Tensor q, Tensor k, Tensor v, Tensor state, Tensor? decay, Tensor? step, Tensor? rate, "
    "Tensor? sequence, bool before, bool keep) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "element_scan_backward(Tensor d_o, Tensor d_last, Tensor q, Tensor k, Tensor v, Tensor firsts, Tensor? decay, "
    "Tensor? step, Tensor? rate, Tensor? sequence, bool before) -> Tensor[]"
)


def _plain(function: Any) -> Any:
    """Operator bodies run without autocast, on contiguous operands."""

    def run(*arguments: Any) -> Any:
        with torch.autocast(arguments[0].device.type, enabled=False):
            return function(*(x.contiguous() if isinstance(x, Tensor) else x for x in arguments))

    return run


def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, decay: Tensor | None, step: Tensor | None, rate: Tensor | None,
    sequence: Tensor | None, before: bool, keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    firsts = v.new_empty(q.shape[0] if keep else 0, q.shape[2], *state.shape[1:])
    return v.new_empty(v.shape), state.new_empty(state.shape), firsts


def _backward_fake(
    d_o: Tensor, d_last: Tensor, q: Tensor, k: Tensor, v: Tensor, firsts: Tensor, decay: Tensor | None,
    step: Tensor | None, rate: Tensor | None, sequence: Tensor | None, before: bool,
) -> list[Tensor]:  # fmt: skip
    return [q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (q, k, v, d_last, decay, step, rate)]


_LIBRARY.impl("element_scan", _plain(_forward), "CompositeExplicitAutograd")
_LIBRARY.impl("element_scan_backward", _plain(_backward), "CompositeExplicitAutograd")
torch.library.register_fake("deltazoo::element_scan", _forward_fake, lib=_LIBRARY)
torch.library.register_fake("deltazoo::element_scan_backward", _backward_fake, lib=_LIBRARY)
_forward_op = torch.ops.deltazoo.element_scan.default
_backward_op = torch.ops.deltazoo.element_scan_backward.default


class _ElementScan(torch.autograd.Function):
    @staticmethod
    def forward(before: bool, *operands: Any) -> tuple[Tensor, ...]:
        return _forward_op(*operands, before, True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        before, *operands = inputs
        x = ElementOperands(*operands)
        o, last, firsts = output
        ctx.before = before
        ctx.mark_non_differentiable(firsts)
        ctx.set_materialize_grads(False)
        ctx.o_shape, ctx.state_shape = o.shape, last.shape
        ctx.save_for_backward(x.q, x.k, x.v, firsts, x.decay, x.step, x.rate, x.sequence)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_o: Tensor | None, d_last: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        d_o = saved[0].new_zeros(ctx.o_shape) if d_o is None else d_o
        d_last = saved[0].new_zeros(ctx.state_shape) if d_last is None else d_last
        d_q, d_k, d_v, d_state, d_decay, d_step, d_rate = _backward_op(d_o, d_last, *saved, ctx.before)
        decays = [None if x is None else d for x, d in zip(saved[4:7], (d_decay, d_step, d_rate), strict=True)]
        return None, d_q, d_k, d_v, d_state, *decays, None
