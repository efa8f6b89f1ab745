"""Attention over a paged cache against float64: by plain torch, in Triton's interpreter, or on a GPU."""

import random

import pytest
import torch
from torch import Tensor
from triton_cases import DEVICE, needs_triton

from deltazoo.backends.ops import paged_attention
from deltazoo.backends.ops.paged_attention import Pages, attend_pages_
from deltazoo.backends.ops.token_attention import TokenOperands, Turn, attend_token_
from deltazoo.backends.triton.attention import paged_op

G, SCALE = 2, 0.4


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32, device: str = DEVICE) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def pages_in_random_order(
    lengths: list[int], slots: int, widths: tuple[int, int], dtype: torch.dtype, device: str
) -> Pages:
    """Pages for sequences of these lengths, in random order among others; page 0 and free ones are NaN.

    Args: widths: of keys and values.
    """
    counts = [-(-length // slots) for length in lengths]
    order = list(range(1, sum(counts) + 4))
    random.Random(0).shuffle(order)
    table = torch.zeros(len(lengths), max(counts) + 2, dtype=torch.int32)
    for n, count in enumerate(counts):
        table[n, :count] = torch.tensor([order.pop() for _ in range(count)])
    shape = sum(counts) + 4, slots, G
    k, v = (torch.full((*shape, width), torch.nan, dtype=dtype, device=device) for width in widths)
    return Pages(k, v, table.to(device))


def fill(pages: Pages, n: int, keys: Tensor, values: Tensor) -> None:
    """Write the tokens [L, G, E] of a sequence."""
    S = pages.k.shape[1]
    for p in range(len(keys)):
        page = int(pages.table[n, p // S])
        pages.k[page, p % S], pages.v[page, p % S] = keys[p], values[p]


def tokens_of(pages: Pages, n: int, length: int) -> tuple[Tensor, Tensor]:
    """Read the tokens of a sequence in float64."""
    S = pages.k.shape[1]
    used = pages.table[n].long()
    k, v = (x[used].flatten(0, 1)[:length].double() for x in (pages.k, pages.v))
    assert length <= len(used) * S
    return k, v


def expected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend from the last tokens q [T, H, E] of a sequence k, v [L, G, E] in float64."""
    (T, H, _), L = q.shape, len(k)
    k, v = (x.double().repeat_interleave(H // G, 1) for x in (k, v))
    scores = SCALE * torch.einsum("the,she->hts", q.double(), k)
    future = torch.arange(L, device=q.device) > torch.arange(L - T, L, device=q.device)[:, None]
    return torch.einsum("hts,she->the", scores.masked_fill(future, -torch.inf).softmax(-1), v)


# tokens before, new tokens, query heads, widths of keys and values, slots of a page, whether packed
CASES = {
    "one token": ([0, 31, 32, 77], [1, 1, 1, 1], 2, (12, 12), 32, False),
    "drafts, grouped heads": ([0, 33, 100], [3, 3, 3], 6, (20, 20), 32, False),
    "drafts, wider keys": ([0, 15, 100], [2, 2, 2], 2, (24, 9), 16, False),
    "pack with empty sequences": ([5, 0, 40, 0, 17], [9, 0, 30, 41, 0], 4, (16, 16), 16, True),
    "long pack, wider keys": ([63, 64], [70, 1], 2, (40, 32), 64, True),
}
FORMS = [
    pytest.param("torch", torch.float64, 1e-12, id="torch, float64"),
    pytest.param("kernels", torch.float32, 1e-5, id="kernels, float32", marks=needs_triton),
    pytest.param("kernels", torch.float16, 4e-3, id="kernels, float16", marks=needs_triton),
]


@pytest.mark.parametrize(("form", "dtype", "tolerance"), FORMS)
@pytest.mark.parametrize("name", CASES)
def test_new_tokens_attend_to_those_of_their_sequence_and_join_them(name, form, dtype, tolerance):
    before, new, H, (E, V), slots, packed = CASES[name]
    device = DEVICE if form == "kernels" else "cpu"
    N, T = len(before), sum(new) if packed else new[0]
    pages = pages_in_random_order([b + n for b, n in zip(before, new, strict=True)], slots, (E, V), dtype, device)
    past = [
        [draw(b, G, width, seed=10 * n + i, dtype=dtype, device=device) for i, width in enumerate((E, V))]
        for n, b in enumerate(before)
    ]
    for n, (k, v) in enumerate(past):
        fill(pages, n, k, v)
    shape = (1, T + 5) if packed else (N, T)  # a pack ends with tokens of no sequence
    sizes = (H, E), (G, E), (G, V)
    q, k, v = (draw(*shape, *size, seed=i, dtype=dtype, device=device) for i, size in enumerate(sizes))
    bounds = [0, *torch.tensor(new).cumsum(0).tolist()]
    cu = torch.tensor(bounds, dtype=torch.int32, device=device) if packed else None
    before_N = torch.tensor(before, device=device)
    operator = paged_op.attend_pages if form == "kernels" else paged_attention._attend_pages
    o = operator(q, k, v, *pages, before_N, None, cu, SCALE)
    for n in range(N):
        own = (0, slice(bounds[n], bounds[n + 1])) if packed else (n,)
        keys, values = (torch.cat([old, x[own]]) for old, x in zip(past[n], (k, v), strict=True))
        for stored, given in zip(tokens_of(pages, n, len(keys)), (keys, values), strict=True):
            assert torch.equal(stored, given.double())
        torch.testing.assert_close(o[own].double(), expected(q[own], keys, values), rtol=tolerance, atol=tolerance)
    if packed:
        assert not o[0, T:].any()
    assert pages.k[0].isnan().all()


@pytest.mark.parametrize(("form", "dtype", "tolerance"), FORMS[:2])
def test_padded_tokens_and_rows_without_pages_store_nothing(form, dtype, tolerance):
    device = DEVICE if form == "kernels" else "cpu"
    pages = pages_in_random_order([4, 0], 16, (8, 8), dtype, device)
    kept = pages.k.clone(), pages.v.clone()
    q, k, v = (draw(2, 4, heads, 8, seed=heads, dtype=dtype, device=device) for heads in (4, G, G))
    before, counts = torch.tensor([0, 70], device=device), torch.tensor([2, 4], device=device)
    operator = paged_op.attend_pages if form == "kernels" else paged_attention._attend_pages
    o = operator(q, k, v, *pages, before, counts, None, SCALE)
    torch.testing.assert_close(
        o[0, :2].double(), expected(q[0, :2], k[0, :2], v[0, :2]), rtol=tolerance, atol=tolerance
    )
    page = int(pages.table[0, 0])
    for x, new, old in zip(pages[:2], (k, v), kept, strict=True):
        assert torch.equal(x[page, :2], new[0, :2])
        old[page, :2] = new[0, :2]
        assert torch.equal(x.nan_to_num(7.0), old.nan_to_num(7.0))


@pytest.mark.parametrize(("form", "dtype", "tolerance"), FORMS[:2])
def test_drafts_beyond_the_pages_of_a_row_do_not_change_those_within(form, dtype, tolerance):
    device = DEVICE if form == "kernels" else "cpu"
    pages = pages_in_random_order([32], 16, (8, 8), dtype, device)
    keys, values = (draw(32, G, 8, seed=seed, dtype=dtype, device=device) for seed in (7, 8))
    fill(pages, 0, keys[:30], values[:30])
    q, k, v = (draw(1, 4, heads, 8, seed=heads, dtype=dtype, device=device) for heads in (4, G, G))
    operator = paged_op.attend_pages if form == "kernels" else paged_attention._attend_pages
    o = operator(q, k, v, *pages, torch.tensor([30], device=device), None, None, SCALE)
    keys, values = torch.cat([keys[:30], k[0, :2]]), torch.cat([values[:30], v[0, :2]])
    torch.testing.assert_close(o[0, :2].double(), expected(q[0, :2], keys, values), rtol=tolerance, atol=tolerance)
    assert pages.k[0].isnan().all()


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_token_with_norm_and_rotation_reads_pages_as_one_block(dtype):
    """The pages give the bits of a contiguous cache with the same tiles."""
    H, E, slots, before = 4, 12, 16, [0, 15, 16, 130]
    pages = pages_in_random_order([b + 1 for b in before], slots, (E, E), dtype, DEVICE)
    S = pages.table.shape[1] * slots
    k, v = (torch.zeros(4, S, G, E, dtype=dtype, device=DEVICE) for _ in range(2))
    for n, length in enumerate(before):
        k[n, :length], v[n, :length] = (draw(length, G, E, seed=5 * n + i, dtype=dtype) for i in range(2))
        fill(pages, n, k[n, :length], v[n, :length])
    x = TokenOperands(draw(4, (H + 2 * G) * E, seed=4, dtype=dtype), gate=draw(4, H * E, seed=5, dtype=dtype))
    turn, results = Turn(6, 1e4), []
    for cache in ((k, v), pages):
        position = torch.tensor(before, device=DEVICE)
        results.append(attend_token_(x, *cache[:2], position, turn, SCALE, *cache[2:]))
        assert position.tolist() == [b + 1 for b in before]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)
    for n, length in enumerate(before):
        stored = tokens_of(pages, n, length + 1)
        assert torch.equal(stored[0], k[n, : length + 1].double())
        assert torch.equal(stored[1], v[n, : length + 1].double())
    assert pages.k[0].isnan().all()


@needs_triton
def test_a_row_without_pages_stores_nothing_and_gives_zeros():
    pages = pages_in_random_order([20, 0], 16, (8, 8), torch.float32, DEVICE)
    fill(pages, 0, *(draw(20, G, 8, seed=i) for i in range(2)))
    kept, position = pages.k.clone(), torch.tensor([19, 500], device=DEVICE)
    o = attend_token_(
        TokenOperands(draw(2, (2 + 2 * G) * 8, seed=1)), pages.k, pages.v, position, None, SCALE, pages.table
    )
    assert o[0].isfinite().all()
    assert not o[1].any()
    changed = (pages.k.nan_to_num(7.0) != kept.nan_to_num(7.0)).flatten(1).any(1)
    assert changed.nonzero().flatten().tolist() == [int(pages.table[0, 1])]


@pytest.mark.parametrize("name", ["attend_pages_", pytest.param("triton_attend_pages_", marks=needs_triton)])
def test_the_operators_pass_opcheck(name):
    device = DEVICE if name.startswith("triton") else "cpu"
    pages = pages_in_random_order([20, 9], 16, (8, 8), torch.float32, device)
    pages.k.zero_()
    pages.v.zero_()
    q, k, v = (draw(2, 3, heads, 8, seed=heads, device=device) for heads in (4, G, G))
    arguments = (q, k, v, *pages, torch.tensor([3, 5], device=device), None, None, SCALE)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(getattr(torch.ops.deltazoo, name).default, arguments, test_utils=tests)


def test_the_wrapper_takes_the_plain_form_for_small_pages():
    pages = pages_in_random_order([5], 4, (8, 8), torch.float32, "cpu")
    q, k, v = (draw(1, 5, heads, 8, seed=heads, device="cpu") for heads in (4, G, G))
    o = attend_pages_(q, k, v, pages, torch.tensor([0]), SCALE)
    torch.testing.assert_close(o[0].double(), expected(q[0], k[0], v[0]), rtol=1e-5, atol=1e-5)
