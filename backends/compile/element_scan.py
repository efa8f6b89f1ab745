"""Elementwise scan for narrow values: token by token over the state, one chunk of tokens at a time.

    S_t = exp(g_t) * S_{t-1} + k_t v_t^T,   o_t = S_t^T q_t, or S_{t-1}^T q_t

For V of 1 or 2 (Mamba, HGRN, RG-LRU, RWKV-4, LRU), C x C scores per head are more work than the recurrence itself.
Here the decays and the products k v^T of a chunk are computed at once, and one fused multiply-add per token is
sequential. Tensors of size time x state exist for one chunk only, forward and backward: the decay step x rate is never
stored for all T, and the backward saves the first state of each chunk and recomputes the others.

B batch, N chunks, C tokens per chunk, H key heads, G value heads per key head, HV = H G, K key width, V value width,
Y sequences
"""

import math
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from deltazoo.backends.compile.operator_body import body
from deltazoo.backends.torch_ext.autograd import differentiable_once
from deltazoo.backends.torch_ext.custom_op import cache_forward_signature, differentiate_exported, operator
from deltazoo.backends.update.base import UpdateInputs, state_dtype
from deltazoo.backends.update.lowering import log_decay, strengths
from deltazoo.backends.update.spec import UpdateSpec

MAX_VALUE_WIDTH = 2
LOG2_E = math.log2(math.e)
MIN_BMM_COLUMNS = 8  # below this many columns (G V), an elementwise product and a sum are faster than bmm


class ElementOperands(NamedTuple):
    """Operands of the scan. The value heads are innermost, because they are the longest axis of these mixers.

    Args:
        q, k: [N, C, B, H, K]. v: [N, C, B, H, G, V].
        state: initial states [Y, H, K, G, V].
        decay: log decay [N, C, B, H, 1 or K, G].
        step, rate: log decay = step * rate, instead of `decay`. [N, C, B, H, G] and [H, K, G].
        sequence: [N] int64, the row of `state` that each chunk continues; then B = 1. None: row b of the batch
            continues row b.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    state: Tensor
    decay: Tensor | None = None
    step: Tensor | None = None
    rate: Tensor | None = None
    sequence: Tensor | None = None


def uses_element_scan(spec: UpdateSpec, x: UpdateInputs) -> bool:
    """Whether the elementwise scan is less work than chunk products: additive, one step per token, narrow V."""
    narrow = x.v.shape[-1] <= MAX_VALUE_WIDTH
    return narrow and spec.transition == "additive" and spec.householders == 1


def element_update(spec: UpdateSpec, x: UpdateInputs, sequence: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the update of operands in chunks; arguments and results are those of `chunked_update`."""
    dtype = state_dtype(x.q.dtype)
    B, _, _, H, K = x.q.shape
    HV, V = x.v.shape[-2:]
    _, write = strengths(spec, x)
    v = x.v.to(dtype)
    if write is not None:
        v = v * (write if write.dim() == v.dim() else write.unsqueeze(-1))
    scale = spec.scale_of(K)
    decay = None
    if spec.decay not in ("none", "rate"):
        decay = x.log_decay if spec.decay == "fixed" else log_decay(spec, x)
        assert decay is not None
        decay = rearrange(decay.unsqueeze(-1) if decay.dim() == 4 else decay, "b n c (h g) k -> n c b h k g", h=H)
    state = x.q.new_zeros(B, HV, K, V, dtype=dtype) if x.state is None else x.state
    operands = ElementOperands(
        q=rearrange(scale * x.q.to(dtype), "b n c h k -> n c b h k"),
        k=rearrange(x.k.to(dtype), "b n c h k -> n c b h k"),
        v=rearrange(v, "b n c (h g) v -> n c b h g v", h=H),
        state=rearrange(state, "y (h g) k v -> y h k g v", h=H),
        decay=decay,
        step=None if x.step is None else rearrange(x.step, "b n c (h g) -> n c b h g", h=H),
        rate=None if x.rate is None else rearrange(x.rate, "(h g) k -> h k g", h=H),
        sequence=sequence,
    )
    o, final_state = element_scan(operands, spec.read == "before")
    o = rearrange(o, "n c b h g v -> b n c (h g) v").to(x.v.dtype)
    return o, rearrange(final_state, "y h k g v -> y (h g) k v")


def element_scan(operands: ElementOperands, read_before: bool) -> tuple[Tensor, Tensor]:
    """Run the scan; differentiable once. Returns o [N, C, B, H, G, V] and the final states [Y, H, K, G, V]."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands):
        o, final_state, _ = _ElementScan.apply(read_before, *operands)
    else:
        o, final_state, _ = _forward_op(*operands, read_before, False)
    return o, final_state


def _scan(x: ElementOperands, read_before: bool, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Compute o, the final states, and with `save` the first state of each chunk, else an empty tensor."""
    N, C, B = x.q.shape[:3]
    o, final_state = torch.empty_like(x.v), x.state.clone()
    chunk_states = x.v.new_empty(N if save else 0, B, *x.state.shape[1:])
    history = x.v.new_empty(C + 1, B, *x.state.shape[1:])
    buffer = _decay_buffer(x)
    for n in range(N):
        history[0] = final_state if x.sequence is None else final_state.index_select(0, x.sequence[n : n + 1])
        if save:
            chunk_states[n] = history[0]
        a = _decays(n, x, buffer)
        _propagate(history, a, x.k[n], x.v[n])
        _read(history[:-1] if read_before else history[1:], x.q[n], o[n])
        if x.sequence is None:
            final_state.copy_(history[-1])
        else:
            final_state.index_copy_(0, x.sequence[n : n + 1], history[-1])
    return o, final_state, chunk_states


def _reverse_scan(x: ElementOperands, d_o: Tensor, d_final: Tensor, read_before: bool) -> list[Tensor]:
    """Compute the gradients of the operands by the reverse scan; each chunk recomputes its states from its first.

    Args: x: the operands, with the first state of each chunk [N, B, H, K, G, V] in place of the initial states.
    """
    N, C = x.q.shape[:2]
    d_q, d_k, d_v, d_state = torch.empty_like(x.q), torch.empty_like(x.k), torch.empty_like(x.v), d_final.clone()
    d_decay, d_step = (x.q.new_empty(0) if y is None else torch.empty_like(y) for y in (x.decay, x.step))
    d_rate = x.q.new_empty(0) if x.rate is None else torch.zeros_like(x.rate)
    history = x.state.new_empty(C + 1, *x.state.shape[1:])
    dS, dS_read = (history.new_empty(C, *x.state.shape[1:]) for _ in range(2))
    buffer = _decay_buffer(x)
    for n in reversed(range(N)):
        history[0] = x.state[n]
        a = _decays(n, x, buffer)
        _propagate(history, a, x.k[n], x.v[n])
        d_after = d_state if x.sequence is None else d_state.index_select(0, x.sequence[n : n + 1])
        _outer(x.q[n], d_o[n], dS_read)
        d_before = _propagate_back(dS, d_after, a, dS_read, read_before)
        _contract(history[:-1] if read_before else history[1:], d_o[n], d_q[n])
        _contract(dS, x.v[n], d_k[n])
        _read(dS, x.k[n], d_v[n])
        if a is not None:
            d_log = history[:-1].mul_(dS)
            d_log = d_log.squeeze(-1) if x.v.shape[-1] == 1 else d_log.sum(-1)
            d_log = d_log.mul_(a.squeeze(-1))  # [C, B, H, K, G]
            if x.step is not None and x.rate is not None:
                d_rate += (d_log * x.step[n].unsqueeze(3)).sum((0, 1))
                d_step[n] = d_log.mul_(x.rate).sum(3)
            else:
                d_decay[n] = d_log if x.decay is None or x.decay.shape[4] > 1 else d_log.sum(3, keepdim=True)
        if x.sequence is None:
            d_state.copy_(d_before)
        else:
            d_state.index_copy_(0, x.sequence[n : n + 1], d_before)
    return [d_q, d_k, d_v, d_state, d_decay, d_step, d_rate]


def _decay_buffer(x: ElementOperands) -> Tensor | None:
    """Allocate the decays of a chunk, [C, B, H, 1 or K, G], once: an allocation per chunk is slower."""
    if x.step is not None:
        return x.step.new_empty(*x.step.shape[1:4], x.q.shape[-1], x.step.shape[4])
    return None if x.decay is None else x.decay.new_empty(x.decay.shape[1:])


def _decays(n: int, x: ElementOperands, buffer: Tensor | None) -> Tensor | None:
    """Compute the decays of chunk n in the buffer: [C, B, H, 1 or K, G, 1].

    By exp2, which takes a quarter of the time of exp on a CPU.
    """
    if buffer is None:
        return None
    if x.step is not None and x.rate is not None:
        torch.mul(x.step[n].unsqueeze(3), x.rate * LOG2_E, out=buffer)
    elif x.decay is not None:
        torch.mul(x.decay[n], LOG2_E, out=buffer)
    return buffer.exp2_().unsqueeze(-1)


def _propagate(history: Tensor, a: Tensor | None, k: Tensor, v: Tensor) -> None:
    """Fill history [C + 1, B, H, K, G, V] from its first state."""
    _outer(k, v, history[1:])
    previous, *states = history.unbind(0)
    if a is None:
        for state in states:
            previous = state.add_(previous)
        return
    for state, decay in zip(states, a.unbind(0), strict=True):
        previous = state.addcmul_(previous, decay)


def _propagate_back(dS: Tensor, d_after: Tensor, a: Tensor | None, dS_read: Tensor, read_before: bool) -> Tensor:
    """Fill dS [C, B, H, K, G, V], the gradient of the state after each token; return that of the chunk's first state.

    Args: d_after: gradient of the state after the chunk; dS_read: q d_o^T of each token.
    """
    d_state = d_after
    for t in reversed(range(dS.shape[0])):
        if read_before:
            dS[t] = d_state
            d_state = dS_read[t] + d_state if a is None else torch.addcmul(dS_read[t], d_state, a[t])
            continue
        d_state = torch.add(d_state, dS_read[t], out=dS[t])
        if a is not None:
            d_state = d_state * a[t]
    return d_state


def _outer(k: Tensor, v: Tensor, out: Tensor) -> None:
    """k [C, B, H, K] and v [C, B, H, G, V] -> out [C, B, H, K, G, V]."""
    torch.mul(k[..., None, None], v.unsqueeze(3), out=out)


def _read(S: Tensor, q: Tensor, out: Tensor) -> None:
    """S [C, B, H, K, G, V] and q [C, B, H, K] -> out = S^T q [C, B, H, G, V]."""
    K, columns = S.shape[3], S.shape[4] * S.shape[5]
    if K == 1:
        torch.mul(S.squeeze(3), q[..., None], out=out)
    elif columns < MIN_BMM_COLUMNS:
        torch.sum(S * q[..., None, None], 3, out=out)
    else:
        torch.bmm(q.reshape(-1, 1, K), S.reshape(-1, K, columns), out=out.view(-1, 1, columns))


def _contract(S: Tensor, v: Tensor, out: Tensor) -> None:
    """S [C, B, H, K, G, V] and v [C, B, H, G, V] -> out = sum over G and V [C, B, H, K]."""
    K, columns = S.shape[3], S.shape[4] * S.shape[5]
    if columns < MIN_BMM_COLUMNS:
        torch.sum(S * v.unsqueeze(3), (4, 5), out=out)
    else:
        torch.bmm(S.reshape(-1, K, columns), v.reshape(-1, columns, 1), out=out.view(-1, K, 1))


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *operands, read_before, save = arguments
    return _scan(ElementOperands(*operands), read_before, save)


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *operands, _, save = arguments
    x = ElementOperands(*operands)
    chunk_states = x.v.new_empty(x.q.shape[0] if save else 0, x.q.shape[2], *x.state.shape[1:])
    return x.v.new_empty(x.v.shape), x.state.new_empty(x.state.shape), chunk_states


def _backward(*arguments: Any) -> list[Tensor]:
    d_o, d_final, *saved, read_before = arguments
    return _reverse_scan(ElementOperands(*saved), d_o, d_final, read_before)


def _backward_fake(*arguments: Any) -> list[Tensor]:
    _, d_final, *saved, _ = arguments
    x = ElementOperands(*saved)
    tensors = (x.q, x.k, x.v, d_final, x.decay, x.step, x.rate)
    return [x.q.new_empty(0) if y is None else y.new_empty(y.shape) for y in tensors]


_forward_op = operator(
    "element_scan(Tensor q, Tensor k, Tensor v, Tensor state, Tensor? decay, Tensor? step, Tensor? rate, "
    "Tensor? sequence, bool read_before, bool save) -> (Tensor, Tensor, Tensor)",
    body(_forward),
    _forward_fake,
)
_backward_op = operator(
    "element_scan_backward(Tensor d_o, Tensor d_final, Tensor q, Tensor k, Tensor v, Tensor state, "
    "Tensor? decay, Tensor? step, Tensor? rate, Tensor? sequence, bool read_before) -> Tensor[]",
    body(_backward),
    _backward_fake,
)


@cache_forward_signature
class _ElementScan(torch.autograd.Function):
    @staticmethod
    def forward(read_before: bool, *operands: Any) -> tuple[Tensor, ...]:
        return _forward_op(*operands, read_before, True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.read_before, *operands = inputs
        x = ElementOperands(*operands)
        o, final_state, chunk_states = output
        ctx.mark_non_differentiable(chunk_states)
        ctx.set_materialize_grads(False)
        ctx.o_shape, ctx.state_shape = o.shape, final_state.shape
        ctx.save_for_backward(*x._replace(state=chunk_states))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, d_o: Tensor | None, d_final: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        saved = ElementOperands(*ctx.saved_tensors)
        d_o = saved.q.new_zeros(ctx.o_shape) if d_o is None else d_o
        d_final = saved.q.new_zeros(ctx.state_shape) if d_final is None else d_final
        d_q, d_k, d_v, d_state, d_decay, d_step, d_rate = _backward_op(d_o, d_final, *saved, ctx.read_before)
        d_decays = ((saved.decay, d_decay), (saved.step, d_step), (saved.rate, d_rate))
        return None, d_q, d_k, d_v, d_state, *(None if x is None else gradient for x, gradient in d_decays), None


# After the operands come read_before and save.
differentiate_exported("element_scan", lambda *arguments: _ElementScan.apply(arguments[-2], *arguments[:-2]))
