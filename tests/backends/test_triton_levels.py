"""The kernels of log-linear attention against token-by-token recurrences in float64: in the interpreter, or on a GPU.

T time, N sequences, H key heads, HV value heads, K key width, V value width, L levels, J levels of chunks
"""

import functools
import itertools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from triton_cases import DEVICE, INTERPRETED, needs_triton

from deltazoo import watch
from deltazoo.backends.ops.log_linear import LevelOperands, level_scan, level_step_, refusals
from deltazoo.backends.triton.levels.operands import operand_refusals
from deltazoo.mixers import Context, LogLinearGDN, LogLinearMamba2
from deltazoo.mixers.core.mixer import Mixer
from deltazoo.mixers.core.named_tensors import NamedTensors
from deltazoo.mixers.parts.memory import log_linear as part

DTYPE = torch.float32
NEAR = 1e-5  # of results in DTYPE
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 5e-3}
GRADIENTS = {"q": 2, "k": 2, "v": 2, "log_decay": 4, "erase": 4, "weights": 2, "state": 2}  # times the tolerance
BOUNDS = [0, 5, 5, 9, 250]  # an empty sequence; one of four chunks; three tokens follow, which belong to none


def token_by_token(x: LevelOperands, position: int = 0) -> tuple[Tensor, Tensor]:
    """Return o [T, HV, V] of one row from `position` on, and the states [L - 1, HV, K, V] after it."""
    T, HV, _ = x.v.shape
    q, k = (y.repeat_interleave(HV // x.q.shape[1], 1) for y in (x.q, x.k))
    states = list(x.state.unbind(0))
    outputs = []
    for t in range(T):
        new = k[t, :, :, None] * x.v[t, :, None]
        o = x.weights[t, :, 0, None] * torch.einsum("hk,hkv->hv", q[t], new)
        for j, state in enumerate(states):
            S = x.log_decay[t].exp()[:, None, None] * state
            if x.erase is not None:
                erased = x.erase[t][:, None] * torch.einsum("hkv,hk->hv", S, k[t])
                S = S - k[t, :, :, None] * erased[:, None]
            states[j] = S
            o = o + x.weights[t, :, j + 1, None] * torch.einsum("hk,hkv->hv", q[t], S)
        outputs.append(o)
        after = position + t + 1
        moves_to = min((after & -after).bit_length() - 1, len(states) - 1)
        states[moves_to] = sum(states[:moves_to], states[moves_to] + new)
        states[:moves_to] = [torch.zeros_like(new)] * moves_to
    return torch.stack(outputs) if outputs else x.v, torch.stack(states)


class Sizes(NamedTuple):
    B: int = 1
    T: int = 253
    H: int = 1
    HV: int = 2
    K: int = 16
    V: int = 16
    L: int = 9


def draw(sizes: Sizes, delta: bool, dtype: torch.dtype, strong: bool = False) -> LevelOperands:
    """Draw operands in float64 whose numbers `dtype` holds."""
    generator = torch.Generator().manual_seed(0)
    B, T, H, HV, K, V, L = sizes
    normal = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    uniform = functools.partial(torch.rand, generator=generator, dtype=torch.float64)
    decay = -0.2 * uniform(B, T, HV)
    if strong:
        decay = torch.tensor([0.0, -20.0, -60.0])[torch.randint(3, (B, T, HV), generator=generator)]
    unit = [torch.nn.functional.normalize(normal(B, T, H, K), dim=-1).to(dtype) for _ in range(2)]
    rest = [decay.float(), uniform(B, T, HV).float() if delta else None, (0.1 + uniform(B, T, HV, L)).float()]
    operands = (*unit, normal(B, T, HV, V).to(dtype), *rest)
    return LevelOperands(*(None if y is None else y.double() for y in operands))


def row(x: LevelOperands, b: int, tokens: slice, state: Tensor | None = None) -> LevelOperands:
    """Return tokens of a row, with the states of all levels, or with empty ones."""
    HV, V = x.v.shape[2:]
    empty = x.q.new_zeros(x.weights.shape[-1] - 1, HV, x.q.shape[-1], V)
    named = {name: y[b, tokens] for name, y in x._asdict().items() if name in GRADIENTS and y is not None}
    return LevelOperands(**({"erase": None} | named | {"state": empty if state is None else state}))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.detach().double().cpu() - expected).norm() / expected.norm().clamp(min=1e-30))


def assert_same(
    x: LevelOperands, expected: list[Tensor], exact: list[Tensor], dtype: torch.dtype, chunks: LevelOperands
) -> None:
    """Compare the kernels' results and gradients with `expected`, computed from the leaves `exact`."""
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(y.shape, generator=generator, dtype=torch.float64) for y in expected]
    references = torch.autograd.grad(expected, exact, cotangents)
    cast = {
        name: y.detach().to(DEVICE, dtype if name in ("q", "k", "v") else torch.float32).requires_grad_()
        for name, y in x._asdict().items()
        if name in GRADIENTS and y is not None
    }
    with watch() as log:
        results = level_scan(chunks._replace(**cast))[: len(expected)]
        gradients = torch.autograd.grad(results, list(cast.values()), [
            y.to(DEVICE, z.dtype) for y, z in zip(cotangents, results, strict=True)
        ])  # fmt: skip
    assert log.kernels["level_reverse_kernel"] == log.kernels["level_gradients_kernel"] >= 1
    for actual, reference in zip(results, expected, strict=True):
        assert relative_error(actual, reference.detach()) <= TOLERANCE[dtype]
    for (name, leaf), actual, reference in zip(cast.items(), gradients, references, strict=True):
        assert actual.dtype == leaf.dtype
        assert relative_error(actual, reference) <= GRADIENTS[name] * TOLERANCE[dtype], name


CASES = {
    "additive": (Sizes(V=20), False, DTYPE, False),
    "delta": (Sizes(H=2), True, DTYPE, False),
    "delta, strong decays": (Sizes(L=8, K=48), True, torch.float16, True),
}
if not INTERPRETED:
    CASES["bfloat16"] = (Sizes(H=2, K=128, V=64), True, torch.bfloat16, False)
    CASES["wide float32"] = (Sizes(H=2, K=128, V=128), True, torch.float32, True)


@needs_triton
@pytest.mark.parametrize("case", CASES)
def test_packed_sequences_and_all_gradients(case):
    sizes, delta, dtype, strong = CASES[case]
    x = draw(sizes, delta, dtype, strong)
    x = LevelOperands(*(None if y is None else y.requires_grad_() for y in x))
    parts = [token_by_token(row(x, 0, slice(*bounds)))[0] for bounds in itertools.pairwise(BOUNDS)]
    o = torch.cat([*parts, x.v.new_zeros(sizes.T - BOUNDS[-1], *x.v.shape[2:])])[None]
    bounds = LevelOperands(*x[:6], cu=torch.tensor(BOUNDS, dtype=torch.int32, device=DEVICE))
    assert_same(x, [o], [y for y in x if y is not None], dtype, bounds)


@needs_triton
@pytest.mark.parametrize("delta", [pytest.param(True, marks=pytest.mark.kernel_smoke), False])
def test_rows_that_continue_at_chunks_of_their_own(delta, monkeypatch):
    """Chunk 3 of a tree of three levels follows all of them; a row without tokens keeps its states."""
    from deltazoo.backends.triton.levels import launch

    monkeypatch.setattr(launch, "FLOAT32", launch.FLOAT32._replace(scratch=0, group=1))  # a window for every head
    sizes, first, counts = Sizes(B=3, T=130, L=10), [3, 6, 13], [128, 64, 0]
    x = draw(sizes, delta, DTYPE)
    J = sizes.L - 7
    live = torch.tensor([[c & 1, c >> 1 & 1, c >= 4] for c in first]).double()
    state = live[..., None, None, None] * torch.randn(sizes.B, J, sizes.HV, sizes.K, sizes.V, dtype=torch.float64)
    x = x._replace(state=state)
    x = LevelOperands(*(None if y is None else y.requires_grad_() for y in x))
    outputs, finals = [], []
    for b, (start, count) in enumerate(zip(first, counts, strict=True)):
        low = state.new_zeros(6, *state.shape[2:])
        levels = torch.cat([low, live[b][:, None, None, None] * x.state[b]])
        o, states = token_by_token(row(x, b, slice(count), levels), 64 * start)
        outputs.append(torch.cat([o, o.new_zeros(sizes.T - count, *o.shape[1:])]))
        finals.append(states[6:])
    numbers = {"first": torch.tensor(first), "counts": torch.tensor(counts)}
    chunks = x._replace(**{name: y.to(DEVICE, torch.int32) for name, y in numbers.items()})
    exact = [y for y in x if y is not None]
    assert_same(x, [torch.stack(outputs), torch.stack(finals)], exact, DTYPE, chunks)


@needs_triton
@pytest.mark.parametrize("delta", [pytest.param(True, marks=pytest.mark.kernel_smoke), False])
def test_decoded_tokens(delta):
    """Two rows; the second has a token in every other call only. Level 4 of 5 holds all tokens from the fourth on."""
    sizes = Sizes(B=2, T=12, HV=4, K=12, V=20, L=5)
    x = draw(sizes, delta, DTYPE)
    states = torch.zeros(2, sizes.L - 1, sizes.HV, sizes.K, sizes.V, device=DEVICE)
    seen, outputs = torch.zeros(2, dtype=torch.int64, device=DEVICE), []
    for t in range(sizes.T):
        present = torch.tensor([1, t % 2], device=DEVICE)
        token = [None if y is None else y[:, t : t + 1].to(DEVICE, torch.float32) for y in x]
        token[:3] = [y.to(DTYPE) for y in token[:3]]
        outputs.append(level_step_(LevelOperands(*token), states, seen, present))
        seen += present
    o = torch.cat(outputs, 1)
    for b, tokens in enumerate((slice(None), slice(1, None, 2))):
        expected, after = token_by_token(row(x, b, tokens))
        assert relative_error(o[b, tokens], expected) < NEAR
        assert relative_error(states[b], after) < NEAR
    assert not o[1, ::2].any()


MIXERS = {
    "gdn": LogLinearGDN(heads=2, key_width=8, value_width=4, value_heads=4, levels=10),
    "mamba2": LogLinearMamba2(heads=2, key_width=8, value_width=4, value_heads=4, levels=9),
}


def results(mixer: Mixer, x: Tensor, pieces: list[int], context: Context | None = None) -> list[Tensor]:
    """Return the outputs of pieces of x, and the last states."""
    rows = x.shape[0] if context is None else context.cu_seqlens.shape[0] - 1
    state, outputs = mixer.init_state(rows), []
    for piece in x.split(pieces, 1):
        y, state, _ = mixer(piece, state, context)
        outputs.append(y)
    return [torch.cat(outputs, 1), state[mixer.levels_key]]


@needs_triton
@pytest.mark.parametrize("name", MIXERS)
@torch.no_grad()
def test_pieces_of_a_mixer_equal_plain_torch(name, monkeypatch):
    """Pieces start inside chunks, end inside them, or are one token; the pack has sequences of different lengths."""
    torch.manual_seed(0)
    mixer = MIXERS[name].build(24).to(DTYPE)
    for parameter in mixer.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    x, pieces = torch.randn(2, 150, 24, dtype=DTYPE), [66, 1, 83]
    bounds = Context(cu_seqlens=torch.tensor([0, 66, 66, 150], dtype=torch.int32))
    exact = MIXERS[name].build(24).double()
    exact.load_state_dict(mixer.state_dict())
    expected = [*results(exact, x.double(), [150]), *results(exact, x[:1].double(), [150], bounds)]
    mixer.to(DEVICE)
    monkeypatch.setattr(part, "refusals", operand_refusals)
    with watch() as log:
        actual = results(mixer, x.to(DEVICE), pieces)
    launched = {name: count for name, count in log.kernels.items() if name.startswith("level_")}
    assert launched == {"level_prepare_kernel": 2, "level_scan_kernel": 2, "level_step_kernel": 1}
    bounds = Context(cu_seqlens=bounds.cu_seqlens.to(DEVICE))
    actual += results(mixer, x[:1].to(DEVICE), [150], bounds)
    for mine, reference in zip(actual, expected, strict=True):
        assert relative_error(mine, reference) < NEAR


@needs_triton
def test_gradients_of_pieces_and_of_the_states_before_them(monkeypatch):
    """67 tokens precede: the first level, and that of 64 tokens, hold some."""
    torch.manual_seed(0)
    mixer, exact = (MIXERS["mamba2"].build(24).to(DTYPE) for _ in range(2))
    exact.load_state_dict(mixer.state_dict())
    exact.double()
    before, x = (torch.randn(2, T, 24, dtype=DTYPE) for T in (67, 130))
    gradients = []
    for module, refused in ((exact, lambda _: ["planted"]), (mixer.to(DEVICE), operand_refusals)):
        monkeypatch.setattr(part, "refusals", refused)
        weight = next(module.parameters())
        with torch.no_grad():
            _, state, _ = module(before.to(weight), module.init_state(2))
        start = NamedTensors({**state, module.levels_key: state[module.levels_key].clone().requires_grad_()})
        leaves = [x.to(weight).requires_grad_(), start[module.levels_key], *module.parameters()]
        y, state, _ = module(leaves[0], start)
        gradients.append(list(torch.autograd.grad(y.cos().sum() + state[module.levels_key].sin().sum(), leaves)))
        gradients[-1][1] *= start[module.levels_key].detach().ne(0)  # a level without tokens has no gradient
    for reference, actual in zip(*gradients, strict=True):
        assert relative_error(actual, reference) < NEAR


@needs_triton
def test_operands_that_the_kernels_do_not_take():
    x = LevelOperands(*(None if y is None else y.float() for y in draw(Sizes(T=2), True, DTYPE)))
    narrow = x._replace(q=x.q.bfloat16(), k=x.k.bfloat16(), v=x.v.bfloat16())
    assert not operand_refusals(x)
    for operands in (narrow, x):
        assert (not refusals(LevelOperands(*(None if y is None else y.to(DEVICE) for y in operands)))) != INTERPRETED
    wide = draw(Sizes(T=2, K=129), True, torch.float32)
    refused = [x._replace(q=x.q.double()), x._replace(weights=x.weights[..., :7]), x._replace(q=wide.q.float())]
    refused.append(LevelOperands(*(None if y is None else y.double() for y in x)))
    assert all(map(operand_refusals, refused))
