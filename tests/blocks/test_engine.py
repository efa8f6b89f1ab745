"""The engine gives each request the tokens of a run alone, whatever the other requests do."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from deltazoo import Engine, Sampling
from deltazoo.backends.io.errors import ConfigError, StateError, ValueRangeError
from deltazoo.blocks.generation.generate import generate_tokens
from deltazoo.blocks.model.stack import LanguageModel

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
    return generate_tokens(model, torch.tensor([prompt]), sampling)[0].tolist()


def run(engine: Engine) -> None:
    for _ in engine:
        pass


def draw(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


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


def check_random_requests(model: LanguageModel, count: int, seed: int, **settings) -> None:
    """Submit requests at random moments; each must give the tokens of a run alone."""
    rng, engine = random.Random(seed), make(model, **settings)
    waiting, submitted = random_requests(count, seed), []
    while waiting or engine.pending:
        for _ in range(min(rng.choice([0, 0, 1, 5]), len(waiting))):
            prompt, sampling = waiting.pop()
            submitted.append(engine.submit(prompt, sampling))
        engine.step()
    for request in submitted:
        assert request.error is None
        assert request.tokens == alone(model, request.prompt, request.sampling), request.prompt


def test_random_requests_give_the_tokens_of_runs_alone(model):
    check_random_requests(model, 12, seed=0)


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
        expected = alone_on_cuda(model, request.prompt, request.sampling)
        assert request.error is None
        assert request.tokens == (expected[: len(request.tokens)] if request.reason == "cancelled" else expected)


def alone_on_cuda(model: LanguageModel, prompt: list[int], sampling: Sampling) -> list[int]:
    return generate_tokens(model, torch.tensor([prompt], device="cuda"), sampling)[0].tolist()
