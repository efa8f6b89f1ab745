"""Whole models decode few rows by their own kernels with the logits of separate operations, against float64."""

import copy

import pytest
import torch

from deltazoo.backends.ops import gemv
from deltazoo.blocks import Decoder, StackSpec
from deltazoo.blocks.generation.generate import generate_tokens
from deltazoo.blocks.generation.sampling import Sampling

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
LAYERS = {
    "wide heads": {
        "width": 320, "pattern": "gated_deltanet", "layers": {
            "gated_deltanet": {"mixer": "gated_deltanet", "heads": 2, "key_width": 200, "value_width": 400},
        },
    },
    "hybrid": {
        "width": 256, "pattern": "gated_deltanet + sliding_window + attention", "layers": {
            "gated_deltanet": {
                "mixer": "gated_deltanet", "heads": 2, "value_heads": 4, "key_width": 64, "value_width": 64,
            },
            "sliding_window": {"mixer": "sliding_window", "heads": 4, "window": 8},
            "attention": {
                "mixer": "attention", "heads": 8, "key_value_heads": 2, "head_width": 64, "rotary_fraction": 0.25,
                "qk_norm": "head", "gate": True,
            },
        },
    },
    "experts": {
        "width": 256, "pattern": "gated_deltanet", "layers": {
            "gated_deltanet": {"mixer": "gated_deltanet", "heads": 2, "key_width": 64, "value_width": 64},
        },
        "mlp": {"type": "moe", "width": 128, "experts": 6, "active": 2, "shared_width": 64, "shared_gate": True},
    },
    "kda": {"width": 256, "pattern": "kda(heads=4, key_width=64, value_width=64)"},
    "mamba2": {"width": 256, "pattern": "mamba2", "mlp": "none"},
    "rwkv6": {"width": 256, "pattern": "rwkv6"},
    "rwkv7": {"width": 256, "pattern": "rwkv7"},
}  # fmt: skip
# In bfloat16 the error of separate operations is the measure.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: torch.inf}


def build(name, dtype):
    torch.manual_seed(0)
    spec = StackSpec.model_validate({"depth": 3, "vocab": 97, "tied": False, "norm_eps": 1e-5, **LAYERS[name]})
    model = spec.build().cuda()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
    model = model.to(dtype).eval()
    exact = copy.deepcopy(model).double().rebind("reference")
    return model, exact


def logits(model, prompt, following):
    """The logits of each token of `following` [B, T] after a prompt."""
    decoder, results = Decoder(model, len(prompt), prompt.shape[1] + following.shape[1]), []
    decoder.prefill(prompt)
    for token in following.T:
        decoder.tokens.copy_(token[:, None])
        decoder.step()
        results.append(decoder.logits.double().clone())
    return torch.stack(results, 1)


@pytest.mark.cuda
@CUDA
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 32])
@pytest.mark.parametrize("name", LAYERS)
def test_logits_of_decoded_tokens(name, rows, dtype, monkeypatch):
    model, exact = build(name, dtype)
    prompt, following = torch.randint(97, (rows, 11), device="cuda"), torch.randint(97, (rows, 5), device="cuda")
    expected = logits(exact, prompt, following)
    error = relative_error(logits(model, prompt, following), expected, name == "experts")
    for name_of_limit in ("MAX_ROWS", "MAX_DOT_ROWS"):
        monkeypatch.setattr(gemv, name_of_limit, 0)
    separate = relative_error(logits(model, prompt, following), expected, name == "experts")
    assert error <= TOLERANCE[dtype]
    assert error <= 1.25 * separate + 1e-6


def relative_error(actual, expected, is_median):
    """The error of all logits, or the median over tokens: a rounding error may choose another expert for a few."""
    errors, sizes = (actual - expected).norm(dim=-1), expected.norm(dim=-1)
    return float((errors / sizes).median() if is_median else errors.norm() / sizes.norm())


@pytest.mark.cuda
@CUDA
@pytest.mark.parametrize("rows", [1, 8])
def test_experts_in_16_bits_are_near_those_in_float32(rows):
    model, _ = build("experts", torch.bfloat16)
    prompt, following = torch.randint(97, (rows, 11), device="cuda"), torch.randint(97, (rows, 24), device="cuda")
    actual = logits(model, prompt, following)
    expected = logits(copy.deepcopy(model).float(), prompt, following)
    assert relative_error(actual, expected, is_median=True) <= 3e-2


@pytest.mark.cuda
@CUDA
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("name", LAYERS)
def test_eager_and_captured_steps_choose_equal_tokens(name, rows):
    model, _ = build(name, torch.float32)
    prompt, sampling = torch.randint(97, (rows, 11), device="cuda"), Sampling(max_tokens=40, temperature=0)
    expected = generate_tokens(Decoder(model, rows, 60), prompt, sampling)
    assert torch.equal(generate_tokens(model, prompt, sampling), expected)


@pytest.mark.parametrize("rows", [1, 3])
def test_the_head_reads_rows_whose_stride_does_not_depend_on_the_prompt(rows, monkeypatch):
    model = StackSpec(width=16, depth=1, vocab=11, pattern="mamba2(heads=2)").build("reference")
    strides, head = set(), model.logits

    def recorded(x):
        strides.add(x.stride())
        return head(x)

    monkeypatch.setattr(model, "logits", recorded)
    for tokens in (2, 3):
        Decoder(model, rows, None).prefill(torch.ones(rows, tokens, dtype=torch.int64))
    assert strides == {(16, 1)}
