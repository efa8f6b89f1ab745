"""States of every mixer: pieces, packed sequences and padded batches give the outputs and states of separate rows.

Gradients through a state, rollback, causality and isolation are checked by the conformance kit (test_matrix.py).
"""

import itertools

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from deltazoo.backends.io.errors import StateError
from deltazoo.mixers import Context, MixerConfig
from deltazoo.mixers.core import state as states
from deltazoo.mixers.core.mixer import Mixer, State

CAPACITY = 16


def assert_same(values: object, expected: object) -> None:
    left_leaves, right_leaves = tree_leaves(values), tree_leaves(expected)
    assert len(left_leaves) == len(right_leaves) > 0
    for left, right in zip(left_leaves, right_leaves, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-11)


def run_pieces(mixer: Mixer, x: Tensor, pieces: list[int]) -> tuple[Tensor, State]:
    state, outputs = mixer.init_state(x.shape[0], CAPACITY), []
    for piece in x.split(pieces, dim=1):
        y, state, _ = mixer(piece, state)
        outputs.append(y)
    return torch.cat(outputs, 1), state


@pytest.mark.parametrize(
    ("pieces", "grad"),
    [([2, 1, 0, 6], True), ([2, 1, 0, 6], False), ([1] * 9, False)],
    ids=["grad", "no grad, in place", "no grad, token by token"],
)
def test_pieces_give_the_output_and_state_of_one_call(mixer: Mixer, x: Tensor, pieces: list[int], grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        whole, no_state, _ = mixer(x)
        _, expected, _ = mixer(x, mixer.init_state(3, CAPACITY))
        y, state = run_pieces(mixer, x, pieces)
    assert no_state is None
    assert_same(y, whole)
    assert_same(state, expected)


def test_empty_batch_returns_empty_output_and_state(config: MixerConfig, x: Tensor) -> None:
    mixer = config.build(x.shape[2], backend="reference").double()
    y, state, _ = mixer(x[:0], mixer.init_state(0, CAPACITY))
    assert y.shape == mixer(x[:0])[0].shape == (0, *x.shape[1:])
    assert [leaf.shape for leaf in tree_leaves(state)] == [leaf.shape for leaf in tree_leaves(mixer.init_state(0, 16))]


def test_state_is_updated_in_place_without_gradients(mixer: Mixer, x: Tensor) -> None:
    with torch.no_grad():
        state = mixer.init_state(3, CAPACITY)
        addresses = [leaf.data_ptr() for leaf in tree_leaves(state)]
        for piece in x.split([4, 1, 1, 3], dim=1):
            _, state, _ = mixer(piece, state)
    assert [leaf.data_ptr() for leaf in tree_leaves(state)] == addresses


def test_a_call_with_gradients_leaves_the_given_state_unchanged(config: MixerConfig) -> None:
    mixer = config.build(24, backend="reference")
    state = mixer.init_state(2, 8)
    before = states.snapshot(state)
    mixer(torch.randn(2, 3, 24), state)
    assert all(torch.equal(x, y) for x, y in zip(tree_leaves(state), tree_leaves(before), strict=True))


def test_packed_sequences_equal_separate_sequences(mixer: Mixer, x: Tensor) -> None:
    bounds = [0, 4, 4, 9]
    context = Context(cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    sequences = [x[:1, start:stop] for start, stop in itertools.pairwise(bounds)]
    expected = torch.cat([mixer(sequence)[0] for sequence in sequences], 1)
    assert_same(mixer(x[:1], None, context)[0], expected)
    y, state, _ = mixer(x[:1], mixer.init_state(3, CAPACITY), context)
    assert_same(y, expected)
    for n, sequence in enumerate(sequences):
        _, alone, _ = mixer(sequence, mixer.init_state(1, CAPACITY))
        assert_same(tree_map(lambda leaf, n=n: leaf[n : n + 1], state), alone)


def test_packed_sequences_continue_from_their_states(mixer: Mixer, x: Tensor) -> None:
    first, second = [3, 1, 5], [2, 6, 1]

    def pack(lengths: list[int], start: list[int]) -> tuple[Tensor, Context]:
        pieces = [x[n, s : s + length] for n, (s, length) in enumerate(zip(start, lengths, strict=True))]
        return torch.cat(pieces)[None], Context(
            cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        )

    x_first, context_first = pack(first, [0, 0, 0])
    x_second, context_second = pack(second, first)
    _, state, _ = mixer(x_first, mixer.init_state(3, CAPACITY), context_first)
    y, state, _ = mixer(x_second, state, context_second)
    for n, piece in enumerate(y.split(second, dim=1)):
        whole, alone, _ = mixer(x[n : n + 1, : first[n] + second[n]], mixer.init_state(1, CAPACITY))
        assert_same(piece, whole[:, first[n] :])
        assert_same(tree_map(lambda leaf, n=n: leaf[n : n + 1], state), alone)


PADDED = ((0, 9), (3, 9), (6, 9), (0, 5), (0, 2), (2, 7), (4, 5), (0, 0))  # the bounds of the tokens of each row


def test_padded_rows_equal_unpadded_rows(mixer: Mixer, x: Tensor) -> None:
    rows = torch.arange(len(PADDED)) % 3
    starts, stops = torch.tensor(PADDED).T[..., None]
    mask = (torch.arange(9) >= starts) & (torch.arange(9) < stops)
    padded = torch.where(mask[..., None], x[rows], float("nan"))
    prefix = torch.randn(3, 2, x.shape[2], dtype=x.dtype)
    _, state, _ = mixer(prefix[rows], mixer.init_state(len(PADDED), CAPACITY))
    y, new_state, _ = mixer(padded, state, Context(mask=mask))
    without_state = mixer(padded, None, Context(mask=mask)).y
    for n, (start, stop) in enumerate(PADDED):
        row = n % 3
        real = x[row : row + 1, start:stop]
        _, alone, _ = mixer(prefix[row : row + 1], mixer.init_state(1, CAPACITY))
        expected, expected_state, _ = mixer(real, alone)
        assert_same(y[n : n + 1, start:stop], expected)
        assert_same(tree_map(lambda leaf, n=n: leaf[n : n + 1], new_state), expected_state)
        assert_same(without_state[n : n + 1, start:stop], mixer(real)[0])
    assert y.isfinite().all()
    assert without_state.isfinite().all()


def test_decoding_a_padded_token_does_not_change_the_state(mixer: Mixer, x: Tensor) -> None:
    with torch.no_grad():
        _, state, _ = mixer(x[:, :4], mixer.init_state(3, CAPACITY))
        saved = states.snapshot(state)
        mask = torch.tensor([[True], [False], [True]])
        y, new_state, _ = mixer(x[:, 4:5], states.snapshot(state), Context(mask=mask))
        expected, expected_state, _ = mixer(x[:, 4:5], state)
    real, padding = torch.tensor([0, 2]), torch.tensor([1])
    assert_same(y[real], expected[real])
    assert_same(states.select(new_state, real), states.select(expected_state, real))
    assert_same(states.select(new_state, padding), states.select(saved, padding))


def test_gradients_of_padded_rows_equal_those_of_unpadded_rows(mixer: Mixer, x: Tensor) -> None:
    mask = torch.tensor(9 * [True] + 2 * [False] + 5 * [True] + 6 * [False] + [True] + 4 * [False]).view(3, 9)
    weight = torch.randn_like(x) * mask[..., None]
    padded = torch.autograd.grad((mixer(x, None, Context(mask=mask))[0] * weight).sum(), list(mixer.parameters()))
    alone = sum((mixer(x[n : n + 1, mask[n]])[0] * weight[n : n + 1, mask[n]]).sum() for n in range(3))
    for left, right in zip(padded, torch.autograd.grad(alone, list(mixer.parameters())), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-8, atol=1e-10)


def test_reordered_rows_continue_from_their_own_state(mixer: Mixer, x: Tensor) -> None:
    order = torch.tensor([2, 0, 0])
    with torch.no_grad():
        whole = mixer(x).y
        _, state, _ = mixer(x[:, :6], mixer.init_state(3, CAPACITY))
        y = mixer(x[order, 6:], states.reorder(state, order)).y
    assert_same(y, whole[order, 6:])


def test_context_positions_override_the_default_positions(mixer: Mixer, x: Tensor) -> None:
    counted = torch.arange(9).expand(3, 9)
    assert_same(mixer(x, None, Context(positions=counted))[0], mixer(x)[0])
    shifted = mixer(x, None, Context(positions=counted + 1000))[0]  # rotary embeddings are relative
    torch.testing.assert_close(shifted, mixer(x)[0], rtol=1e-6, atol=1e-9)


def test_state_of_another_batch_size_is_refused(mixer: Mixer, x: Tensor) -> None:
    with pytest.raises(StateError, match="one row for each row of x, 3 in all, got 2"):
        mixer(x, mixer.init_state(2, CAPACITY))
