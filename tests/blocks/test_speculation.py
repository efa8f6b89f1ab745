"""Speculative decoding gives the tokens of plain decoding, and samples from the same distribution."""

import copy
import itertools

import pytest
import torch
from torch import Tensor

from deltazoo.backends.io.errors import OperandError, StateError, ValueRangeError
from deltazoo.backends.ops.prompt_lookup import LONGEST_MATCH, accept, lookup
from deltazoo.blocks.generation import speculation
from deltazoo.blocks.generation.decoder import Decoder
from deltazoo.blocks.generation.drafted_pass import Pass
from deltazoo.blocks.generation.generate import generate_tokens, stream
from deltazoo.blocks.generation.sampler import Rows
from deltazoo.blocks.generation.sampling import Sampling
from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.blocks.spec.stack_spec import StackSpec
from deltazoo.mixers import GatedDeltaNet

pytestmark = pytest.mark.runs
REPEATED = [3, 4, 5, 6, 7, 8, 3, 4, 5, 6, 7, 8, 3, 4, 5]


def draft(tokens: list[int], count: int) -> list[int]:
    """Draft after one row of tokens, in a longer history."""
    return lookup(torch.tensor([[-1] * (LONGEST_MATCH + 5) + tokens]), count)[0].tolist()


def test_lookup_continues_the_longest_and_then_the_last_match() -> None:
    assert draft([1, 2, 3, 4, 5, 1, 2, 3], 2) == [4, 5]
    assert draft([1, 2, 3, 4, 0, 2, 3, 6, 1, 2, 3], 2) == [4, 0]  # three tokens match before two that are later
    assert draft([2, 3, 4, 0, 2, 3, 6, 0, 2, 3], 2) == [6, 0]  # 0, 2, 3 before 2, 3
    assert draft([3, 4, 3, 5, 3], 1) == [5]
    assert draft([7, 8, 9, 8], 3) == [9, 8, 9]  # beyond the end the match is a period
    assert draft([1, 1], 3) == [1, 1, 1]
    assert draft([5], 2) == [5, 5] and len(draft([1, 2, 3], 2)) == 2


def test_rows_of_different_lengths_are_looked_up_apart() -> None:
    rows = [[1, 2, 3, 1], [4, 5, 6, 4, 5], [7]]
    width = 8
    history = torch.tensor([[-1] * (LONGEST_MATCH + width - len(row)) + row for row in rows])
    assert lookup(history, 2).tolist() == [draft(row, 2) for row in rows]


def test_drafts_stand_up_to_the_first_that_was_not_chosen() -> None:
    tokens = torch.tensor([[9, 1, 2, 3]] * 4)
    chosen = torch.tensor([[1, 2, 3, 4], [0, 2, 3, 4], [1, 2, 0, 4], [1, 0, 3, 4]])
    assert accept(chosen, tokens).tolist() == [4, 1, 3, 2]


@pytest.mark.parametrize("speculate", [1, 3, 6])
def test_greedy_tokens_equal_those_without_drafts(model: LanguageModel, speculate: int) -> None:
    model, prompts = model.float(), [torch.tensor(REPEATED), torch.tensor([2]), torch.tensor([11, 12, 11, 12, 1])]
    sampling = Sampling(max_tokens=21, temperature=0)
    expected = generate_tokens(model, prompts, sampling)
    assert torch.equal(generate_tokens(model, prompts, sampling, speculate=speculate), expected)
    assert torch.equal(model.generate(prompts, sampling, speculate=speculate), expected)


def test_samples_equal_those_without_drafts(model: LanguageModel) -> None:
    prompts = [torch.tensor(REPEATED), torch.tensor([2, 2, 2])]
    for sampling in (
        Sampling(max_tokens=19, temperature=0.4, seed=5),
        Sampling(max_tokens=19, temperature=0.6, top_p=0.9, repetition_penalty=1.3, seed=(3, 4), stop=((7, 8),)),
    ):
        expected = generate_tokens(model, prompts, sampling)
        assert torch.equal(generate_tokens(model, prompts, sampling, speculate=3), expected)


def test_stream_yields_the_columns_and_stops_with_the_last_row(model: LanguageModel) -> None:
    prompt = torch.tensor([REPEATED, REPEATED])
    free = generate_tokens(model, prompt, Sampling(max_tokens=12, temperature=0))
    sampling = Sampling(max_tokens=12, temperature=0, stop=int(free[0, 5]))
    expected = generate_tokens(model, prompt, sampling)
    assert expected.shape[1] < 12
    columns = list(stream(model, prompt, sampling, speculate=4))
    assert torch.equal(torch.stack(columns, 1), expected)


def test_a_decoder_is_reused_and_needs_slots_for_drafts(model: LanguageModel) -> None:
    decoder, prompt = Decoder(model, 2, 40), torch.tensor([REPEATED, REPEATED])
    for count in (22, 9, 22):
        sampling = Sampling(max_tokens=count, temperature=0)
        expected = generate_tokens(model, prompt, sampling)
        assert torch.equal(generate_tokens(decoder, prompt, sampling, speculate=4), expected)
    assert decoder.steps < 22 + 9 + 22 - 3  # some drafts were accepted
    with pytest.raises(StateError, match="capacity 40 is too small for 15 \\+ 23 tokens and 4 drafted ones"):
        generate_tokens(decoder, prompt, Sampling(max_tokens=23), speculate=4)
    with pytest.raises(ValueRangeError, match="speculate must be an integer >= 0, got -1"):
        generate_tokens(model, prompt, speculate=-1)


@torch.no_grad()
def test_a_model_verifies_and_commits_any_number_of_tokens_of_each_row(model: LanguageModel) -> None:
    """With steps without drafts between, in a model with every kind of state."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, model.spec.vocab, (3, 40), generator=generator)
    expected = model(text)[0]
    _, state = model(text[:, :2], model.init_state(3, 48))
    seen, rows = torch.full((3,), 2), torch.arange(3)[:, None]
    for step in range(8):
        T = 1 if step % 3 == 2 else 5
        accepted = torch.randint(0, T + 1, (3,), generator=generator) if T > 1 else torch.ones(3, dtype=torch.int64)
        index = seen[:, None] + torch.arange(T)
        is_accepted = torch.arange(T) < accepted[:, None]
        tokens = torch.where(is_accepted, text[rows, index], torch.randint(0, 29, (3, T), generator=generator))
        if T == 1:
            logits, state = model(tokens, state)
        else:
            logits, drafted = model.verify(tokens, state)
            model.commit_(drafted, state, accepted.int())
        torch.testing.assert_close(logits[is_accepted], expected[rows, index][is_accepted])
        seen += accepted
    with torch.enable_grad(), pytest.raises(OperandError, match="no gradients, got gradients"):
        model.verify(text[:, :2], state)


def test_samples_have_the_distribution_of_the_model() -> None:
    """All continuations of three tokens over a vocabulary of three, enumerated, against 6,000 rows (chi-square)."""
    torch.manual_seed(0)
    spec = StackSpec(width=8, depth=1, vocab=3, pattern=GatedDeltaNet(heads=1), logit_scale=0.3)
    model = spec.build("reference").double()
    with torch.no_grad():
        model.embedding.weight.normal_(std=0.3)
        prompt, rows = torch.tensor([0, 1, 2, 0, 1]), 6000
        probability = torch.ones(27, dtype=torch.float64)
        for i, continuation in enumerate(itertools.product(range(3), repeat=3)):
            logits = model(torch.cat([prompt, torch.tensor(continuation)])[None])[0][0, 4:7]
            for token, p in zip(continuation, logits.softmax(-1), strict=True):
                probability[i] *= p[token]
    sampling = Sampling(max_tokens=3, temperature=1.0, seed=1)
    drawn = generate_tokens(model, prompt.expand(rows, -1), sampling, speculate=2)
    counts = torch.bincount(drawn @ torch.tensor([9, 3, 1]), minlength=27)

    def chi_square(counts: Tensor) -> float:
        return float(((counts - rows * probability) ** 2 / (rows * probability)).sum())

    quantile = 54.1  # 0.999, with 26 degrees of freedom
    assert rows * probability.min() > 5 and chi_square(counts) < quantile < chi_square(counts.flip(0))


@pytest.mark.slow  # compiles two graphs
def test_a_compiled_decoder_speculates(build, spec: StackSpec) -> None:
    model, prompt = build(spec, "compile").float(), torch.tensor([REPEATED])
    decoder = Decoder(model, 1, 48, compile=True)
    for count in (20, 11):
        sampling = Sampling(max_tokens=count, temperature=0)
        expected = generate_tokens(model, prompt, sampling)
        assert torch.equal(generate_tokens(decoder, prompt, sampling, speculate=3), expected)


@torch.no_grad()
def test_another_sampling_is_captured_after_the_passes_of_all_slots(model: LanguageModel, monkeypatch) -> None:
    """The capture is replaced by one eager call, as that before a capture."""

    def run_once(call, device):
        call()
        return call

    monkeypatch.setattr(speculation, "capture", run_once)
    monkeypatch.setattr(Pass, "capture", lambda self, memory: self)
    monkeypatch.setattr(Decoder, "captured", property(lambda self: True))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    decoder = Decoder(model, 1, 300)
    speculator = speculation.Speculator(decoder, 2)
    rows = Rows.of(torch.tensor([REPEATED]))
    for temperature in (0, 0.5):
        decoder.prefill(rows.tokens)
        speculator.begin(Sampling(max_tokens=250, temperature=temperature), rows, torch.tensor([6]))
        for _ in range(speculation.SLOTS):
            speculator.step()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_passes_equal_eager_ones(model: LanguageModel) -> None:
    """Also after a longer prompt, which needs a larger decoder."""
    model = model.float()
    on_gpu = copy.deepcopy(model).cuda().rebind(None)
    for length, seed in ((1, 0), (1, 1), (20, 2)):
        prompts = [torch.tensor(REPEATED * length), torch.tensor([11, 12, 11, 12, 1])]
        for sampling in (
            Sampling(max_tokens=90, temperature=0),
            Sampling(max_tokens=90, temperature=0.5, top_p=0.9, repetition_penalty=1.2, seed=seed),
        ):
            expected = generate_tokens(on_gpu, [prompt.cuda() for prompt in prompts], sampling)
            for _ in range(2):
                got = generate_tokens(on_gpu, [prompt.cuda() for prompt in prompts], sampling, speculate=3)
                assert torch.equal(got, expected)
