"""Mixers in low precision: gates and states stay in float32, outputs and gradients stay close to float64."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from deltazoo.backends.compile import CompileBackend
from deltazoo.backends.update import registry
from deltazoo.backends.update.base import Backend, UpdateInputs
from deltazoo.mixers.core.conformance import relative_error
from deltazoo.mixers.core.delta_mixer import DeltaMixer
from deltazoo.mixers.core.mixer import Context, Mixer, MixerConfig, Place
from deltazoo.mixers.core.part import HeadShape, OutputArguments
from deltazoo.mixers.mom import Router
from deltazoo.mixers.parts.memory.preconditioner import EraseAsPair
from deltazoo.mixers.parts.skips import Bonus
from deltazoo.mixers.path_attention import PathAttention
from deltazoo.mixers.raven import Raven


def without_zero_parameters(mixer: Mixer) -> Mixer:
    """Draw the parameters that are initialised to zero, because they make the gradients of other parameters zero."""
    with torch.no_grad():
        for parameter in mixer.parameters():
            if not parameter.any():
                parameter.normal_(std=0.1)
    return mixer


def test_every_parameter_gets_a_gradient(mixer: Mixer, x: Tensor) -> None:
    y = without_zero_parameters(mixer)(x).y
    (y * torch.randn_like(y)).sum().backward()
    for name, parameter in mixer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("part", ["bonus", "pair"])
def test_products_with_gates_keep_operands_of_16_bits_for_the_backward(part: str) -> None:
    q, k, v, e = (torch.randn(2, 5, 3, 4, dtype=torch.bfloat16, requires_grad=True) for _ in range(4))
    gate = torch.rand(2, 5, 3, 4, requires_grad=True)
    inputs = UpdateInputs(q, k, v, log_decay=-gate, beta=gate[..., 0], erase_key=e)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda y: saved.append(y) or y, lambda y: y):
        if part == "pair":
            EraseAsPair()(q, inputs, None, Context())
        else:
            bonus = Bonus(HeadShape(12, 3, 3, 4, 4), 0.3)
            bonus(torch.randn_like(v), OutputArguments(q, inputs, inputs), None, Context())
    copies = [y for y in saved if any(y.shape == x.shape and torch.equal(y, x.float()) for x in (q, k, v, e))]
    assert copies
    assert {y.dtype for y in copies} == {torch.bfloat16}


def seed_of(config: MixerConfig) -> int:
    """Return a seed with which Raven, which activates the slots with the largest products, has no equal products.

    It may choose another of slots whose products are equal in 16 bits than in float64.
    """
    return 1 if isinstance(config, Raven) else 0


def in_float64(config: MixerConfig, like: Mixer, width: int, backend: str | Backend = "reference") -> Mixer:
    """Build the mixer in float64 with the parameters of another."""
    mixer = config.build(width, backend=backend).double()
    mixer.load_state_dict({name: value.double() for name, value in like.state_dict().items()})
    return mixer


@pytest.fixture
def float64_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("float64_by_default")
def test_a_mixer_built_with_float64_as_default_dtype_is_float64(config: MixerConfig) -> None:
    mixer = config.build(24, Place(1, 4), backend="reference")
    mixer.init_weights()
    for name, tensor in [*mixer.named_parameters(), *mixer.named_buffers()]:
        assert tensor.dtype == torch.float64 or not tensor.is_floating_point(), name
    y, state, _ = mixer(torch.randn(2, 3, 24), mixer.init_state(2, 8))
    assert y.dtype == torch.float64
    assert {leaf.dtype for leaf in tree_leaves(state)} <= {torch.float64, torch.int64}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_autocast_is_close_to_float64_and_keeps_states_in_float32(
    case: tuple[MixerConfig, str | Backend], dtype: torch.dtype
) -> None:
    config, backend = case
    torch.manual_seed(seed_of(config))
    mixer = without_zero_parameters(config.build(64, backend=backend))
    x = torch.randn(2, 12, 64)
    weight = torch.randn(2, 12, 64)
    with torch.autocast("cpu", dtype=dtype):
        y, state, _ = mixer(x, mixer.init_state(2, 12))
        (y * weight).sum().backward()
    exact = in_float64(config, mixer, 64)
    expected = exact(x.double()).y
    (expected * weight).sum().backward()
    assert y.dtype == dtype
    assert relative_error(y, expected) < 0.03
    assert {leaf.dtype for leaf in tree_leaves(state)} <= {torch.float32, torch.int64}
    for (name, ours), theirs in zip(mixer.named_parameters(), exact.parameters(), strict=True):
        assert relative_error(ours.grad, theirs.grad) < 0.1, name


def test_path_attention_casts_its_output_once_under_autocast() -> None:
    mixer, dtypes = PathAttention(heads=1).build(16), []
    mixer.out.register_forward_pre_hook(lambda module, arguments: dtypes.append(arguments[0].dtype))
    for enabled in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            mixer(torch.randn(1, 5, 16))
    assert dtypes == [torch.bfloat16, torch.float32]


def test_decoding_under_autocast_is_close_to_prefill(case: tuple[MixerConfig, str | Backend]) -> None:
    config, backend = case
    torch.manual_seed(0)
    mixer = config.build(64, backend=backend)
    x = torch.randn(2, 12, 64)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        whole = mixer(x).y
        state, outputs = mixer.init_state(2, 12), []
        for piece in x.split([7, 1, 1, 1, 1, 1], dim=1):
            y, state, _ = mixer(piece, state)
            outputs.append(y)
    assert relative_error(torch.cat(outputs, 1), whole) < 0.02


def test_bf16_module_is_close_to_float64(case: tuple[MixerConfig, str | Backend]) -> None:
    config, backend = case
    torch.manual_seed(seed_of(config))
    mixer = config.build(64, backend=backend).bfloat16()
    x = torch.randn(2, 12, 64, dtype=torch.bfloat16)
    y, state, _ = mixer(x, mixer.init_state(2, 12))
    expected = in_float64(config, mixer, 64)(x.double()).y
    assert y.dtype == torch.bfloat16
    assert relative_error(y, expected) < 0.01
    if isinstance(mixer, DeltaMixer):
        assert state[mixer.update_key].dtype == torch.float32


# Mixers whose rates, angles or sums over time would have errors that grow with the length; the others are slow cases.
GROWING = ("attention", "fox", "hgrn", "hyena", "lru", "mamba3", "mlstm", "retnet", "rwkv4", "s4d", "s5")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in GROWING else [pytest.mark.slow]) for n in registry.names(registry.MIXERS)],
)
def test_bf16_weights_stay_close_to_float64_over_4096_tokens(name: str) -> None:
    config, chunked = registry.load(registry.MIXERS, name)(), CompileBackend(compiled=False)
    torch.manual_seed(0)
    mixer = without_zero_parameters(config.build(64, backend=chunked)).bfloat16()
    x = torch.randn(1, 4096, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        assert relative_error(mixer(x)[0], in_float64(config, mixer, 64, chunked)(x.double())[0]) < 0.01


def test_gates_and_rates_of_bf16_parameters_are_computed_in_float32(config: MixerConfig) -> None:
    """With float32 activations and linear maps, any rate that is rounded to bfloat16 gives an error near 1e-3."""
    torch.manual_seed(0)
    mixer = without_zero_parameters(config.build(64, backend="reference"))
    for module in mixer.modules():
        if not isinstance(module, nn.Linear | nn.LayerNorm | Router):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.bfloat16()
    x = torch.randn(1, 24, 64)
    with torch.no_grad():
        expected = in_float64(config, mixer, 64)(x.double())[0]
        assert relative_error(mixer(x)[0], expected) < 1e-5


@pytest.mark.parametrize(
    ("dtype", "wide"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)]
)
def test_gates_and_decays_are_computed_in_float32_or_wider(
    update_config: MixerConfig, dtype: torch.dtype, wide: torch.dtype
) -> None:
    mixer = update_config.build(32, backend="reference").to(dtype)
    assert isinstance(mixer, DeltaMixer)
    inputs = []
    mixer.update.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    mixer(torch.randn(1, 3, 32, dtype=dtype))
    for name in ("log_decay", "beta"):
        operand = getattr(inputs[0], name)
        assert operand is None or operand.dtype == wide, name
