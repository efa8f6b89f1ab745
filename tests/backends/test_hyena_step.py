"""Hyena decodes a token by three kernels before its output map: in Triton's interpreter, or on a GPU."""

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from triton_cases import DEVICE, INTERPRETED, needs_triton

from deltazoo import watch
from deltazoo.backends.ops import gemv, long_conv
from deltazoo.mixers import Hyena, Mixer
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.named_tensors import NamedTensors

B, T, D, CAPACITY = 2, 3, 16, 8
CONFIGS = {
    "defaults": Hyena(),
    "bands": Hyena(bands=3, filter_width=12, max_length=6, conv_width=4),
    "no history of the short convolution": Hyena(conv_width=1),
}
NETWORK, STEP = "implicit_filter_kernel", "long_conv_step_kernel"


def build(name: str = "defaults", dtype: torch.dtype = torch.float32) -> Mixer:
    torch.manual_seed(0)
    mixer = CONFIGS[name].build(D, backend="triton")
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return mixer.to(DEVICE, dtype)


def on(monkeypatch: pytest.MonkeyPatch, kernels: bool) -> None:
    for module in (gemv, long_conv):
        monkeypatch.setattr(module, "kernel_refusals", lambda *_: [] if kernels else ["it is off."])


def inputs(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2 + T, B, 1, D, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)


@torch.no_grad()
def decode(mixer: Mixer, x: Tensor, context: Context | None = None) -> tuple[list[Tensor], list[str]]:
    """Return the outputs of tokens after two others, and the new state; and the kernels of the last token."""
    state = mixer.init_state(B, CAPACITY)
    mixer(x[:2, :, 0].transpose(0, 1), state)
    outputs = [mixer(x_t, state, context).y for x_t in x[2:-1]]
    with watch() as record:
        outputs.append(mixer(x[-1], state, context).y)
    return [*outputs, *state.values()], [run.name for run in record.runs if run.programs]


@needs_triton
@pytest.mark.parametrize(
    "name", [pytest.param("defaults", marks=pytest.mark.kernel_smoke), *sorted({*CONFIGS} - {"defaults"})]
)
def test_a_step_by_kernels_equals_one_by_parts(name, monkeypatch):
    mixer, x = build(name), inputs()
    on(monkeypatch, False)
    separate, others = decode(mixer, x)
    on(monkeypatch, True)
    packed, kernels = decode(mixer, x)
    assert {NETWORK, STEP}.isdisjoint(others)
    convolved = ["gemv_kernel"] if CONFIGS[name].conv_width > 1 else []
    assert kernels == [*convolved, NETWORK, STEP, "gemv_kernel"]
    for ours, reference in zip(packed, separate, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)


@needs_triton
def test_a_step_in_16_bits_is_as_close_to_float64_as_one_by_parts(monkeypatch):
    dtype = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter multiplies no matrices in bfloat16
    mixer, x = build("bands", dtype), inputs(dtype)
    on(monkeypatch, False)
    separate, _ = decode(mixer, x)
    on(monkeypatch, True)
    packed, kernels = decode(mixer, x)
    step = kernels.index(STEP)
    assert kernels[step - 1] == NETWORK and kernels[step + 1].startswith("few_rows")
    on(monkeypatch, False)
    exact, _ = decode(mixer.double(), x.double())
    for ours, parts, wide in zip(packed[:T], separate, exact, strict=False):
        errors = [(y.double() - wide).norm() / wide.norm() for y in (ours, parts)]
        assert errors[0] <= max(1.2 * errors[1], torch.finfo(dtype).eps)


@needs_triton
@torch.no_grad()
def test_rows_with_different_numbers_of_tokens(monkeypatch):
    mixer, x = build(), inputs()
    results = []
    for kernels in (False, True):
        on(monkeypatch, kernels)
        state = mixer.init_state(B, CAPACITY)
        mask = torch.tensor([[True, True, False], [True, False, False]], device=DEVICE)
        mixer(x[:3, :, 0].transpose(0, 1), state, Context(mask=mask))
        results.append([*(mixer(x_t, state).y for x_t in x[3:]), *state.values()])
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)


@needs_triton
@torch.no_grad()
def test_a_changed_weight_of_the_network_changes_the_next_token(monkeypatch):
    mixer, x = build(), inputs()
    on(monkeypatch, True)
    state = mixer.init_state(B, CAPACITY)
    mixer(x[0], state)
    mixer.filters["long"].last.weight.mul_(-2)
    ours = mixer(x[1], NamedTensors({name: tensor.clone() for name, tensor in state.items()})).y
    on(monkeypatch, False)
    torch.testing.assert_close(ours, mixer(x[1], state).y, rtol=1e-4, atol=1e-5)


class Doubled(nn.Linear):
    """A linear map that is not plain."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@needs_triton
def test_maps_that_are_not_plain_are_called(monkeypatch):
    mixer, x = build(), inputs()
    for path, linear in [*mixer.named_modules()]:
        if isinstance(linear, nn.Linear):
            parent, _, child = path.rpartition(".")
            doubled = Doubled(linear.in_features, linear.out_features, linear.bias is not None, device=DEVICE)
            doubled.load_state_dict(linear.state_dict())
            setattr(mixer.get_submodule(parent), child, doubled)
            on(monkeypatch, False)
            separate, _ = decode(mixer, x)
            on(monkeypatch, True)
            packed, kernels = decode(mixer, x)
            assert (NETWORK in kernels) == ("filters" not in path) and STEP in kernels
            torch.testing.assert_close(packed[-3 - T : -3], separate[-3 - T : -3], rtol=2e-3, atol=1e-3)
            setattr(mixer.get_submodule(parent), child, linear)


@needs_triton
@torch.no_grad()
def test_a_module_with_a_hook_is_called(monkeypatch):
    mixer, x = build(), inputs()
    on(monkeypatch, True)
    for path, module in [*mixer.named_modules()]:
        if path in ("", "filters", "filters.long.layers"):  # of the last two nobody calls the forward
            continue
        state, calls = mixer.init_state(B, CAPACITY), []
        hook = module.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        with watch() as record:
            mixer(x[0], state)
        assert calls and (STEP in record.kernels), path
        assert (NETWORK in record.kernels) == (not path.startswith("filters.long.")), path
        hook.remove()


class Mode(TorchFunctionMode):
    """Calls every function as without the mode."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@needs_triton
def test_under_a_function_mode_the_network_runs_by_parts(monkeypatch):
    mixer, x = build(), inputs()
    on(monkeypatch, True)
    expected, _ = decode(mixer, x)
    with Mode():
        ours, kernels = decode(mixer, x)
    assert NETWORK not in kernels and STEP in kernels
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@needs_triton
def test_padded_tokens_decode_by_parts(monkeypatch):
    mixer, x = build(), inputs()
    on(monkeypatch, True)
    expected, _ = decode(mixer, x)
    ours, kernels = decode(mixer, x, Context(mask=torch.ones(B, 1, dtype=torch.bool, device=DEVICE)))
    assert NETWORK not in kernels and STEP not in kernels
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@needs_triton
@torch.no_grad()
def test_a_step_is_one_graph(monkeypatch):
    torch._dynamo.reset()
    on(monkeypatch, True)
    mixer, x = build(), inputs()[0]
    states = [mixer.init_state(B, CAPACITY) for _ in range(2)]
    compiled = torch.compile(mixer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, states[0]).y, mixer(x, states[1]).y)
    torch.testing.assert_close(dict(states[0]), dict(states[1]))
