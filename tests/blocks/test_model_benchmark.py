"""Benchmarks of whole models: the FLOPs of a token, the timed calls, rows and refusals."""

import math
from functools import partial

import pytest
import torch

from deltazoo.backends.io.errors import ConfigError, UnknownNameError
from deltazoo.blocks.inspect import model_benchmark, model_calls
from deltazoo.blocks.inspect.describe import parameter_count
from deltazoo.blocks.inspect.flops import token_flops
from deltazoo.blocks.inspect.model_benchmark import ModelBenchConfig, ModelBenchmark, bench_model
from deltazoo.blocks.inspect.model_calls import DECODED, OurCalls, PretrainedCalls
from deltazoo.blocks.inspect.peer_models import fla_config, fla_model, transformers_model
from deltazoo.blocks.spec.stack_spec import StackSpec, preset

GDN = StackSpec(
    width=32, depth=2, vocab=50, mlp={"width": 48},
    pattern="gated_deltanet(heads=2, value_heads=4, key_width=8, value_width=8)",
)  # fmt: skip
QUICK = ModelBenchConfig(batch=2, length=9, rounds=3, seconds=0.1)


def attention(mixer, tied=True, mlp="none"):
    return StackSpec(width=8, depth=2, vocab=20, mlp=mlp, tied=tied, pattern=mixer)


def flops(spec, length, direction):
    return token_flops(spec.build(), spec.describe(), length, direction)


@pytest.fixture
def eager(monkeypatch):
    """Leave out compilation, which takes a minute."""
    decoder = model_calls.Decoder
    monkeypatch.setattr(model_calls, "compile_layers", lambda model: model)
    monkeypatch.setattr(model_calls, "Decoder", lambda *args, compile=False: decoder(*args))


def test_operations_of_attention_equal_a_count_by_hand():
    spec = attention("attention(heads=2)")
    maps, head = 4 * 8 * 8, 20 * 8  # q, k, v, out; the head, which is the embedding
    norms = 3 * 8
    prefill = flops(spec, 5, "forward")
    assert prefill.by_parameters == 2 * (2 * maps + head + norms)
    assert prefill.all == 2 * (2 * maps + head) + 2 * 4 * 8 * (1 + 2 + 3 + 4 + 5) / 5
    assert flops(spec, 5, "decode").all == 2 * (2 * maps + head) + 2 * 4 * 8 * 6
    training = flops(spec, 5, "backward")
    assert (training.by_parameters, training.all) == (3 * prefill.by_parameters, 3 * prefill.all)
    untied = flops(attention("attention(heads=2)", tied=False), 5, "forward")
    assert untied.by_parameters == prefill.by_parameters  # the embedding is a look-up


def test_operations_of_a_window_count_what_the_window_leaves():
    full = flops(attention("attention(heads=2)"), 5, "forward").all
    assert flops(attention("sliding_window(heads=2, window=64)"), 5, "forward").all == pytest.approx(full)
    narrow = flops(attention("sliding_window(heads=2, window=2)"), 5, "forward").all
    assert full - narrow == pytest.approx(2 * 4 * 8 * (15 - (1 + 2 + 2 + 2 + 2)) / 5)
    assert flops(attention("sliding_window(heads=2, window=2)"), 5, "decode").all < narrow + 2 * 4 * 8


def test_parameters_of_unused_experts_are_not_counted():
    mlp = {"type": "moe", "experts": 8, "active": 2, "width": 16}
    few, more = (flops(attention("attention", mlp={**mlp, "active": n}), 5, "forward") for n in (2, 3))
    assert more.by_parameters - few.by_parameters == 2 * 2 * 3 * 8 * 16  # one more SwiGLU in each of two layers


@pytest.mark.parametrize(
    "name", ["gated-deltanet-small", "gated-deltanet-1.3b", "transformer-pp-1.3b", "qwen3-next-tiny"]
)
def test_peer_model_of_transformers_has_as_many_parameters(name):
    pytest.importorskip("transformers", minversion="5.23")
    spec = preset(name)
    with torch.device("meta"):
        assert parameter_count(transformers_model(spec, "cpu")) == spec.describe().parameters


@pytest.mark.parametrize(
    "spec",
    [
        GDN,
        attention("attention(heads=2, key_value_heads=1)", mlp={"width": 16}),
        attention("sliding_window(heads=2, window=4)", mlp={"width": 16}),
    ],
    ids=["gdn", "attention", "window"],
)
def test_peer_model_decodes_what_it_computes_for_the_whole_text(spec):
    pytest.importorskip("transformers", minversion="5.23")
    torch.manual_seed(0)
    module = transformers_model(spec, "cpu")
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    tokens = torch.randint(spec.vocab, (2, 7))
    calls, read, logits = PretrainedCalls(module, tokens), [], []

    def record(module, args, kwargs, out):
        read.append(kwargs["input_ids"])
        logits.append(out.logits)

    hook = module.register_forward_hook(record, with_kwargs=True)
    decode = calls.decoding(rounds=3)
    decode()
    hook.remove()
    text = torch.cat(read, 1)
    assert text.shape == (2, 7 + DECODED)
    with torch.no_grad():
        expected = module(input_ids=text, use_cache=False).logits
    torch.testing.assert_close(torch.cat(logits, 1), expected[:, 6:], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(text[:, 7:], expected[:, 6:-1].argmax(-1))


@pytest.mark.parametrize("peer", [False, True], ids=["ours", "transformers"])
def test_training_steps_lower_the_loss(eager, peer):
    torch.manual_seed(0)
    tokens = torch.randint(GDN.vocab, (2, 9))
    if peer:
        pytest.importorskip("transformers", minversion="5.23")
        calls = PretrainedCalls(transformers_model(GDN, "cpu"), tokens)
    else:
        calls = OurCalls(GDN, "reference", tokens, torch.float32)
    before, step = calls.loss().item(), calls.training_step()
    for _ in range(40):
        step()
    assert before == pytest.approx(math.log(50), rel=0.05)
    assert calls.loss().item() < before - 0.05


def test_rows_have_the_speeds_and_the_reasons(eager):
    pytest.importorskip("transformers", minversion="5.23")
    names = ["reference", "transformers_model", "fla_model", "triton"]
    result = bench_model("gdn", GDN, names, QUICK)
    assert ModelBenchmark.model_validate_json(result.model_dump_json()) == result
    ours, theirs = ([row for row in result.rows if row.implementation == name] for name in names[:2])
    assert [row.direction for row in ours] == [row.direction for row in theirs] == ["backward", "forward", "decode"]
    for row in (*ours, *theirs):
        assert row.parameters == GDN.describe().parameters
        tokens = 2 * (DECODED if row.direction == "decode" else 9)
        assert row.tokens_per_second == pytest.approx(1e3 * tokens / row.median_ms)
        counts = result.flops[row.direction]
        assert row.tflops_all == pytest.approx(1e-12 * row.tokens_per_second * counts.all)
        assert row.first_call_s > 0
        assert row.peak_gib is None
    table = result.table()
    assert table.columns[2:] == [">tokens/s", ">ms", ">20-80 %", ">6N", ">all", ">first s"]
    notes = dict(table.notes)
    assert notes["fla"] == "it needs a CUDA device, got 'cpu'."
    assert "cuda" in notes["deltazoo (triton)"]
    peak = result.model_copy(update={"peak_tflops": 2 * ours[0].tflops_all})
    assert float(peak.table().rows[0][6]) == 50.0  # per cent of the peak
    assert "| deltazoo (reference) | training |" in result.markdown()
    slow = ours[0].model_copy(update={"tflops_by_parameters": 2.34567e-7, "tflops_all": 9.87654e-7})
    assert result.model_copy(update={"rows": [slow]}).table().rows[0][5:7] == ["0", "0.001"]  # GFLOP/s


@pytest.mark.runs
def test_layers_and_decoding_step_are_compiled(monkeypatch):
    # Inductor takes a minute
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(model_calls, "compile_layers", partial(model_calls.compile_layers, compiler="eager"))
    config = QUICK.model_copy(update={"directions": ("decode",)})
    (row,) = bench_model("gdn", GDN.model_copy(update={"depth": 1}), ["reference"], config).rows
    assert row.refused == []
    assert row.rounds == 3


def test_a_failure_of_one_model_does_not_end_the_benchmark(eager, monkeypatch):
    def broken(spec, device):
        raise ImportError("Please install Flash Attention")

    monkeypatch.setitem(model_benchmark.PEER_MODELS, "fla_model", broken)
    broken_row, ours = bench_model("gdn", GDN, ["fla_model", "reference"], QUICK.model_copy(
        update={"directions": ("forward",)}
    )).rows  # fmt: skip
    assert broken_row.refused == ["failed with ImportError: Please install Flash Attention"]
    assert ours.median_ms is not None


def test_models_that_the_other_packages_lack_are_refused():
    refusals = {
        "negative_eigenvalues": GDN.model_copy(update={"pattern": "gated_deltanet(negative_eigenvalues=both)"}),
        "one mixer": GDN.model_copy(update={"pattern": "gated_deltanet | attention"}),
        "or equal attention": GDN.model_copy(update={"pattern": "gla"}),
        "the same dense SwiGLU": attention("attention"),
        "no embedding_scale": GDN.model_copy(update={"embedding_scale": 2.0}),
        "no qk_norm": attention("attention(qk_norm=head)", mlp={"width": 16}),
        "must have a gate": GDN.model_copy(update={"pattern": "gated_deltanet + attention"}),
    }
    pytest.importorskip("transformers", minversion="5.23")
    for message, spec in refusals.items():
        with pytest.raises(ConfigError, match=message):
            transformers_model(spec, "cpu")
    with pytest.raises(ConfigError, match="needs gated_deltanet, kda or attention"):
        fla_config(GDN.model_copy(update={"pattern": "gla"}))
    with pytest.raises(ConfigError, match="it needs a CUDA device, got 'cpu'"):
        fla_model(GDN, "cpu")
    with pytest.raises(UnknownNameError, match="did you mean 'transformers_model'"):
        bench_model("gdn", GDN, ["transformers_modell"], QUICK)


def test_config_of_fla_has_the_sizes_of_the_stack():
    negative = "gated_deltanet(heads=2, key_width=8, value_width=16, negative_eigenvalues=both)"
    config = fla_config(GDN.model_copy(update={"pattern": f"{negative} + sliding_window(heads=4, window=5)"}))
    assert config == {
        "class": "GatedDeltaNet", "config": "GatedDeltaNetConfig", "vocab_size": 50, "hidden_size": 32,
        "num_hidden_layers": 2, "intermediate_size": 48, "tie_word_embeddings": True, "norm_eps": GDN.norm_eps,
        "head_dim": 8, "expand_v": 2.0, "num_heads": 2, "num_v_heads": 2, "conv_size": 4, "allow_neg_eigval": True,
        "attn": {"layers": [1], "num_heads": 4, "num_kv_heads": 4, "window_size": 5, "rope_theta": 10000.0},
    }  # fmt: skip
    assert fla_config(GDN.model_copy(update={"pattern": "kda"}))["class"] == "KDA"
