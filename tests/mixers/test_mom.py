"""Mixture of memories: equality with a loop over tokens, causality, isolation, router losses, graphs."""

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._pytree import tree_leaves, tree_map

from deltazoo.backends.compile import CompileBackend
from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.update import registry
from deltazoo.mixers import Context, GatedDeltaNet, LinearAttention, MixerConfig, MoM, parse
from deltazoo.mixers.core.config import config_class
from deltazoo.mixers.core.delta_mixer import can_group
from deltazoo.mixers.core.state import snapshot
from deltazoo.mixers.mom import JointMoMMixer, MoMMixer, Router
from deltazoo.mixers.parts.memory.token_pack import TokenPack

WIDTH, T = 24, 9
GROUPED = (
    "deltanet", "deltaproduct", "efla", "gated_deltanet", "gated_deltaproduct", "gated_efla", "gated_longhorn", "kda",
    "longhorn",
)  # fmt: skip


def build(memory: MixerConfig, **fields: object) -> MoMMixer:
    torch.manual_seed(0)
    fields = {"memories": 4, "active": 2, "balance": 0.0, "z": 0.0, "sharing": "none", **fields}
    config = MoM(memory=memory, **fields)
    mixer = config.build(WIDTH, backend="reference").double()
    with torch.no_grad():
        mixer.router.weight.normal_()
    return mixer


def assert_same(value: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-11)


def loop_over_tokens(mixer: MoMMixer, x: Tensor) -> Tensor:
    """Each memory decodes, token by token, only the tokens sent to it."""
    rows = []
    for b in range(x.shape[0]):
        states = [memory.init_state(1, T) for memory in mixer.memories]
        shared = mixer.shared.init_state(1, T)
        for t in range(x.shape[1]):
            token = x[b : b + 1, t : t + 1]
            y, shared, _ = mixer.shared(token, shared)
            p = torch.softmax(mixer.router.weight @ token[0, 0], 0)
            chosen = sorted(range(len(p)), key=lambda m: (-float(p[m].detach()), m))[: mixer.router.active]
            for m in chosen:
                o, states[m], _ = mixer.memories[m](token, states[m])
                y = y + p[m] / sum(p[i] for i in chosen) * o
            rows.append(y)
    return torch.cat(rows, 1).view_as(x)


def test_mixture_of_any_mixer_equals_a_loop_over_tokens(memory: MixerConfig) -> None:
    mixer = build(memory)
    x = torch.randn(2, T, WIDTH, dtype=torch.float64, requires_grad=True)
    y, expected = mixer(x)[0], loop_over_tokens(mixer, x)
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-11)
    weight = torch.randn_like(expected)
    leaves = [x, *mixer.parameters()]
    ours, theirs = (torch.autograd.grad((z * weight).sum(), leaves, allow_unused=True) for z in (y, expected))
    for left, right in zip(ours, theirs, strict=True):
        if left is not None or right is not None:
            left, right = (torch.zeros_like(other) if z is None else z for z, other in ((left, right), (right, left)))
            torch.testing.assert_close(left, right, rtol=1e-7, atol=1e-9)


def joint_by_tokens(mixer: JointMoMMixer, x: Tensor) -> Tensor:
    """The source's layer with Gated DeltaNet, one token at a time, with the state and convolution of each memory."""
    joint, (_, H, _, K, V, _) = mixer.joint, mixer.joint.shape
    beta_map, decay_map, decay = joint.gates["beta"], joint.gates["decay"], joint.operands["decay"]
    one_map = joint.sizes.one_map
    taps = torch.cat([joint.convs["q"].conv.weight, joint.convs["kv"].conv.weight])
    rows = []
    for b in range(x.shape[0]):
        S = [x.new_zeros(H, K, V) for _ in range(joint.sizes.total)]
        history = [[x.new_zeros(len(taps))] * 3 for _ in S]
        for token in x[b]:
            p = torch.softmax(mixer.router.weight @ token, 0)
            chosen = sorted(range(len(p)), key=lambda m: -float(p[m].detach()))[: mixer.router.active]
            weight = {m: p[m] / sum(p[i] for i in chosen) for m in chosen} | {len(p): 1.0}
            mixture = 0.0
            for m, w in weight.items():
                own = 0 if one_map else m
                window = [*history[m], torch.cat([joint.to_q(token), joint.to_kv[own](token)])]
                history[m] = window[1:]
                q, k, v = F.silu((torch.stack(window, 1) * taps).sum(1)).split([H * K, H * K, H * V])
                q, k = (y * (y.square().sum(1, keepdim=True) + 1e-6).rsqrt() for y in (q.view(H, K), k.view(H, K)))
                beta = torch.sigmoid(beta_map[own](token))[:, None]
                raw = decay_map[own](token) + decay.dt_bias
                S[m] = torch.exp(-decay.A_log.exp() * F.softplus(raw))[:, None, None] * S[m]
                error = v.view(H, V) - torch.einsum("hkv,hk->hv", S[m], k)
                S[m] = S[m] + torch.einsum("hk,hv->hkv", k, beta * error)
                mixture = mixture + w * torch.einsum("hkv,hk->hv", S[m], q) * K**-0.5
            norm = mixture * (mixture.square().mean(1, keepdim=True) + 1e-5).rsqrt() * joint.outputs["norm"].weight
            rows.append(joint.out((norm * F.silu(joint.outputs["gate"].proj(token).view(H, V))).flatten()))
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("sharing", ["query", "all"])
def test_joint_memories_equal_the_source_token_by_token(sharing: str) -> None:
    mixer = build(GatedDeltaNet(heads=2, key_width=4, value_width=3), sharing=sharing)
    x = torch.randn(2, T, WIDTH, dtype=torch.float64, requires_grad=True)
    y, expected = mixer(x)[0], joint_by_tokens(mixer, x)
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-11)
    leaves, weight = [x, *mixer.parameters()], torch.randn_like(x)
    ours, theirs = (torch.autograd.grad((z * weight).sum(), leaves) for z in (y, expected))
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", ["gated_deltanet", "kda", "longhorn", "gated_deltaproduct"])
def test_joint_memories_continue_from_any_piece_and_layout(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mixer = build(config_class(name)(heads=2, key_width=4), sharing="query")
    x = torch.randn(2, T, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        whole = mixer(x)[0]
        state = mixer.init_state(2)
        pieces = [mixer(piece, state)[0] for piece in x.split([4, 1, 1, T - 6], 1)]
        assert_same(torch.cat(pieces, 1), whole)
        padded = torch.cat([torch.full_like(x[:, :3], 1e3), x], 1)
        mask = (torch.arange(T + 3) >= 3).expand(2, -1)
        pack = Context(cu_seqlens=torch.tensor([0, T, T, 2 * T], dtype=torch.int32))
        assert_same(mixer(x.view(1, -1, WIDTH), None, pack)[0].view_as(x), whole)
        state = snapshot(mixer(x[:, :5], mixer.init_state(2))[1])
        stepped = mixer(x[:, 5:6], snapshot(state), Context(mask=torch.tensor([[True], [False]])))
        assert_same(stepped.y[0], whole[0, 5:6])
        assert all(torch.equal(stepped.state[name][1], state[name][1]) for name in state)
        for packs in (True, False):
            monkeypatch.setattr(type(mixer.joint), "_takes_packs", lambda *_, packs=packs: packs)
            assert_same(mixer(x)[0], whole)
            assert_same(mixer(padded, None, Context(mask=mask))[0][:, 3:], whole)
            assert mixer(x[:0])[0].shape == (0, T, WIDTH) or packs


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("sharing", ["query", "all", "none"])
def test_a_state_computed_with_gradients_is_decoded(shared: bool, sharing: str) -> None:
    mixer, x = build(GatedDeltaNet(heads=2), shared=shared, sharing=sharing), torch.randn(2, T, WIDTH).double()
    state = mixer(x[:, :-1], mixer.init_state(2)).state
    with torch.no_grad():
        assert_same(mixer(x[:, -1:], state).y, mixer(x).y[:, -1:])


def test_memories_that_cannot_share_are_complete_or_refused() -> None:
    assert isinstance(MoM(memory=LinearAttention(heads=1)).build(WIDTH), MoMMixer)
    assert isinstance(MoM(memory=GatedDeltaNet(heads=1)).build(WIDTH), JointMoMMixer)
    with pytest.raises(ConfigError, match="sharing='query' needs a memory with a matrix state, got attention"):
        MoM(memory=parse({"mixer": "attention"}), sharing="query").build(WIDTH)


def test_mixture_of_any_mixer_is_causal_and_isolated(memory: MixerConfig) -> None:
    mixer = build(memory)
    x = torch.randn(2, T, WIDTH, dtype=torch.float64)
    pack = Context(cu_seqlens=torch.tensor([0, 5, T], dtype=torch.int32))
    with torch.no_grad():
        rows, packed = mixer(x)[0], mixer(x[:1], None, pack)[0]
        for t in (0, 3, T - 2):
            later = x.clone()
            later[:, t + 1 :] = 7 * torch.randn_like(later[:, t + 1 :])
            assert_same(mixer(later)[0][:, : t + 1], rows[:, : t + 1])
        neighbour = x.clone()
        neighbour[1] = torch.nan
        assert_same(mixer(neighbour)[0][0], rows[0])
        earlier = x[:1].clone()
        earlier[:, :5] = 7 * torch.randn_like(earlier[:, :5])
        assert_same(mixer(earlier, None, pack)[0][:, 5:], packed[:, 5:])


def test_any_memory_continues_decoding_from_packed_sequences(memory: MixerConfig) -> None:
    """The longest sequence fills the capacity, and one sequence is empty."""
    mixer = build(memory)
    x = torch.randn(1, T, WIDTH, dtype=torch.float64)
    bounds = [0, 5, 5, T]
    with torch.no_grad():
        expected = torch.cat([mixer(x[:, :5])[0], mixer(x[:, 5:])[0]], 1)
        context = Context(cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
        assert_same(mixer(x, mixer.init_state(3, 5), context)[0], expected)
        halves = Context(cu_seqlens=torch.tensor([0, 3, 3, 5], dtype=torch.int32))
        state = mixer(torch.cat([x[:, :3], x[:, 5:7]], 1), mixer.init_state(3, 5), halves)[1]
        for i in range(2):
            tokens = torch.cat([x[:, 3 + i], x[:, i], x[:, 7 + i]])[:, None]
            y, state, _ = mixer(tokens, state)
            assert_same(y[0, 0], expected[0, 3 + i])
            assert_same(y[2, 0], expected[0, 7 + i])


@pytest.mark.parametrize("width", [24, 100, 1024])
def test_routes_are_bitwise_equal_for_pieces_and_single_rows(width: int) -> None:
    """Prefill and decoding must choose the same memories even if two scores are close."""
    torch.manual_seed(0)
    router = Router(MoM(), width)
    x = torch.randn(2, 70, width)
    whole = router(x, Context())
    for parts in (x.split([1] * 70, 1), x.split([3, 66, 1], 1)):
        pieces = [router(part, Context()) for part in parts]
        assert torch.equal(torch.cat([piece.weight for piece in pieces], 1), whole.weight)
        assert torch.equal(torch.cat([piece.chosen for piece in pieces], 1), whole.chosen)
    assert torch.equal(torch.cat([router(row, Context()).weight for row in x.split(1)]), whole.weight)
    half = x.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(router(half, Context()).weight, router(half.float(), Context()).weight)


def record(module: Callable[..., object], x: Tensor, **context: Tensor) -> dict[str, Tensor]:
    """Run a module and return its auxiliary losses by name."""
    side = module(x, context=Context(losses=True, **context)).side
    return {loss.name: loss.combine(loss.statistics[None]) for loss in side.losses}


def test_router_losses_ignore_padding() -> None:
    mixer = build(GatedDeltaNet(heads=2, key_width=4), balance=0.3, z=0.2)
    x = torch.randn(1, T, WIDTH, dtype=torch.float64)
    padded = torch.cat([torch.full_like(x[:, :4], 1e3), x], 1)
    mask = torch.arange(T + 4)[None] >= 4
    expected = record(mixer.router, x)
    for module in (mixer.router, mixer):
        for name, loss in record(module, padded, mask=mask).items():
            torch.testing.assert_close(loss, expected[name], rtol=1e-12, atol=0)
    assert not mixer.router(padded, Context(mask=mask)).chosen[:, :4].any()


@pytest.mark.parametrize("training", [True, False])
def test_gradient_of_a_token_reaches_only_earlier_tokens_of_its_sequence(training: bool) -> None:
    mixer = build(GatedDeltaNet(heads=2, key_width=4)).train(training)
    x = torch.randn(1, T, WIDTH, dtype=torch.float64, requires_grad=True)
    context = Context(cu_seqlens=torch.tensor([0, 5, T], dtype=torch.int32))
    y = mixer(x, None, context)[0]
    for t in range(T):
        (grad,) = torch.autograd.grad(y[0, t].sum(), x, retain_graph=True)
        nonzero = grad[0].abs().sum(-1) > 0
        assert not nonzero[t + 1 :].any()
        assert not nonzero[: 5 if t >= 5 else 0].any()
        assert nonzero[t]


def test_training_and_evaluation_give_equal_outputs() -> None:
    mixer = build(GatedDeltaNet(heads=2, key_width=4), balance=0.1, z=0.1)
    x = torch.randn(2, T, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        expected = mixer.eval()(x)[0]
    assert torch.equal(mixer.train()(x)[0], expected)


def test_ties_go_to_the_memories_with_the_lowest_index() -> None:
    mixer = build(GatedDeltaNet(heads=2, key_width=4))
    with torch.no_grad():
        mixer.router.weight.zero_()
    routes = mixer.router(torch.randn(2, 3, WIDTH), Context())
    assert routes.chosen.tolist() == [[[True, True, False, False]] * 3] * 2
    assert routes.weight[routes.chosen].tolist() == [0.5] * 12


def test_memories_of_memories_record_their_losses() -> None:
    inner = MoM(memory=LinearAttention(heads=1), memories=2, active=1)
    x = torch.randn(2, T, WIDTH, dtype=torch.float64)
    losses = build(inner, memories=3, balance=0.01)(x, None, Context(losses=True)).side.losses
    assert [len(loss.statistics[0]) for loss in losses] == [3, 2, 2, 2, 2]  # the router, three memories, the shared one


def test_auxiliary_losses_equal_their_equations() -> None:
    """M sum_m f_m P_m, where the fractions f sum to the active memories, and mean(logsumexp^2)."""
    mixer = build(GatedDeltaNet(heads=2, key_width=4), balance=0.3, z=0.2)
    x = torch.randn(2, T, WIDTH, dtype=torch.float64)
    losses = record(mixer, x)
    weight = mixer.router.weight.detach().clone().requires_grad_()
    logits = x @ weight.mT
    p = logits.softmax(-1)
    fraction = torch.zeros(4, dtype=torch.float64)
    for token in p.flatten(0, 1):
        for m in token.topk(2).indices:
            fraction[m] += 1 / (2 * T)
    expected = {
        "mom_balance": 4 * (fraction * p.mean((0, 1))).sum(),
        "mom_z": logits.logsumexp(-1).square().mean(),
    }
    assert losses.keys() == expected.keys()
    for name, loss in losses.items():
        assert_same(loss, expected[name])
    actual_gradient = torch.autograd.grad(sum(losses.values()), mixer.router.weight)
    assert_same(*actual_gradient, *torch.autograd.grad(sum(expected.values()), weight))


def test_balance_loss_spreads_tokens_over_the_memories() -> None:
    """The router sends nearly all tokens to one memory at first."""
    mixer = build(GatedDeltaNet(heads=1, key_width=4), balance=1.0, active=1)
    x = torch.randn(4, 64, WIDTH, dtype=torch.float64) + 1
    with torch.no_grad():
        mixer.router.weight.mul_(0.1)
        mixer.router.weight[0] += 0.1
    optimiser = torch.optim.Adam(mixer.router.parameters(), 0.02)

    def largest_fraction() -> float:
        return float(mixer.router(x, Context()).chosen.double().mean((0, 1)).max())

    initial = largest_fraction()
    for _ in range(60):
        optimiser.zero_grad()
        record(mixer.router, x)["mom_balance"].backward()
        optimiser.step()
    assert initial > 0.9
    assert largest_fraction() < 0.5


def test_grouped_memories_equal_memories_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each mixer whose parts can be grouped: outputs, states and gradients, dense, packed and padded."""
    configs = [parse({"mixer": name, "heads": 2, "key_width": 4}) for name in GROUPED]
    x = torch.randn(2, T, WIDTH, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(T) < torch.tensor([[T], [5]])
    packs = torch.tensor([0, 4, 4, T], dtype=torch.int32)
    for config in configs:
        mixer = build(config)
        assert can_group(list(mixer.memories)), config.name
        with torch.no_grad():  # parameters that start at equal values must differ between the memories
            for parameter in mixer.memories.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        for inputs, context, rows in (
            (x, Context(), 2),
            (x, Context(mask=mask), 2),
            (x[:1], Context(cu_seqlens=packs), 3),
        ):
            results = []
            for groups in (True, False):
                monkeypatch.setattr("deltazoo.mixers.mom.can_group", lambda _, groups=groups: groups)
                state = tree_map(lambda leaf: torch.ones_like(leaf).requires_grad_(), mixer.init_state(rows))
                y, new, _ = mixer(inputs, state, context)
                if context.mask is not None:
                    y = y * context.mask[..., None]  # outputs at padded tokens have no meaning, and differ
                total = y.square().sum() + sum(leaf.square().sum() for leaf in tree_leaves(new))
                leaves = [inputs, *mixer.parameters(), *tree_leaves(state)]
                gradients = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
                results.append([y, *tree_leaves(new), *gradients])
            for left, right in zip(*results, strict=True):
                torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-11)


def test_which_mixers_are_grouped() -> None:
    mixers = {name: config_class(name)().build(128, backend="reference") for name in registry.names(registry.MIXERS)}
    assert [name for name, mixer in mixers.items() if can_group([mixer])] == list(GROUPED)


def test_a_hooked_memory_is_not_grouped() -> None:
    mixer = build(GatedDeltaNet(heads=2, key_width=4))
    x = torch.randn(1, T, WIDTH, dtype=torch.float64)
    expected = mixer(x)[0]
    calls = []
    mixer.memories[2].project.to_qkv.register_forward_hook(lambda *_: calls.append(1))
    assert_same(mixer(x)[0], expected)
    assert calls


@pytest.mark.graphs
def test_grouped_memories_are_one_graph_for_all_routes() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    memory = GatedDeltaNet(heads=1, key_width=4)
    mixer = (
        MoM(memory=memory, memories=2, active=1, shared=False)
        .build(WIDTH, backend=CompileBackend(chunk=16, compiled=False))
        .double()
    )
    counter = CompileCounterWithBackend("aot_eager")
    module = torch.compile(mixer, fullgraph=True, backend=counter)
    parameters = list(mixer.parameters())
    for seed in (1, 2):
        torch.manual_seed(seed)
        x = torch.randn(2, 20, WIDTH, dtype=torch.float64)
        actual, expected = module(x)[0], mixer(x)[0]
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
        gradients = (torch.autograd.grad(y.square().sum(), parameters) for y in (actual, expected))
        for left, right in zip(*gradients, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-8, atol=1e-11)
    assert counter.frame_count == 1


def test_a_pack_of_a_symbolic_number_of_rows_equals_the_eager_one() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)

    def sort(order: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        pack = TokenPack.of(order, weight, 4, Context())
        return pack.order, pack.bounds

    order, weight = torch.randint(4, (3, 20, 1)), torch.rand(3, 20, 1)
    torch._dynamo.mark_dynamic(order, 0)
    torch._dynamo.mark_dynamic(weight, 0)
    compiled = torch.compile(sort, fullgraph=True, backend="eager")
    for actual, expected in zip(compiled(order, weight), sort(order, weight), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.slow
def test_at_most_three_graphs_serve_all_lengths_and_routes() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = MoM(memory=LinearAttention(heads=2), memories=2, active=1, shared=False)
    mixer = config.build(WIDTH, backend=CompileBackend(chunk=16, compiled=False)).double()
    counter = CompileCounterWithBackend("aot_eager")
    module = torch.compile(mixer, fullgraph=True, backend=counter)
    for length in (40, 64, 33, 50):
        x = torch.randn(2, length, WIDTH, dtype=torch.float64)
        torch.testing.assert_close(module(x)[0], mixer(x)[0], rtol=1e-10, atol=1e-12)
    assert counter.frame_count <= 3  # for the first length, for multiples of the chunk, and for other lengths


def test_packed_sequences_equal_separate_sequences() -> None:
    mixer = build(GatedDeltaNet(heads=2, key_width=4))
    x = torch.randn(1, T, WIDTH, dtype=torch.float64)
    bounds = [0, 4, 4, T]
    context = Context(cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    with torch.no_grad():
        expected = torch.cat([mixer(x[:, a:b])[0] for a, b in itertools.pairwise(bounds)], 1)
        y, state, _ = mixer(x, mixer.init_state(3), context)
        more = mixer(x[:, :1].expand(3, -1, -1), state).y
        whole = mixer(torch.cat([x[:, 4:], x[:, :1]], 1))[0]
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(more[2:], whole[:, -1:], rtol=1e-9, atol=1e-11)


def test_memories_with_a_replaced_map_run_one_by_one() -> None:
    """A subclass of nn.Linear may compute more than its weight, as LoRA does."""

    class Doubled(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    mixer = build(GatedDeltaNet(heads=2, key_width=4))
    assert can_group(list(mixer.memories))
    old = mixer.memories[0].out
    mixer.memories[0].out = Doubled(old.in_features, old.out_features, bias=False, dtype=torch.float64)
    assert not can_group(list(mixer.memories))


def test_auxiliary_losses_of_no_tokens_are_finite() -> None:
    mixer = build(GatedDeltaNet(heads=2, key_width=4), balance=0.1, z=0.1)
    losses = mixer(torch.zeros(2, 0, WIDTH, dtype=torch.float64), None, Context(losses=True)).side.losses
    assert len(losses) == 2
    assert all(loss.combine(loss.statistics[None]).isfinite().all() for loss in losses)
