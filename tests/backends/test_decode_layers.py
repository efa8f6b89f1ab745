"""Layers that decode by products of few rows: in Triton's interpreter, or on a GPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from triton_cases import DEVICE, INTERPRETED, needs_triton

from deltazoo import watch
from deltazoo.backends.ops import forgetting_attention, gemv
from deltazoo.backends.triton.decode import rwkv_op
from deltazoo.blocks import Dense, StackSpec
from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.mixers import GLA, KDA, RWKV7, Attention, GatedDeltaNet, Mamba2, MixerConfig, SlidingWindow
from deltazoo.mixers.core.delta_mixer import DeltaMixer

B, T = 1, 2
MIXERS: dict[str, MixerConfig] = {
    "gdn": GatedDeltaNet(heads=2, key_width=8, value_width=12),
    "maps of low rank": KDA(heads=2, key_width=8, value_width=8),
    "a norm after the step": Mamba2(heads=1, value_heads=2, key_width=8, value_width=8),
    "decays of a sigmoid": GLA(heads=2, key_width=8, value_width=8),
    "attention": Attention(heads=4, key_value_heads=2, gate=True, qk_norm="head"),
    "window": SlidingWindow(heads=2, window=2),
    "token shift": RWKV7(heads=2, key_width=8, value_width=12),
}


def build(mixer: MixerConfig, **fields: object) -> LanguageModel:
    torch.manual_seed(0)
    spec = StackSpec(width=16, **({"depth": 1, "vocab": 11, "pattern": mixer, "mlp": Dense(width=20)} | fields))
    model = spec.build(backend="triton").to(DEVICE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape).to(DEVICE))  # some start at 0
    return model


@torch.no_grad()
def decode(model: LanguageModel, monkeypatch: pytest.MonkeyPatch, packed: bool) -> tuple[Tensor, list[str]]:
    """Return the logits of T tokens, and the kernels that were launched. packed: by products of few rows."""
    with monkeypatch.context() as patch:
        for module in (gemv, forgetting_attention):
            patch.setattr(module, "kernel_refusals", lambda *_: [] if packed else ["it is off."])
        tokens = torch.arange(B * T, device=DEVICE).view(B, T)
        state, logits = model.init_state(B, T), []
        with watch() as record:
            for t in range(T):
                y, state = model(tokens[:, t : t + 1], state)
                logits.append(y)
    return torch.cat(logits, 1), [run.name for run in record.runs]


@needs_triton
@pytest.mark.parametrize("name", MIXERS)
def test_packed_products_equal_separate_ones(name, monkeypatch):
    model = build(MIXERS[name])
    separate, unpacked_kernels = decode(model, monkeypatch, packed=False)
    packed, kernels = decode(model, monkeypatch, packed=True)
    torch.testing.assert_close(packed, separate, rtol=1e-4, atol=1e-5)
    # the products convolve what a kernel convolves for heads that share keys
    assert unpacked_kernels.count("convolve_step_kernel") == (T if name == "a norm after the step" else 0)
    assert "convolve_step_kernel" not in kernels
    # norm and maps, residual; norm and hidden channels, residual; head; the second maps of KDA and GLA
    assert kernels.count("gemv_kernel") == T * (5 + (name in ("maps of low rank", "decays of a sigmoid")))
    steps = {"token_attention_kernel", "fused_step_kernel", "rwkv_step_kernel"}
    assert not INTERPRETED or steps.intersection(kernels)


class Doubled(nn.Linear):
    """A linear map that is not plain."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def add_hook(model: LanguageModel, name: str) -> None:
    model.get_submodule(name).register_forward_hook(lambda module, arguments, output: 2 * output)


def replace(model: LanguageModel, name: str) -> None:
    parent, _, child = name.rpartition(".")
    linear = model.get_submodule(name)
    assert isinstance(linear, nn.Linear)
    doubled = Doubled(linear.in_features, linear.out_features, bias=False, device=DEVICE)
    doubled.load_state_dict(linear.state_dict())
    setattr(model.get_submodule(parent), child, doubled)


@needs_triton
@pytest.mark.parametrize(("joint_rows", "small_bytes"), [(0, 0), (1, 0), (0, 1 << 20)])
def test_values_of_later_rwkv7_layers_are_interpolated(joint_rows, small_bytes, monkeypatch):
    """The step of few rows, or with small weights, applies the maps of low rank itself."""
    monkeypatch.setattr(rwkv_op, "_JOINT_ROWS", joint_rows)
    monkeypatch.setattr(rwkv_op, "_SMALL_BYTES", small_bytes)
    model = build(MIXERS["token shift"], depth=2)
    separate, _ = decode(model, monkeypatch, packed=False)
    packed, kernels = decode(model, monkeypatch, packed=True)
    torch.testing.assert_close(packed, separate, rtol=1e-4, atol=1e-5)
    assert kernels.count("rwkv_step_kernel") == 2 * T
    assert kernels.count("rwkv_low_rank_kernel") == (0 if joint_rows or small_bytes else 2 * T)


@needs_triton
@torch.no_grad()
def test_an_rwkv7_mixer_without_a_norm_before_it_decodes_by_the_same_kernels(monkeypatch):
    mixer = build(MIXERS["token shift"]).stack.layers[0].mixers[0]
    assert isinstance(mixer, DeltaMixer)
    x = torch.randn(T, B, 1, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    results = []
    for reasons in (["it is off."], []):
        monkeypatch.setattr(gemv, "kernel_refusals", lambda *_, reasons=reasons: reasons)
        state = mixer.init_state(B)
        with watch() as record:
            outputs = [mixer(x_t, state).y for x_t in x]
        results.append((torch.cat(outputs), *state.values()))
    assert [run.name for run in record.runs].count("rwkv_step_kernel") == T
    for packed, separate in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(packed, separate, rtol=1e-4, atol=1e-5)


@needs_triton
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mixers.0.project.to_qkv", add_hook),
        ("mixers.0.outputs.gate.proj", replace),
        ("mixers.0.out", replace),
        ("mlp.to_hidden", replace),
        ("mlp.out", add_hook),
    ],
)
def test_maps_that_are_not_plain_are_called(name: str, change: Callable[[LanguageModel, str], None], monkeypatch):
    model = build(MIXERS["gdn"])
    change(model, f"stack.layers.0.{name}")
    separate, _ = decode(model, monkeypatch, packed=False)
    packed, _ = decode(model, monkeypatch, packed=True)
    torch.testing.assert_close(packed, separate, rtol=1e-4, atol=1e-5)


@needs_triton
def test_hooks_of_a_mixer_and_of_an_mlp_run(monkeypatch):
    model = build(MIXERS["gdn"])
    calls: list[str] = []
    for module in (model.stack.layers[0].mixers[0], model.stack.layers[0].mlp):
        module.register_forward_hook(lambda module, arguments, output: calls.append(type(module).__name__))
    decode(model, monkeypatch, packed=True)
    assert calls == ["DeltaMixer", "DenseMlp"] * T
