"""Generation equals repeated forward passes, for prompts of different lengths, with sampling and stop sequences."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from deltazoo.backends.io.errors import (
    ConfigError,
    DtypeError,
    InputError,
    ShapeError,
    StateError,
    UnsupportedError,
    ValueRangeError,
)
from deltazoo.blocks.generation.decoder import Decoder
from deltazoo.blocks.generation.generate import STOPPED, generate_tokens, stream
from deltazoo.blocks.generation.philox import philox, uniforms
from deltazoo.blocks.generation.sampling import Sampling, filter_logits, penalize, sample
from deltazoo.blocks.spec.stack_spec import StackSpec
from deltazoo.mixers import GatedDeltaNet, SlidingWindow
from deltazoo.mixers.core.state import snapshot


def generate(model, prompt, max_tokens, generator=None, **sampling) -> Tensor:
    return generate_tokens(model, prompt, Sampling(max_tokens=max_tokens, **sampling), generator)


def greedy_reference(model, tokens_BT: Tensor, count: int) -> Tensor:
    """Greedy continuation that runs the whole text again for each token."""
    for _ in range(count):
        tokens_BT = torch.cat([tokens_BT, model(tokens_BT)[0][:, -1:].argmax(-1)], 1)
    return tokens_BT[:, -count:]


def test_greedy_decoding_equals_repeated_forward_passes(model, tokens):
    actual = generate(model, tokens(3, 7), 9, temperature=0)
    assert actual.tolist() == greedy_reference(model, tokens(3, 7), 9).tolist()
    assert len(set(actual.flatten().tolist())) > 3


def test_prompts_of_different_lengths_do_not_affect_each_other(model, tokens):
    rows = [tokens(9), tokens(2), tokens(5)]
    together = generate(model, rows, 6, temperature=0)
    for row, continuation in zip(rows, together, strict=True):
        assert continuation.tolist() == greedy_reference(model, row[None], 6)[0].tolist()


def test_stream_and_the_method_of_a_model_give_the_tokens_of_generate_tokens(model, tokens):
    sampling = Sampling(max_tokens=5, temperature=1.3, top_k=5, top_p=0.9, stop=(4, (2, 3)), seed=3)
    expected = generate_tokens(model, tokens(2, 4), sampling)
    assert torch.equal(torch.stack(list(stream(model, tokens(2, 4), sampling)), 1), expected)
    assert torch.equal(model.generate(tokens(2, 4), sampling), expected)
    assert model.generate(tokens(1, 2)).shape == (1, Sampling().max_tokens)


def test_seeds_and_generators_determine_the_samples(model, tokens):
    first, repeated, other = (generate(model, tokens(2, 4), 12, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first, repeated)
    assert not torch.equal(first, other)
    torch.manual_seed(3)
    default, later = (generate(model, tokens(2, 4), 12, seed=None) for _ in range(2))
    assert not torch.equal(default, later)
    torch.manual_seed(3)
    assert torch.equal(default, generate(model, tokens(2, 4), 12, seed=None))
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    assert torch.equal(*(generate(model, tokens(2, 4), 12, generator=source) for source in generators))
    assert torch.equal(
        generate(model, tokens(2, 4), 12, generator=generators[0]),
        generate(model, tokens(2, 4), 12, generator=generators[1]),
    )


def test_a_row_with_its_own_seed_draws_the_same_tokens_in_every_batch(model, tokens, monkeypatch):
    rows, seeds = [tokens(9), tokens(2), tokens(5)], (7, 2**62 + 5, 7)
    together = generate(model, rows, 20, seed=seeds)
    monkeypatch.setattr(
        "deltazoo.blocks.generation.sampler.SLOTS", 6
    )  # the number of steps drawn at once has no effect
    for row, seed, expected in zip(rows, seeds, together, strict=True):
        assert torch.equal(generate(model, [row], 20, seed=(seed,))[0], expected)
    assert torch.equal(generate(model, [rows[0]], 20, seed=7)[0], together[0])
    equal = generate(model, tokens(1, 4).expand(2, -1), 12, seed=3)
    assert not torch.equal(*equal)
    with pytest.raises(ValueRangeError, match="seed must be a number, or one for each of 3 prompts, got 2"):
        generate(model, rows, 2, seed=(1, 2))


def test_philox_gives_the_published_blocks():
    """Known answers of Random123 1.09."""
    known = [
        ([0] * 6, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 6, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ]
    for words, expected in known:
        a, b, c, d, *key = map(torch.tensor, words)
        assert [int(word) for word in philox((a, b, c, d), key)] == expected
    numbers = uniforms(torch.tensor([5, 5]), torch.tensor([0, 1]), 3, 9)
    assert torch.equal(numbers[4:], uniforms(torch.tensor([5, 5]), torch.tensor([0, 1]), 7, 5))
    later = uniforms(torch.tensor([5, 5]), torch.tensor([0, 1]), torch.tensor([3, 6]), 6)
    assert torch.equal(later, torch.stack([numbers[:6, 0], numbers[3:, 1]], 1))
    assert len(set(numbers.flatten().tolist())) == 18


def filtered_probabilities(probabilities: list[float], top_k: int | None, top_p: float | None) -> list[float]:
    """Probabilities after top-k and then top-p, from a loop over the sorted tokens."""
    order = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])[: top_k or None]
    total_top_k, cumulative, included = sum(probabilities[token] for token in order), 0.0, []
    for token in order:
        if top_p is not None and cumulative >= top_p:
            break
        included.append(token)
        cumulative += probabilities[token] / total_top_k
    total = sum(probabilities[token] for token in included)
    return [probabilities[token] / total if token in included else 0.0 for token in range(len(probabilities))]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(None, None), (3, None), (1, None), (99, None), (None, 0.6), (4, 0.7), (None, 1.0)]
)
def test_top_k_and_top_p_equal_a_direct_computation(temperature, top_k, top_p):
    logits = torch.randn(5, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    actual = filter_logits(logits, Sampling(temperature=temperature, top_k=top_k, top_p=top_p)).softmax(-1)
    plain = (logits / temperature).softmax(-1)
    expected = [filtered_probabilities(row, top_k, top_p) for row in plain.tolist()]
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64))


def test_top_k_keeps_the_first_of_equally_likely_tokens():
    filtered = filter_logits(torch.zeros(1, 5), Sampling(top_k=2))
    assert filtered.isfinite().tolist() == [[True, True, False, False, False]]


def test_min_p_excludes_tokens_by_their_ratio_to_the_most_likely_one():
    logits = torch.tensor([[0.6, 0.29, 0.31, 0.05]], dtype=torch.float64).log()
    filtered = filter_logits(logits, Sampling(temperature=1, min_p=0.5)).softmax(-1)
    torch.testing.assert_close(filtered, torch.tensor([[0.6, 0, 0.31, 0]], dtype=torch.float64) / 0.91)


def test_the_repetition_penalty_moves_the_logits_of_seen_tokens_towards_less_likely(model, tokens):
    logits = torch.tensor([[2.0, -1.0, 3.0, -4.0]])
    seen = torch.tensor([[True, True, False, False]])
    assert penalize(logits, seen, 2.0).tolist() == [[1.0, -2.0, 3.0, -4.0]]
    rows = [tokens(3), tokens(7)]
    actual = generate(model, rows, 9, temperature=0, repetition_penalty=1.4)
    for row, continuation in zip(rows, actual, strict=True):
        text = row.tolist()
        for _ in range(9):
            logits = model(torch.tensor([text]))[0][0, -1].float()
            for token in set(text):
                logits[token] *= 1 / 1.4 if logits[token] > 0 else 1.4
            text.append(int(logits.argmax()))
        assert continuation.tolist() == text[-9:]


def test_sample_frequencies_equal_the_probabilities():
    """Chi-square at 6 and 2 degrees of freedom: each limit is exceeded with a probability of 1e-5."""
    count = 40_000
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 1.5, 0.5, -2.0]]).expand(count, -1)
    uniform = uniforms(torch.tensor([11]), torch.tensor([0]), 0, count)[:, 0]
    for top_k, limit in ((None, 33.1), (3, 23.0)):
        drawn = sample(logits, Sampling(temperature=1.3, top_k=top_k), uniform)
        observed = drawn.bincount(minlength=7)
        expected = count * torch.tensor(filtered_probabilities((logits[0] / 1.3).softmax(-1).tolist(), top_k, None))
        possible = expected > 0
        assert not observed[~possible].any()
        assert ((observed - expected)[possible] ** 2 / expected[possible]).sum() < limit
    assert torch.equal(sample(logits[:3], Sampling(temperature=1e-30), uniform[:3]), torch.zeros(3, dtype=torch.int64))
    assert torch.equal(sample(logits[:3], Sampling(temperature=0), uniform[:3]), torch.zeros(3, dtype=torch.int64))


def test_a_row_stops_after_its_stop_sequence_while_others_continue(model, tokens):
    unstopped = generate(model, tokens(3, 7), 12, seed=0)
    rows = unstopped.tolist()
    stop = [rows[0][2], rows[1][4:6]]

    def truncate(row: list[int]) -> list[int]:
        for i in range(len(row)):
            if row[i] == stop[0] or row[i - 1 : i + 1] == stop[1]:
                return row[: i + 1] + [STOPPED] * (len(row) - i - 1)
        return row

    expected = torch.tensor([truncate(row) for row in rows])
    longest = int((expected != STOPPED).sum(1).max())
    actual = generate(model, tokens(3, 7), 12, stop=stop, seed=0)
    assert (expected == STOPPED).any()
    assert actual.tolist() == expected[:, :longest].tolist()


def test_generation_ends_when_all_rows_have_stopped(model, tokens):
    assert generate(model, tokens(2, 3), 50, stop=list(range(29))).shape == (2, 1)


def test_a_decoder_is_reusable_and_keeps_its_addresses(model, tokens):
    decoder = Decoder(model, batch=2, capacity=20)
    tensors = [decoder.tokens, decoder.logits, *tree_leaves(decoder.state)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    first = generate(decoder, tokens(2, 7), 9, temperature=0)
    generate(decoder, tokens(2, 3), 4, seed=1)
    assert torch.equal(generate(decoder, tokens(2, 7), 9, temperature=0), first)
    assert torch.equal(generate(model, tokens(2, 7), 9, temperature=0), first)
    tensors_after = [decoder.tokens, decoder.logits, *tree_leaves(decoder.state)]
    assert [tensor.data_ptr() for tensor in tensors_after] == addresses


@pytest.mark.runs
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_step_generates_the_same_tokens(build, tokens, monkeypatch, compiler):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compiler))
    pattern = GatedDeltaNet(heads=2) + SlidingWindow(heads=2, window=4)
    model = build(StackSpec(width=16, depth=2, vocab=29, pattern=pattern, mlp="none"))
    decoder = Decoder(model, batch=2, capacity=20, compile=True)
    expected = generate(model, tokens(2, 7), 9, temperature=0)
    assert torch.equal(generate(decoder, tokens(2, 7), 9, temperature=0), expected)
    assert torch.equal(
        generate(decoder, tokens(2, 4), 3, temperature=0), generate(model, tokens(2, 4), 3, temperature=0)
    )


@pytest.mark.runs
def test_a_compiled_decoder_refuses_hooks_that_the_model_got_after_the_first_step(build, spec, tokens, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = build(spec)
    decoder = Decoder(model, batch=1, capacity=20, compile=True)
    hook = model.stack.layers[0].register_forward_hook(lambda *_: None)
    expected = generate(decoder, tokens(1, 3), 4, temperature=0)
    hook.remove()
    with pytest.raises(StateError, match="must keep the hooks that it had in the first step of the decoder"):
        generate(decoder, tokens(1, 3), 4, temperature=0)
    eager = Decoder(model, batch=1, capacity=20)
    assert torch.equal(generate(eager, tokens(1, 3), 4, temperature=0), expected)
    model.stack.layers[0].register_forward_hook(lambda *_: None)
    generate(eager, tokens(1, 3), 4, temperature=0)


@pytest.mark.runs
def test_a_compiled_decoder_refuses_a_model_that_was_converted(build, spec, tokens, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = build(spec)
    decoder = Decoder(model, batch=1, capacity=20, compile=True)
    generate(decoder, tokens(1, 3), 4)
    model.half()
    with pytest.raises(StateError, match="must keep the dtypes, shapes and devices of the compiled decoder"):
        generate(decoder, tokens(1, 3), 4)


def test_warm_up_leaves_the_state(model, tokens):
    decoder = Decoder(model, batch=1, capacity=20)
    decoder.prefill(tokens(1, 3))
    before = snapshot(decoder.state)
    decoder.warm_up()
    assert all(map(torch.equal, tree_leaves(decoder.state), tree_leaves(before)))
    decoder.step()
    assert not all(map(torch.equal, tree_leaves(decoder.state), tree_leaves(before)))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_captured_step_generates_the_same_tokens(spec, compiled):
    model = spec.build("compile").cuda()
    prompt = torch.arange(14, device="cuda").view(2, 7)
    decoder = Decoder(model, batch=2, capacity=40, compile=compiled).capture()
    expected = generate(model, prompt, 30, temperature=0)
    assert torch.equal(generate(decoder, prompt, 30, temperature=0), expected)
    assert torch.equal(generate(decoder, prompt, 30, seed=1), generate(model, prompt, 30, seed=1))


def test_weights_that_are_nan_are_refused(model, tokens):
    with torch.no_grad():
        model.stack.layers[1].mixers[0].out.weight[0, 0] = float("nan")
    with pytest.raises(ValueRangeError, match="the logits of the prompt must be finite, got NaN or inf"):
        generate(model, tokens(1, 3), 4)


def test_streaming_does_not_disable_gradients(model, tokens):
    for _ in stream(model, tokens(1, 3), Sampling(max_tokens=3)):
        assert torch.is_grad_enabled()


ERRORS = [
    (ConfigError, "temperature must be at least 0", {"temperature": -1.0}),
    (ConfigError, "temperature must be a finite number, got nan", {"temperature": float("nan")}),
    (ConfigError, "top_k must be at least 1, got 0", {"top_k": 0}),
    (ConfigError, "top_p must be at most 1, got 1.5", {"top_p": 1.5}),
    (ConfigError, "temperature must be a .*number, got 'hot'", {"temperature": "hot"}),
    (ConfigError, "top_k must be an integer, got 1.5", {"top_k": 1.5}),
    (ConfigError, "min_p must be at most 1, got 2", {"min_p": 2}),
    (ConfigError, "repetition_penalty must be greater than 0, got 0", {"repetition_penalty": 0}),
    (ConfigError, "seed", {"seed": (1, -1)}),
    (ConfigError, "max_tokens must be at least 1, got 0", {"max_tokens": 0}),
    (ConfigError, "max_tokens must be an integer, got 2.5", {"max_tokens": 2.5}),
    (ConfigError, "max_tokens must be an integer, got True", {"max_tokens": True}),
    (ConfigError, "stop must be texts, tokens or sequences of tokens, none of them empty, got .1.5", {"stop": [1.5]}),
    (ConfigError, "stop must be texts, tokens or sequences of tokens, none of them empty", {"stop": [[]]}),
    (InputError, "generator must be a torch.Generator or None, got 'x'", {"generator": "x"}),
    (ValueRangeError, r"stop must contain tokens in \[0, 29\) or sequences of them, got 'ab'", {"stop": "ab"}),
    (ValueRangeError, r"stop must contain tokens in \[0, 29\)", {"stop": [29]}),
    (
        ValueRangeError,
        r"stop must contain tokens in \[0, 29\) or sequences of them, got \(3, -1\)",
        {"stop": [[3, -1]]},
    ),
    (DtypeError, r"prompt must be a tensor \[B, T\], or a list of tensors", {"prompt": [[1, 2]]}),
    (ValueRangeError, r"tokens must be in \[0, 29\)", {"prompt": torch.tensor([[30]])}),
    (ShapeError, r"must have shape \[B, T\]", {"prompt": torch.tensor([3])}),
    (ShapeError, "T >= 1", {"prompt": torch.zeros(2, 0, dtype=torch.int64)}),
    (ShapeError, "T >= 1", {"prompt": [torch.tensor([1]), torch.zeros(0, dtype=torch.int64)]}),
    (ShapeError, "T >= 1", {"prompt": []}),
    (ShapeError, r"at least one row, got \[0, 3\]", {"prompt": torch.zeros(0, 3, dtype=torch.int64)}),
    (DtypeError, r"prompt must be a tensor \[B, T\], or a list", {"prompt": iter([torch.tensor([1])])}),
    (DtypeError, "must be int64", {"prompt": torch.zeros(1, 3)}),
]


@pytest.mark.parametrize(("error", "sentence", "change"), ERRORS)
def test_invalid_arguments_are_refused(model, tokens, error, sentence, change):
    with pytest.raises(error, match=sentence):
        generate(model, **{"prompt": tokens(1, 3), "max_tokens": 2} | change)


@pytest.mark.parametrize("speculate", [0, 2])
def test_a_newer_stream_of_a_decoder_ends_the_older_one(model, tokens, speculate):
    sampling, decoder = Sampling(max_tokens=4, temperature=0), Decoder(model, batch=1, capacity=12)
    older, newer = (stream(decoder, tokens(1, n), sampling, speculate=speculate) for n in (3, 5))
    next(older)
    columns = [next(newer)]
    with pytest.raises(StateError, match="use one decoder for each stream"):
        next(older)
    columns += newer
    assert torch.equal(torch.stack(columns, 1), generate_tokens(model, tokens(1, 5), sampling))


def test_a_decoder_refuses_inputs_beyond_its_batch_or_capacity(model, tokens):
    decoder = Decoder(model, batch=2, capacity=8)
    assert generate(decoder, tokens(2, 5), 4).shape == (2, 4)
    with pytest.raises(StateError, match=r"capacity 8 is too small for 5 \+ 5 tokens"):
        generate(decoder, tokens(2, 5), 5)
    with pytest.raises(StateError, match="exceeds the decoder's capacity of 8"):
        decoder.prefill(tokens(2, 9))
    with pytest.raises(ShapeError, match="1 <= B <= 2"):
        generate(decoder, tokens(3, 2), 2)
    with pytest.raises(UnsupportedError, match="a CUDA graph needs the model on a CUDA device, got cpu"):
        decoder.capture()
