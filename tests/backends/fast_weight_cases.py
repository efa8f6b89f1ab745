"""TTT-Linear and the neural memory of Titans token by token, the references of their operators, and random operands.

N sequences, H heads, E head width, F inner width
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.backends.ops.fast_weights.neural_memory_chunks import MemoryOperands
from deltazoo.backends.ops.fast_weights.ttt_linear_chunks import TTTOperands

# spans of sequences (first row, tokens, place in the chunk, whether fresh), and rows in all
DENSE = ([(0, 7, 0, 1), (7, 7, 0, 1)], 14)
# a start inside a chunk, two empty sequences, one at a chunk's start, one token, a fresh one; the last row is in none
PACKED = ([(0, 5, 2, 0), (5, 0, 1, 0), (5, 0, 0, 0), (5, 9, 0, 0), (14, 1, 2, 0), (15, 6, 0, 1)], 22)


def ttt_reference(x: TTTOperands) -> list[Tensor]:
    """Return o and the new W, G, b, g."""
    states, M = [_start(x.spans, *pair) for pair in zip(_first(x), (x.W, x.G, x.b, x.g), strict=True)], len(x.rate)
    q_R, k_R, v_R, eta_R = (y.flatten(0, 1) for y in (x.q, x.k, x.v, x.eta))
    outputs = [torch.zeros_like(q) for q in q_R]
    for n, (start, tokens, place, _) in enumerate(x.spans.tolist()):
        W, G, b, g = (state[n] for state in states)
        for t in range(tokens):
            q, k, v, eta = (y[start + t] for y in (q_R, k_R, v_R, eta_R))
            rate = x.rate[(place + t) % M]
            if (place + t) % M == 0:
                W, b, G, g = W - x.rate[-1] * G, b - x.rate[-1] * g, torch.zeros_like(G), torch.zeros_like(g)
            z = _read(W, k) + b
            centred = z - z.mean(-1, keepdim=True)
            std = (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
            unit = centred / std
            d = x.gain * (x.gain * unit + x.bias - (v - k))
            d = eta[:, None] * (d - d.mean(-1, keepdim=True) - unit * (d * unit).mean(-1, keepdim=True)) / std
            G, g = G + k[:, :, None] * d[:, None, :], g + d
            r = F.layer_norm(_read(W - rate * G, q) + b - rate * g, q.shape[-1:], eps=1e-6)
            outputs[start + t] = q + x.gain * r + x.bias
        for state, new in zip(states, (W, G, b, g), strict=True):
            state[n] = new
    return [torch.stack(outputs).view(x.q.shape), *(torch.stack(state) for state in states)]


def memory_reference(x: MemoryOperands, size: int) -> list[Tensor]:
    """Return o and the new layers of M, M' and S."""
    depth = len(x.first)
    first = [*x.first, *x.first, *(torch.zeros_like(y) for y in x.first)]
    stored = x.state or [None] * len(first)
    states = [_start(x.spans, *pair) for pair in zip(first, stored, strict=True)]
    M, start_M, S = states[:depth], states[depth : 2 * depth], states[2 * depth :]
    rows = [y.flatten(0, 1) for y in x[:6]]
    outputs = [torch.zeros_like(q) for q in rows[0]]
    for n, (start, tokens, place, _) in enumerate(x.spans.tolist()):
        for t in range(tokens):
            q, k, v, eta, theta, alpha = (y[start + t] for y in rows)
            if (place + t) % size == 0:
                for layer, now in zip(start_M, M, strict=True):
                    layer[n] = now[n]
            h = _read(start_M[0][n], k)
            inner = F.silu(h)
            error = 2 * ((_read(start_M[1][n], inner) if depth == 2 else h) - v)
            pairs = [(k, error)]
            if depth == 2:
                gate = h.sigmoid()
                back = torch.einsum("hkv,hv->hk", start_M[1][n], error) * gate * (1 + h * (1 - gate))
                pairs = [(k, back), (inner, error)]
            for layer, momentum, (left, right) in zip(M, S, pairs, strict=True):
                gradient = left[:, :, None] * right[:, None, :]
                momentum[n] = eta[:, None, None] * momentum[n] - theta[:, None, None] * gradient
                layer[n] = (1 - alpha[:, None, None]) * layer[n] + momentum[n]
            o = _read(M[0][n], q)
            outputs[start + t] = _read(M[1][n], F.silu(o)) if depth == 2 else o
    return [torch.stack(outputs).view(x.q.shape), *(torch.stack(state) for state in states)]


Case = tuple[list[tuple[int, ...]], int]


def draw_ttt(case: Case, E: int, M: int, device: str = "cpu", seed: int = 0) -> TTTOperands:
    """Draw operands in float64 for two heads; without a state if all sequences are fresh."""
    spans, rows = case
    draw, N, H = _Draw(device, seed), len(spans), 2
    has_state = not all(span[3] for span in spans)
    shapes = [(N, H, E, E), (N, H, E, E), (N, H, E), (N, H, E)]
    return TTTOperands(
        *(draw.normal(1, rows, H, E) for _ in range(3)), draw.uniform(1, rows, H), draw.uniform(M), draw.normal(H, E),
        draw.normal(H, E), draw.normal(H, E, E), draw.normal(H, E),
        *(draw.normal(*shape) if has_state else None for shape in shapes), draw.spans(spans),
    )  # fmt: skip


def draw_memory(
    case: Case, widths: tuple[int, int], depth: int, strong: bool = False, device: str = "cpu", seed: int = 0
) -> MemoryOperands:
    """Draw operands in float64 for two heads. Args: strong: some gates forget everything."""
    spans, rows = case
    draw, N, H = _Draw(device, seed), len(spans), 2
    E, inner = widths
    eta, theta, alpha = (draw.uniform(1, rows, H) for _ in range(3))
    if strong:
        eta, alpha = eta.where(draw.uniform(1, rows, H) > 0.3, 0.0), alpha.where(draw.uniform(1, rows, H) > 0.3, 1.0)
    shapes = [(H, E, E)] if depth == 1 else [(H, E, inner), (H, inner, E)]
    state = [] if all(span[3] for span in spans) else [draw.normal(N, *shape) for _ in range(3) for shape in shapes]
    return MemoryOperands(
        *(draw.normal(1, rows, H, E) for _ in range(3)), eta, theta, alpha, [draw.normal(*shape) for shape in shapes],
        state, draw.spans(spans),
    )  # fmt: skip


def tensors(x: TTTOperands | MemoryOperands) -> list[Tensor]:
    """Return the float operands in order."""
    flat = [z for y in x for z in (y if isinstance(y, list) else [y])]
    return [y for y in flat if y is not None and y.is_floating_point()]


def convert(x, dtype: torch.dtype, other: torch.dtype | None = None):
    """Convert q, k, v to a dtype and the others to `other`, or to the same; leaves that require a gradient."""

    def leaf(y, dtype):
        if isinstance(y, list):
            return [leaf(z, dtype) for z in y]
        return y if y is None or not y.is_floating_point() else y.detach().to(dtype).requires_grad_()

    return type(x)(*(leaf(y, dtype if i < 3 else other or dtype) for i, y in enumerate(x)))


def detached(x):
    """Return copies that require no gradient."""

    def copy(y):
        return [copy(z) for z in y] if isinstance(y, list) else None if y is None else y.detach().clone()

    return type(x)(*map(copy, x))


class _Draw:
    def __init__(self, device: str, seed: int) -> None:
        self.generator, self.device = torch.Generator().manual_seed(seed), device

    def normal(self, *shape: int) -> Tensor:
        scale = 0.5 if len(shape) < 4 or shape[-1] < 8 else shape[-1] ** -0.5
        return scale * torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(self.device)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, dtype=torch.float64).to(self.device)

    def spans(self, spans: list[tuple[int, ...]]) -> Tensor:
        return torch.tensor(spans, dtype=torch.int32, device=self.device)


def _first(x: TTTOperands) -> tuple[Tensor, ...]:
    return x.first_W, torch.zeros_like(x.first_W), x.first_b, torch.zeros_like(x.first_b)


def _start(spans: Tensor, first: Tensor, stored: Tensor | None) -> list[Tensor]:
    """Return the state of each sequence before its first token."""
    return [first if stored is None or span[3] else stored[n] for n, span in enumerate(spans.tolist())]


def _read(W: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("hkv,hk->hv", W, x)
