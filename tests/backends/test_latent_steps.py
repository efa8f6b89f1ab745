"""Steps of the mixer `mla` by the kernels of a token against those by parts: in Triton's interpreter, or on a GPU."""

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from triton_cases import DEVICE, needs_triton

from deltazoo import watch
from deltazoo.backends.ops import gemv
from deltazoo.mixers import MLA
from deltazoo.mixers.core.mixer import Context, Mixer
from deltazoo.mixers.parts.rope_scaling import RopeScaling

B, T, D, SLOTS = 2, 3, 16, 9
KERNELS = {"latent_token_kernel", "latent_attention_kernel", "latent_output_kernel"}
SIZES = {"heads": 3, "key_width": 6, "value_width": 5, "latent_width": 20, "rotary_width": 4}
CONFIGS = {
    "default fields": MLA(),
    "sizes that are no powers of two": MLA(**SIZES),
    "no positions, odd rotary width": MLA(**SIZES | {"rotary_width": 3}, rotary_theta=None),
    "no rotary channels": MLA(**SIZES | {"rotary_width": 0}),
    "gate per head, biases, wide output": MLA(**SIZES | {"heads": 4}, gate="head", bias=True),
    "gate per channel, low-rank query": MLA(**SIZES, gate="channel", query_rank=3),
    "scaled frequencies": MLA(**SIZES, rope_scaling=RopeScaling(rope_type="linear", factor=4.0)),
}


def build(config: MLA) -> Mixer:
    torch.manual_seed(0)
    mixer = config.build(D).to(DEVICE)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape).to(DEVICE))
    return mixer


def draw_tokens() -> Tensor:
    return torch.randn(T, B, 1, D, generator=torch.Generator().manual_seed(1)).to(DEVICE)


@torch.no_grad()
def decode(mixer: Mixer, monkeypatch: pytest.MonkeyPatch, by_kernels: bool) -> tuple[list[Tensor], set[str]]:
    """Return the outputs of tokens after two, and the new state; and the kernels."""
    x, positions = draw_tokens(), torch.tensor([[100_000], [3]], device=DEVICE)
    with monkeypatch.context() as patch:
        patch.setattr(gemv, "kernel_refusals", lambda *_: [] if by_kernels else ["it is off."])
        state = mixer.init_state(B, SLOTS)
        mixer(x[:2, :, 0].transpose(0, 1), state)
        with watch() as record:
            outputs = [mixer(x_t, state).y for x_t in x] + [mixer(x[0], state, Context(positions=positions)).y]
    return [*outputs, *state.values()], {run.name for run in record.runs}


def assert_equal_steps(mixer: Mixer, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Compare steps by kernels with those by parts. Returns: the kernels."""
    separate, others = decode(mixer, monkeypatch, by_kernels=False)
    ours, kernels = decode(mixer, monkeypatch, by_kernels=True)
    assert not KERNELS & others - {"latent_attention_kernel"}
    for result, reference in zip(ours, separate, strict=True):
        torch.testing.assert_close(result, reference, rtol=1e-4, atol=1e-5)
    return kernels


@needs_triton
@pytest.mark.parametrize(
    "name", [pytest.param("default fields", marks=pytest.mark.kernel_smoke), *sorted({*CONFIGS} - {"default fields"})]
)
def test_a_step_by_kernels_equals_one_by_parts(name, monkeypatch):
    assert assert_equal_steps(build(CONFIGS[name]), monkeypatch) >= KERNELS


@needs_triton
def test_steps_with_a_window_are_computed_by_parts(monkeypatch):
    assert "latent_token_kernel" not in assert_equal_steps(build(MLA(**SIZES, window=2)), monkeypatch)


@torch.no_grad()
def kernels_of_step(mixer: Mixer, context: Context | None = None, rows: int = 1) -> set[str]:
    with watch() as record:
        mixer(draw_tokens()[0, :rows], mixer.init_state(rows, SLOTS), context)
    return {run.name for run in record.runs}


@needs_triton
def test_a_part_with_a_hook_is_called(monkeypatch):
    mixer = build(MLA(**SIZES, gate="head", query_rank=3))
    monkeypatch.setattr(gemv, "kernel_refusals", lambda *_: [])
    for name, module in mixer.named_children():
        if name in ("filters", "to_kv"):  # a step multiplies the weights of to_kv into q and o
            continue
        calls = []
        hook = module.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        kernels_of_step(mixer)
        assert calls, name
        hook.remove()
    hook = mixer.to_kv.register_forward_hook(lambda *_: None)
    assert "latent_token_kernel" not in kernels_of_step(mixer)
    hook.remove()
    assert kernels_of_step(mixer) >= KERNELS


class Doubled(nn.Linear):
    """A linear map that is not plain."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@needs_triton
@pytest.mark.parametrize("name", ["to_q", "to_latent", "to_kv", "to_gate", "out"])
def test_maps_that_are_not_plain_are_called(name, monkeypatch):
    mixer = build(MLA(**SIZES, gate="head"))
    linear = mixer.get_submodule(name)
    doubled = Doubled(linear.in_features, linear.out_features, bias=False, device=DEVICE)
    doubled.load_state_dict(linear.state_dict())
    setattr(mixer, name, doubled)
    kernels = assert_equal_steps(mixer, monkeypatch)
    assert ("latent_token_kernel" in kernels) == (name != "to_kv")


class Mode(TorchFunctionMode):
    """Calls every function as without the mode."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@needs_triton
def test_modes_autocast_padding_and_packs_decode_by_parts(monkeypatch):
    mixer = build(MLA(**SIZES))
    monkeypatch.setattr(gemv, "kernel_refusals", lambda *_: [])
    mask = Context(mask=torch.ones(1, 1, dtype=torch.bool, device=DEVICE))
    pack = Context(cu_seqlens=torch.tensor([0, 1], dtype=torch.int32, device=DEVICE))
    for context in (mask, pack):
        assert "latent_token_kernel" not in kernels_of_step(mixer, context)
    for manager in (Mode(), torch.autocast(DEVICE, torch.float16)):
        with manager:
            assert "latent_token_kernel" not in kernels_of_step(mixer)
    assert kernels_of_step(mixer) >= KERNELS


@needs_triton
@torch.no_grad()
def test_a_step_is_one_graph(monkeypatch):
    torch._dynamo.reset()  # else it counts the forward methods that other tests have compiled
    monkeypatch.setattr(gemv, "kernel_refusals", lambda *_: [])
    mixer, x = build(MLA(**SIZES)), draw_tokens()[0]
    states = [mixer.init_state(B, SLOTS) for _ in range(2)]
    compiled = torch.compile(mixer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, states[0]).y, mixer(x, states[1]).y)
    torch.testing.assert_close(dict(states[0]), dict(states[1]))
