"""Requests share a pool of pages: each gets the tokens of a run alone, and no page is lost."""

import logging

import pytest
import torch
from test_engine import VOCAB, alone, check_random_requests, draw, make, model_of, random_requests, run

from deltazoo import Engine, Sampling
from deltazoo.backends.compile import CompileBackend
from deltazoo.backends.io.errors import StateError
from deltazoo.blocks.generation.engine import pages
from deltazoo.blocks.generation.engine.pages import PageAllocator
from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.blocks.spec.stack_spec import StackSpec

pytestmark = pytest.mark.runs
SLOTS = 4  # of a page


@pytest.fixture(autouse=True)
def small_pages(monkeypatch):
    monkeypatch.setattr(pages, "PAGE_TOKENS", SLOTS)


@pytest.fixture
def model(model: LanguageModel) -> LanguageModel:
    """The hybrid in float32."""
    return model.float()


def check_no_page_is_lost(engine: Engine) -> None:
    """All pages are free but those of snapshots, which are free once there is no snapshot."""
    engine.step()  # frees the rows of the last requests
    held = {page for node in engine.prefixes._stored for page in node.snapshot.pages} if engine.prefixes else set()
    assert engine.pages.free == engine.pages.count - len(held)
    if engine.prefixes is not None:
        assert engine.prefixes.bytes <= engine.prefixes.limit
        assert engine.prefixes.make_room(engine.pages.count)
        assert engine.prefixes.bytes == 0 or all(not node.snapshot.pages for node in engine.prefixes._stored)
    assert engine.pages.free == engine.pages.count
    for pool in (engine._reading, engine._decoding):
        assert not pool._table.any()


def check_random_requests_in_pages(model: LanguageModel, count: int, seed: int, **settings) -> None:
    """Check random requests, of which some are cancelled, in a pool that few of them fill."""
    engine, free = make(model, **{"cache_tokens": 100, **settings}), []
    check_random_requests(engine, count, seed, cancels=0.03, after_step=lambda: free.append(engine.pages.free))
    assert min(free) < 5  # most pages were in use
    check_no_page_is_lost(engine)


@pytest.mark.parametrize("settings", [{}, {"prefix_bytes": 0}, {"speculate": 3, "step_tokens": 40}])
def test_random_requests_in_a_small_pool_give_the_tokens_of_runs_alone(model, settings):
    check_random_requests_in_pages(model, 10, seed=0, **settings)


@pytest.mark.parametrize("speculate", [0, 3])
def test_random_requests_to_forgetting_attention_give_the_tokens_of_runs_alone(speculate):
    check_random_requests_in_pages(model_of("fox(heads=2, kv_shift=True)"), 8, 0, speculate=speculate, step_tokens=40)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 2, 16, 64])
@pytest.mark.parametrize("speculate", [0, 2])
def test_two_hundred_random_requests_give_the_tokens_of_runs_alone(model, monkeypatch, slots, speculate):
    monkeypatch.setattr(pages, "PAGE_TOKENS", slots)
    settings = {"slots": 6, "step_tokens": 30 + slots, "cache_tokens": max(110, 3 * slots), "speculate": speculate}
    check_random_requests_in_pages(model, 25, seed=slots, **settings)


@pytest.mark.slow
def test_compiled_steps_give_the_tokens_of_runs_alone(model):
    check_random_requests_in_pages(model, 12, seed=1, compile=True)


@pytest.mark.parametrize("past", [0, 3])
def test_a_hit_shares_the_full_pages_of_a_prefix(model, past):
    engine, prefix = make(model), draw(10 * SLOTS + past)
    sampling = Sampling(temperature=0, max_tokens=5)
    requests = [engine.submit(prefix + draw(2, n), sampling) for n in range(4)]
    while len(engine._decoding) < 4:
        engine.step()
    in_use = {page for job in engine._decoding.jobs for page in job.pages}
    own = engine.pages.pages_of(past + 2 + 4)
    assert len(in_use) == 10 + 4 * own
    run(engine)
    assert [request.reused for request in requests] == [0, *[len(prefix)] * 3]
    for request in requests:
        assert request.tokens == alone(model, request.prompt, sampling)
    check_no_page_is_lost(engine)


def test_requests_wait_for_pages_in_order(model):
    engine = make(model, cache_tokens=10 * SLOTS, prefix_bytes=0)
    sampling = Sampling(temperature=0, max_tokens=SLOTS + 1)
    lengths = [5, 6, 1, 9, 1]  # pages; the third one would fit beside the first
    requests = [engine.submit(draw((n - 1) * SLOTS, i) or [1], sampling) for i, n in enumerate(lengths)]
    ended = [event.request for event in engine if event.done]
    assert ended.index(requests[1]) < ended.index(requests[3]) < ended.index(requests[4])
    assert requests[2].first_s > requests[0].ended_s
    for request in requests:
        assert request.tokens == alone(model, request.prompt, sampling)
    check_no_page_is_lost(engine)


def test_snapshots_yield_their_pages_to_requests(model):
    engine, sampling = make(model, cache_tokens=12 * SLOTS), Sampling(temperature=0, max_tokens=2)
    first = engine.submit(draw(30, 1), sampling)
    run(engine)
    engine.step()
    assert engine.prefixes.bytes > 0
    assert engine.pages.free < 12
    largest = engine.submit(draw(12 * SLOTS - 1, 2), sampling)
    run(engine)
    for request in (first, largest):
        assert request.tokens == alone(model, request.prompt, sampling)
    with pytest.raises(StateError, match=r"at most 48 tokens of a request, but it needs 49: 48 .* and 2 new ones"):
        engine.submit(draw(12 * SLOTS, 2), sampling)
    check_no_page_is_lost(engine)


def test_a_long_prompt_takes_more_than_an_equal_share(model):
    engine, sampling = make(model, cache_tokens=4 * 40), Sampling(temperature=0, max_tokens=4)
    requests = [engine.submit(draw(n, n), sampling) for n in (100, 3, 5)]
    run(engine)
    for request in requests:
        assert request.tokens == alone(model, request.prompt, sampling)


@pytest.mark.parametrize("phase", ["read", "decode"])
def test_an_error_in_a_step_frees_the_pages_of_its_requests(model, monkeypatch, phase):
    engine, sampling = make(model), Sampling(temperature=0, max_tokens=8)
    requests = [engine.submit(draw(n + 5, n), sampling) for n in range(2)]
    for _ in range(3):
        engine.step()
    requests += [engine.submit(draw(n + 5, n + 7), sampling) for n in range(2)]
    with monkeypatch.context() as patched:
        patched.setattr(engine._steps, phase, lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    run(engine)
    assert any(request.error for request in requests)
    check_no_page_is_lost(engine)


def test_nan_in_freed_pages_does_not_reach_later_requests(build, spec):
    model = build(spec.model_copy(update={"tied": False})).float()
    engine = make(model, cache_tokens=12 * SLOTS, prefix_bytes=0)
    with torch.no_grad():
        model.embedding.weight[7] = torch.nan
    sampling = Sampling(temperature=0, max_tokens=4, stop=(7,))
    bad = engine.submit([7] * 40, sampling)
    run(engine)
    clean = [[token for token in draw(9, n) if token != 7] for n in range(6)]
    requests = [engine.submit(prompt, sampling) for prompt in clean]
    run(engine)
    assert bad.reason == "error"
    for request in requests:
        assert request.tokens == alone(model, request.prompt, sampling)


def test_mixers_without_pages_keep_a_full_cache_per_slot_and_are_named(caplog):
    torch.manual_seed(0)
    spec = StackSpec(width=16, depth=2, vocab=VOCAB, pattern="mla(heads=2) + attention(heads=2)", mlp="none")
    model = spec.build(backend=CompileBackend(compiled=False))
    with caplog.at_level(logging.WARNING, logger="deltazoo"):
        engine = make(model, cache_tokens=4 * 50)
    assert "caches of MLAMixer are not in pages: each of 4 slots keeps 50 tokens" in caplog.text
    prefix, sampling = draw(30), Sampling(temperature=0, max_tokens=4)
    requests = [engine.submit(prefix + draw(n + 1, n), sampling) for n in range(5)]
    run(engine)
    assert engine.counts.reused > 0
    for request in requests:
        assert request.tokens == alone(model, request.prompt, sampling)
    with pytest.raises(StateError, match="at most 50 tokens of a request, but it needs 51"):
        engine.submit(draw(48), sampling)
    check_no_page_is_lost(engine)


def test_a_model_without_such_caches_has_no_pages_and_no_limit():
    pattern = "gated_deltanet(heads=2) + sliding_window(heads=2, window=4)"
    model = StackSpec(width=16, depth=2, vocab=VOCAB, pattern=pattern, mlp="none").build("reference")
    engine = make(model, cache_tokens=10)
    assert engine.pages is None
    engine.submit(draw(50), Sampling(max_tokens=2))
    run(engine)


def test_a_page_is_free_when_its_last_user_releases_it():
    allocator = PageAllocator(3, 64)
    taken = allocator.take(2)
    allocator.share(taken[:1])
    allocator.release(taken)
    assert (allocator.free, allocator.users(taken[0]), allocator.users(taken[1])) == (2, 1, 0)
    allocator.release(taken[:1])
    assert sorted(allocator.take(3)) == [1, 2, 3]
    assert [allocator.pages_of(n) for n in (0, 1, 64, 65)] == [0, 1, 1, 2]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("settings", [{}, {"speculate": 3, "step_tokens": 40}])
@pytest.mark.parametrize("pattern", ["attention(heads=2) + gated_deltanet(heads=2)", "fox(heads=2)", None])
def test_captured_steps_read_pages_by_kernels(model, build, spec, monkeypatch, pattern, settings):
    """The engine captures them in CUDA graphs, of more rows than there are requests."""
    monkeypatch.setattr(pages, "PAGE_TOKENS", 16)
    if pattern is not None:
        model = build(StackSpec(width=32, depth=2, vocab=VOCAB, pattern=pattern, mlp={"width": 24})).float()
    model = model.cuda()
    engine = make(model, **{"cache_tokens": 160, "slots": 6, **settings})
    requests = [engine.submit(*request) for request in random_requests(20, 3)]
    run(engine)
    for request in requests:
        assert request.error is None
        assert request.tokens == alone(model, request.prompt, request.sampling)
    check_no_page_is_lost(engine)
