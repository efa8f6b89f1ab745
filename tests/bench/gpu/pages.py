"""Time attention over pages and over a contiguous cache per row: python pages.py [LAYER]... [few]

bf16, pages of 64 tokens in random order, captured in CUDA graphs; medians in us. LAYER is an index of LAYERS. Rows of

token: one token per row after 8,191 tokens (full), or after 64 to 8,191, log-uniform (mixed).
piece: pieces of prompts as one pack, stored, and attending to the tokens before; without pages by torch's flash
    attention on a copy of the keys.
drafts: four drafted tokens per row after mixed lengths; without pages by SDPA with a mask.
few: few repetitions, to fill the caches of compilers.

The last column is the largest difference between both results. Needs a CUDA device.
"""

import math
import random
import statistics
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.ops.paged_attention import Pages, attend_pages_
from deltazoo.backends.ops.token_attention import TokenOperands, Turn, attend_token_
from deltazoo.mixers.parts.attention.caches import KVCache, append_to_cache
from deltazoo.mixers.parts.attention.softmax_attention import attend_cache, attend_packed

TOKENS, SLOTS, DRAFTED = 8192, 64, 4
PIECES = [([2048], [0]), ([2048], [6144]), ([512] * 4, [1024] * 4), ([128], [6144])]  # new tokens, tokens before
TIMES = 3 if "few" in sys.argv else 20


class Layer(NamedTuple):
    """Query heads, key-value heads and their width."""

    H: int
    G: int
    E: int


LAYERS = [Layer(32, 32, 64), Layer(32, 8, 128)]


class Caches(NamedTuple):
    """The same tokens in a contiguous cache per row and in pages."""

    k: Tensor
    v: Tensor
    pages: Pages


def caches(layer: Layer, rows: int) -> Caches:
    order = torch.randperm(rows * TOKENS // SLOTS, generator=torch.Generator().manual_seed(0)) + 1
    table = order.view(rows, -1).int().cuda()
    blocks, paged = [], []
    for _ in range(2):
        block = draw(rows, TOKENS, layer.G, layer.E)
        pages = draw(len(order) + 1, SLOTS, layer.G, layer.E)
        pages[table.long()] = block.view(rows, -1, SLOTS, layer.G, layer.E)
        blocks.append(block)
        paged.append(pages)
    return Caches(*blocks, Pages(*paged, table))


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def mixed(rows: int) -> Tensor:
    rng = random.Random(0)
    lengths = [round(math.exp(rng.uniform(math.log(64), math.log(TOKENS - 1 - DRAFTED)))) for _ in range(rows)]
    return torch.tensor(lengths, device="cuda")


def median(call: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """Return the time of a call in us, and its result."""
    for _ in range(2):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    samples = []
    for _ in range(TIMES):
        start, stop = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        samples.append(1000 * start.elapsed_time(stop))
    return statistics.median(samples), result.clone()


def compare(cells: list[str], block: Callable[[], Tensor], paged: Callable[[], Tensor]) -> None:
    (before, want), (after, got) = median(block), median(paged)
    ratio, difference = after / before, (want.float() - got.float()).abs().max().item()
    cells += [f"block {before:.1f}", f"pages {after:.1f} us", f"{ratio:.3f}x", f"difference {difference:.1e}"]
    print(" | ".join(cells), flush=True)


def time_tokens(layer: Layer, rows: int) -> None:
    k, v, pages = caches(layer, rows)
    H, G, E = layer
    x, turn = TokenOperands(draw(rows, (H + 2 * G) * E)), Turn(E // 2, 1e4)
    for name, before in (("full", torch.full((rows,), TOKENS - 1, device="cuda")), ("mixed", mixed(rows))):
        position = before.clone()

        def step(
            k: Tensor, v: Tensor, table: Tensor | None = None, position: Tensor = position, before: Tensor = before
        ) -> Tensor:
            position.copy_(before)
            return attend_token_(x, k, v, position, turn, E**-0.5, table)

        cells = ["token", f"{H}/{G} x {E}", f"B={rows}", name]
        compare(cells, lambda step=step: step(k, v), lambda step=step: step(*pages))


def time_piece(layer: Layer, new: list[int], before: list[int]) -> None:
    k, v, pages = caches(layer, len(new))
    q, *kv = (draw(1, sum(new), heads, layer.E) for heads in (layer.H, layer.G, layer.G))
    bounds = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    before_N, position, scale = torch.tensor(before, device="cuda"), torch.tensor(before, device="cuda"), layer.E**-0.5

    def block() -> Tensor:
        cache = KVCache(k, v, position.copy_(before_N))
        o = attend_packed(q, *kv, scale, None, cache, bounds)
        append_to_cache(cache, *kv, bounds.diff().long(), bounds[:-1].long())
        return o

    cells = ["piece", f"{layer.H}/{layer.G} x {layer.E}", f"{len(new)} x {new[0]} after {before[0]}"]
    compare(cells, block, lambda: attend_pages_(q, *kv, pages, before_N, scale, None, bounds))


def time_drafts(layer: Layer, rows: int) -> None:
    k, v, pages = caches(layer, rows)
    q, *kv = (draw(rows, DRAFTED, heads, layer.E) for heads in (layer.H, layer.G, layer.G))
    before, position, scale = mixed(rows), mixed(rows), layer.E**-0.5
    count, time = torch.full_like(before, DRAFTED), torch.arange(DRAFTED, device="cuda")

    def block() -> Tensor:
        cache = append_to_cache(KVCache(k, v, position.copy_(before)), *kv, count)
        return attend_cache(q, cache, scale, before[:, None] + time)

    cells = ["drafts", f"{layer.H}/{layer.G} x {layer.E}", f"B={rows}", f"T={DRAFTED}"]
    compare(cells, block, lambda: attend_pages_(q, *kv, pages, before, scale))


@torch.no_grad()
def main() -> None:
    print(" | ".join([torch.cuda.get_device_name(), torch.__version__]), flush=True)
    for layer in [LAYERS[int(name)] for name in sys.argv[1:] if name != "few"] or LAYERS:
        for rows in (1, 32, 64):
            time_tokens(layer, rows)
        for new, before in PIECES:
            time_piece(layer, new, before)
        for rows in (1, 16):
            time_drafts(layer, rows)


if __name__ == "__main__":
    main()
