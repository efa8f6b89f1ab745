"""Mixers against transformers' modules, random weights mapped over: outputs, all gradients, cached decoding."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from einops import rearrange
from torch import Tensor, nn

from deltazoo.backends.base import Backend
from deltazoo.mixers import KDA, Attention, GatedDeltaNet, Mamba2, MixerConfig

pytest.importorskip("transformers", minversion="5.17", reason="deltazoo[hf] needs transformers 5.17 or newer")

WIDTH = 32
# Relative error of a float32 module against a float32 module.
FORWARD, GRADIENT = 2e-5, 1e-4

Tensors = dict[str, Tensor]


class Oracle(NamedTuple):
    """ours: the config; theirs: the module; call: theirs on (x, cache); mapped: their parameters, or gradients, by name
    to ours; cache: an empty one."""

    ours: MixerConfig
    theirs: nn.Module
    call: Callable[[Tensor, Any], Tensor]
    mapped: Callable[[Tensors], Tensors]
    cache: Callable[[], Any]


def qwen3_next_delta() -> Oracle:
    from transformers import DynamicCache, Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    config = Qwen3NextConfig(
        hidden_size=WIDTH,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=6,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        rms_norm_eps=1e-5,
    )
    theirs = Qwen3NextGatedDeltaNet(config, 0)

    def mapped(w: Tensors) -> Tensors:
        qkvz = rearrange(w["in_proj_qkvz.weight"], "(h c) d -> h c d", h=2).split([8, 8, 12, 12], dim=1)
        q, k, v, z = (stream.flatten(0, 1) for stream in qkvz)
        b, a = rearrange(w["in_proj_ba.weight"], "(h two r) d -> two (h r) d", h=2, two=2)
        return {
            "project.to_qkv.weight": torch.cat([q, k, v]),
            "project.conv.weight": w["conv1d.weight"].squeeze(1),
            "operands.decay.A_log": w["A_log"],
            "operands.decay.dt_bias": w["dt_bias"],
            "operands.decay.proj.weight": a,
            "operands.beta.proj.weight": b,
            "outputs.norm.weight": w["norm.weight"],
            "outputs.gate.proj.weight": z,
            "out.weight": w["out_proj.weight"],
        }

    return Oracle(
        GatedDeltaNet(heads=2, value_heads=4, key_width=8, value_width=6),
        theirs,
        lambda x, cache: theirs(x, cache_params=cache),
        mapped,
        lambda: DynamicCache(config=config),
    )


def mamba2() -> Oracle:
    pytest.importorskip("transformers", minversion="5.23")  # older ones norm all groups of Mamba-2 as one
    from transformers import DynamicCache, Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    config = Mamba2Config(
        hidden_size=WIDTH,
        num_heads=8,
        head_dim=8,
        state_size=6,
        n_groups=2,
        expand=2,
        chunk_size=16,
        num_hidden_layers=1,
        layer_norm_epsilon=1e-5,
    )
    theirs = Mamba2Mixer(config, 0).eval()

    def mapped(w: Tensors) -> Tensors:
        def streams(x: Tensor) -> Tensor:  # x, B, C -> q, k, v
            v, k, q = x.split([64, 12, 12])
            return torch.cat([q, k, v])

        z, xbc, dt = w["in_proj.weight"].split([64, 88, 8])
        return {
            "project.to_qkv.weight": streams(xbc),
            "project.conv.weight": streams(w["conv1d.weight"].squeeze(1)),
            "project.conv.bias": streams(w["conv1d.bias"]),
            "operands.decay.A_log": w["A_log"],
            "operands.decay.dt_bias": w["dt_bias"],
            "operands.decay.proj.weight": dt,
            "outputs.skip.D": w["D"],
            "outputs.gate.proj.weight": z,
            "outputs.norm.weight": w["norm.weight"],
            "out.weight": w["out_proj.weight"],
        }

    return Oracle(
        Mamba2(heads=2, key_width=6, value_width=8),
        theirs,
        lambda x, cache: theirs(x, cache_params=cache),
        mapped,
        lambda: DynamicCache(config=config),
    )


def kimi_linear() -> Oracle:
    from transformers import DynamicCache, KimiLinearConfig
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

    config = KimiLinearConfig(
        hidden_size=WIDTH,
        linear_num_heads=3,
        linear_head_dim=8,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        rms_norm_eps=1e-5,
    )
    theirs = KimiLinearDeltaAttention(config, 0)

    def mapped(w: Tensors) -> Tensors:
        return {
            "project.to_qkv.weight": torch.cat([w[f"{name}_proj.weight"] for name in "qkv"]),
            "project.conv.weight": w["conv1d.weight"].squeeze(1),
            "operands.decay.A_log": w["forget_gate.A_log"].flatten(),
            "operands.decay.dt_bias": w["forget_gate.dt_bias"],
            "operands.decay.proj.0.weight": w["forget_gate.f_a_proj.weight"],
            "operands.decay.proj.1.weight": w["forget_gate.f_b_proj.weight"],
            "operands.beta.proj.weight": w["b_proj.weight"],
            "outputs.norm.weight": w["o_norm.weight"],
            "outputs.gate.proj.0.weight": w["g_a_proj.weight"],
            "outputs.gate.proj.1.weight": w["g_b_proj.weight"],
            "out.weight": w["o_proj.weight"],
        }

    return Oracle(
        KDA(heads=3, key_width=8, value_width=8),
        theirs,
        lambda x, cache: theirs(x, cache_params=cache),
        mapped,
        lambda: DynamicCache(config=config),
    )


def llama() -> Oracle:
    from transformers import DynamicCache, LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=WIDTH, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1, rope_theta=10000.0
    )
    config._attn_implementation = "sdpa"
    theirs, rotary = LlamaAttention(config, 0), LlamaRotaryEmbedding(config)

    def mapped(w: Tensors) -> Tensors:
        qkv = torch.cat([w[f"{name}_proj.weight"] for name in "qkv"])
        return {"to_qkv.weight": qkv, "out.weight": w["o_proj.weight"]}

    return Oracle(
        Attention(heads=4, key_value_heads=2),
        theirs,
        with_rotary(theirs, rotary),
        mapped,
        lambda: DynamicCache(config=config),
    )


def qwen3_next_attention() -> Oracle:
    from transformers import DynamicCache, Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention, Qwen3NextRotaryEmbedding

    config = Qwen3NextConfig(
        hidden_size=WIDTH,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_hidden_layers=1,
        layer_types=["full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    )
    config._attn_implementation = "sdpa"
    theirs, rotary = Qwen3NextAttention(config, 0), Qwen3NextRotaryEmbedding(config)

    def mapped(w: Tensors) -> Tensors:
        q, gate = rearrange(w["q_proj.weight"], "(h two e) d -> two (h e) d", h=4, two=2)
        return {
            "to_qkv.weight": torch.cat([q, w["k_proj.weight"], w["v_proj.weight"]]),
            "to_gate.weight": gate,
            # their norm multiplies by 1 + weight: `ours_of` adds the 1
            "q_norm.weight": w["q_norm.weight"],
            "k_norm.weight": w["k_norm.weight"],
            "out.weight": w["o_proj.weight"],
        }

    return Oracle(
        Attention(heads=4, key_value_heads=2, head_width=16, rotary_fraction=0.25, qk_norm=True, gate=True),
        theirs,
        with_rotary(theirs, rotary),
        mapped,
        lambda: DynamicCache(config=config),
    )


ORACLES = [qwen3_next_delta, mamba2, kimi_linear, llama, qwen3_next_attention]


def with_rotary(attention: nn.Module, rotary: nn.Module) -> Callable[[Tensor, Any], Tensor]:
    """Their attention wants the rotary embeddings and a mask from its model."""

    def call(x: Tensor, cache: Any) -> Tensor:
        seen = cache.get_seq_length() if cache is not None else 0
        place = torch.arange(seen, seen + x.shape[1])
        mask = torch.arange(seen + x.shape[1]) <= place[:, None]
        embeddings = rotary(x, place[None])
        return attention(x, position_embeddings=embeddings, attention_mask=mask[None, None], past_key_values=cache)[0]

    return call


@pytest.fixture(params=ORACLES, ids=lambda make: make.__name__)
def oracle(request: pytest.FixtureRequest) -> Oracle:
    """With random values in every parameter, those that start at 0, 1 or a ladder too."""
    made: Oracle = request.param()
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in made.theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 0.5))
    return made


def ours_of(oracle: Oracle, backend: str | Backend) -> nn.Module:
    weights = oracle.mapped({name: parameter.detach().clone() for name, parameter in oracle.theirs.named_parameters()})
    if oracle.theirs.__class__.__name__ == "Qwen3NextAttention":
        weights |= {name: 1 + weights[name] for name in ("q_norm.weight", "k_norm.weight")}
    mixer = oracle.ours.build(WIDTH, backend=backend)
    mixer.load_state_dict(weights)
    return mixer


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float(((ours - theirs).norm() / theirs.norm()).detach())


def test_outputs_and_gradients_equal_theirs(oracle: Oracle, backend: str | Backend) -> None:
    ours = ours_of(oracle, backend)
    torch.manual_seed(4)
    weight = torch.randn(2, 37, WIDTH)
    x_ours = torch.randn(2, 37, WIDTH, requires_grad=True)
    x_theirs = x_ours.detach().clone().requires_grad_()
    got, want = ours(x_ours)[0], oracle.call(x_theirs, None)
    assert relative(got, want) < FORWARD
    (got * weight).sum().backward()
    (want * weight).sum().backward()
    assert relative(x_ours.grad, x_theirs.grad) < GRADIENT
    theirs = oracle.mapped({name: parameter.grad for name, parameter in oracle.theirs.named_parameters()})
    mine = dict(ours.named_parameters())
    assert mine.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert relative(mine[name].grad, gradient) < GRADIENT, name


def test_cached_decoding_equals_theirs(oracle: Oracle, backend: str | Backend) -> None:
    ours, cache = ours_of(oracle, backend), oracle.cache()
    torch.manual_seed(5)
    x = torch.randn(2, 9, WIDTH)
    with torch.no_grad():
        state = ours.init_state(2, capacity=9)
        for piece in x.split([5, 1, 1, 1, 1], dim=1):
            got, state = ours(piece, state)
            assert relative(got, oracle.call(piece, cache)) < FORWARD
