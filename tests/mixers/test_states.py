"""Every mixer: pieces, packs and padded batches give the numbers of the whole, the pack taken apart, the rows alone."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from deltazoo.backends.errors import StateError
from deltazoo.mixers import Context, MixerConfig
from deltazoo.mixers.core import state as states
from deltazoo.mixers.core.mixer import Mixer, State
from deltazoo.mixers.hyena import HyenaMixer

CAPACITY = 16


def assert_same(got: object, want: object) -> None:
    ours, theirs = tree_leaves(got), tree_leaves(want)
    assert len(ours) == len(theirs) > 0
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-11)


def in_pieces(mixer: Mixer, x: Tensor, pieces: list[int]) -> tuple[Tensor, State]:
    state, outputs = mixer.init_state(x.shape[0], CAPACITY), []
    for piece in x.split(pieces, dim=1):
        y, state = mixer(piece, state)
        outputs.append(y)
    return torch.cat(outputs, 1), state


@pytest.mark.parametrize("pieces", [[9], [4, 5], [1] * 9, [2, 1, 1, 5], [6, 0, 3]], ids=str)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad, in place"])
def test_pieces_equal_the_whole(mixer: Mixer, x: Tensor, pieces: list[int], grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        whole, nothing = mixer(x)
        _, want = mixer(x, mixer.init_state(3, CAPACITY))
        got, state = in_pieces(mixer, x, pieces)
    assert nothing is None
    assert_same(got, whole)
    assert_same(state, want)


def test_an_empty_batch_is_a_batch(config: MixerConfig, x: Tensor) -> None:
    mixer = config.build(x.shape[2], backend="reference").double()
    y, state = mixer(x[:0], mixer.init_state(0, CAPACITY))
    assert y.shape == mixer(x[:0])[0].shape == (0, *x.shape[1:])
    assert [leaf.shape for leaf in tree_leaves(state)] == [leaf.shape for leaf in tree_leaves(mixer.init_state(0, 16))]


def test_without_gradients_a_state_keeps_its_addresses(mixer: Mixer, x: Tensor) -> None:
    with torch.no_grad():
        state = mixer.init_state(3, CAPACITY)
        before = [leaf.data_ptr() for leaf in tree_leaves(state)]
        for piece in x.split([4, 1, 1, 3], dim=1):
            _, state = mixer(piece, state)
    assert [leaf.data_ptr() for leaf in tree_leaves(state)] == before


def test_gradients_flow_through_the_state(mixer: Mixer, x: Tensor) -> None:
    weight = torch.randn_like(x)
    whole = torch.autograd.grad((mixer(x)[0] * weight).sum(), list(mixer.parameters()))
    pieces = torch.autograd.grad((in_pieces(mixer, x, [4, 1, 4])[0] * weight).sum(), list(mixer.parameters()))
    for left, right in zip(pieces, whole, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-8, atol=1e-10)


def test_a_pack_equals_its_sequences(mixer: Mixer, x: Tensor) -> None:
    bounds = [0, 4, 4, 9]
    context = Context(cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    apart = [x[:1, start:stop] for start, stop in itertools.pairwise(bounds)]
    want = torch.cat([mixer(sequence)[0] for sequence in apart], 1)
    assert_same(mixer(x[:1], None, context)[0], want)
    y, state = mixer(x[:1], mixer.init_state(3, CAPACITY), context)
    assert_same(y, want)
    for n, sequence in enumerate(apart):
        _, alone = mixer(sequence, mixer.init_state(1, CAPACITY))
        assert_same(tree_map(lambda leaf, n=n: leaf[n : n + 1], state), alone)


def test_a_pack_goes_on_from_the_states_of_its_sequences(mixer: Mixer, x: Tensor) -> None:
    first, second = [3, 1, 5], [2, 6, 1]

    def pack(lengths: list[int], start: list[int]) -> tuple[Tensor, Context]:
        pieces = [x[n, s : s + length] for n, (s, length) in enumerate(zip(start, lengths, strict=True))]
        return torch.cat(pieces)[None], Context(
            cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        )

    x_first, context_first = pack(first, [0, 0, 0])
    x_second, context_second = pack(second, first)
    _, state = mixer(x_first, mixer.init_state(3, CAPACITY), context_first)
    y, state = mixer(x_second, state, context_second)
    for n, piece in enumerate(y.split(second, dim=1)):
        whole, alone = mixer(x[n : n + 1, : first[n] + second[n]], mixer.init_state(1, CAPACITY))
        assert_same(piece, whole[:, first[n] :])
        assert_same(tree_map(lambda leaf, n=n: leaf[n : n + 1], state), alone)


MASKS: dict[str, Callable[[int], Tensor]] = {
    "left": lambda T: torch.arange(T) >= torch.tensor([[0], [3], [6]]),
    "right": lambda T: torch.arange(T) < torch.tensor([[T], [5], [2]]),
    "both": lambda T: (
        (torch.arange(T) >= torch.tensor([[0], [2], [4]])) & (torch.arange(T) < torch.tensor([[T], [7], [5]]))
    ),
    "a row of padding": lambda T: (torch.arange(T) >= 0) & torch.tensor([[True], [False], [True]]),
}


@pytest.mark.parametrize("side", MASKS)
def test_padded_rows_equal_the_rows_alone(mixer: Mixer, x: Tensor, side: str) -> None:
    mask = MASKS[side](9)
    garbage = torch.where(mask[..., None], x, float("nan"))
    lead = torch.randn(3, 2, x.shape[2], dtype=x.dtype)
    _, state = mixer(lead, mixer.init_state(3, CAPACITY))
    y, after = mixer(garbage, state, Context(mask=mask))
    fresh, _ = mixer(garbage, None, Context(mask=mask))
    for n in range(3):
        real = x[n : n + 1, mask[n]]
        _, alone = mixer(lead[n : n + 1], mixer.init_state(1, CAPACITY))
        want, want_state = mixer(real, alone)
        assert_same(y[n : n + 1, mask[n]], want)
        assert_same(tree_map(lambda leaf, n=n: leaf[n : n + 1], after), want_state)
        assert_same(fresh[n : n + 1, mask[n]], mixer(real)[0])
    assert y.isfinite().all()
    assert fresh.isfinite().all()


def test_a_decoded_row_that_is_padding_keeps_its_state(mixer: Mixer, x: Tensor) -> None:
    with torch.no_grad():
        _, state = mixer(x[:, :4], mixer.init_state(3, CAPACITY))
        before = states.snapshot(state)
        mask = torch.tensor([[True], [False], [True]])
        y, after = mixer(x[:, 4:5], states.snapshot(state), Context(mask=mask))
        want, want_after = mixer(x[:, 4:5], state)
    assert_same(y[[0, 2]], want[[0, 2]])
    assert_same(states.select(after, torch.tensor([0, 2])), states.select(want_after, torch.tensor([0, 2])))
    assert_same(states.select(after, torch.tensor([1])), states.select(before, torch.tensor([1])))


def test_padded_gradients_equal_those_of_the_rows_alone(mixer: Mixer, x: Tensor) -> None:
    mask = MASKS["both"](9)
    weight = torch.randn_like(x) * mask[..., None]
    padded = torch.autograd.grad((mixer(x, None, Context(mask=mask))[0] * weight).sum(), list(mixer.parameters()))
    alone = sum((mixer(x[n : n + 1, mask[n]])[0] * weight[n : n + 1, mask[n]]).sum() for n in range(3))
    for left, right in zip(padded, torch.autograd.grad(alone, list(mixer.parameters())), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-8, atol=1e-10)


def test_reordered_rows_decode_as_themselves(mixer: Mixer, x: Tensor) -> None:
    order = torch.tensor([2, 0, 0])
    with torch.no_grad():
        whole, _ = mixer(x)
        _, state = mixer(x[:, :6], mixer.init_state(3, CAPACITY))
        y, _ = mixer(x[order, 6:], states.reorder(state, order))
    assert_same(y, whole[order, 6:])


def test_rollback_forgets_what_came_after_the_snapshot(mixer: Mixer, x: Tensor) -> None:
    with torch.no_grad():
        _, state = mixer(x[:, :5], mixer.init_state(3, CAPACITY))
        kept = states.snapshot(state)
        _, state = mixer(torch.randn_like(x[:, :2]), state)
        y, _ = mixer(x[:, 5:], states.rollback_(state, kept))
        whole, _ = mixer(x)
    assert_same(y, whole[:, 5:])


def test_positions_may_be_given(mixer: Mixer, x: Tensor) -> None:
    counted = torch.arange(9).expand(3, 9)
    assert_same(mixer(x, None, Context(positions=counted))[0], mixer(x)[0])
    shifted = mixer(x, None, Context(positions=counted + 1000))[0]  # rotary embeddings are relative
    torch.testing.assert_close(shifted, mixer(x)[0], rtol=1e-6, atol=1e-9)


def test_the_future_does_not_leak(mixer: Mixer, x: Tensor) -> None:
    changed = torch.cat([x[:, :5], torch.randn_like(x[:, 5:])], 1)
    ours, theirs = mixer(x)[0], mixer(changed)[0]
    if isinstance(mixer, HyenaMixer):  # by FFT, whose rounding depends on the whole
        torch.testing.assert_close(ours[:, :5], theirs[:, :5], rtol=1e-12, atol=1e-13)
    else:
        assert torch.equal(ours[:, :5], theirs[:, :5])
    assert not torch.allclose(ours[:, 5:], theirs[:, 5:])


def test_rows_do_not_leak_into_one_another(mixer: Mixer, x: Tensor) -> None:
    torch.testing.assert_close(mixer(x)[0][1:2], mixer(x[1:2])[0], rtol=1e-10, atol=1e-12)


def test_a_state_of_another_batch_is_refused(mixer: Mixer, x: Tensor) -> None:
    with pytest.raises(StateError, match="one row for each row of x, 3 in all, got 2"):
        mixer(x, mixer.init_state(2, CAPACITY))
