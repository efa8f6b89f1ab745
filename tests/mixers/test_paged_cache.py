"""A paged cache gives the outputs of a contiguous cache: prompts in pieces, tokens, drafts and padding."""

import pytest
import torch
from torch import Tensor

from deltazoo.backends.io.errors import StateError
from deltazoo.mixers import Attention, Context, FoX, Mixer, PageTable, SlidingWindow
from deltazoo.mixers.core.named_tensors import NamedTensors
from deltazoo.mixers.parts import CachePages, KVCache, PagedCache

State = KVCache | PagedCache | NamedTensors

WIDTH, ROWS, SLOTS = 24, 3, 4
CONFIGS = {
    "grouped heads": Attention(heads=4, key_value_heads=2, head_width=6),
    "gate, norm, no positions": Attention(heads=2, gate=True, qk_norm="all", rotary_theta=None),
    "forget gates": FoX(heads=4, key_value_heads=2, head_width=6, rotary_theta=1e3, kv_shift=True),
}


@pytest.fixture(params=CONFIGS)
def mixer(request) -> Mixer:
    torch.manual_seed(0)
    return CONFIGS[request.param].build(WIDTH).double()


def pages_of(state: State) -> CachePages | None:
    return state.get("pages") if isinstance(state, NamedTensors) else getattr(state, "pages", None)


def position_of(state: State) -> Tensor:
    return state["seen"] if isinstance(state, NamedTensors) else state.position


def paged(mixer: Mixer) -> State:
    """Rows of up to 5 pages in an order that mixes them."""
    order = torch.randperm(5 * ROWS, generator=torch.Generator().manual_seed(1)).int() + 1
    state = mixer.init_paged_state(5 * SLOTS, PageTable(order.view(ROWS, 5), 5 * ROWS, SLOTS))
    pages = pages_of(state)
    assert pages is not None
    for x in (pages.k, pages.v):
        x.fill_(torch.nan)  # what earlier requests left
    return state


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def check_both(mixer: Mixer, calls: list[tuple[Tensor, Context]]) -> None:
    states: list[State] = [mixer.init_state(ROWS, 5 * SLOTS), paged(mixer)]
    for x, context in calls:
        results = [mixer(x, state, context) for state in states]
        torch.testing.assert_close(results[1].y, results[0].y, rtol=1e-12, atol=1e-12)
        states = [result.state for result in results]
        assert torch.equal(*map(position_of, states))


@torch.no_grad()
def test_pieces_tokens_and_padding(mixer):
    mask = torch.tensor([[False, True, True], [True, False, False], [True, True, True]])
    bounds = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
    check_both(
        mixer,
        [
            (draw(1, 12), Context(cu_seqlens=bounds)),  # the second sequence is empty
            (draw(1, 4, seed=1), Context(cu_seqlens=torch.tensor([0, 1, 3, 4], dtype=torch.int32))),
            (draw(ROWS, 1, seed=2), Context()),
            (draw(ROWS, 3, seed=3), Context(mask=mask)),
            (draw(ROWS, 2, seed=4), Context()),
        ],
    )


@torch.no_grad()
@pytest.mark.parametrize("accepted", [(0, 1, 3), (3, 0, 2)])
def test_accepted_drafts_join_the_cache_and_others_leave_no_trace(mixer, accepted):
    prompt, drafts, token = draw(ROWS, 6), draw(ROWS, 3, seed=1), draw(ROWS, 2, seed=2)
    outputs = []
    for state in (mixer.init_state(ROWS, 5 * SLOTS), paged(mixer)):
        _, state, _ = mixer(prompt, state)
        y, draft, _ = mixer(drafts, state, Context(verify=True))
        mixer.commit_(draft, state, torch.tensor(accepted, dtype=torch.int32))
        outputs.append((y, mixer(token, state).y))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-12, atol=1e-12)


@pytest.mark.graphs
@torch.no_grad()
def test_a_compiled_step_is_one_graph(mixer):
    step = torch.compile(lambda x, state: mixer(x, state), fullgraph=True, backend="aot_eager")
    states, outputs = [paged(mixer) for _ in range(2)], []
    for call, state in zip((mixer, step), states, strict=True):
        _, state, _ = mixer(draw(ROWS, 7), state)
        outputs.append([call(draw(ROWS, 1, seed=seed), state).y for seed in range(3)])
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)
    assert torch.equal(*map(position_of, states))
    assert torch.equal(*(pages_of(state).k.nan_to_num(7.0) for state in states))


def test_a_window_keeps_its_ring_and_pages_are_no_tensors_of_the_tree():
    table = PageTable(torch.zeros(2, 3, dtype=torch.int32), 6, SLOTS)
    assert isinstance(SlidingWindow(heads=2, window=5).build(WIDTH).init_paged_state(12, table), KVCache)
    state = Attention(heads=2).build(WIDTH).init_paged_state(12, table)
    assert isinstance(state.pages, CachePages)
    leaves = torch.utils._pytree.tree_leaves(state)
    assert [type(leaf) for leaf in leaves] == [CachePages, Tensor, Tensor]


def test_gradients_full_pages_and_other_states_are_refused(mixer):
    x = draw(ROWS, 5 * SLOTS + 1)
    with pytest.raises(StateError, match="a paged cache needs calls without gradients on one rank, got gradients"):
        mixer(x[:, :2], paged(mixer))
    with torch.no_grad():
        with pytest.raises(StateError, match="the cache is full: its capacity is 20 tokens, but a sequence has 21"):
            mixer(x, paged(mixer))
        state = paged(mixer)
        pages = pages_of(state)
        pages.k, pages.v = pages.k[..., :1], pages.v[..., :1]
        with pytest.raises(StateError, match=r"the cache must have key-value heads|state 'k' must have shape"):
            mixer(x[:, :1], state)
