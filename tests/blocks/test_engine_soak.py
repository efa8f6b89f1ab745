"""Thousands of short requests leave the memory of an engine as it was, also with cancelled ones and NaN among them."""

import gc
import os
import random
from pathlib import Path

import pytest
import torch
from test_engine import run

from deltazoo import Engine, Sampling
from deltazoo.backends.compile import CompileBackend
from deltazoo.blocks.generation.engine.prefix_tree import PrefixTree
from deltazoo.blocks.spec.stack_spec import StackSpec

pytestmark = pytest.mark.runs
VOCAB, NAN = 24, 23  # the embedding of the last token is NaN
SLOTS = 8


def make(speculate: int) -> Engine:
    torch.manual_seed(0)
    pattern = "gated_deltanet(heads=1) + attention(heads=1)"
    spec = StackSpec(width=16, depth=2, vocab=VOCAB, pattern=pattern, mlp="none", tied=False)
    model = spec.build(backend=CompileBackend(compiled=False)).eval()
    with torch.no_grad():
        model.embedding.weight[NAN] = torch.nan
    engine = Engine(model, SLOTS, cache_tokens=SLOTS * 64, prefix_bytes=0, speculate=speculate)
    engine = Engine(model, SLOTS, None, SLOTS * 64, 40 * engine._reading.row_bytes, speculate=speculate)
    for requests in range(1, SLOTS + 1):  # each number of rows has buffers, which are kept
        for _ in range(requests):
            engine.submit([requests], Sampling(max_tokens=2))
        run(engine)
    return engine


def tensors_outside(tree: PrefixTree) -> int:
    """Count the live tensors that are not in the tree of prefixes."""
    gc.collect()
    nodes, inside = [tree._root], 0
    for node in nodes:
        nodes.extend(node.children.values())
        inside += 1 if node.snapshot is None else 1 + len(node.snapshot.tensors)
    return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()) - inside


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def serve(engine: Engine, count: int, rng: random.Random) -> dict[str, int]:
    """Serve requests of which some share a prefix, have NaN, or are cancelled; return the number of each reason."""
    shared, reasons = [[rng.randrange(NAN) for _ in range(20)] for _ in range(4)], dict[str, int]()
    submitted = []
    for _ in range(count):
        prompt = rng.choice(shared)[: rng.choice([0, 18, 20])] + [rng.randrange(NAN) for _ in range(rng.randint(1, 6))]
        prompt += [NAN] * (rng.random() < 0.01)
        temperature = rng.choice([0.0, 0.8])
        sampling = Sampling(max_tokens=rng.randint(1, 4), temperature=temperature, seed=rng.randrange(99), stop=NAN)
        submitted.append(engine.submit(prompt, sampling))
        if len(submitted) < 4 * SLOTS:
            continue
        engine.step()
        if rng.random() < 0.05:
            engine.cancel(rng.choice(submitted))
        for request in [request for request in submitted if request.done]:
            assert (request.reason == "error") == (NAN in request.prompt) or request.reason == "cancelled"
            reasons[request.reason] = reasons.get(request.reason, 0) + 1
            submitted.remove(request)
        assert engine.prefixes.bytes <= engine.prefixes.limit
    run(engine)
    engine.step()  # frees the rows of the last requests
    return reasons


def check_memory(engine: Engine, before: int, count: int) -> None:
    """Serve `before` requests, and then `count`, which must not add tensors."""
    rng = random.Random(0)
    serve(engine, before, rng)
    tensors = tensors_outside(engine.prefixes)
    reasons = serve(engine, count, rng)
    assert {"max_tokens", "cancelled", "error"} <= set(reasons)
    assert tensors_outside(engine.prefixes) == tensors
    assert (engine.pending, len(engine._waiting), len(engine._in_flight)) == (0, 0, 0)
    assert engine.counts.reused > engine.counts.read


def test_two_hundred_requests_leave_no_tensors():
    check_memory(make(speculate=2), 60, 200)


@pytest.mark.slow  # 30 s of CPU time for each engine, with and without drafts
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the resident memory of Linux")
@pytest.mark.parametrize("speculate", [0, 2])
def test_ten_thousand_requests_leave_the_memory_as_it_was(speculate):
    """The limit is below 1 KiB per request: what a request keeps in a list would exceed it."""
    engine = make(speculate)
    check_memory(engine, 60, 1000)
    before = resident_bytes()
    check_memory(engine, 1, 10_000)
    assert resident_bytes() - before < 8 * 2**20
