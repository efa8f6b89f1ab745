"""One case of each way into other libraries; `make test-integrations` has the products.

The tests are about the calls between the libraries, so the reference computes the updates: it compiles nothing.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import deltazoo
import deltazoo.fla as fla
from deltazoo import Sampling, StackSpec, UpdateInputs, UpdateSpec

pytest.importorskip("transformers")

import transformers
from tiny_models import assert_close, build, in_pieces, tokens, trained

from deltazoo.integrations.transformers import DeltazooConfig, register, use


@pytest.fixture(autouse=True)
def token_by_token() -> Iterator[None]:
    with deltazoo.use_backend("reference"):
        yield


def test_a_function_of_fla_normalises_and_transposes_as_asked() -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(1, 9, 2, 8, dtype=torch.float64) for _ in range(2))
    v, state = torch.randn(1, 9, 4, 6, dtype=torch.float64), torch.randn(2, 4, 8, 6, dtype=torch.float64)
    g, beta, bounds = F.logsigmoid(v[..., 0]), v[..., 1].sigmoid(), torch.tensor([0, 4, 9])
    o, final = fla.chunk_gated_delta_rule(
        q, k, v, g, beta, initial_state=state.transpose(-1, -2), output_final_state=True, state_v_first=True,
        use_qk_l2norm_in_kernel=True, cu_seqlens=bounds,
    )  # fmt: skip
    unit = [x / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k)]
    inputs = UpdateInputs(*unit, v=v, log_decay=g, beta=beta, state=state, cu_seqlens=bounds.int())
    wanted = deltazoo.update(UpdateSpec(decay="head", beta="head"), inputs)
    assert final is not None
    assert_close(o, wanted.o, 1e-12)
    assert_close(final.transpose(-1, -2), wanted.state, 1e-12)


@pytest.mark.parametrize("name", ["qwen3_5_text", "kimi_linear", "mamba", "mamba2"])
def test_a_model_of_transformers_computes_the_same_with_our_operators(name: str) -> None:
    model = build(name)
    logits, gradients = trained(model)
    with use(model), deltazoo.watch() as seen:
        ours, our_gradients = trained(model)
        with torch.no_grad():
            pieces = in_pieces(model, tokens())
    assert seen.runs
    assert_close(ours, logits)
    assert_close(pieces, logits, 5e-5)
    scale = max(float(gradient.norm()) for gradient in gradients.values())
    for key, gradient in gradients.items():
        assert float((our_gradients[key] - gradient).norm()) < 1e-4 * scale, key


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["qwen3_5_text", "kimi_linear", "mamba", "mamba2"])
def test_a_model_on_a_gpu_equals_the_one_on_the_cpu(name: str) -> None:
    model = build(name)
    with use(model):  # where flash-linear-attention is installed, transformers calls it on a CPU, too
        logits, gradients = trained(model)
    model = model.cuda()
    with deltazoo.use_backend("triton"), use(model):
        ours, our_gradients = trained(model)
        with torch.no_grad():
            pieces = in_pieces(model, tokens().cuda())
    assert_close(ours.cpu(), logits, 1e-3)
    assert_close(pieces.cpu(), logits, 1e-3)
    scale = max(float(gradient.norm()) for gradient in gradients.values())
    for key, gradient in gradients.items():
        assert float((our_gradients[key].cpu() - gradient).norm()) < 5e-3 * scale, key


def test_a_stack_is_saved_read_and_generates_as_a_model_of_transformers(tmp_path: Path) -> None:
    register()
    layers = {
        "gdn": {"mixer": "gated_deltanet", "heads": 2, "key_width": 8},
        "attn": {"mixer": "attention", "heads": 2},
    }
    spec = StackSpec(width=16, depth=2, vocab=29, pattern="gdn + attn", layers=layers)
    model = transformers.AutoModelForCausalLM.from_config(DeltazooConfig(stack=spec)).eval()
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    prompt = tokens() % 29
    generated = loaded.generate(prompt, max_new_tokens=4, do_sample=False)
    assert torch.equal(
        generated[:, prompt.shape[1] :], model.model.generate(prompt, Sampling(max_tokens=4, temperature=0))
    )
