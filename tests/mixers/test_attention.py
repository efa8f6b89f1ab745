"""Attention against a softmax over explicit token lists in float64, and the limits of its caches.

B batch, T time, H heads, G key-value heads, E head width
"""

import itertools

import pytest
import torch
import torch.nn.attention.varlen
from equations import LargestTensor, assert_same_with_gradients
from torch import Tensor

from deltazoo.backends.io.errors import StateError
from deltazoo.mixers import Attention, Context, SlidingWindow
from deltazoo.mixers.attention import AttentionConfig, AttentionMixer
from deltazoo.mixers.parts.attention import softmax_attention
from deltazoo.mixers.parts.attention.caches import KVCache

WIDTH, H, G, E = 24, 4, 2, 6
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="flash attention needs a CUDA device")
HEADS = {"heads": H, "key_value_heads": G, "head_width": E}


def looped_attention(mixer: AttentionMixer, config: AttentionConfig, x: Tensor, window: int) -> Tensor:
    """Compute attention token by token and head by head, with rotary pairs as complex numbers."""
    T = x.shape[1]
    q, k, v = (x @ mixer.to_qkv.weight.mT).split([H * E, G * E, G * E], dim=-1)
    if config.qk_norm == "all":
        q, k = rms_norm(q, mixer.q_norm.weight), rms_norm(k, mixer.k_norm.weight)
    heads = []
    for h in range(H):
        query_channels = slice(h * E, (h + 1) * E)
        key_channels = slice(h * G // H * E, (h * G // H + 1) * E)
        q_h, k_h, v_h = q[..., query_channels], k[..., key_channels], v[..., key_channels]
        if config.qk_norm == "head":
            q_h, k_h = rms_norm(q_h, mixer.q_norm.weight), rms_norm(k_h, mixer.k_norm.weight)
        if config.rotary_theta is not None:
            R = int(config.rotary_fraction * E) // 2
            angle = torch.arange(T)[:, None] * config.rotary_theta ** (-torch.arange(R).double() / R)
            q_h, k_h = (rotate(y, torch.polar(torch.ones_like(angle), angle)) for y in (q_h, k_h))
        rows = []
        for t in range(T):
            visible = slice(max(0, t - window + 1), t + 1)
            weight = torch.softmax((k_h[:, visible] @ q_h[:, t, :, None]).squeeze(-1) * E**-0.5, dim=-1)
            rows.append((weight[..., None] * v_h[:, visible]).sum(1))
        heads.append(torch.stack(rows, 1))
    o = torch.cat(heads, -1)
    if mixer.to_gate is not None:
        o = o * torch.sigmoid(x @ mixer.to_gate.weight.mT)
    return o @ mixer.out.weight.mT


def rms_norm(y: Tensor, weight: Tensor) -> Tensor:
    return weight * y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def rotate(y: Tensor, rotation: Tensor) -> Tensor:
    R = rotation.shape[-1]
    z = torch.complex(y[..., :R], y[..., R : 2 * R]) * rotation
    return torch.cat([z.real, z.imag, y[..., 2 * R :]], -1)


CASES = {
    "full": Attention(**HEADS),
    "no rotary": Attention(**HEADS, rotary_theta=None),
    "partial rotary, theta": Attention(**HEADS, rotary_fraction=0.7, rotary_theta=500.0),
    "norm of each head, gate": Attention(**HEADS, qk_norm="head", gate=True),
    "norm of all heads, no rotary": Attention(**HEADS, qk_norm="all", rotary_theta=None),
    "window 1": SlidingWindow(**HEADS, window=1),
    "window 3": SlidingWindow(**HEADS, window=3),
    "window 8": SlidingWindow(**HEADS, window=8),
    "window 100": SlidingWindow(**HEADS, window=100),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("T", [1, 4, 8, 13])
def test_attention_equals_softmax_over_visible_tokens(name: str, T: int) -> None:
    config = CASES[name]
    torch.manual_seed(0)
    mixer = config.build(WIDTH).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    x = torch.randn(2, T, WIDTH, dtype=torch.float64, requires_grad=True)
    expected = looped_attention(mixer, config, x, getattr(config, "window", T))
    assert_same_with_gradients(mixer(x)[0], expected, [x, *mixer.parameters()], 1e-9)


def in_pieces(
    mixer: AttentionMixer, x: Tensor, lengths: list[int], capacity: int | None = None
) -> tuple[Tensor, KVCache]:
    """Return the outputs of a prefill in pieces, and the final state."""
    with torch.no_grad():
        state, outputs = mixer.init_state(1, capacity), []
        for piece in x.split(lengths, dim=1):
            y, state, _ = mixer(piece, state)
            outputs.append(y)
    return torch.cat(outputs, 1), state


def test_ring_buffer_holds_the_last_window_of_tokens() -> None:
    config = SlidingWindow(**HEADS, window=4)
    torch.manual_seed(0)
    mixer = config.build(WIDTH).double()
    x = torch.randn(1, 50, WIDTH, dtype=torch.float64)
    y, state = in_pieces(mixer, x, [3, 1, 1, 9, 1, 2, 2, 4, 5, 1, 1, 20])
    assert state.k.shape == (1, 4, G, E)
    torch.testing.assert_close(y, looped_attention(mixer, config, x, 4), rtol=1e-9, atol=1e-11)


def test_window_longer_than_the_capacity_allocates_the_capacity() -> None:
    config = SlidingWindow(**HEADS, window=100)
    torch.manual_seed(0)
    mixer = config.build(WIDTH).double()
    x = torch.randn(1, 9, WIDTH, dtype=torch.float64)
    y, state = in_pieces(mixer, x, [3, 1, 1, 4], capacity=9)
    assert state.k.shape == (1, 9, G, E)
    torch.testing.assert_close(y, looped_attention(mixer, config, x, 100), rtol=1e-9, atol=1e-11)
    with torch.no_grad(), pytest.raises(StateError, match="its capacity is 9 tokens"):
        mixer(x[:, :1], state)


@pytest.mark.parametrize("one_by_one", [True, False])
@pytest.mark.parametrize("config", [Attention(**HEADS), SlidingWindow(**HEADS, window=3)], ids=lambda c: c.name)
def test_packed_attention_stays_within_each_sequence(
    config: AttentionConfig, one_by_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequence by sequence, as on a CPU, and with a mask over the whole pack; without a cache and with one."""
    monkeypatch.setattr(softmax_attention, "values_are_readable", lambda *_: one_by_one)
    torch.manual_seed(0)
    mixer = config.build(WIDTH).double()
    x = torch.randn(1, 23, WIDTH, dtype=torch.float64)
    context = Context(cu_seqlens=torch.tensor([0, 2, 9, 9, 21, 23], dtype=torch.int32))  # one sequence is empty
    window = config.window if isinstance(config, SlidingWindow) else 23
    for state in (None, mixer.init_state(5, 12)):
        actual = mixer(x, state, context).y
        for start, stop in ((0, 2), (2, 9), (9, 21), (21, 23)):
            expected = looped_attention(mixer, config, x[:, start:stop], window)
            torch.testing.assert_close(actual[:, start:stop], expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("config", [Attention(**HEADS), SlidingWindow(**HEADS, window=3)], ids=lambda c: c.name)
def test_a_nan_stays_in_its_packed_sequence_on_a_cpu(config: AttentionConfig) -> None:
    mixer = config.build(WIDTH)
    x = torch.randn(1, 12, WIDTH)
    x[0, 2] = torch.nan
    x[0, 8] = torch.inf
    x.requires_grad_()
    context = Context(cu_seqlens=torch.tensor([0, 4, 8, 12], dtype=torch.int32))
    for state in (None, mixer.init_state(3, 4)):
        y = mixer(x, state, context).y
        (gradient,) = torch.autograd.grad(y.sum(), x)
        for result in (y, gradient):
            assert result[0, 4:8].isfinite().all()
            assert result[0, 2].isnan().all()


def test_cache_can_be_filled_to_the_last_slot() -> None:
    mixer = Attention(**HEADS).build(WIDTH).double()
    x = torch.randn(2, 6, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        state = mixer.init_state(2, capacity=6)
        y, state, _ = mixer(x, state)
    torch.testing.assert_close(y, mixer(x)[0], rtol=1e-9, atol=1e-11)
    assert state.position.tolist() == [6, 6]


def test_padding_takes_no_cache_slot() -> None:
    """The capacity counts real tokens: six slots are enough for rows of nine tokens of which six are real."""
    mixer = Attention(**HEADS).build(WIDTH).double()
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    mask = torch.stack([torch.arange(9) >= 3, torch.arange(9) < 6])
    y, state, _ = mixer(x, mixer.init_state(2, capacity=6), Context(mask=mask))
    assert state.position.tolist() == [6, 6]
    torch.testing.assert_close(y[:1, 3:], mixer(x[:1, 3:])[0], rtol=1e-9, atol=1e-11)


def test_rotary_angles_are_accurate_at_position_131072() -> None:
    """Outputs depend on relative positions only, up to the rounding of float32 angles at position 2^17."""
    torch.manual_seed(0)
    mixer = Attention(**HEADS).build(WIDTH)
    x = torch.randn(1, 8, WIDTH)
    far = mixer(x, None, Context(positions=2**17 + torch.arange(8)[None]))[0]
    assert float(((far - mixer(x)[0]).norm() / far.norm()).detach()) < 1e-2


def test_packed_window_takes_memory_linear_in_time() -> None:
    """The largest tensor of a forward pass doubles with T, so none is T x T."""
    mixer = SlidingWindow(**HEADS, window=16).build(WIDTH)

    def largest(T: int) -> int:
        context = Context(cu_seqlens=torch.tensor([0, T // 3, T], dtype=torch.int32))
        with LargestTensor() as tensors, torch.no_grad():
            mixer(torch.randn(1, T, WIDTH), None, context)
        return tensors.elements

    assert largest(2048) <= 2.1 * largest(1024)


def exact_varlen_attn(q, k, v, bounds, bounds_k, longest, longest_k, *, scale, window_size):
    """torch's varlen_attn in float64, sequence by sequence. It writes no gradient of keys that belong to none."""
    assert bounds.dtype == bounds_k.dtype == torch.int32
    assert window_size[1] == 0
    k, v = k * 1, v * 1
    for x in (k, v):
        if x.requires_grad:
            x.register_hook(lambda grad: grad.index_fill(0, torch.arange(bounds_k[-1], len(grad)), torch.nan))
    pieces = []
    pairs = zip(itertools.pairwise(bounds.tolist()), itertools.pairwise(bounds_k.tolist()), strict=True)
    for (begin, end), (begin_k, end_k) in pairs:
        assert end - begin <= longest
        assert end_k - begin_k <= longest_k
        q_n = q[begin:end].double().transpose(0, 1)
        k_n, v_n = (x[begin_k:end_k].double().transpose(0, 1) for x in (k, v))
        earlier = (end_k - begin_k) - (end - begin)
        age = torch.arange(earlier, earlier + end - begin)[:, None] - torch.arange(end_k - begin_k)
        visible = (age >= 0) & ((age <= window_size[0]) | (window_size[0] < 0))
        score = (scale * q_n @ k_n.mT).masked_fill(~visible, -torch.inf)
        pieces.append((score.softmax(-1) @ v_n).transpose(0, 1).to(q.dtype))
    return torch.cat(pieces)


@pytest.mark.parametrize("on_gpu", [False, pytest.param(True, marks=needs_gpu)])
@pytest.mark.parametrize("window", [None, 2, 7, 40])
@pytest.mark.parametrize("bounds", [None, (0, 9, 9, 30, 36)])
def test_flash_attention_computes_the_same_windows_and_packs(bounds, window, on_gpu, monkeypatch):
    """Without a GPU the bounds, windows and groups that flash attention gets are checked."""
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float64)
    if not on_gpu:
        monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", exact_varlen_attn)
    generator = torch.Generator().manual_seed(0)
    B = 2 if bounds is None else 1
    q, k, v = (torch.randn(B, 40, heads, 16, generator=generator).to(device, dtype) for heads in (4, 2, 2))
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32, device=device)
    assert softmax_attention.has_flash_attention(q, v) == on_gpu
    results = []
    for function, target in ((softmax_attention.flash_attend, dtype), (softmax_attention.attend, torch.float64)):
        leaves = [x.to(target).requires_grad_() for x in (q, k, v)]
        o = function(*leaves, 0.3, window, cu_seqlens)
        results.append((o, *torch.autograd.grad(o.square().sum(), leaves)))
    for actual, expected in zip(*results, strict=True):
        error = (actual.double() - expected).norm() / expected.norm()
        assert error <= (1e-2 if on_gpu else 1e-12), error


@pytest.mark.parametrize("on_gpu", [False, pytest.param(True, marks=needs_gpu)])
@pytest.mark.parametrize("window", [None, 5])
def test_flash_attention_of_packs_reads_the_filled_slots_of_a_cache(window, on_gpu, monkeypatch):
    """The rows of the cache are empty, partly filled, full and, with a window, overwritten; one piece is empty."""
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float64)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 20, heads, 16, generator=generator).to(device, dtype) for heads in (4, 2, 2))
    past_k, past_v = (torch.randn(4, window or 9, 2, 16, generator=generator).to(device, dtype) for _ in range(2))
    cache = KVCache(past_k, past_v, torch.tensor([0, 3, window or 9, 13 if window else 4], device=device))
    cu_seqlens = torch.tensor([0, 6, 7, 7, 17], dtype=torch.int32, device=device)
    wide = KVCache(past_k.double(), past_v.double(), cache.position)
    results = []
    for operands, past in (([x.double() for x in (q, k, v)], wide), ((q, k, v), cache)):
        leaves = [x.requires_grad_() for x in operands]
        o = softmax_attention.attend_packed(*leaves, 0.3, window, past, cu_seqlens)
        results.append((o, *torch.autograd.grad(o.square().sum(), leaves)))
        if not on_gpu:
            monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", exact_varlen_attn)
            monkeypatch.setattr(softmax_attention, "has_flash_attention", lambda q, v: True)
    for expected, actual in zip(*results, strict=True):
        error = (actual.double() - expected).norm() / expected.norm()
        assert error <= (1e-2 if on_gpu else 1e-12), error
