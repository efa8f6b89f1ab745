"""Decoding through a mixture of experts against the module's separate operations: in the interpreter, or on a GPU."""

import pytest
import torch
from triton_cases import DEVICE, needs_triton

from deltazoo import watch
from deltazoo.backends.ops import gemv
from deltazoo.backends.ops.gemv import Norm
from deltazoo.backends.ops.rms_norm import rms_norm
from deltazoo.blocks.model.moe import MoE
from deltazoo.mixers.core.mixer import Context


@pytest.fixture(autouse=True)
def kernels(monkeypatch) -> None:
    """Let the interpreter run the kernels of layers."""
    monkeypatch.setattr(gemv, "kernel_refusals", lambda *_: [])


CONFIGS = {
    "shared, normalised": MoE(width=20, experts=6, active=2, shared_width=12, shared_gate=True),
    "sigmoid, biased": MoE(
        width=24, experts=40, active=3, scores="sigmoid", selection_bias=True, scale=2.5, shared_width=40,
        activation="relu2", gated=False,
    ),
    "not normalised": MoE(width=8, experts=5, active=5, normalize=False),
}  # fmt: skip


@needs_triton
@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_step_equals_separate_operations(name, rows, monkeypatch):
    torch.manual_seed(0)
    config, D = CONFIGS[name], 16
    mlp = config.build(D).to(DEVICE)
    for parameter in mlp.parameters():
        parameter.normal_(std=0.5)
    if mlp.router.bias is not None:
        mlp.router.bias.normal_()
    x, norm = torch.randn(rows, 1, D, device=DEVICE), Norm(torch.rand(D, device=DEVICE) + 0.5, 1e-5)
    if rows * config.active > config.experts:
        assert mlp.residual_step(x, norm) is None
        return
    with watch() as record:
        y = mlp.residual_step(x, norm)
    exact = mlp.double()(rms_norm(x.double(), norm.weight.double(), norm.eps), Context()).y + x.double()
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5)
    assert [run.name for run in record.runs if run.name != "products of few rows"] == [
        "gemv_kernel", "select_kernel", "expert_hidden_kernel", "expert_output_kernel",
    ]  # fmt: skip


@needs_triton
@torch.no_grad()
def test_equal_scores_choose_the_experts_of_lower_index():
    mlp = MoE(width=8, experts=6, active=2, normalize=False).build(8).to(DEVICE)
    mlp.router.weight.zero_()
    mlp.out.weight[2:] = torch.nan
    x, norm = torch.randn(1, 1, 8, device=DEVICE), Norm(torch.ones(8, device=DEVICE), 1e-5)
    y = mlp.residual_step(x, norm)
    exact = mlp(rms_norm(x, *norm), Context()).y + x
    torch.testing.assert_close(y, exact)
    assert y.isfinite().all()


@needs_triton
@torch.no_grad()
@pytest.mark.parametrize("change", ["hook", "dtype", "bias"])
def test_other_modules_are_called(change):
    mlp = MoE(width=8, experts=4, active=2, shared_width=8).build(16).to(DEVICE)
    if change == "hook":
        mlp.router.register_forward_hook(lambda *_: None)
    elif change == "dtype":
        mlp.router.double()
    else:
        mlp.shared.out = torch.nn.Linear(8, 16, bias=True, device=DEVICE)
    assert mlp.residual_step(torch.randn(1, 1, 16, device=DEVICE), Norm(torch.ones(16, device=DEVICE), 1e-5)) is None


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@torch.no_grad()
def test_layers_in_a_cuda_graph_load_the_experts_of_each_token():
    """In a graph the output weights are loaded before the hidden channels are ready."""
    torch.manual_seed(0)
    config = MoE(width=96, experts=64, active=4, shared_width=64, shared_gate=True)
    layers = [config.build(256).to(DEVICE, torch.bfloat16) for _ in range(6)]
    for parameter in (parameter for layer in layers for parameter in layer.parameters()):
        parameter.normal_(std=0.1)
    x, norm = torch.randn(1, 1, 256, device=DEVICE).bfloat16(), Norm(torch.ones(256, device=DEVICE).bfloat16(), 1e-5)

    def run() -> torch.Tensor:
        y = x
        for layer in layers:
            y = layer.residual_step(y, norm)
        return y

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(50):
        x.normal_()
        graph.replay()
        assert torch.equal(captured, run())
