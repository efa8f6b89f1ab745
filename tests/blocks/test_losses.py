"""Auxiliary losses: their definition over all layers, and their gradients under checkpointing and accumulation."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from deltazoo.blocks.model.compilation import compile_layers
from deltazoo.blocks.model.losses import Losses, combine_losses
from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.blocks.spec.stack_spec import StackSpec
from deltazoo.mixers import AuxiliaryLoss, Context, LinearAttention, MoM
from deltazoo.mixers.core.side import LostGradientError

MEMORY = LinearAttention(heads=1)
MOM = MoM(memory=MEMORY, memories=3, active=2, balance=0.3, z=0.2)


@pytest.fixture
def mom_model(build) -> LanguageModel:
    return build(StackSpec(width=8, depth=3, vocab=29, pattern=2 * MOM + MEMORY, mlp={"width": 8}))


@pytest.fixture
def small_model(build) -> LanguageModel:
    """Two equal layers, for tests that compile."""
    mom = MoM(memory=MEMORY, memories=2, active=1, shared=False, balance=0.3)
    return build(StackSpec(width=8, depth=2, vocab=29, pattern=mom, mlp={"width": 8}))


def gradients(loss: Tensor, model: LanguageModel) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    for left, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-11)


def router_logits(model: LanguageModel, tokens_BT: Tensor, context: Context | None) -> list[Tensor]:
    """The logits of every router, [B T, M] each."""
    logits: list[Tensor] = []
    routers = [layer.mixers[0].router for layer in model.stack.layers[:2]]
    handles = [
        router.register_forward_hook(lambda r, inputs, _: logits.append((inputs[0] @ r.weight.mT).flatten(0, 1)))
        for router in routers
    ]
    model(tokens_BT, None, context)
    for handle in handles:
        handle.remove()
    return logits


@pytest.mark.parametrize(("length", "lengths"), [(8, None), (10, (10, 6))])
def test_losses_equal_their_definitions_over_all_layers(mom_model, tokens, length, lengths):
    tokens_BT = tokens(2, length)
    mask = None if lengths is None else torch.arange(length) < torch.tensor(lengths)[:, None]
    context = Context(mask=mask)
    targets = tokens_BT if mask is None else tokens_BT.masked_fill(~mask, -100)
    losses = mom_model.losses(tokens_BT, targets, context)
    logits = router_logits(mom_model, tokens_BT, context)
    entropy = F.cross_entropy(mom_model(tokens_BT, None, context)[0].flatten(0, 1), targets.flatten())
    real = torch.ones(16, dtype=torch.bool) if mask is None else mask.flatten()
    p = torch.cat([layer[real] for layer in logits]).softmax(-1)
    balance = 3 * (F.one_hot(p.topk(2).indices, 3).sum(1).double().mean(0) * p.mean(0)).sum()
    float32_balance = load_balancing_loss_func(tuple(logits), 3, 2, mask)
    torch.testing.assert_close(balance, float32_balance, rtol=1e-6, atol=0, check_dtype=False)
    z = sum(layer[real].logsumexp(-1).square().mean() for layer in logits)
    assert_same([losses.cross_entropy], [entropy])
    assert set(losses.auxiliary) == {"mom_balance", "mom_z"}
    assert_same([losses.auxiliary["mom_balance"], losses.auxiliary["mom_z"]], [balance, z])
    assert_same([losses.total], [entropy + 0.3 * losses.auxiliary["mom_balance"] + 0.2 * z])
    assert_same([mom_model.loss(tokens_BT, targets, context)], [losses.total])
    assert_same(gradients(losses.total, mom_model), gradients(entropy + 0.3 * balance + 0.2 * z, mom_model))


def test_a_uniform_router_has_the_balance_loss_k(mom_model, tokens):
    with torch.no_grad():
        for layer in mom_model.stack.layers[:2]:
            layer.mixers[0].router.weight.zero_()
    losses = mom_model.losses(tokens(2, 9), tokens(2, 9))
    assert losses.auxiliary["mom_balance"].item() == pytest.approx(2)


def test_a_coefficient_of_zero_records_no_loss(build, tokens):
    losses = build(StackSpec(width=8, depth=1, vocab=29, pattern=MoM(memory=MEMORY, balance=0))).losses(
        tokens(2, 9), tokens(2, 9)
    )
    assert losses.auxiliary == {}
    assert torch.equal(losses.total, losses.cross_entropy)


@pytest.mark.graphs
def test_checkpointed_and_compiled_layers_count_each_loss_once(small_model, tokens):
    tokens_BT = tokens(2, 2)

    def run() -> tuple[Losses, list[Tensor]]:
        losses = small_model.losses(tokens_BT, tokens_BT)
        return losses, gradients(losses.total, small_model)

    expected, expected_gradients = run()
    small_model.checkpoint_layers()
    for losses, grads in (run(), compile_layers(small_model, "aot_eager") and run()):
        assert_same([losses.total, *losses.auxiliary.values()], [expected.total, *expected.auxiliary.values()])
        assert_same(grads, expected_gradients)


def checkpoint_reentrantly(module: nn.Module) -> None:
    module.forward = functools.partial(checkpoint, module.forward, use_reentrant=True)


LOSING = {
    "an MLP": ({}, lambda layer: layer.mlp, "side outputs moe_balance"),
    "a router": ({}, lambda layer: layer.mlp.router, "side outputs moe_balance"),
    "a mixer": ({"pattern": MOM}, lambda layer: layer.mixers[0], "side outputs mom_balance, mom_z"),
    "a layer": ({}, lambda layer: layer, "side outputs moe_balance"),
    "the first values": ({"pattern": "rwkv7(heads=1)"}, lambda layer: layer.mixers[0], "rwkv7 first value"),
}


@pytest.mark.parametrize("name", LOSING)
def test_a_reentrant_checkpoint_that_would_lose_gradients_is_refused(build, tokens, name):
    fields, choose, tensors = LOSING[name]
    spec = {"width": 8, "depth": 2, "vocab": 29, "pattern": MEMORY, "mlp": {"type": "moe", "experts": 2, "width": 8}}
    model = build(StackSpec(**spec | fields))
    checkpoint_reentrantly(choose(model.stack.layers[0]))
    with pytest.raises(LostGradientError, match=f"{tensors}.* would get no gradients: .* pass use_reentrant=False"):
        model.loss(tokens(2, 5), tokens(2, 5))


def test_a_later_layer_in_a_reentrant_checkpoint_does_not_read_first_values(build, tokens):
    model = build(StackSpec(width=8, depth=2, vocab=29, pattern="rwkv7(heads=1)", mlp={"width": 8}))
    checkpoint_reentrantly(model.stack.layers[1])
    with pytest.raises(LostGradientError, match="rwkv7 first value would get no gradients"):
        model.loss(tokens(2, 5), tokens(2, 5))


def test_a_reentrant_checkpoint_of_modules_without_side_outputs_keeps_the_gradients(build, tokens):
    spec = StackSpec(width=8, depth=3, vocab=29, pattern=MEMORY, mlp={"width": 8})
    expected, model = build(spec), build(spec)
    expected.loss(tokens(2, 5), tokens(2, 5)).backward()
    first, second, third = model.stack.layers
    for module in (first, second.mixers[0], third.mlp):
        checkpoint_reentrantly(module)
    model.loss(tokens(2, 5), tokens(2, 5)).backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in expected.parameters()])


def test_statistics_that_were_cast_are_combined_in_float32():
    cast = AuxiliaryLoss("a", 1.0, torch.tensor([1.0, 2.0**-9], dtype=torch.bfloat16))
    assert combine_losses(torch.tensor(0.0), [cast]).auxiliary["a"].item() == 1 + 2.0**-9


@pytest.mark.graphs
def test_equal_layers_with_losses_share_a_graph(small_model, tokens):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    small_model.requires_grad_(False)
    with torch.no_grad():
        compile_layers(small_model, counter).losses(tokens(2, 3), tokens(2, 3))
    assert counter.frame_count == 2  # of the layers and of the last norm


@pytest.mark.graphs
def test_losses_compile_to_one_graph(small_model, tokens):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")  # the test of checkpointed layers has AOTAutograd
    tokens_BT = tokens(2, 2)
    expected = small_model.losses(tokens_BT, tokens_BT)
    actual = torch.compile(small_model.losses, fullgraph=True, backend=counter)(tokens_BT, tokens_BT)
    assert counter.frame_count == 1
    assert actual.auxiliary.keys() == expected.auxiliary.keys()
    assert_same([actual.total, *actual.auxiliary.values()], [expected.total, *expected.auxiliary.values()])
    assert_same(gradients(actual.total, small_model), gradients(expected.total, small_model))


def test_accumulated_and_scaled_gradients_are_those_of_the_mean_loss(mom_model, tokens):
    """The balance loss is one of each micro-batch."""
    halves = tokens(4, 9).split(2)
    expected = gradients(sum(mom_model.loss(half, half) for half in halves) / 2, mom_model)
    for half in halves:
        (1024 * mom_model.loss(half, half) / 2).backward()
    assert_same([parameter.grad / 1024 for parameter in mom_model.parameters()], expected)


def test_losses_with_other_coefficients_or_shapes_are_combined_separately():
    def half_of_squares(statistics_LE: Tensor) -> Tensor:
        return statistics_LE.sum(0).square().sum() / 2

    statistics = [torch.tensor(values) for values in ([1.0, 2.0], [3.0, 4.0], [1.0, 1.0], [2.0])]
    coefficients = [0.1, 0.1, 0.5, 0.1]
    recorded = [
        AuxiliaryLoss("a", coefficient, x, half_of_squares)
        for coefficient, x in zip(coefficients, statistics, strict=True)
    ]
    losses = combine_losses(torch.tensor(7.0), [*recorded, AuxiliaryLoss("b", 2.0, torch.tensor(3.0))])
    assert losses.auxiliary["a"].item() == 26 + 1 + 2  # (4^2 + 6^2) / 2, (1 + 1) / 2 and 2^2 / 2
    assert losses.auxiliary["b"].item() == 3
    assert losses.total.item() == pytest.approx(7 + 0.1 * 26 + 0.5 * 1 + 0.1 * 2 + 2 * 3)
