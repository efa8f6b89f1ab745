"""`use`: layers of transformers on our operators, against the untouched model with the same random weights."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from folders import ATTENTION, EPS, HEADS, MODELS, SIZES, VOCAB, Model
from torch import Tensor, nn

import deltazoo
from deltazoo.backends.io.errors import InputError, UnsupportedError
from deltazoo.integrations.transformers import use

transformers = pytest.importorskip("transformers")

MAMBA2 = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 7, "mamba_n_groups": 3, "mamba_expand": 3}
MORE = {
    "falcon_h1": Model(
        "FalconH1", "FalconH1Config",
        SIZES | ATTENTION | MAMBA2 | {"mamba_d_ssm": 96, "mamba_chunk_size": 8, "head_dim": 8},
    ),
    "granitemoehybrid": Model(
        "GraniteMoeHybrid", "GraniteMoeHybridConfig",
        SIZES | ATTENTION | MAMBA2 | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        | {"num_local_experts": 3, "num_experts_per_tok": 2, "shared_intermediate_size": 12},
    ),
    "nemotron_h": Model(
        "NemotronH", "NemotronHConfig",
        SIZES | HEADS | {"mamba_num_heads": 6, "mamba_head_dim": 16, "ssm_state_size": 7, "n_groups": 3, "expand": 3}
        | {"hybrid_override_pattern": "M*M", "layer_norm_epsilon": EPS, "head_dim": 8, "chunk_size": 8},
    ),
    "zamba2": Model(
        "Zamba2", "Zamba2Config",
        SIZES | HEADS | {"mamba_d_state": 7, "mamba_ngroups": 1, "n_mamba_heads": 8, "mamba_expand": 2}
        | {"num_mem_blocks": 1, "chunk_size": 8, "mamba_headdim": 8, "num_hidden_layers": 3}
        | {"layers_block_type": ["linear_attention", "hybrid", "linear_attention"], "adapter_rank": 4},
    ),
    "zamba": Model(
        "Zamba", "ZambaConfig",
        SIZES | HEADS | {"mamba_d_state": 5, "mamba_dt_rank": 3, "n_mamba_heads": 2}
        | {"layers_block_type": ["linear_attention", "hybrid", "linear_attention"], "num_key_value_heads": 4},
    ),
}  # fmt: skip
FAMILIES = {name: model for name, model in {**MODELS, **MORE}.items() if name not in ("llama", "llama-tied")}
FAMILIES = {name: model for name, model in FAMILIES.items() if not name.startswith("qwen3-") and name != "qwen3"}
MAMBA1 = ("mamba", "falcon_mamba", "jamba", "zamba")
T = 21


@pytest.fixture(autouse=True)
def token_by_token() -> Iterator[None]:
    """The wiring is tested, so the reference computes the updates: other backends compile each spec."""
    with deltazoo.use_backend("reference"):
        yield


def build(name: str) -> Any:
    """Build a tiny model with uneven sizes and random weights in every parameter."""
    family = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, family.config)(**family.fields, attn_implementation="eager")
    model = getattr(transformers, f"{family.name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def tokens(batch: int = 2, length: int = T, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def assert_close(actual: Tensor, wanted: Tensor, tolerance: float = 2e-5) -> None:
    assert actual.shape == wanted.shape
    error = (actual.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-12)
    assert float(error.detach()) < tolerance


def trained(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits in training mode, and the gradient of every parameter."""
    model.train()
    model.zero_grad()
    logits = model(tokens(), use_cache=False).logits
    (logits * torch.linspace(-1, 1, VOCAB)).sum().backward()
    model.eval()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", FAMILIES)
def test_training_equals_the_untouched_model_and_is_undone(name: str) -> None:
    model = build(name)
    before = trained(model)
    with use(model) as used:
        ours = trained(model)
        assert [report for report in used.layers if report.replaced]
    after = trained(model)
    assert_close(ours[0], before[0])
    assert set(ours[1]) == set(before[1])
    scale = max(float(gradient.norm()) for gradient in before[1].values())
    for key, gradient in before[1].items():
        assert float((ours[1][key] - gradient).norm()) < 1e-4 * max(float(gradient.norm()), 1e-3 * scale), key
    assert torch.equal(after[0], before[0])
    assert all("forward" not in vars(module) for module in model.modules())


def in_pieces(model: Any, ids: Tensor) -> Tensor:
    """The logits of a prefill, continuations by several tokens, and single tokens."""
    pieces, cache = [], transformers.DynamicCache(config=model.config)
    name = "cache_params" if model.config.model_type in ("mamba", "mamba2", "falcon_mamba") else "past_key_values"
    for piece in ids.split([9, 1, 5, 1, 1, 1, 3], 1):
        pieces.append(model(piece, use_cache=True, **{name: cache}).logits)
    return torch.cat(pieces, 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_prefill_continuation_and_decoding_equal_one_uncached_call(name: str) -> None:
    model, ids = build(name), tokens()
    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits
        with use(model):
            ours = in_pieces(model, ids)
        if name == "bamba":  # whose own cached attention differs from one call
            wanted = in_pieces(model, ids)
    assert_close(ours, wanted, 5e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_left_padding_does_not_change_the_real_tokens(name: str) -> None:
    model, ids = build(name), tokens()
    mask = torch.ones_like(ids)
    mask[1, :8] = 0
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask, use_cache=False).logits
        with use(model):
            ours = model(ids, attention_mask=mask, use_cache=False).logits
            generated = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0)
        assert_close(ours[mask.bool()], wanted[mask.bool()])
        expected = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert torch.equal(generated, expected)


def replaced_layers(model: nn.Module, names: list[str]) -> list[nn.Module]:
    return [model.get_submodule(name) for name in names]


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_sequences_do_not_see_each_other(name: str) -> None:
    model = build(name)
    bounds, x = torch.tensor([0, 2, 2, 13, T], dtype=torch.int32), torch.randn(1, T, model.config.hidden_size)
    spans = [(a, b) for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True) if b > a]
    with torch.no_grad(), use(model) as used:
        layers = [r.name for r in used.layers if r.replaced and r.replaced != ("forward",)]
        for layer in replaced_layers(model, layers):
            packed = layer(x, cu_seq_lens_q=bounds)
            assert_close(packed, torch.cat([layer(x[:, start:stop]) for start, stop in spans], 1))
            assert not torch.allclose(packed, layer(x), atol=1e-3)


def test_packed_sequences_without_their_bounds_or_after_a_cache_are_refused() -> None:
    model = build("qwen3_5_text")
    bounds = torch.tensor([0, 2, 5], dtype=torch.int32)
    with torch.no_grad(), use(model):
        layer = model.model.layers[0].linear_attn
        with pytest.raises(UnsupportedError, match="seq_idx alone"):
            layer(torch.randn(1, T, 32), seq_idx=torch.zeros(1, T, dtype=torch.int32))
        cache = model(tokens(1, 7), use_cache=True).past_key_values
        with pytest.raises(UnsupportedError, match="cannot continue a cache"):
            layer(torch.randn(1, 5, 32), cache_params=cache, cu_seq_lens_q=bounds)


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear", "mamba", "mamba2", "lfm2"])
def test_autocast_is_no_less_exact_than_the_untouched_model(name: str) -> None:
    model, ids = build(name), tokens()
    with torch.no_grad():
        exact = model(ids, use_cache=False).logits
        with torch.autocast("cpu", torch.bfloat16):
            theirs = model(ids, use_cache=False).logits
            with use(model):
                ours = model(ids, use_cache=False).logits
    errors = [float((logits.float() - exact).norm() / exact.norm()) for logits in (ours, theirs)]
    assert errors[0] < 1.2 * errors[1] + 1e-3


@pytest.mark.parametrize("name", ["qwen3_5_text", "kimi_linear", "mamba", "mamba2", "lfm2"])
def test_a_replaced_layer_is_one_graph(name: str) -> None:
    model, x = build(name), torch.randn(2, 5, 32)
    with use(model) as used:
        reports = [r for r in used.layers if r.replaced and r.replaced != ("forward",)]
        layer = model.get_submodule(reports[0].name)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert_close(compiled(x), layer(x))


def test_another_model_of_the_family_is_unchanged() -> None:
    model, other = build("qwen3_5_text"), build("qwen3_5_text")
    with use(model), deltazoo.watch() as seen:
        other(tokens())
    assert not seen.runs


@pytest.mark.parametrize("name", ["qwen3_5_text", "mamba"])
def test_all_models_of_the_process_use_our_operators_in_the_block_alone(name: str) -> None:
    with use() as used, deltazoo.watch() as seen, torch.no_grad():
        model = build(name)
        ours = model(tokens(), use_cache=False).logits
    assert seen.runs and len({report.layer for report in used.layers}) > 15
    with deltazoo.watch() as seen, torch.no_grad():
        assert_close(ours, model(tokens(), use_cache=False).logits)
    assert not seen.runs


def test_layers_that_are_not_served_are_reported_with_the_reason() -> None:
    fields = SIZES | ATTENTION | {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
    config = transformers.MiniMaxConfig(**fields, num_local_experts=2, head_dim=8, block_size=4)
    with pytest.raises(InputError, match=r"MiniMaxLightningAttention.*not replaced.*without a call"):
        use(transformers.MiniMaxForCausalLM(config))
    with pytest.raises(InputError, match="no recurrent or convolution layer"):
        use(nn.Linear(2, 2))
    with pytest.raises(InputError, match="model must be"):
        use("qwen")  # type: ignore[arg-type]
