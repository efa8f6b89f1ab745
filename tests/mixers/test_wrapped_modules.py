"""Every mixer calls its linear maps, so that LoRA, packed and offloaded weights, and hooks take effect.

The same with the libraries themselves: tests/integrations.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import wrapping
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves, tree_map

from deltazoo.backends.context_parallel.heads import HeadShare
from deltazoo.backends.io.errors import DtypeError
from deltazoo.backends.torch_ext.plain_module import is_plain, is_plain_linear
from deltazoo.mixers import Hyena, MixerConfig
from deltazoo.mixers.core.activations import activation_like
from deltazoo.mixers.core.conformance import relative_error
from deltazoo.mixers.core.mixer import Mixer
from deltazoo.mixers.parts import norms

WIDTH, T = 32, 6  # wide enough that the maps to decay and beta are computed by one product


def build(config: MixerConfig, dtype: torch.dtype = torch.float64) -> Mixer:
    torch.manual_seed(0)
    return config.build(WIDTH, backend="reference").to(dtype)


def draw(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, T, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(1))


def decode(mixer: Mixer, x: Tensor) -> Tensor:
    state, outputs = mixer.init_state(x.shape[0], T), []
    with torch.no_grad():
        for token in x.split(1, 1):
            y, state = mixer(token, state)[:2]
            outputs.append(y)
    return torch.cat(outputs, 1)


def assert_computes(mixer: Mixer, expected: Mixer, x: Tensor, tolerance: float) -> None:
    """Outputs of a call and of decoding equal those of `expected`, and states have its classes, dtypes and devices."""
    y = expected(x)[0]
    assert relative_error(mixer(x)[0], y) < tolerance
    assert relative_error(decode(mixer, x), y) < tolerance
    states = [tree_leaves(m.init_state(2, T)) for m in (mixer, expected)]
    kinds = [[(type(leaf), leaf.dtype, leaf.device, leaf.shape) for leaf in leaves] for leaves in states]
    assert kinds[0] == kinds[1]
    assert all(leaf.dtype == torch.int64 or leaf.dtype == x.dtype for leaf in states[0])


def test_lora_on_every_linear_map_equals_merged_weights(config: MixerConfig) -> None:
    mixer, merged, x = build(config), build(config), draw()
    adapted = wrapping.replace(mixer, wrapping.Adapted)
    wrapping.merge(merged, adapted)
    assert_computes(mixer, merged, x, 1e-12)
    parameters = {f"{name}.{part}": getattr(layer, part) for name, layer in adapted.items() for part in "AB"}
    gradients = torch.autograd.grad(mixer(x)[0].square().sum(), list(parameters.values()), allow_unused=True)
    assert not [name for name, d in zip(parameters, gradients, strict=True) if d is None or not d.abs().sum() > 0]


def test_packed_weights_equal_their_unpacked_values(one_of_each: MixerConfig) -> None:
    mixer, unpacked = (build(one_of_each, torch.float32) for _ in range(2))
    wrapping.merge(unpacked, wrapping.replace(mixer, wrapping.Packed))
    assert_computes(mixer, unpacked, draw(torch.float32), 1e-5)


def test_weights_of_another_class_are_used_only_by_their_own_product(one_of_each: MixerConfig) -> None:
    mixer = build(one_of_each)
    wrapping.replace(mixer, wrapping.with_product_weight)
    assert_computes(mixer, build(one_of_each), draw(), 1e-12)


def test_offloaded_weights_are_loaded_for_each_call(one_of_each: MixerConfig) -> None:
    mixer = build(one_of_each)
    wrapping.offload(mixer)
    assert_computes(mixer, build(one_of_each), draw(), 1e-12)


@pytest.mark.parametrize("kind", ["forward", "forward pre", "backward", "backward pre", "all modules"])
def test_module_with_a_hook_is_not_plain(kind: str) -> None:
    linear = nn.Linear(2, 3)
    assert is_plain_linear(linear)
    register: dict[str, Callable[..., Any]] = {
        "forward": linear.register_forward_hook,
        "forward pre": linear.register_forward_pre_hook,
        "backward": linear.register_full_backward_hook,
        "backward pre": linear.register_full_backward_pre_hook,
        "all modules": torch_module.register_module_forward_hook,
    }
    handle = register[kind](lambda *arguments: None)
    with torch.set_grad_enabled(kind != "all modules"):
        assert not is_plain(linear)
    handle.remove()
    assert is_plain_linear(linear)


def test_module_with_other_weights_or_forward_is_not_plain() -> None:
    assert not is_plain_linear(wrapping.Packed(nn.Linear(2, 3)))
    assert not is_plain_linear(wrapping.Adapted(nn.Linear(2, 3)))
    assert not is_plain_linear(wrapping.with_product_weight(nn.Linear(2, 3)))
    assert not is_plain_linear(parametrize.register_parametrization(nn.Linear(2, 3), "weight", nn.Identity()))
    loaded = nn.Linear(2, 3)
    wrapping.offload(loaded)
    assert not is_plain_linear(loaded)


def test_activations_of_packed_offloaded_and_empty_modules() -> None:
    packed = wrapping.Packed(nn.Linear(2, 3, bias=False))
    assert activation_like(packed).dtype == torch.float32  # torch's default: no parameter has a float dtype
    assert activation_like(packed, nn.LayerNorm(2).bfloat16()).dtype == torch.bfloat16
    assert activation_like(nn.Linear(2, 3, dtype=torch.float16), nn.LayerNorm(2)).dtype == torch.float16
    assert activation_like(nn.Identity()).dtype == torch.float32
    with FakeTensorMode():
        fake = nn.Linear(2, 3)
    assert isinstance(activation_like(fake), FakeTensor)
    on_meta = nn.Linear(2, 3, device="meta")
    assert activation_like(on_meta).is_meta
    wrapping.offload(on_meta)
    assert activation_like(on_meta).device == torch.device("cpu")


def test_hyena_computes_its_filter_in_float32_with_adapted_bfloat16_maps() -> None:
    """In bfloat16 the error would be 0.14, because the sines of the network have a high frequency."""
    plain, adapted = (build(Hyena()).filters["long"].bfloat16() for _ in range(2))
    for layer in wrapping.replace(adapted, wrapping.Adapted).values():
        layer.B.data.zero_()
    for module in (plain, adapted):
        module.frequency.data.fill_(10)
    actual, expected = (
        m.kernel(2048, torch.zeros(1, dtype=torch.bfloat16), HeadShare(1, None)) for m in (adapted, plain)
    )
    assert relative_error(actual, expected) < 0.02


def test_rounded_states_are_refused_unless_they_hold_activations(one_of_each: MixerConfig) -> None:
    """A sum over tokens would lose precision with each call."""
    mixer, x = build(one_of_each, torch.bfloat16), draw(torch.bfloat16)
    rounded = tree_map(lambda leaf: leaf.bfloat16() if leaf.is_floating_point() else leaf, mixer.init_state(2, T))
    with torch.no_grad():
        if one_of_each.name in ("attention", "sliding_window", "mla", "hyena", "lfm2_conv", "rwkv_channel_mix"):
            assert torch.equal(mixer(x, rounded)[0], mixer(x, mixer.init_state(2, T))[0])
            return
        with pytest.raises(DtypeError, match=r"^state '.*' must be torch.float32 with x in .*, got torch.bfloat16$"):
            mixer(x, rounded)


def test_parts_that_are_not_plain_are_not_fused_into_a_decode_step(zoo: dict[str, MixerConfig]) -> None:
    mixer = build(zoo["gated_deltanet"])
    assert mixer.decode_fusion() is not None
    handle = torch_module.register_module_forward_hook(lambda *arguments: None)
    with torch.no_grad():
        assert mixer.decode_fusion() is None
    handle.remove()
    assert mixer.decode_fusion() is not None
    mixer.project.conv.weight = nn.Parameter(mixer.project.conv.weight.detach().as_subclass(wrapping.Product))
    assert mixer.decode_fusion() is None


def test_kernel_of_a_norm_is_used_only_for_plain_rms_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubled(norms.RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    monkeypatch.setattr(norms, "refusals", lambda x, weight: [])
    monkeypatch.setattr(norms, "add_rms_norm", lambda *arguments: "the kernel")
    x = torch.randn(1, 2, 8)
    assert norms.add_and_normalize(norms.RMSNorm(8), x, None) == "the kernel"
    for norm in (Doubled(8), nn.LayerNorm(8)):
        assert torch.equal(norms.add_and_normalize(norm, x, None)[1], norm(x))
    offloaded = norms.RMSNorm(8)
    wrapping.offload(offloaded)
    assert torch.equal(norms.add_and_normalize(offloaded, x, None)[1], norms.RMSNorm(8)(x))


@pytest.mark.parametrize(
    ("wrapper", "dtype"),
    [(wrapping.Adapted, torch.float32), (wrapping.Adapted, torch.bfloat16), (wrapping.Packed, torch.bfloat16)],
    ids=["lora in 32 bits", "lora", "packed"],
)
def test_wrapped_maps_are_called_on_a_gpu(
    one_of_each: MixerConfig, wrapper: type[nn.Module], dtype: torch.dtype
) -> None:
    """Whole sequences and decode steps, whose launch code runs on meta tensors. The wrapper of LoRA has no bias."""
    pytest.importorskip("triton", reason="the kernels need the package triton")
    with torch.device("meta"):
        mixer = one_of_each.build(WIDTH).to(dtype)
        wrappers = {*wrapping.replace(mixer, wrapper).values()}
        x = torch.empty(2, T, WIDTH, dtype=dtype)
    for tokens in (x, x[:, :1]):
        state = mixer.init_state(2, T)
        assert wrapping.called_on_a_gpu(wrappers, lambda tokens=tokens, state=state: mixer(tokens, state)) == wrappers


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_lora_equals_merged_weights_with_kernels(one_of_each: MixerConfig) -> None:
    """The relative error allows for TF32."""
    mixer, merged = (build(one_of_each, torch.float32) for _ in range(2))
    wrapping.merge(merged, wrapping.replace(mixer, wrapping.Adapted))
    for module in (mixer.cuda(), merged.cuda()):
        rebind = getattr(module, "rebind", None)
        if rebind is not None:
            rebind(None)
    x = draw(torch.float32).cuda()
    assert_computes(mixer, merged, x, 1e-2)
