"""Helpers of the equation tests: raw weights by name, projections, norms and a scan over tokens, in float64.

B batch, T time, D width, H key heads, HV value heads, K key width, V value width
"""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deltazoo.backends.update.base import Backend
from deltazoo.mixers import MixerConfig
from deltazoo.mixers.core.mixer import FIRST_PLACE, Place

D, T = 20, 11
H, HV, K, V = 2, 4, 6, 5
HEADS = {"heads": H, "value_heads": HV, "key_width": K, "value_width": V}
LATER_LAYER = Place(1, 4)

Weights = dict[str, Tensor]
Equation = Callable[[Weights, Tensor], Tensor]
Case = tuple[MixerConfig, Equation]


def assert_equals_equation(
    case: Case,
    rtol: float,
    backend: str | Backend = "reference",
    place: Place = FIRST_PLACE,
    width: int = D,
    noise: float = 0.3,
) -> None:
    """Compare outputs and all gradients of a mixer with its equation. Every parameter gets random noise first."""
    config, equation = case
    torch.manual_seed(0)
    mixer = config.build(width, place, backend=backend).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    x = torch.randn(2, T, width, dtype=torch.float64, requires_grad=True)
    expected = equation(dict(mixer.named_parameters()) | dict(mixer.named_buffers()), x)
    assert_same_with_gradients(mixer(x)[0], expected, [x, *mixer.parameters()], rtol)


def assert_same_with_gradients(actual: Tensor, expected: Tensor, leaves: Iterable[Tensor], rtol: float) -> None:
    """Compare two outputs, and their gradients at `leaves` with a tolerance a hundred times as large."""
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=rtol / 100)
    leaves, weight = list(leaves), torch.randn_like(expected)
    actual_gradients, expected_gradients = (torch.autograd.grad((y * weight).sum(), leaves) for y in (actual, expected))
    torch.testing.assert_close(actual_gradients, expected_gradients, rtol=100 * rtol, atol=rtol)


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    """Apply a linear map, full rank or low rank."""
    if f"{name}.0.weight" in w:
        return linear(w, f"{name}.1", linear(w, f"{name}.0", x))
    return x @ w[f"{name}.weight"].mT + w.get(f"{name}.bias", 0)


def low_rank(w: Weights, name: str, x: Tensor, activation: Callable[[Tensor], Tensor] = lambda y: y) -> Tensor:
    """Apply one of RWKV's low-rank maps."""
    return linear(w, f"{name}.up", activation(linear(w, f"{name}.down", x))) + w.get(f"{name}.bias", 0)


def conv(w: Weights, name: str, x: Tensor) -> Tensor:
    """Apply a causal depthwise convolution, if the mixer has one."""
    if f"{name}.weight" not in w:
        return x
    weight = w[f"{name}.weight"]
    taps = weight.shape[1]
    y = F.conv1d(x.mT, weight[:, None], w.get(f"{name}.bias"), padding=taps - 1, groups=x.shape[2])
    return y.mT[:, : x.shape[1]]


def token_shift(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 1, 0))[:, :-1]


def split_heads(x: Tensor, size: int) -> Tensor:
    return x.unflatten(-1, (-1, size))


def per_value_head(x: Tensor, dim: int = 2) -> Tensor:
    """Repeat each key head for the value heads that share it."""
    return x.repeat_interleave(HV // x.shape[dim], dim)


def qkv(w: Weights, x: Tensor, n: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [B, T, HV, K], k [B, T, n, HV, K] and v [B, T, n, HV, V], without the axis n if n = 1."""
    projected = conv(w, "project.conv", linear(w, "project.to_qkv", x))
    heads = (projected.shape[-1] - n * HV * V) // ((1 + n) * K)
    q, k, v = projected.split([heads * K, n * heads * K, n * HV * V], -1)
    q = per_value_head(split_heads(q, K))
    if n == 1:
        return q, per_value_head(split_heads(k, K)), split_heads(v, V)
    return q, per_value_head(k.unflatten(-1, (n, heads, K)), 3), v.unflatten(-1, (n, HV, V))


def unit(x: Tensor) -> Tensor:
    return x / torch.sqrt((x**2).sum(-1, keepdim=True) + 1e-6)


def outer(k: Tensor, v: Tensor) -> Tensor:
    return k[..., :, None] * v[..., None, :]


def read(S: Tensor, q: Tensor) -> Tensor:
    return (S * q[..., None]).sum(-2)


def scan(step: Callable[[Tensor, int], Tensor], read_token: Callable[[Tensor, int], Tensor], state: Tensor) -> Tensor:
    """S <- step(S, t), o_t = read_token(S, t) for the T tokens of the tests."""
    outputs = []
    for t in range(T):
        state = step(state, t)
        outputs.append(read_token(state, t))
    return torch.stack(outputs, 1)


def zero_state(x: Tensor, k: int = K, v: int = V) -> Tensor:
    return x.new_zeros(x.shape[0], HV, k, v)


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    erase: Tensor | None = None,
    write: Tensor | None = None,
    scale: float = K**-0.5,
) -> Tensor:
    """S <- D S, S <- S + k (write * v - S^T (erase * k))^T, o = scale S^T q; None: no decay, no erase, write = 1.

    decay and erase: [B, T, HV, K or 1]; write: [B, T, HV, V or 1].
    """
    S, outputs = q.new_zeros(q.shape[0], HV, q.shape[-1], v.shape[-1]), []
    for t in range(q.shape[1]):
        S = S if decay is None else decay[:, t, ..., None] * S
        written = v[:, t] if write is None else write[:, t] * v[:, t]
        erased = 0 if erase is None else read(S, erase[:, t] * k[:, t])
        S = S + outer(k[:, t], written - erased)
        outputs.append(scale * read(S, q[:, t]))
    return torch.stack(outputs, 1)


def rms_norm(w: Weights, o: Tensor, eps: float = 1e-5, dims: int = 1) -> Tensor:
    """RMS norm over the last `dims` dimensions, with the weights of the output's norm."""
    flat = o.flatten(-dims) if dims > 1 else o
    return (w["outputs.norm.weight"] * (flat / (flat.pow(2).mean(-1, keepdim=True) + eps).sqrt())).view(o.shape)


def layer_norm(w: Weights, o: Tensor, eps: float = 1e-5) -> Tensor:
    """Layer norm of each head, with a weight and perhaps a bias for each channel of each head."""
    o = o - o.mean(-1, keepdim=True)
    weight, bias = w["outputs.norm.weight"].view(-1, o.shape[-1]), w.get("outputs.norm.bias")
    normed = weight * (o / (o.pow(2).mean(-1, keepdim=True) + eps).sqrt())
    return normed if bias is None else normed + bias.view(-1, o.shape[-1])


def gate(w: Weights, x: Tensor, o: Tensor, activation: Callable[[Tensor], Tensor] = F.silu) -> Tensor:
    return o * activation(linear(w, "outputs.gate.proj", x)).view(o.shape)


def out(w: Weights, o: Tensor) -> Tensor:
    return linear(w, "out", o.flatten(2))


def beta(w: Weights, x: Tensor) -> Tensor:
    return torch.sigmoid(linear(w, "operands.beta.proj", x))[..., None]


def softplus_decay(w: Weights, x: Tensor) -> Tensor:
    """Mamba-2's decay, [B, T, HV, 1], or KDA's, [B, T, HV, K]."""
    raw = (linear(w, "operands.decay.proj", x) + w["operands.decay.dt_bias"]).unflatten(-1, (HV, -1))
    return torch.exp(-torch.exp(w["operands.decay.A_log"])[:, None] * torch.log1p(torch.exp(raw)))


def rotate(x: Tensor, length: int) -> Tensor:
    """Rotary positions 0 to length - 1 with base 10000: [B, T, HV, K] -> complex [B, T, HV, K / 2]."""
    half = x.shape[-1] // 2
    angle = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    return torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)[None, :, None]


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(x.numel() for x in tree_leaves(result) if torch.is_tensor(x))])
        return result
