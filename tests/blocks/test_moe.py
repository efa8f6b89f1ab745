"""Mixture of experts: equality with transformers' blocks in float64, losses, decoding, graphs, initial values."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import JambaConfig, KimiLinearConfig, NemotronHConfig, Qwen3NextConfig
from transformers.models.jamba.modeling_jamba import JambaSparseMoeBlock
from transformers.models.jamba.modeling_jamba import load_balancing_loss_func as jamba_loss
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearMoE
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMoE
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

from deltazoo.backends.ops.grouped import Copies, grouped_linear, grouped_linear_of_copies
from deltazoo.blocks.model.moe import MoE, MoEMlp
from deltazoo.blocks.spec.stack_spec import StackSpec
from deltazoo.mixers import Context

D, HIDDEN, SHARED, EXPERTS, ACTIVE = 12, 20, 28, 5, 3


def qwen3_next() -> tuple[nn.Module, MoE, dict[str, str]]:
    sizes = {"moe_intermediate_size": HIDDEN, "shared_expert_intermediate_size": SHARED}
    config = Qwen3NextConfig(
        hidden_size=D, num_experts=EXPERTS, num_experts_per_tok=ACTIVE, norm_topk_prob=True, **sizes
    )
    ours = MoE(experts=EXPERTS, active=ACTIVE, width=HIDDEN, shared_width=SHARED, shared_gate=True)
    return Qwen3NextSparseMoeBlock(config), ours, {"router": "gate", "shared": "shared_expert"}


def jamba() -> tuple[nn.Module, MoE, dict[str, str]]:
    config = JambaConfig(
        hidden_size=D,
        intermediate_size=HIDDEN,
        num_local_experts=EXPERTS,
        num_experts=EXPERTS,
        num_experts_per_tok=ACTIVE,
    )
    return JambaSparseMoeBlock(config), MoE(experts=EXPERTS, active=ACTIVE, width=HIDDEN, normalize=False), {}


def kimi_linear() -> tuple[nn.Module, MoE, dict[str, str]]:
    config = KimiLinearConfig(
        hidden_size=D,
        moe_intermediate_size=HIDDEN,
        n_shared_experts=2,
        num_local_experts=EXPERTS,
        num_experts=EXPERTS,
        num_experts_per_tok=ACTIVE,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.446,
    )
    ours = MoE(
        experts=EXPERTS,
        active=ACTIVE,
        width=HIDDEN,
        scores="sigmoid",
        selection_bias=True,
        scale=2.446,
        shared_width=2 * HIDDEN,
        balance=0,
    )
    return KimiLinearMoE(config), ours, {"router": "gate", "shared": "shared_experts"}


def nemotron_h() -> tuple[nn.Module, MoE, dict[str, str]]:
    """Groups of experts, latent vectors, and MLPs without a gate."""
    config = NemotronHConfig(
        hidden_size=D,
        moe_intermediate_size=HIDDEN,
        moe_shared_expert_intermediate_size=SHARED,
        moe_latent_size=10,
        n_routed_experts=8,
        num_experts_per_tok=ACTIVE,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
    )
    ours = MoE(
        experts=8,
        active=ACTIVE,
        width=HIDDEN,
        scores="sigmoid",
        selection_bias=True,
        scale=1.5,
        groups=4,
        active_groups=2,
        activation="relu2",
        gated=False,
        latent_width=10,
        shared_width=SHARED,
    )
    return NemotronHMoE(config), ours, {"router": "gate", "shared": "shared_experts"}


def copy_weights(ours: MoEMlp, theirs: nn.Module, names: dict[str, str]) -> dict[nn.Parameter, list[nn.Parameter]]:
    """Copy theirs to ours. Returns: the parameters that each of ours consists of."""
    router = getattr(theirs, names.get("router", "router"))
    pairs = {
        ours.router.weight: [router.weight],
        ours.to_hidden.weight: [theirs.experts.gate_up_proj if ours.config.gated else theirs.experts.up_proj],
        ours.out.weight: [theirs.experts.down_proj],
    }
    if ours.shared is not None:
        shared = getattr(theirs, names["shared"])
        gate = [shared.gate_proj.weight] if ours.config.gated else []
        pairs[ours.shared.to_hidden.weight] = [*gate, shared.up_proj.weight]
        pairs[ours.shared.out.weight] = [shared.down_proj.weight]
    if ours.to_latent is not None:
        pairs |= {
            ours.to_latent.weight: [theirs.fc1_latent_proj.weight],
            ours.from_latent.weight: [theirs.fc2_latent_proj.weight],
        }
    if ours.shared_gate is not None:
        pairs[ours.shared_gate.weight] = [theirs.shared_expert_gate.weight]
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.5)
        for mine, sources in pairs.items():
            mine.copy_(torch.cat(sources))
        if ours.router.bias is not None:
            ours.router.bias.copy_(router.e_score_correction_bias.normal_(std=0.3))
    assert len(pairs) == len(list(ours.parameters()))
    return pairs


@pytest.mark.parametrize("published", [qwen3_next, jamba, kimi_linear, nemotron_h])
def test_equals_the_published_block(published, monkeypatch):
    torch.manual_seed(0)
    theirs, config, names = published()
    theirs, ours = theirs.double(), config.build(D).double()
    pairs = copy_weights(ours, theirs, names)
    x = torch.randn(2, 7, D, dtype=torch.float64, requires_grad=True)
    with monkeypatch.context() as patch:  # their routers compute in float32
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch, "float32", torch.float64)
        expected = theirs(x)
    actual = ours(x, Context()).y
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(x)
    mine = torch.autograd.grad((actual * weight).sum(), [x, *pairs])
    flat = torch.autograd.grad((expected * weight).sum(), [x, *(p for sources in pairs.values() for p in sources)])
    torch.testing.assert_close(mine[0], flat[0], rtol=1e-11, atol=1e-12)
    rest = iter(flat[1:])
    for gradient, sources in zip(mine[1:], pairs.values(), strict=True):
        torch.testing.assert_close(gradient, torch.cat([next(rest) for _ in sources]), rtol=1e-11, atol=1e-12)


@pytest.fixture
def mlp() -> MoEMlp:
    torch.manual_seed(0)
    mlp = MoE(experts=4, active=2, width=8, balance=0.1, z=0.01).build(D).double()
    with torch.no_grad():
        mlp.router.weight.normal_()
    return mlp


@pytest.mark.parametrize("padded", [False, True])
def test_losses_equal_their_definitions(mlp, padded):
    x = torch.randn(2, 9, D, dtype=torch.float64)
    mask = torch.arange(9) < torch.tensor([[9], [5]]) if padded else None
    losses = mlp(x, Context(mask=mask, losses=True)).side.losses
    actual = {loss.name: (loss.coefficient, loss.combine(loss.statistics[None])) for loss in losses}
    logits = (x @ mlp.router.weight.mT).flatten(0, 1)
    real = torch.ones(18, dtype=torch.bool) if mask is None else mask.flatten()
    assert [actual[name][0] for name in ("moe_balance", "moe_z")] == [0.1, 0.01]
    balance = jamba_loss((logits,), 4, 2, mask).double()  # computed in float32
    torch.testing.assert_close(actual["moe_balance"][1], balance, rtol=1e-6, atol=0)
    z = logits[real].logsumexp(-1).square().mean()
    torch.testing.assert_close(actual["moe_z"][1], z, rtol=1e-12, atol=0)


def test_balance_of_sigmoid_scores_uses_their_shares():
    """DeepSeek-V3 2412.19437, equations 17 to 20: the scores divided by their sum over the experts."""
    torch.manual_seed(0)
    mlp = MoE(experts=4, active=2, width=8, scores="sigmoid").build(D).double()
    x = torch.randn(1, 9, D, dtype=torch.float64)
    losses = mlp(x, Context(losses=True)).side.losses
    s = (x[0] @ mlp.router.weight.mT).sigmoid()
    fraction = F.one_hot(s.topk(2).indices, 4).sum(1).double().mean(0)
    expected = 4 * (fraction * (s / s.sum(-1, keepdim=True)).mean(0)).sum()
    torch.testing.assert_close(losses[0].combine(losses[0].statistics[None]), expected, rtol=1e-12, atol=0)


def test_ties_go_to_the_experts_with_the_lowest_index(mlp):
    with torch.no_grad():
        mlp.router.weight.zero_()
    experts, weight, _ = mlp.router(torch.randn(2, 3, D, dtype=torch.float64), Context())
    assert experts.tolist() == [[[0, 1]] * 3] * 2
    assert weight.tolist() == [[[0.5, 0.5]] * 3] * 2


def test_a_model_decodes_what_it_computes_in_one_call(build, tokens):
    mlp = {"type": "moe", "experts": 4, "active": 2, "width": 8, "shared_width": 8}
    pattern = "gated_deltanet(heads=1) + attention(heads=1)"
    model = build(StackSpec(width=16, depth=2, vocab=29, pattern=pattern, mlp=mlp))
    assert StackSpec(**model.spec.model_dump()) == model.spec
    tokens_BT, state, logits = tokens(2, 7), model.init_state(2, capacity=7), []
    for token in tokens_BT.split(1, 1):
        out, state = model(token, state)
        logits.append(out)
    torch.testing.assert_close(torch.cat(logits, 1), model(tokens_BT)[0], rtol=1e-9, atol=1e-9)
    losses = model.losses(tokens_BT, tokens_BT)
    assert list(losses.auxiliary) == ["moe_balance"]
    torch.testing.assert_close(losses.total, losses.cross_entropy + 0.001 * losses.auxiliary["moe_balance"])


def test_a_layer_can_have_its_own_experts():
    layers = {"dense": {"mixer": {"mixer": "retnet", "heads": 1}}}
    layers["sparse"] = layers["dense"] | {"mlp": {"type": "moe", "experts": 3, "width": 8}}
    spec = StackSpec(width=16, depth=2, vocab=29, pattern="dense + sparse", layers=layers, mlp={"width": 8})
    dense, sparse = (row.flops for row in spec.describe().layers)
    assert sparse - dense == 2 * (3 * 16 * 8 + 3 * 16)  # one more expert, and the router
    model = spec.build()
    assert [type(layer.mlp).__name__ for layer in model.stack.layers] == ["DenseMlp", "MoEMlp"]
    for name, std in (("to_hidden", 0.02), ("out", 0.02 / 2), ("router", 0.02)):
        weight = getattr(model.stack.layers[1].mlp, name).weight
        assert weight.std().item() == pytest.approx(std, rel=0.25), name


def test_every_length_and_route_uses_the_same_graph(mlp):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    module = torch.compile(mlp, fullgraph=True, backend=counter, dynamic=True)
    for length in (5, 8, 3):
        x = torch.randn(2, length, D, dtype=torch.float64, requires_grad=True)
        with torch.device("cpu"):  # an active torch function mode
            actual = module(x, Context()).y
        expected = mlp(x, Context()).y
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
        gradients = (torch.autograd.grad(y.square().sum(), [x, *mlp.parameters()]) for y in (actual, expected))
        for left, right in zip(*gradients, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-11)
    assert counter.frame_count == 1


@pytest.mark.parametrize("ends", [[2, 2, 7, 9], [0, 0, 9, 9], [9, 9, 9, 9]])
def test_grouped_linear_equals_a_product_per_group(ends):
    torch.manual_seed(0)
    x = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 5, 6, dtype=torch.float64, requires_grad=True)
    bounds = itertools.pairwise([0, *ends])
    expected = torch.cat([x[start:end] @ weight[g].mT for g, (start, end) in enumerate(bounds)])
    actual = grouped_linear(x, weight, torch.tensor(ends, dtype=torch.int32))
    torch.testing.assert_close(actual, expected)
    grad = torch.randn(9, 5, dtype=torch.float64)
    for left, right in zip(*(torch.autograd.grad(y, [x, weight], grad) for y in (actual, expected)), strict=True):
        torch.testing.assert_close(left, right)


def test_grouped_linear_under_autocast_is_close_to_float32():
    x, weight, ends = torch.randn(9, 6), torch.randn(2, 5, 6), torch.tensor([4, 9], dtype=torch.int32)
    with torch.autocast("cpu", torch.bfloat16):
        actual = grouped_linear(x, weight, ends)
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.float(), grouped_linear(x, weight, ends), rtol=0.02, atol=0.05)


def test_grouped_linear_off_the_cpu_equals_a_product_per_group(monkeypatch):
    """Devices without the kernel zero the rows of other groups; here the CPU runs that form."""
    from deltazoo.backends.ops import grouped as module

    ends = torch.tensor([2, 2, 7, 9], dtype=torch.int32)
    x, grad, weight = torch.randn(9, 6), torch.randn(9, 5), torch.randn(4, 6, 5)
    expected = module._product(x, weight, ends), module._outer_products(grad, x, ends)
    monkeypatch.setattr(module, "_runs_by_rows", lambda x: False)
    torch.testing.assert_close(module._product(x, weight, ends), expected[0])
    torch.testing.assert_close(module._outer_products(grad, x, ends), expected[1])


class _MapOfCopies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor, order: Tensor, ends: Tensor) -> Tensor:
        return grouped_linear_of_copies(x, Copies(order, order.argsort(), 2), self.weight, ends)


@pytest.mark.graphs
def test_an_exported_map_of_copies_has_gradients() -> None:
    generator = torch.Generator().manual_seed(1)
    module, order = _MapOfCopies(), torch.randperm(12, generator=generator)
    inputs = torch.randn(6, 4, generator=generator), order, torch.tensor([5, 12], dtype=torch.int32)
    results = []
    for call in (module, torch.export.export(module, inputs, strict=False).module()):
        x = inputs[0].clone().requires_grad_()
        y = call(x, *inputs[1:])
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, *call.parameters()))))
    torch.testing.assert_close(*results)
