"""The engine gives each request the tokens of a run alone, whatever the other requests do."""

import random
from collections.abc import Callable

import pytest
import torch

from deltazoo import Engine, Sampling, generate
from deltazoo.backends.compile import CompileBackend
from deltazoo.backends.io.errors import ConfigError, StateError, ValueRangeError
from deltazoo.backends.update import registry
from deltazoo.blocks.generation import decoder, drafted_pass
from deltazoo.blocks.generation.engine import steps
from deltazoo.blocks.generation.engine.steps import step_sizes
from deltazoo.blocks.generation.generate import generate_tokens
from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.blocks.spec.stack_spec import StackSpec
from deltazoo.mixers import hyena
from deltazoo.mixers.families import token_cache

VOCAB = 29


@pytest.fixture
def model(model: LanguageModel) -> LanguageModel:
    """The hybrid in float32."""
    return model.float()


@pytest.fixture
def engine(model: LanguageModel) -> Engine:
    return make(model)


def make(model: LanguageModel, **settings) -> Engine:
    return Engine(model, **{"slots": 4, "step_tokens": 24, "cache_tokens": 4 * 200, **settings})


def alone(model: LanguageModel, prompt: list[int], sampling: Sampling) -> list[int]:
    return generate_tokens(model, torch.tensor([prompt], device=model.device), sampling)[0].tolist()


def run(engine: Engine) -> None:
    for _ in engine:
        pass


def draw(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def model_of(pattern: str) -> LanguageModel:
    """Build a small model in float64, with weights large enough that greedy tokens vary."""
    torch.manual_seed(0)
    spec = StackSpec(width=32, depth=2, vocab=VOCAB, pattern=pattern, mlp={"width": 32})
    model = spec.build(backend=CompileBackend(compiled=False)).double()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=1.0 if "embedding" in path else parameter.shape[1] ** -0.5)
    return model


def random_requests(count: int, seed: int) -> list[tuple[list[int], Sampling]]:
    """Prompts of which a part begins with a shared prefix, with different lengths and stop sequences."""
    rng = random.Random(seed)
    shared = draw(40, seed)
    requests = []
    for n in range(count):
        prompt = shared[: rng.choice([0, 0, 17, 30, 40])] + draw(rng.choice([1, 2, 3, 8, 30]), seed + n)
        stop = tuple(rng.sample(range(VOCAB), rng.choice([0, 0, 1])))
        requests.append((prompt, Sampling(temperature=0, max_tokens=rng.randint(1, 12), stop=stop)))
    return requests


def check_random_requests(
    engine: Engine, count: int, seed: int, cancels: float = 0.0, after_step: Callable[[], object] = lambda: None
) -> None:
    """Submit requests at random moments; each must give the tokens of a run alone.

    Args: cancels: probability that a request is cancelled before a step.
    """
    rng, waiting, submitted = random.Random(seed), random_requests(count, seed), []
    while waiting or engine.pending:
        for _ in range(min(rng.choice([0, 0, 1, 5]), len(waiting))):
            submitted.append(engine.submit(*waiting.pop()))
        if cancels and submitted and rng.random() < cancels:
            engine.cancel(rng.choice(submitted))
        engine.step()
        after_step()
    for request in submitted:
        expected = alone(engine.model, request.prompt, request.sampling)
        assert request.error is None
        assert request.tokens == (expected[: len(request.tokens)] if request.reason == "cancelled" else expected)


def test_a_step_reads_at_most_step_tokens_of_pieces_and_rows_whose_prompts_end_among_them(model):
    engine = make(model, slots=8, step_tokens=12)
    requests = [engine.submit(draw(2 + n, n), Sampling(temperature=0, max_tokens=6)) for n in range(8)]
    counts = []
    while engine.pending:
        read, before = engine.counts.read, [len(request.tokens) for request in requests]
        engine.step()
        decoded = sum(len(x.tokens) - max(n, 1) for x, n in zip(requests, before, strict=True) if x.tokens)
        counts.append(engine.counts.read - read + decoded)
    assert max(counts) == 12


def test_random_requests_give_the_tokens_of_runs_alone(model):
    check_random_requests(make(model), 12, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_two_hundred_random_requests_give_the_tokens_of_runs_alone(model, seed):
    check_random_requests(make(model, slots=1 + seed, step_tokens=10 + 10 * seed), 25, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*registry.names(registry.MIXERS), "kda + mla", "mamba2 + attention"])
def test_requests_to_every_mixer_give_the_tokens_of_runs_alone(name):
    check_random_requests(make(model_of(name)), 10, seed=0)


@pytest.mark.parametrize("name", ["hyena", "mla", "fox", "path_attention"])
def test_rows_without_a_request_may_outgrow_their_cache(name, monkeypatch):
    """A step of more rows than requests counts tokens in the others, too. A GPU does not check the capacity."""
    for module in (hyena, token_cache):
        monkeypatch.setattr(module, "check_capacity", lambda *arguments: None)
    torch.manual_seed(0)
    spec = StackSpec(width=32, depth=1, vocab=VOCAB, pattern=name, mlp="none")
    model = spec.build(backend=CompileBackend(compiled=False)).double()
    engine, sampling = make(model, cache_tokens=4 * 12), Sampling(temperature=0, max_tokens=9)
    engine._decoding.sizes = [1, 2, 4]
    for count in (4, 3, 3):
        requests = [engine.submit(draw(3, n), sampling) for n in range(count)]
        run(engine)
        assert [request.tokens for request in requests] == [alone(model, x.prompt, sampling) for x in requests]


@pytest.mark.slow
def test_compiled_steps_give_the_tokens_of_runs_alone(model):
    check_random_requests(make(model, compile=True), 12, seed=1)


@pytest.mark.runs
def test_sampled_tokens_are_those_of_generate_tokens_with_the_same_seed(model, engine):
    samplings = [
        Sampling(temperature=0.7, seed=1, max_tokens=70),
        Sampling(temperature=1.3, top_k=5, seed=2, max_tokens=9),
        Sampling(temperature=1.0, top_p=0.6, seed=3, max_tokens=9),
        Sampling(temperature=1.0, top_k=9, top_p=0.8, min_p=0.05, seed=4, max_tokens=9),
        Sampling(temperature=1.0, min_p=0.2, repetition_penalty=1.5, seed=5, max_tokens=9),
        Sampling(temperature=0, repetition_penalty=2.0, max_tokens=9),
        Sampling(temperature=0, max_tokens=9),
    ]
    prompts = [draw(n + 3, n) for n in range(len(samplings))]
    requests = [engine.submit(*pair) for pair in zip(prompts, samplings, strict=True)]
    run(engine)
    for request in requests:
        assert request.tokens == alone(model, request.prompt, request.sampling), request.sampling


@pytest.mark.runs
def test_the_penalty_does_not_count_draws_before_the_end_of_the_prompt(model):
    """A piece of a prompt may end in the step that draws the first token of another one."""
    penalized = Sampling(temperature=0, repetition_penalty=5.0, max_tokens=9)
    engine = make(model)
    requests = [engine.submit(draw(20, n), penalized) for n in range(12)]
    run(engine)
    for request in requests:
        assert request.tokens == alone(model, request.prompt, penalized)


def test_log_probabilities_are_those_of_the_forward_pass(model, engine):
    request = engine.submit(draw(6), Sampling(temperature=0.9, seed=3, max_tokens=4, logprobs=3))
    only_chosen = engine.submit(draw(5, 2), Sampling(temperature=0, max_tokens=2, logprobs=0))
    none = engine.submit(draw(5, 2), Sampling(temperature=0, max_tokens=2))
    run(engine)
    text = torch.tensor([request.prompt + request.tokens])
    with torch.no_grad():
        logits = model(text)[0]
    expected = logits[0, len(request.prompt) - 1 : -1].log_softmax(-1)
    assert len(request.logprobs) == 4
    for entry, token, row in zip(request.logprobs, request.tokens, expected, strict=True):
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        top = row.topk(3)
        assert [token for token, _ in entry.top] == top.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(top.values.tolist(), abs=1e-4)
    assert [entry.top for entry in only_chosen.logprobs] == [(), ()]
    assert none.logprobs == []


@pytest.mark.runs
def test_a_common_prefix_is_read_once_whether_requests_come_together_or_later(model):
    prefix, sampling = draw(90), Sampling(temperature=0, max_tokens=3)
    prompts = [prefix + draw(n + 1, n) for n in range(6)]
    together, later = make(model), make(model)
    requests = [together.submit(prompt, sampling) for prompt in prompts]
    run(together)
    for prompt in prompts:
        requests.append(later.submit(prompt, sampling))
        run(later)
    suffixes = sum(len(prompt) - 90 for prompt in prompts)
    assert together.counts.read == 90 + suffixes
    assert together.counts.reused == 5 * 90
    assert later.counts.read == 2 * 90 + suffixes  # the second request shows where the prompts part
    for request in requests:
        assert request.tokens == alone(model, request.prompt, sampling)


def test_equal_prompts_are_read_once(model, engine):
    prompt, sampling = draw(40), Sampling(temperature=0, max_tokens=3)
    requests = [engine.submit(prompt, sampling) for _ in range(5)]
    run(engine)
    requests.append(engine.submit(prompt, sampling))
    requests.append(engine.submit(prompt + draw(1, 3), sampling))
    run(engine)
    assert engine.counts.read == 40 + 5 + 2  # a snapshot after 39 tokens
    for request in requests:
        assert request.tokens == alone(model, request.prompt, sampling)


@pytest.mark.runs
@pytest.mark.parametrize("suffix", [1, 2, 3, 4, 5])
def test_a_piece_shorter_than_a_convolution_after_a_shared_prefix_leaves_the_snapshot(model, engine, suffix):
    prefix, sampling = draw(33), Sampling(temperature=0, max_tokens=4)
    requests = [engine.submit(prefix + draw(suffix, n), sampling) for n in range(4)]
    run(engine)
    requests.append(engine.submit(prefix + draw(7, 9), sampling))
    run(engine)
    assert requests[-1].reused == 33
    for request in requests:
        assert request.tokens == alone(model, request.prompt, sampling)


@pytest.mark.parametrize("past", [4, 10])
def test_a_prefix_that_ends_a_few_tokens_past_a_chunk_is_restored_exactly(past):
    """The chunked form has chunks of 64 tokens; a prefix may end anywhere in one."""
    torch.manual_seed(0)
    pattern = "gated_deltanet(heads=2) + mamba2"
    spec = StackSpec(width=32, depth=2, vocab=VOCAB, pattern=pattern, mlp="none")
    model = spec.build(backend=CompileBackend(compiled=False)).double()
    engine, prefix, sampling = make(model), draw(64 + past), Sampling(temperature=0, max_tokens=4)
    requests = [engine.submit(prefix + draw(n + 1, n), sampling) for n in range(3)]
    run(engine)
    assert [request.reused for request in requests] == [0, 64 + past, 64 + past]
    for request in requests:
        assert request.tokens == alone(model, request.prompt, sampling)


@pytest.mark.runs
def test_snapshots_stay_within_their_memory_and_the_tree_forgets_prompts(model):
    engine = make(model)
    row = engine._reading.row_bytes
    engine = make(model, prefix_bytes=3 * row)
    for n in range(30):
        engine.submit(draw(40, n), Sampling(temperature=0, max_tokens=1))
    run(engine)
    assert engine.prefixes.bytes <= 3 * row
    nodes, stored = [engine.prefixes._root], 0
    for node in nodes:
        nodes.extend(node.children.values())
        stored += node.snapshot is not None
        assert node.users == 0
    assert stored >= 1
    assert len(nodes) <= 2 * stored + 1


def test_a_prefix_larger_than_the_memory_is_read_by_each_request(model):
    prefix, sampling = draw(60), Sampling(temperature=0, max_tokens=2)
    engine = make(model, prefix_bytes=0)
    requests = [engine.submit(prefix + draw(2, n), sampling) for n in range(3)]
    run(engine)
    assert engine.counts.read == 3 * 62
    for request in requests:
        assert request.tokens == alone(model, request.prompt, sampling)


@pytest.mark.runs
def test_a_request_with_nan_logits_ends_alone(build, spec):
    model = build(spec.model_copy(update={"tied": False})).float()
    engine = make(model)
    with torch.no_grad():
        model.embedding.weight[7] = torch.nan
    clean = [[token for token in draw(12, n) if token != 7] for n in range(5)]
    sampling = Sampling(temperature=0, max_tokens=6, stop=(7,))
    requests = [engine.submit(prompt, sampling) for prompt in clean[:2]]
    bad = engine.submit([*clean[2], 7, 3], Sampling(temperature=0, max_tokens=6))
    requests += [engine.submit(prompt, sampling) for prompt in clean[2:]]
    run(engine)
    again = [engine.submit(prompt, sampling) for prompt in clean]  # in the rows of the request that ended
    run(engine)
    assert bad.reason == "error"
    assert isinstance(bad.error, ValueRangeError)
    assert bad.tokens == []
    for request in (*requests, *again):
        assert request.tokens == alone(model, request.prompt, sampling)


@pytest.mark.parametrize("phase", ["read", "decode", "draw"])
def test_an_error_in_a_step_ends_the_requests_of_the_call_and_no_other(model, engine, monkeypatch, phase):
    sampling = Sampling(temperature=0, max_tokens=8)
    first = [engine.submit(draw(n + 5, n), sampling) for n in range(2)]
    for _ in range(3):
        engine.step()
    second = [engine.submit(draw(n + 5, n + 7), sampling) for n in range(2)]

    def fail(*args):
        raise RuntimeError("out of order")

    with monkeypatch.context() as patched:
        patched.setattr(engine._steps, phase, fail)
        with pytest.raises(RuntimeError, match="out of order"):
            engine.step()
    third = engine.submit(draw(9, 3), sampling)
    run(engine)
    failed = [request for request in (*first, *second) if request.error is not None]
    assert failed == ([*first, *second] if phase == "decode" else second)
    for request in (*first, *second, third):
        expected = alone(model, request.prompt, sampling)
        if request in failed:
            assert request.reason == "error"
            expected = expected[: len(request.tokens)]
        assert request.tokens == expected


@pytest.mark.runs
def test_requests_cancelled_at_random_moments_leave_the_others(model):
    rng, engine = random.Random(3), make(model)
    requests = [engine.submit(prompt, sampling) for prompt, sampling in random_requests(16, 5)]
    while engine.pending:
        if rng.random() < 0.3:
            engine.cancel(rng.choice(requests))
        engine.step()
    assert any(request.reason == "cancelled" for request in requests)
    for request in requests:
        expected = alone(model, request.prompt, request.sampling)
        assert request.tokens == (expected[: len(request.tokens)] if request.reason == "cancelled" else expected)


def test_a_cancelled_reader_of_a_prefix_does_not_block_those_that_wait_for_it(model, engine):
    prefix, sampling = draw(100), Sampling(temperature=0, max_tokens=2)
    requests = [engine.submit(prefix + draw(2, n), sampling) for n in range(3)]
    engine.step()
    engine.cancel(requests[0])
    run(engine)
    assert requests[0].reason == "cancelled"
    for request in requests[1:]:
        assert request.tokens == alone(model, request.prompt, sampling)


def test_events_give_every_token_in_order_and_the_end(model, engine):
    requests = [engine.submit(draw(n + 1, n), Sampling(temperature=0, max_tokens=n + 1)) for n in range(6)]
    events = list(engine)
    for request in requests:
        own = [event for event in events if event.request is request]
        assert [event.token for event in own] == request.tokens
        assert request.done
        assert request.reason == "max_tokens"
        assert request.submitted_s <= request.first_s <= request.ended_s
    assert engine.pending == 0


def test_text_prompts_stop_at_texts_and_stream_what_precedes(build, spec):
    model = build(spec.model_copy(update={"vocab": 256})).float()
    sampling = Sampling(temperature=0.9, seed=4, max_tokens=30)
    engine = make(model)
    whole = engine.submit("some text", sampling)
    run(engine)
    assert whole.text == bytes(whole.tokens).decode("utf-8", "replace")
    assert whole.text == generate(model, "some text", sampling).text
    stop = whole.text[4:6]
    request = engine.submit("some text", sampling.model_copy(update={"stop": (stop,)}))
    text = "".join(event.text for event in engine)
    assert request.reason == "stop"
    assert text == request.text == whole.text[: whole.text.index(stop) + len(stop)]


def test_a_model_with_a_tokenizer_takes_text_and_ends_with_its_end_tokens(model):
    sampling = Sampling(temperature=1.5, max_tokens=20)
    end = alone(model, [7, 4, 11, 11, 14], sampling)[7]

    class Letters:
        def __init__(self):
            self.end = (end,)

        def encode(self, text):
            return [ord(letter) - ord("a") for letter in text]

        def decode_stream(self, prompt):
            return self

        def step(self, token):
            return chr(token + ord("a"))

        def flush(self):
            return ""

    model.tokenizer = Letters()
    engine = make(model)
    requests = [engine.submit("hello", sampling.model_copy(update={"seed": n})) for n in range(3)]
    run(engine)
    for request in requests:
        tokens = alone(model, request.prompt, request.sampling.model_copy(update={"stop": (end,)}))
        assert request.prompt == [7, 4, 11, 11, 14]
        assert request.tokens == tokens
        assert request.reason == ("end" if tokens[-1] == end else "max_tokens")
        assert request.text == "".join(chr(token + ord("a")) for token in tokens if token != end)
    assert requests[0].reason == "end"
    of_tokens = engine.submit(requests[0].prompt, sampling)
    run(engine)
    assert of_tokens.tokens == alone(model, of_tokens.prompt, sampling)
    assert of_tokens.reason == "max_tokens"


def test_memory_does_not_grow_with_the_number_of_requests(model):
    engine = make(model, prefix_bytes=0)
    for n in range(40):
        engine.submit(draw(3, n), Sampling(temperature=0, max_tokens=1))
        run(engine)
    assert not engine._waiting
    assert not engine._in_flight
    assert not len(engine._reading) + len(engine._decoding)


@pytest.mark.parametrize(
    ("error", "sentence", "prompt", "sampling"),
    [
        (StateError, "at most 832 tokens of a request, but it needs 836", [1] * 827, Sampling(max_tokens=10)),
        (ValueRangeError, "at least one token, got none", [], None),
        (ValueRangeError, r"integers in \[0, 29\), got 29", [1, 29], None),
        (ValueRangeError, "seed must be a number or None", [1], Sampling(seed=(1,))),
        (ValueRangeError, r"stop must contain tokens in \[0, 29\)", [1], Sampling(max_tokens=1, stop=(30,))),
        (ConfigError, "a prompt of text needs a vocabulary of bytes or a tokenizer", "text", None),
        (ConfigError, "stop must contain tokens for a vocabulary of 29", [1], Sampling(max_tokens=1, stop=("a",))),
        (ValueRangeError, r"integers \[T\], got torch.float32", torch.ones(3), None),
    ],
)
def test_a_request_that_cannot_run_is_refused_at_submit(engine, error, sentence, prompt, sampling):
    with pytest.raises(error, match=sentence):
        engine.submit(prompt, sampling)
    assert engine.pending == 0


def test_sizes_of_steps_are_rounded_up_by_at_most_a_half():
    assert step_sizes(1, 64) == [1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    assert step_sizes(1, 20) == [1, 2, 4, 6, 8, 12, 16, 20]
    assert step_sizes(1, 20, halves=False) == [1, 2, 4, 8, 16, 20]
    assert step_sizes(64, 512) == [64, 128, 256, 384, 512]
    assert step_sizes(1, 1) == [1]


@pytest.mark.parametrize(
    ("sentence", "settings"),
    [
        ("slots must be an integer >= 1", {"slots": 0}),
        ("step_tokens must be above slots = 4, got 4", {"step_tokens": 4}),
        ("cache_tokens must be at least slots = 4, got 3", {"cache_tokens": 3}),
        ("the model keeps every token: give cache_tokens", {"cache_tokens": None}),
    ],
)
def test_an_engine_with_wrong_sizes_is_refused(model, sentence, settings):
    with pytest.raises((ValueRangeError, StateError), match=sentence):
        make(model, **settings)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("seed", range(3))
def test_captured_steps_give_the_tokens_of_runs_alone(model, seed):
    model = model.cuda()
    rng, engine = random.Random(seed), make(model)
    submitted = [engine.submit(prompt, sampling) for prompt, sampling in random_requests(20, seed)]
    while engine.pending:
        engine.step()
        if rng.random() < 0.05:
            engine.cancel(rng.choice(submitted))
    for request in submitted:
        expected = alone(model, request.prompt, request.sampling)
        assert request.error is None
        assert request.tokens == (expected[: len(request.tokens)] if request.reason == "cancelled" else expected)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("speculate", [0, 3])
def test_no_step_is_captured_after_the_warm_up(model, speculate, monkeypatch):
    engine = make(model.cuda().rebind(None), step_tokens=40, speculate=speculate)
    engine.warm_up()

    def fail(*arguments, **settings):
        raise AssertionError("captured after the warm-up")

    for part in (steps, decoder, drafted_pass):
        monkeypatch.setattr(part, "capture", fail)
    for sampling in (Sampling(temperature=0), Sampling(temperature=0.8), Sampling(top_p=0.8, temperature=0.8)):
        for count in (1, 3, 4, 2):
            for n in range(count):
                engine.submit(draw(9 * n + 1, n), sampling.model_copy(update={"max_tokens": 5 + n}))
            run(engine)
