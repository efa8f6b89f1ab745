"""A hybrid language model: pieces, packed and padded sequences equal one forward pass; one graph when compiled."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

from deltazoo.backends.io.errors import ConfigError, DeviceError, DtypeError, ShapeError, StateError, ValueRangeError
from deltazoo.blocks.model.checkpointing import _policy, run_layer
from deltazoo.blocks.model.compilation import compile_layers
from deltazoo.blocks.model.stack import LanguageModel, StackState
from deltazoo.blocks.spec.stack_spec import LayerSpec, StackSpec
from deltazoo.mixers import Context, GatedDeltaNet, SlidingWindow
from deltazoo.mixers.core.state import batch, detach, load_, nbytes, reorder, rollback_, save, select, snapshot


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def in_pieces(model: LanguageModel, tokens_BT: Tensor, sizes: list[int]) -> tuple[Tensor, StackState | None]:
    state: StackState | None = model.init_state(tokens_BT.shape[0], capacity=tokens_BT.shape[1])
    logits = []
    for piece in tokens_BT.split(sizes, 1):
        out, state = model(piece, state)
        logits.append(out)
    return torch.cat(logits, 1), state


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("sizes", [[11], [4, 7], [1, 9, 1], [1] * 11])
def test_pieces_equal_the_full_sequence(model, tokens, sizes, grad):
    tokens_BT = tokens(2, 11)
    with torch.set_grad_enabled(grad):
        expected, no_state = model(tokens_BT)
        actual, _ = in_pieces(model, tokens_BT, sizes)
    assert no_state is None
    assert_close(actual, expected)


def test_later_tokens_do_not_leak(model, tokens):
    tokens_BT = tokens(2, 11)
    changed = tokens_BT.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % 29
    changed[1] = (changed[1] + 3) % 29
    assert_close(model(changed)[0][0, :6], model(tokens_BT)[0][0, :6])
    assert not torch.allclose(model(changed)[0][0, 6], model(tokens_BT)[0][0, 6])


def test_packed_sequences_equal_separate_sequences(model, tokens):
    lengths = [4, 1, 6]
    packed = tokens(1, sum(lengths))
    context = Context(cu_seqlens=torch.tensor([0, 4, 5, 11], dtype=torch.int32))
    logits, state = model(packed, model.init_state(3, capacity=12), context)
    separate = [model(row, model.init_state(1, capacity=12)) for row in packed.split(lengths, 1)]
    assert_close(logits, torch.cat([out for out, _ in separate], 1))
    assert_close(model(packed, None, context)[0], logits)
    for n, (_, separate_state) in enumerate(separate):
        next_logits = [model(packed[:, :2], s)[0] for s in (select(state, slice(n, n + 1)), separate_state)]
        assert_close(*next_logits)
    targets = packed.roll(-1, 1)
    assert_close(model.loss(packed, targets, context), F.cross_entropy(logits[0], targets[0]))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_equal_unpadded_ones(model, tokens, side):
    tokens_BT, lengths = tokens(3, 9), [9, 4, 1]
    time_T = torch.arange(9)
    masks = [time_T >= 9 - length if side == "left" else time_T < length for length in lengths]
    context = Context(mask=torch.stack(masks))
    logits, state = model(tokens_BT, model.init_state(3, capacity=12), context)
    assert logits.isfinite().all()
    for n, mask in enumerate(masks):
        expected, expected_state = model(tokens_BT[n : n + 1, mask], model.init_state(1, capacity=12))
        assert_close(logits[n : n + 1, mask], expected)
        row_state = select(state, slice(n, n + 1))
        assert_close(model(tokens_BT[:1, :2], row_state)[0], model(tokens_BT[:1, :2], expected_state)[0])


def test_positions_change_the_rotary_embedding(model, tokens):
    tokens_BT = tokens(1, 6)
    default, doubled = (torch.arange(6)[None] * step for step in (1, 2))
    assert_close(model(tokens_BT, None, Context(positions=default))[0], model(tokens_BT)[0])
    assert not torch.allclose(model(tokens_BT, None, Context(positions=doubled))[0], model(tokens_BT)[0])


def test_outputs_of_parallel_mixers_are_summed(tokens):
    torch.manual_seed(0)
    gdn, swa = GatedDeltaNet(heads=1), SlidingWindow(heads=1, window=3)
    layer = LayerSpec(mixer=(gdn, swa), mlp="none").build(8, place=None, backend="reference")
    x = torch.randn(2, 5, 8)
    normed = F.rms_norm(x, (8,), layer.norm.weight, layer.norm.eps)
    expected = x + layer.mixers[0](normed)[0] + layer.mixers[1](normed)[0]
    torch.testing.assert_close(layer(x)[0], expected)


def test_the_loss_is_the_cross_entropy_of_the_logits(model, tokens):
    tokens_BT = tokens(2, 9)
    targets = tokens_BT.roll(-1, 1)
    targets[:, -1] = -100
    parameters = list(model.parameters())
    actual_loss = model.loss(tokens_BT, targets)
    expected_loss = F.cross_entropy(model(tokens_BT)[0].flatten(0, 1), targets.flatten())
    assert_close(actual_loss, expected_loss)
    gradients = (torch.autograd.grad(loss, parameters) for loss in (actual_loss, expected_loss))
    for actual, expected in zip(*gradients, strict=True):
        assert expected.abs().max() > 0
        assert_close(actual, expected)


def test_autocast_is_close_to_float32(spec, tokens):
    torch.manual_seed(0)
    model, tokens_BT = spec.build("reference"), tokens(2, 9)
    float32 = model.loss(tokens_BT, tokens_BT)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model.loss(tokens_BT, tokens_BT)
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(mixed, float32, rtol=5e-3, atol=0)
    gradients = (torch.autograd.grad(loss, list(model.parameters())) for loss in (mixed, float32))
    for actual, expected in zip(*gradients, strict=True):
        assert actual.dtype == torch.float32
        assert (actual - expected).norm() <= 0.05 * expected.norm() + 1e-5


def test_an_untied_head_has_separate_weights(spec, tokens):
    model = StackSpec(**dict(spec) | {"tied": False}).build("reference")
    assert {"embedding.weight", "head.weight"} <= set(model.state_dict())
    x = torch.randn(2, 16)
    torch.testing.assert_close(model.logits(x), x @ model.head.weight.T)
    with torch.no_grad():
        model.embedding.weight.zero_()
    assert model.head.weight.std() > 0.01


def test_checkpointing_saves_less_and_gives_equal_gradients(model, tokens):
    tokens_BT = tokens(2, 9)

    def gradients_and_saved_size() -> tuple[list[Tensor], int]:
        saved: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            saved[x.data_ptr()] = x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss = model.loss(tokens_BT, tokens_BT)
        return list(torch.autograd.grad(loss, list(model.parameters()))), sum(saved.values())

    expected_gradients, saved_size = gradients_and_saved_size()
    model.checkpoint_layers()
    gradients, checkpointed_size = gradients_and_saved_size()
    assert checkpointed_size < saved_size / 2
    for actual, expected in zip(gradients, expected_gradients, strict=True):
        assert_close(actual, expected)
    assert all(layer.checkpointing == "none" for layer in model.checkpoint_layers(False).stack.layers)
    with pytest.raises(ValueRangeError, match="'none', 'selective', 'full', True or False, got 'all'"):
        model.checkpoint_layers("all")


def test_selective_checkpointing_recomputes_no_matrix_product(tokens):
    torch.manual_seed(0)
    spec = StackSpec(width=32, depth=2, vocab=40, pattern="gated_deltanet + attention", mlp={"width": 48})
    model, tokens_BT = spec.build("reference"), tokens(2, 9)
    products, results = {}, {}
    for mode in ("none", "selective", "full"):
        loss = model.checkpoint_layers(mode).loss(tokens_BT, tokens_BT)
        with FlopCounterMode(display=False) as counter:
            results[mode] = torch.autograd.grad(loss, list(model.parameters()))
        products[mode] = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    assert products["selective"] == products["none"] < products["full"]
    for gradients in (results["selective"], results["full"]):
        for actual, expected in zip(gradients, results["none"], strict=True):
            assert_close(actual, expected)


@pytest.mark.graphs
def test_compiled_layers_with_selective_checkpointing_save_less():
    torch.manual_seed(0)
    spec = StackSpec(width=64, depth=2, vocab=40, pattern="gated_deltanet", mlp={"width": 64})
    tokens_BT = torch.randint(40, (2, 64))
    sizes, results = {}, {}
    for mode in ("none", "selective", "full"):
        torch.manual_seed(0)
        model = compile_layers(spec.build().double().checkpoint_layers(mode), "aot_eager_decomp_partition")
        saved = {parameter.untyped_storage().data_ptr(): 0 for parameter in model.parameters()}

        def pack(x: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved.setdefault(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes())
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss = model.loss(tokens_BT, tokens_BT)
        sizes[mode] = sum(saved.values())
        results[mode] = torch.autograd.grad(loss, list(model.parameters()))
    assert sizes["full"] < 0.6 * sizes["selective"], sizes
    assert sizes["selective"] < 0.6 * sizes["none"], sizes
    for gradients in (results["selective"], results["full"]):
        for actual, expected in zip(gradients, results["none"], strict=True):
            assert_close(actual, expected)


@pytest.mark.graphs
def test_a_compiled_layer_with_full_checkpointing_saves_no_result_of_a_function():
    class Squared(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x @ x  # a product, which a graph recomputes only where it is marked

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(output)

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0]

    def layer(x, weight):
        return run_layer(lambda x: Squared.apply((x @ weight).sin()).sin(), "full", x)

    saved = []
    x, weight = torch.randn(8, 4, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.shape) or x, lambda x: x):
        torch.compile(layer, backend="aot_eager_decomp_partition", fullgraph=True)(x, weight)
    assert sorted(saved) == [(4, 8), (8, 4)]


@pytest.mark.parametrize("pattern", ["rwkv7", "gated_deltanet + rwkv7", "rwkv7@[1,2] else gated_deltanet"])
def test_checkpointing_recomputes_the_first_values_of_rwkv7(pattern):
    torch.manual_seed(0)
    spec = StackSpec(width=32, depth=4, vocab=40, pattern=pattern, mlp={"width": 32})
    model, tokens_BT = spec.build("reference"), torch.randint(40, (2, 7))
    expected_gradients = torch.autograd.grad(
        model.loss(tokens_BT, tokens_BT), list(model.parameters()), allow_unused=True
    )
    model.checkpoint_layers()
    gradients = torch.autograd.grad(model.loss(tokens_BT, tokens_BT), list(model.parameters()), allow_unused=True)
    for actual, expected in zip(gradients, expected_gradients, strict=True):
        assert (actual is None) == (expected is None)
        if actual is not None:
            assert_close(actual, expected)


def test_rwkv7_layers_with_different_value_widths_are_refused():
    model = StackSpec(width=32, depth=2, vocab=40, pattern="rwkv7 + rwkv7(value_width=12)").build("reference")
    with pytest.raises(ConfigError, match="got 12 in layer 1"):
        model(torch.randint(40, (1, 3)))


@pytest.mark.parametrize(
    ("name", "std"),
    [("embedding", 0.02), ("to_hidden", 0.02), ("mlp.out", 0.02 / 6**0.5), ("mixers.0.out.weight", 0.02 / 6**0.5)],
)
def test_initial_weights_have_the_documented_scale(name, std):
    torch.manual_seed(0)
    model = StackSpec(width=128, depth=3, vocab=256, pattern="gated_deltanet + 2*attention").build("reference")
    weights = [weight for key, weight in model.named_parameters() if name in key]
    assert weights
    for weight in weights:
        assert abs(weight.std() / std - 1) < 0.03


def test_states_can_be_reordered_selected_and_rolled_back(model, tokens):
    tokens_BT, next_BT = tokens(3, 7), tokens(3, 2)
    with torch.no_grad():
        _, state = model(tokens_BT, model.init_state(3, capacity=12))
        saved = snapshot(state)
        order = torch.tensor([2, 0, 0, 1])
        expected = model(torch.cat([tokens_BT, next_BT], 1))[0][:, 7:]
        assert_close(model(next_BT[order], reorder(saved, order))[0], expected[order])
        assert_close(model(next_BT[1:], select(saved, slice(1, 3)))[0], expected[1:])
        addresses = [tensor.data_ptr() for layer in state.layers for tensor in torch.utils._pytree.tree_leaves(layer)]
        model(next_BT.flip(1), state)
        rollback_(state, saved)
        assert_close(model(next_BT, state)[0], expected)
    assert batch(state) == 3
    assert addresses == [tensor.data_ptr() for tensor in torch.utils._pytree.tree_leaves(state)]
    assert nbytes(state) == nbytes(model.init_state(3, capacity=12))


def test_a_saved_state_can_be_loaded_and_continued(model, tokens, tmp_path):
    tokens_BT = tokens(2, 9)
    with torch.no_grad():
        _, state = model(tokens_BT[:, :7], model.init_state(2, capacity=9))
        save(state, tmp_path / "state.pt")
        loaded = load_(model.init_state(2, capacity=9), tmp_path / "state.pt")
        assert_close(model(tokens_BT[:, 7:], loaded)[0], model(tokens_BT)[0][:, 7:])
    with pytest.raises(StateError, match="got other tensors or shapes"):
        load_(model.init_state(3, capacity=9), tmp_path / "state.pt")
    other = torch.utils._pytree.tree_map(Tensor.float, model.init_state(2, capacity=9))
    with pytest.raises(StateError, match=r"must be torch\.float32, the dtype of the state, got torch\.float64"):
        load_(other, tmp_path / "state.pt")
    (tmp_path / "state.pt").write_bytes(b"abc")
    with pytest.raises(StateError, match=r"state\.pt must hold a state that `save` wrote"):
        load_(other, tmp_path / "state.pt")
    with pytest.raises(ConfigError, match=r"cannot read .*none\.pt: No such file"):
        load_(other, tmp_path / "none.pt")


def test_gradients_flow_through_a_state_unless_detached(model, tokens):
    tokens_BT = tokens(1, 6)
    gradients = []
    for detached in (False, True):
        x_BTD = model.embedding(tokens_BT).detach().requires_grad_()
        _, state, _ = model.stack(x_BTD[:, :3], model.init_state(1, capacity=6))
        y_BTD, *_ = model.stack(x_BTD[:, 3:], detach(state) if detached else state)
        gradients.append(torch.autograd.grad(y_BTD.square().sum(), x_BTD)[0])
    whole_BTD = model.embedding(tokens_BT).detach().requires_grad_()
    assert_close(gradients[0], torch.autograd.grad(model.stack(whole_BTD)[0][:, 3:].square().sum(), whole_BTD)[0])
    assert gradients[0][:, :3].abs().min() > 0
    assert gradients[1][:, :3].abs().max() == 0


def test_a_state_dict_transfers_weights_to_another_model(spec, model, tokens, tmp_path):
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    torch.manual_seed(5)
    other = spec.build("reference").double()
    assert not torch.allclose(other(tokens(1, 5))[0], model(tokens(1, 5))[0])
    other.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert_close(other(tokens(1, 5))[0], model(tokens(1, 5))[0])


def test_invalid_tokens_targets_and_states_are_refused(spec, model, tokens):
    for error, sentence, invalid in [
        (ShapeError, r"tokens must have shape \[B, T\], got \[3\]", tokens(3)),
        (DtypeError, "tokens must be int64, got torch.int32", tokens(1, 3).int()),
        (ValueRangeError, r"tokens must be in \[0, 29\), got 29", torch.tensor([[0, 29]])),
        (ValueRangeError, "got -100", torch.tensor([[-100, 3]])),
        (DeviceError, "tokens must be on cpu, where the model is, got meta", tokens(1, 3).to("meta")),
    ]:
        with pytest.raises(error, match=sentence):
            model(invalid)
    with pytest.raises(ShapeError, match="targets must have the shape of tokens"):
        model.loss(tokens(1, 3), tokens(1, 2))
    with pytest.raises(ValueRangeError, match=r"targets must be in \[0, 29\) or -100, got -1"):
        model.loss(tokens(1, 3), torch.tensor([[-100, 3, -1]]))
    with pytest.raises(StateError, match="one entry for each of 3 layers, got 2"):
        model(tokens(1, 3), StackState(model.init_state(1, capacity=9).layers[:2]))
    for rows, capacity, sentence in [
        (-1, 9, "batch must be an integer >= 0, got -1"),
        (2.5, 9, "batch must be an integer >= 0, got 2.5"),
        (1, 0, "capacity must be an integer >= 1, got 0"),
        (1, "9", "capacity must be an integer >= 1, got '9'"),
    ]:
        with pytest.raises(ValueRangeError, match=sentence):
            model.init_state(rows, capacity)


@pytest.fixture
def hybrid(build) -> tuple[LanguageModel, LanguageModel, CompileCounterWithBackend]:
    """A small hybrid on the reference backend and on the compile backend, and a compiler that counts graphs."""
    torch._dynamo.reset()
    pattern = GatedDeltaNet(heads=2) + SlidingWindow(heads=2, window=4)
    spec = StackSpec(width=16, depth=2, vocab=29, pattern=pattern, mlp={"width": 24})
    return build(spec), build(spec, "compile"), CompileCounterWithBackend("aot_eager")


def assert_equal_gradients(*runs: tuple[Tensor, LanguageModel]) -> None:
    gradients = (torch.autograd.grad(loss, list(model.parameters())) for loss, model in runs)
    for actual, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.graphs
def test_training_is_one_graph_for_every_length(hybrid, tokens):
    model, compiled, _ = hybrid
    counter = CompileCounterWithBackend("eager")  # AOTAutograd's part of the claim is tested on each mixer and the head
    loss = torch.compile(compiled.loss, fullgraph=True, backend=counter)
    for shape in [(1, 64), (1, 128)]:
        tokens_BT, targets_BT = tokens(*shape), tokens(*shape).flip(1)
        for tensor in (tokens_BT, targets_BT):
            torch._dynamo.mark_dynamic(tensor, 1)
        actual, expected = loss(tokens_BT, targets_BT), model.loss(tokens_BT, targets_BT)
        assert_close(actual, expected)
        assert_equal_gradients((actual, compiled), (expected, model))
    assert counter.frame_count == 1


@pytest.mark.graphs
def test_checkpointed_training_on_packed_sequences_is_one_graph(hybrid, tokens):
    model, compiled, counter = hybrid
    loss = torch.compile(compiled.checkpoint_layers().loss, fullgraph=True, backend=counter)
    tokens_BT = tokens(1, 64)
    for bounds in ([0, 4, 64], [0, 33, 64]):
        context = Context(cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
        actual, expected = loss(tokens_BT, tokens_BT, context), model.loss(tokens_BT, tokens_BT, context)
        assert_close(actual, expected)
        assert_equal_gradients((actual, compiled), (expected, model))
    assert counter.frame_count == 1


@pytest.mark.graphs
def test_decoding_is_one_graph(hybrid, tokens):
    model, compiled, counter = hybrid
    step = torch.compile(compiled, fullgraph=True, backend=counter)
    tokens_BT = tokens(2, 6)
    with torch.no_grad():
        expected, _ = model(tokens_BT)
        state = compiled.init_state(2, capacity=6)
        for t in range(6):
            logits, state = step(tokens_BT[:, t : t + 1], state)
            assert_close(logits[:, 0], expected[:, t])
    assert counter.frame_count == 1


def test_selective_checkpointing_saves_the_results_of_attention_and_recomputes_norms():
    from torch.nn.attention import varlen  # noqa: F401  registers its operator

    import deltazoo.backends.ops.forgetting_attention
    import deltazoo.backends.ops.rms_norm  # noqa: F401

    saved, recomputed = _policy(None, torch.ops.aten.mm.default), _policy(None, torch.ops.aten.mul.Tensor)
    assert saved != recomputed
    for operator in (torch.ops.deltazoo.triton_forgetting_attention.default, torch.ops.torch_attn._varlen_attn.default):
        assert _policy(None, operator) == saved
    assert _policy(None, torch.ops.deltazoo.triton_rms_norm.default) == recomputed
