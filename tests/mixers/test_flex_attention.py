"""FoX by FlexAttention: equality with SDPA, block masks, refusals; on a GPU the kernel beside the CPU."""

import copy

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention as torch_flex

from deltazoo.backends.io.errors import DeviceError
from deltazoo.backends.update.varlen import sequence_index
from deltazoo.mixers import Context, FoX
from deltazoo.mixers.parts.attention.flex_attention import causal_blocks, flex_attend, forgetting_attention
from deltazoo.mixers.parts.attention.softmax_attention import attend
from deltazoo.mixers.parts.gates.forget_gates import with_gates

SCALE = 0.3
PACKS = {"one sequence": None, "packed": [0, 130, 130, 290, 299]}  # a last token of no sequence
T = 300  # three blocks, the last one not full


@pytest.fixture
def flex_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses gradients on a CPU, although its eager operator computes them."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)


def operands(bounds: list[int] | None, length: int = T) -> tuple[list[Tensor], Tensor | None]:
    """q, k, v with two query heads per key head, and log gates."""
    torch.manual_seed(0)
    B = 2 if bounds is None else 1
    shapes = [(B, length, 4, 16), (B, length, 2, 16), (B, length, 2, 16), (B, length, 4)]
    q, k, v, raw = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    leaves = [q, k, v, torch.nn.functional.logsigmoid(raw)]
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    return [x.requires_grad_() for x in leaves], cu_seqlens


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("pack", PACKS)
def test_scores_and_gradients_of_gates_equal_those_of_channels(pack: str, flex_on_cpu: None) -> None:
    leaves, cu_seqlens = operands(PACKS[pack])
    q, k, v, log_f = leaves
    sums = log_f.cumsum(1)
    actual = forgetting_attention(q, k, v, sums, SCALE, cu_seqlens)
    expected = attend(*with_gates(q, k, sums, SCALE), v, SCALE, None, cu_seqlens)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    weight = torch.randn_like(actual)
    gradients = (torch.autograd.grad((o * weight).sum(), leaves, retain_graph=True) for o in (actual, expected))
    for left, right in zip(*gradients, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("length", [64, 256, T])
@pytest.mark.parametrize("pack", PACKS)
def test_block_mask_equals_that_of_all_pairs_of_tokens(pack: str, length: int) -> None:
    bounds = PACKS[pack]
    cu_seqlens = None if bounds is None else torch.tensor([min(b, length) for b in bounds], dtype=torch.int32)
    sequence = None if cu_seqlens is None else sequence_index(cu_seqlens, length)
    ours = causal_blocks(length, torch.device("cpu"), sequence)
    theirs = torch_flex.create_block_mask(ours.mask_mod, 1, 1, length, length, device="cpu")
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


@torch.no_grad()
def test_one_graph_serves_all_lengths(flex_on_cpu: None) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    module = torch.compile(forgetting_attention, fullgraph=True, dynamic=True, backend=counter)
    for length in (300, 260, 500):
        (q, k, v, log_f), cu_seqlens = operands([0, 130, 130, 250], length)
        sums = log_f.cumsum(1)
        expected = attend(*with_gates(q, k, sums, SCALE), v, SCALE, None, cu_seqlens)
        torch.testing.assert_close(module(q, k, v, sums, SCALE, cu_seqlens), expected, rtol=1e-10, atol=1e-10)
    # FlexAttention compiles an empty graph beside it
    assert sum(any(node.op == "placeholder" for node in graph.graph.nodes) for graph in counter.graphs) == 1


def test_a_cpu_and_float64_are_refused() -> None:
    (q, k, v, log_f), _ = operands(None, 20)
    with pytest.raises(
        DeviceError, match=r"gradients on CUDA alone, got cpu; its kernel takes float16, .* got torch.float64"
    ):
        flex_attend(q, k, v, log_f.cumsum(1), SCALE)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pack", PACKS)
def test_fox_on_a_gpu_equals_fox_on_a_cpu(pack: str, dtype: torch.dtype, compiled: bool) -> None:
    torch.manual_seed(0)
    exact = FoX(heads=4, key_value_heads=2).build(128).double()
    bounds = PACKS[pack]
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    x = torch.randn(2 if bounds is None else 1, T, 128, dtype=torch.float64)
    mixer = copy.deepcopy(exact).to("cuda", dtype)
    exact.load_state_dict({name: value.double().cpu() for name, value in mixer.state_dict().items()})
    x = x.to(dtype).double()
    context = Context(cu_seqlens=None if cu_seqlens is None else cu_seqlens.cuda())
    module = torch.compile(mixer, fullgraph=True) if compiled else mixer
    y, expected = module(x.to("cuda", dtype), None, context)[0], exact(x, None, Context(cu_seqlens=cu_seqlens))[0]
    weight = torch.randn_like(expected)
    results = [y, *torch.autograd.grad((y * weight.to("cuda", dtype)).sum(), list(mixer.parameters()))]
    references = [expected, *torch.autograd.grad((expected * weight).sum(), list(exact.parameters()))]
    tolerance = 2e-3 if dtype == torch.float32 else 2e-2
    for actual, reference in zip(results, references, strict=True):
        error = (actual.double().cpu() - reference).norm() / reference.norm()
        assert error < tolerance
