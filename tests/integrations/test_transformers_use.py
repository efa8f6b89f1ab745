"""`use`: layers of transformers on our operators, against the untouched model with the same random weights."""

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from folders import ATTENTION, SIZES
from tiny_models import FAMILIES, T, assert_close, build, in_pieces, tokens, trained
from torch import nn

import deltazoo
from deltazoo.backends.io.errors import InputError, UnsupportedError
from deltazoo.integrations.transformers import use


@pytest.fixture(autouse=True)
def token_by_token() -> Iterator[None]:
    """The wiring is tested, so the reference computes the updates: other backends compile each spec."""
    with deltazoo.use_backend("reference"):
        yield


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


@pytest.mark.parametrize("name", ["qwen3_5_text", "olmo_hybrid", "mamba", "mamba2", "lfm2"])
def test_64_and_16_bit_models_are_no_less_exact_than_the_untouched_ones(name: str) -> None:
    ids = tokens()
    with torch.no_grad():
        wanted = build(name).double()(ids, use_cache=False).logits
        for dtype, limit in ((torch.float64, 1e-5), (torch.bfloat16, None)):
            model = build(name).to(dtype)
            theirs = model(ids, use_cache=False).logits
            with use(model):
                ours, pieces = model(ids, use_cache=False).logits, in_pieces(model, ids)
            errors = [float((x.double() - wanted).norm() / wanted.norm()) for x in (ours, pieces, theirs)]
            assert max(errors[:2]) < (1.2 * errors[2] + 2e-3 if limit is None else limit)


def test_layers_with_hooks_of_accelerate_keep_them() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model, ids = build("qwen3_5_text"), tokens()
    layer, calls = model.model.layers[0].linear_attn, []

    class Counter(hooks.ModelHook):  # type: ignore[misc,name-defined]
        def pre_forward(self, module: nn.Module, *arguments: object, **options: object) -> object:
            calls.append(module)
            return arguments, options

    hooks.add_hook_to_module(layer, Counter())
    hooks.add_hook_to_module(layer.conv1d, Counter())
    with torch.no_grad():
        wanted = model(ids).logits
        before, seen_before = len(calls), set(map(type, calls))
        with use(model), deltazoo.watch() as seen:
            assert_close(model(ids).logits, wanted)
        assert len(calls) == 2 * before and set(map(type, calls)) == seen_before
        assert sum(run.name == "update" for run in seen.runs) == 2
        assert torch.equal(model(ids).logits, wanted)


def test_a_copy_of_a_model_in_use_computes_with_its_own_weights() -> None:
    model = build("mamba2")
    with use(model), torch.no_grad():
        copied = copy.deepcopy(model)
        for parameter in copied.parameters():
            parameter.zero_()
        assert not copied(tokens()).logits.any() and model(tokens()).logits.any()


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


FUSED = """
import torch, deltazoo
from tiny_models import assert_close, build, in_pieces, tokens
from deltazoo.integrations.transformers import use

for name in ("qwen3_5_text", "qwen3_next"):
    model, ids = build(name), tokens()
    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits
        with deltazoo.use_backend("triton"), use(model), deltazoo.watch() as seen:
            pieces = in_pieces(model, ids)
    assert_close(pieces, wanted, 5e-5)
    assert sum(run.name == "fused_step_kernel" for run in seen.runs) == 2 * 4, name  # layers, single tokens
"""


def test_single_tokens_of_gated_deltanet_take_the_fused_step() -> None:
    """In Triton's interpreter, which must be chosen before its import."""
    here = Path(__file__).parent
    paths = [str(here), str(here.parent / "families"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-c", FUSED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
