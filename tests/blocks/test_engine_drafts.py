"""An engine that verifies drafts gives each request the tokens of plain decoding, with the same seeds and limits."""

import itertools
import random

import pytest
import torch
from test_engine import VOCAB, alone, check_random_requests, draw, make, model_of, run

from deltazoo import Engine, Sampling
from deltazoo.backends.compile import CompileBackend
from deltazoo.backends.io.errors import StateError, ValueRangeError
from deltazoo.backends.ops.prompt_lookup import append_
from deltazoo.backends.update import registry
from deltazoo.blocks.generation.drafted_pass import MOST_LOOKED_UP, empty_texts, start_text
from deltazoo.blocks.generation.engine import pool
from deltazoo.blocks.generation.engine.pool import RETRY_AFTER
from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.blocks.spec.stack_spec import StackSpec

pytestmark = pytest.mark.runs
REPEATED = [3, 4, 5, 6, 7, 8] * 4


@pytest.fixture
def model(model: LanguageModel) -> LanguageModel:
    """The hybrid in float32."""
    return model.float()


def drafting(model: LanguageModel, speculate: int = 3, ahead: bool | None = None, **settings) -> Engine:
    """Args: ahead: whether the host launches a pass before it has the tokens of the one before, as on CUDA."""
    engine = make(model, **{"speculate": speculate, "step_tokens": 40, **settings})
    engine._is_ahead = engine._is_ahead if ahead is None else ahead
    return engine


def check_random_drafts(engine: Engine, count: int, seed: int) -> float:
    """Check random requests, of which some are cancelled; return the tokens per pass."""
    check_random_requests(engine, count, seed, cancels=0.05)
    return engine.counts.tokens_per_pass


@pytest.mark.parametrize(("most", "ahead"), [(pool.MOST_TOKENS, False), (8, True)])
def test_random_requests_give_the_tokens_of_runs_alone(model, monkeypatch, most, ahead):
    """With the smaller limit, steps of more than two requests have no drafts, so that both kinds alternate."""
    monkeypatch.setattr(pool, "MOST_TOKENS", most)
    assert check_random_drafts(drafting(model, ahead=ahead), 10, seed=0) > 1.2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_two_hundred_random_requests_give_the_tokens_of_runs_alone(model, monkeypatch, seed):
    monkeypatch.setattr(pool, "MOST_TOKENS", (8, 64)[seed % 2])
    settings = {"slots": 1 + seed, "speculate": 1 + seed % 4, "step_tokens": 50, "ahead": seed > 3}
    check_random_drafts(drafting(model, **settings), 25, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*registry.names(registry.MIXERS), "kda + mla", "mamba2 + attention"])
def test_requests_to_every_mixer_give_the_tokens_of_runs_alone(name):
    assert check_random_drafts(drafting(model_of(name)), 10, seed=0) > 1


@pytest.mark.slow
def test_compiled_passes_give_the_tokens_of_runs_alone(model):
    check_random_drafts(drafting(model, slots=2, compile=True), 8, seed=1)


@pytest.mark.parametrize("ahead", [False, True])
def test_the_pass_after_the_last_token_fits_in_a_cache_that_the_request_fills(ahead):
    model, sampling = model_of("mla(heads=2)"), Sampling(temperature=0, max_tokens=12)
    engine = drafting(model, ahead=ahead, slots=1, cache_tokens=len(REPEATED) + 11 + 3)
    request = engine.submit(REPEATED, sampling)
    run(engine)
    assert request.tokens == alone(model, REPEATED, sampling)


@pytest.mark.parametrize("ahead", [False, True])
def test_samples_are_those_of_generate_tokens_with_the_same_seed(model, ahead):
    samplings = [
        Sampling(temperature=0.3, seed=1, max_tokens=70),
        Sampling(temperature=0.5, top_k=5, seed=2, max_tokens=20),
        Sampling(temperature=0.5, top_k=9, top_p=0.8, min_p=0.05, seed=4, max_tokens=20),
        Sampling(temperature=0.6, min_p=0.2, repetition_penalty=1.2, seed=5, max_tokens=20),
        Sampling(temperature=0, repetition_penalty=1.1, max_tokens=20),
        Sampling(temperature=0, max_tokens=20),
    ]
    engine = drafting(model, ahead=ahead)
    requests = [engine.submit([*REPEATED, n], sampling) for n, sampling in enumerate(samplings)]
    run(engine)
    assert engine.counts.tokens_per_pass > 1.2
    for request in requests:
        assert request.tokens == alone(model, request.prompt, request.sampling), request.sampling


def test_log_probabilities_are_those_of_the_forward_pass(model):
    engine = drafting(model)
    requests = [engine.submit(REPEATED, Sampling(temperature=0, max_tokens=12, logprobs=n)) for n in (3, 0)]
    run(engine)
    with torch.no_grad():
        logits = model(torch.tensor([REPEATED + requests[0].tokens]))[0]
    expected = logits[0, len(REPEATED) - 1 : -1].log_softmax(-1)
    assert engine.counts.tokens_per_pass > 1.2
    for request in requests:
        assert len(request.logprobs) == 12
        for entry, token, row in zip(request.logprobs, request.tokens, expected, strict=True):
            assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
            top = row.topk(request.sampling.logprobs)
            assert [token for token, _ in entry.top] == top.indices.tolist()
            assert [value for _, value in entry.top] == pytest.approx(top.values.tolist(), abs=1e-4)


def test_each_request_keeps_its_own_accepted_drafts(model):
    """A request whose drafts are accepted ends in fewer passes than one of the same length, in the same steps."""
    engine, sampling = drafting(model), Sampling(temperature=0, max_tokens=24)
    requests = [engine.submit(prompt, sampling) for prompt in (REPEATED, draw(24, 5), draw(24, 6), draw(24, 7))]
    run(engine)
    passes = [request.passes for request in requests]
    assert min(passes) < max(passes) <= 23
    assert engine.counts.passes == sum(passes)
    assert engine.counts.passed == 4 * 23
    for request in requests:
        assert request.tokens == alone(model, request.prompt, sampling)


def check_short_prompts(engine: Engine) -> None:
    """Prompts of as many tokens as a step or a pass reads are read as prompts, beside rows that decode."""
    sampling = Sampling(temperature=0, max_tokens=9)
    requests = [engine.submit(REPEATED, Sampling(temperature=0, max_tokens=40))]
    for length in (1, 4, 1, 5, 3, 2):
        engine.step()
        requests.append(engine.submit(draw(length, length), sampling))
    run(engine)
    for request in requests:
        assert request.tokens == alone(engine.model, request.prompt, request.sampling)


@pytest.mark.parametrize("speculate", [0, 3])
def test_a_prompt_as_short_as_a_step_or_a_pass_is_read_as_a_prompt(model, speculate):
    check_short_prompts(drafting(model, speculate))


@pytest.mark.parametrize("ahead", [False, True])
def test_steps_without_drafts_leave_the_state_for_passes_after_them(model, monkeypatch, ahead):
    engine = drafting(model, ahead=ahead)
    drafted = itertools.cycle([3, 0, 3, 3, 0, 0])
    monkeypatch.setattr(engine._decoding, "next_drafted", lambda: next(drafted))
    requests = [engine.submit([*REPEATED, n], Sampling(temperature=0.3 * n, max_tokens=30)) for n in range(3)]
    run(engine)
    assert engine.counts.tokens_per_pass > 1.2
    for request in requests:
        assert request.tokens == alone(model, request.prompt, request.sampling)


def test_snapshots_may_be_dropped_while_requests_with_drafts_use_their_prefixes(model, monkeypatch):
    row = drafting(model)._reading.row_bytes
    engine, rng = drafting(model, prefix_bytes=3 * row), random.Random(0)
    dropped, drop = [], engine.prefixes._drop
    monkeypatch.setattr(engine.prefixes, "_drop", lambda node: (dropped.append(node), drop(node)))
    prefixes = [REPEATED[n:] + draw(20, n) for n in range(4)]
    prompts = [rng.choice(prefixes) + REPEATED[: rng.randint(1, 9)] for _ in range(16)]
    requests = [engine.submit(prompt, Sampling(temperature=0, max_tokens=rng.randint(2, 9))) for prompt in prompts]
    run(engine)
    assert dropped
    assert engine.counts.reused > 0
    assert engine.counts.passes > 0
    for request in requests:
        assert request.tokens == alone(model, request.prompt, request.sampling)


@pytest.mark.parametrize("period", [25, 200])
def test_drafts_stop_while_they_are_rejected_and_resume_when_the_text_repeats_itself(period):
    """The model continues with a cycle of tokens. They are new at first, so that no draft is accepted."""
    torch.manual_seed(0)
    spec = StackSpec(width=128, depth=1, vocab=period, pattern="gated_deltanet", mlp="none", tied=False)
    model = spec.build(backend=CompileBackend(compiled=False))
    with torch.no_grad():
        model.head.weight.copy_(model.embedding.weight.roll(1, 0))
        model.embedding.weight.mul_(100)
    engine = drafting(model, slots=1)
    request = engine.submit([3], Sampling(temperature=0, max_tokens=150))
    run(engine)
    assert request.tokens == [(4 + n) % period for n in range(150)]
    rejected = 4  # before the mean is too low
    if period > 150:
        assert request.passes == rejected + (149 - rejected) // (1 + RETRY_AFTER)
    else:
        accepted = (149 - rejected - RETRY_AFTER) / 4
        assert abs(request.passes - rejected - accepted) <= 1


def test_tokens_after_a_stop_in_a_pass_and_beyond_the_limit_are_dropped(model):
    free = alone(model, REPEATED, Sampling(temperature=0, max_tokens=24))
    limits = [(n, ()) for n in range(1, 9)]
    stops = [(24, tuple(free[n : n + 2])) for n in range(2, 12)]
    engine = drafting(model)
    samplings = [Sampling(temperature=0, max_tokens=limit, stop=(stop,) if stop else ()) for limit, stop in limits]
    samplings += [Sampling(temperature=0, max_tokens=limit, stop=(stop,)) for limit, stop in stops]
    requests = [engine.submit(REPEATED, sampling) for sampling in samplings]
    events = list(engine)
    for request in requests:
        assert request.tokens == alone(model, REPEATED, request.sampling)
        assert [event.token for event in events if event.request is request] == request.tokens
    assert engine.counts.tokens_per_pass > 1.2


def test_a_stop_text_may_end_in_the_middle_of_a_pass(build, spec):
    model = build(spec.model_copy(update={"vocab": 256})).float()
    sampling = Sampling(temperature=0, max_tokens=30)
    plain = make(model)
    whole = plain.submit("abcabcabcabc", sampling)
    run(plain)
    engine = drafting(model)
    requests = [
        engine.submit("abcabcabcabc", sampling.model_copy(update={"stop": (whole.text[n : n + 2],)}))
        for n in range(4, 12)
    ]
    run(engine)
    assert engine.counts.tokens_per_pass > 1
    for request in requests:
        (stop,) = request.sampling.stop
        assert request.reason == "stop"
        assert request.text == whole.text[: whole.text.index(stop) + len(stop)]


def test_a_request_with_nan_logits_ends_alone(build, spec):
    """Also when the tokens before are accepted drafts: they arrive, and the error ends the request after them."""
    model = build(spec.model_copy(update={"tied": False})).float()
    prompts = [REPEATED, draw(12, 1), draw(12, 2)]
    sampling = Sampling(temperature=0, max_tokens=12)
    expected = [alone(model, prompt, sampling) for prompt in prompts]
    unseen = min(set(range(VOCAB)) - set().union(*prompts, *expected))
    last = expected[0][9]
    engine = drafting(model)
    with torch.no_grad():
        model.embedding.weight[unseen] = torch.nan
    bad = engine.submit([*REPEATED, unseen, *REPEATED], sampling)
    requests = [engine.submit(prompt, sampling) for prompt in prompts]
    run(engine)
    assert (bad.reason, bad.tokens) == ("error", [])
    assert [request.tokens for request in requests] == expected
    with torch.no_grad():
        model.embedding.weight[last] = torch.nan
    requests = [engine.submit(prompt, sampling) for prompt in prompts]
    run(engine)
    for request, tokens in zip(requests, expected, strict=True):
        if last in request.prompt:
            assert (request.reason, request.tokens) == ("error", [])
        elif last in tokens[:-1]:
            assert isinstance(request.error, ValueRangeError)
            assert request.tokens == tokens[: tokens.index(last) + 1]
        else:
            assert request.tokens == tokens


@pytest.mark.parametrize("phase", ["verify", "draw", "commit"])
def test_an_error_in_a_pass_ends_its_requests_and_no_other(model, monkeypatch, phase):
    engine, sampling = drafting(model), Sampling(temperature=0, max_tokens=20)
    first = [engine.submit(prompt, sampling) for prompt in (REPEATED, draw(6))]
    engine.step()

    def fail(*args):
        raise RuntimeError("out of order")

    with monkeypatch.context() as patched:
        patched.setattr(engine._steps, phase, fail)
        with pytest.raises(RuntimeError, match="out of order"):
            engine.step()
    second = [engine.submit(prompt, sampling) for prompt in (REPEATED, draw(6))]
    run(engine)
    assert [request.reason for request in first] == ["error"] * 2
    for request in second:
        assert request.tokens == alone(model, request.prompt, sampling)


def test_drafts_are_looked_up_in_the_last_tokens_of_a_long_text(model):
    """The history of a row is shorter than the prompt, and moves with the text."""
    texts = empty_texts(2, None, torch.device("cpu"))
    prompt = torch.arange(MOST_LOOKED_UP + 100)
    start_text(texts, 1, prompt, 7)
    chosen, last, accepted = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2)
    append_(chosen, chosen, torch.tensor([[0, 1, 2], [0, 4, 3]]), last, accepted, texts)
    assert texts.history[0].eq(0).all()
    assert texts.history[1].tolist() == [-1, *prompt[102 - 2 :].tolist(), 4, 5]
    assert (texts.drawn.tolist(), texts.left.tolist()) == ([0, 2], [0, 5])
    assert (last.tolist(), accepted.tolist()) == ([[0], [5]], [0, 2])


def test_drafts_need_space_in_the_caches_and_in_a_step(model):
    engine = drafting(model)
    engine.submit([1] * 820, Sampling(max_tokens=10))
    with pytest.raises(StateError, match=r"at most 832 tokens of a request.*needs 833: 821 .* and 3 drafted ones"):
        engine.submit([1] * 821, Sampling(max_tokens=10))
    with pytest.raises(ValueRangeError, match=r"step_tokens must be above slots = 4 \* 4 tokens of a pass, got 16"):
        drafting(model, step_tokens=16)
    with pytest.raises(ValueRangeError, match="speculate must be an integer >= 0, got -1"):
        drafting(model, speculate=-1)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("seed", range(3))
def test_captured_passes_give_the_tokens_of_runs_alone(model, monkeypatch, seed):
    monkeypatch.setattr(pool, "MOST_TOKENS", (64, 8, 12)[seed])  # with the smaller ones few steps have drafts
    tokens_per_pass = check_random_drafts(drafting(model.cuda().rebind(None)), 20, seed)
    assert seed or tokens_per_pass > 1


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_passes_draw_the_samples_of_generate_tokens(model):
    """With one capture for all numbers of accepted drafts: no graph is added after the first request of a kind."""
    model = model.cuda().rebind(None)
    engine, sampling = drafting(model, slots=1, step_tokens=20), Sampling(temperature=0.4, max_tokens=90, seed=0)
    for seed in range(4):
        request = engine.submit(REPEATED + draw(3, seed), sampling.model_copy(update={"seed": seed}))
        run(engine)
        assert request.tokens == alone(model, request.prompt, request.sampling)
        if not seed:
            graphs = len(engine._steps._draws), len(engine._steps._passes), len(engine._steps._decoders)
    assert graphs == (len(engine._steps._draws), len(engine._steps._passes), len(engine._steps._decoders))
    assert engine.counts.tokens_per_pass > 1


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("speculate", [0, 3])
def test_captured_steps_read_a_prompt_as_short_as_a_step_or_a_pass_as_a_prompt(model, speculate):
    check_short_prompts(drafting(model.cuda().rebind(None), speculate))
