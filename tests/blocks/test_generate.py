"""Generation draws what the whole forward pass would, in place, for ragged prompts, until it is told to stop."""

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from deltazoo.backends.errors import DtypeError, ShapeError, StateError, UnsupportedError, ValueRangeError
from deltazoo.blocks.generation.generate import STOPPED, Decoder, generate, stream
from deltazoo.blocks.generation.sampling import filtered, sample
from deltazoo.blocks.spec import StackSpec
from deltazoo.mixers import GatedDeltaNet, SlidingWindow


def greedily(model, tokens_BT: Tensor, count: int) -> Tensor:
    """The likeliest continuation, by running the whole text again for each token."""
    for _ in range(count):
        tokens_BT = torch.cat([tokens_BT, model(tokens_BT)[0][:, -1:].argmax(-1)], 1)
    return tokens_BT[:, -count:]


def test_greedy_decoding_equals_the_whole_forward_pass(model, tokens):
    got = generate(model, tokens(3, 7), 9, temperature=0)
    assert got.tolist() == greedily(model, tokens(3, 7), 9).tolist()
    assert len(set(got.flatten().tolist())) > 3


def test_ragged_prompts_continue_as_if_alone(model, tokens):
    rows = [tokens(9), tokens(2), tokens(5)]
    together = generate(model, rows, 6, temperature=0)
    for row, got in zip(rows, together, strict=True):
        assert got.tolist() == greedily(model, row[None], 6)[0].tolist()


def test_the_stream_is_the_result_column_by_column(model, tokens):
    columns = list(stream(model, tokens(2, 4), 5, top_k=5, generator=3))
    assert torch.equal(torch.stack(columns, 1), generate(model, tokens(2, 4), 5, top_k=5, generator=3))


def test_a_seed_decides_the_draw(model, tokens):
    drawn = [generate(model, tokens(2, 4), 12, generator=seed) for seed in (3, 3, 4)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    assert torch.equal(*(generate(model, tokens(2, 4), 12, generator=source) for source in generators))
    assert torch.equal(
        generate(model, tokens(2, 4), 12, generator=generators[0]),
        generate(model, tokens(2, 4), 12, generator=generators[1]),
    )


def allowed(probabilities: list[float], top_k: int | None, top_p: float | None) -> list[float]:
    """top-k, then top-p, by the book: walk down the sorted list."""
    order = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])[: top_k or None]
    whole, mass, kept = sum(probabilities[token] for token in order), 0.0, []
    for token in order:
        if top_p is not None and mass >= top_p:
            break
        kept.append(token)
        mass += probabilities[token] / whole
    total = sum(probabilities[token] for token in kept)
    return [probabilities[token] / total if token in kept else 0.0 for token in range(len(probabilities))]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(None, None), (3, None), (1, None), (99, None), (None, 0.6), (4, 0.7), (None, 1.0)]
)
def test_top_k_and_top_p_leave_the_masses_of_a_direct_computation(temperature, top_k, top_p):
    logits = torch.randn(5, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    got = filtered(logits, temperature, top_k, top_p).softmax(-1)
    plain = (logits / temperature).softmax(-1)
    want = [allowed(row, top_k, top_p) for row in plain.tolist()]
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64))


def test_of_equal_tokens_the_first_k_are_kept():
    assert filtered(torch.zeros(1, 5), 1.0, 2, None).isfinite().tolist() == [[True, True, False, False, False]]


def test_tokens_are_drawn_as_often_as_they_are_likely():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -30.0]]).expand(40_000, -1)
    drawn = sample(logits, 1.3, top_k=3, generator=torch.Generator().manual_seed(0))
    often = drawn.bincount(minlength=5) / 40_000
    want = torch.tensor(allowed((logits[0] / 1.3).softmax(-1).tolist(), 3, None))
    torch.testing.assert_close(often, want, atol=0.01, rtol=0)  # four standard deviations
    assert torch.equal(sample(logits[:3], 1e-30), torch.zeros(3, dtype=torch.int64))
    assert torch.equal(sample(logits[:3], 0), torch.zeros(3, dtype=torch.int64))


def test_a_row_stops_behind_its_stop_sequence_and_the_others_go_on(model, tokens):
    free = generate(model, tokens(3, 7), 12, generator=0)
    rows = free.tolist()
    stop = [rows[0][2], rows[1][4:6]]

    def cut(row: list[int]) -> list[int]:
        for i in range(len(row)):
            if row[i] == stop[0] or row[i - 1 : i + 1] == stop[1]:
                return row[: i + 1] + [STOPPED] * (len(row) - i - 1)
        return row

    want = torch.tensor([cut(row) for row in rows])
    longest = int((want != STOPPED).sum(1).max())
    got = generate(model, tokens(3, 7), 12, stop=stop, generator=0)
    assert (want == STOPPED).any()
    assert got.tolist() == want[:, :longest].tolist()


def test_all_rows_stopped_ends_the_generation(model, tokens):
    assert generate(model, tokens(2, 3), 50, stop=list(range(29))).shape == (2, 1)


def test_a_decoder_is_used_again_in_place(model, tokens):
    decoder = Decoder(model, batch=2, capacity=20)
    tensors = [decoder.tokens, decoder.logits, *tree_leaves(decoder.state)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    first = generate(decoder, tokens(2, 7), 9, temperature=0)
    generate(decoder, tokens(2, 3), 4, generator=1)
    assert torch.equal(generate(decoder, tokens(2, 7), 9, temperature=0), first)
    assert torch.equal(generate(model, tokens(2, 7), 9, temperature=0), first)
    now = [decoder.tokens, decoder.logits, *tree_leaves(decoder.state)]
    assert [tensor.data_ptr() for tensor in now] == addresses


def test_a_compiled_step_decodes_the_same_tokens(build, tokens):
    pattern = GatedDeltaNet(heads=2) + SlidingWindow(heads=2, window=4)
    model = build(StackSpec(width=16, depth=2, vocab=29, pattern=pattern, mlp="none"))
    decoder = Decoder(model, batch=2, capacity=20, compile=True)
    want = generate(model, tokens(2, 7), 9, temperature=0)
    assert torch.equal(generate(decoder, tokens(2, 7), 9, temperature=0), want)
    assert torch.equal(
        generate(decoder, tokens(2, 4), 3, temperature=0), generate(model, tokens(2, 4), 3, temperature=0)
    )


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_captured_step_decodes_the_same_tokens(spec, compiled):
    model = spec.build("compile").cuda()
    prompt = torch.arange(14, device="cuda").view(2, 7)
    decoder = Decoder(model, batch=2, capacity=40, compile=compiled).capture()
    want = generate(model, prompt, 30, temperature=0)
    assert torch.equal(generate(decoder, prompt, 30, temperature=0), want)
    assert torch.equal(generate(decoder, prompt, 30, generator=1), generate(model, prompt, 30, generator=1))


def test_generation_leaves_the_mode_of_gradients_alone(model, tokens):
    for _ in stream(model, tokens(1, 3), 3):
        assert torch.is_grad_enabled()


MISTAKES = [
    (ValueRangeError, "temperature must be at least 0", {"temperature": -1.0}),
    (ValueRangeError, "temperature must be at least 0", {"temperature": float("nan")}),
    (ValueRangeError, "top_k must be at least 1", {"top_k": 0}),
    (ValueRangeError, r"top_p must be in \(0, 1\]", {"top_p": 1.5}),
    (ValueRangeError, "temperature must be at least 0", {"temperature": "hot"}),
    (ValueRangeError, "top_k must be at least 1, a whole number, got 1.5", {"top_k": 1.5}),
    (ValueRangeError, "max_tokens must be at least 1", {"max_tokens": 0}),
    (ValueRangeError, "max_tokens must be at least 1, a whole number, got 2.5", {"max_tokens": 2.5}),
    (ValueRangeError, "max_tokens must be at least 1, a whole number, got True", {"max_tokens": True}),
    (ValueRangeError, "generator must be a torch.Generator, a seed or None, got 'x'", {"generator": "x"}),
    (ValueRangeError, "stop must hold .* got 5", {"stop": 5}),
    (ValueRangeError, "stop must hold .* got 'ab'", {"stop": "ab"}),
    (ValueRangeError, "stop must hold", {"stop": [1.5]}),
    (DtypeError, r"prompt must be a tensor \[B, T\], or a list of tensors", {"prompt": [[1, 2]]}),
    (ValueRangeError, r"stop must hold tokens in \[0, 29\)", {"stop": [29]}),
    (ValueRangeError, "stop must hold", {"stop": [[]]}),
    (ValueRangeError, r"tokens must be in \[0, 29\)", {"prompt": torch.tensor([[30]])}),
    (ShapeError, r"must have shape \[B, T\]", {"prompt": torch.tensor([3])}),
    (ShapeError, "T >= 1", {"prompt": torch.zeros(2, 0, dtype=torch.int64)}),
    (ShapeError, "T >= 1", {"prompt": [torch.tensor([1]), torch.zeros(0, dtype=torch.int64)]}),
    (ShapeError, "T >= 1", {"prompt": []}),
    (DtypeError, "must be int64", {"prompt": torch.zeros(1, 3)}),
]


@pytest.mark.parametrize(("error", "sentence", "change"), MISTAKES)
def test_mistakes_are_refused_in_words(model, tokens, error, sentence, change):
    with pytest.raises(error, match=sentence):
        generate(model, **{"prompt": tokens(1, 3), "max_tokens": 2} | change)


def test_a_decoder_without_room_says_so(model, tokens):
    decoder = Decoder(model, batch=2, capacity=8)
    assert generate(decoder, tokens(2, 5), 4).shape == (2, 4)
    with pytest.raises(StateError, match=r"capacity 8 has no room for 5 \+ 5 tokens"):
        generate(decoder, tokens(2, 5), 5)
    with pytest.raises(StateError, match="exceeds the decoder's capacity of 8"):
        decoder.prefill(tokens(2, 9))
    with pytest.raises(ShapeError, match="B = 2"):
        generate(decoder, tokens(3, 2), 2)
    with pytest.raises(UnsupportedError, match="a CUDA graph needs the model on a CUDA device, got cpu"):
        decoder.capture()
