"""Flash attention with forget gates against float64: in Triton's interpreter, or on a GPU."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from assembly import disassemble, missing_waits, overwritten_operands, wrong_descriptor_addresses
from compiling import Compiler
from torch import Tensor
from triton_cases import DEVICE, INTERPRETED, needs_triton

from deltazoo import watch
from deltazoo.backends.ops.forgetting_attention import attention_with_cache, decode_attention, forgetting_attention
from deltazoo.backends.triton.attention import launch as launches
from deltazoo.backends.triton.attention import op as operators
from deltazoo.backends.triton.attention.launch import AttentionLaunch
from deltazoo.mixers import Context, FoX, fox

TOLERANCES = {  # of o, of the gradients of q, k and v, and of that of the gates
    torch.float32: (1e-5, 1e-5, 1e-4),
    torch.float16: (2e-3, 2e-3, 2e-3),
    torch.bfloat16: (5e-3, 1e-2, 1e-2),
}
DTYPES = list(TOLERANCES)[: 2 if INTERPRETED else 3]
SCALE = 0.3
TILES = {"keys as queries": (16, 16), "more queries": (32, 16), "more keys": (16, 32)}
PACKS = {"batch": None, "pack": [0, 13, 13, 14, 47], "pack with a tail": [0, 0, 33, 50]}


def exact(q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, bounds: list[int] | None) -> Tensor:
    """The definition, sequence by sequence."""
    T, group = q.shape[1], q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    ends = [0, T] if bounds is None else [*bounds, T]
    pieces = []
    for first, last in itertools.pairwise(ends):
        q_n, k_n, v_n, g = (x[:, first:last].transpose(1, 2) for x in (q, k, v, log_f.cumsum(1)))
        scores = SCALE * q_n @ k_n.mT + g[..., :, None] - g[..., None, :]
        future = torch.ones(last - first, last - first, dtype=torch.bool, device=q.device).triu(1)
        pieces.append((scores.masked_fill(future, -torch.inf).softmax(-1) @ v_n).transpose(1, 2))
    return torch.cat(pieces, 1)


def draw(B: int, T: int, H: int, G: int, E: int, dtype: torch.dtype, gates: float = 1.0) -> list[Tensor]:
    """q, k, v and log gates. Args: gates: factor of the log gates."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, T, H, E), (B, T, G, E), (B, T, G, E), (B, T, H)]
    q, k, v, raw = (torch.randn(shape, generator=generator) for shape in shapes)
    operands = [x.to(DEVICE, dtype) for x in (q, k, v)]
    return [x.requires_grad_() for x in (*operands, gates * F.logsigmoid(raw).to(DEVICE))]


def error(actual: Tensor, expected: Tensor, least: float = 1e-30) -> float:
    return float((actual.double() - expected).norm() / expected.norm().clamp(min=least))


def assert_equals_definition(leaves: list[Tensor], bounds: list[int] | None = None, least: float = 1e-30) -> None:
    """Args: least: norms below it count as this, for gradients that vanish."""
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    o = forgetting_attention(*leaves, SCALE, cu_seqlens)
    d_o = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o)
    gradients = torch.autograd.grad(o, leaves, d_o)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    expected = exact(*wide, bounds)
    references = torch.autograd.grad(expected, wide, d_o.double())
    of_o, of_operands, of_gates = TOLERANCES[leaves[0].dtype]
    tolerances = (of_o, of_operands, of_operands, of_operands, of_gates)
    names = ("o", "dq", "dk", "dv", "d_log_f")
    for name, actual, reference, limit in zip(names, (o, *gradients), (expected, *references), tolerances, strict=True):
        assert error(actual.detach(), reference.detach(), least) <= limit, name


@pytest.fixture
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles, so that small shapes have several."""
    monkeypatch.setattr(launches, "launch_of", lambda *_: AttentionLaunch(*TILES[request.param], 4, 2))
    monkeypatch.setattr(launches, "SUM_ROWS", 32)
    for module in (launches, operators):
        monkeypatch.setattr(module, "sum_block", lambda *_: TILES[request.param][1])


@needs_triton
@pytest.mark.parametrize(
    ("tiles", "pack"),
    [
        pytest.param("keys as queries", "batch", marks=pytest.mark.kernel_smoke),
        ("keys as queries", "pack"),
        ("more queries", "pack with a tail"),
        ("more keys", "pack"),
    ],
    indirect=["tiles"],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_and_its_gradients(pack, dtype, tiles):
    with watch() as log:
        assert_equals_definition(draw(2 if pack == "batch" else 1, 53, 4, 2, 16, dtype), PACKS[pack])
    assert log.kernels == dict.fromkeys(
        (
            "forget_sums_kernel", "key_norms_kernel", "forgetting_attention_kernel", "query_gradients_kernel",
            "key_gradients_kernel", "forget_gradients_kernel",
        ), 1,
    )  # fmt: skip


@needs_triton
@pytest.mark.parametrize(
    ("tiles", "packed"), [("keys as queries", True), ("more keys", False), ("more queries", True)], indirect=["tiles"]
)
def test_new_tokens_attend_to_a_cache_that_includes_them(packed, tiles):
    """Sequences of 0, 9 and 30 cached tokens get 20, 0 and 11 new ones; empty slots hold NaN."""
    N, S, H, G, E = 3, 45, 4, 2, 24
    before, counts = torch.tensor([0, 9, 30]), torch.tensor([20, 0, 11])
    q, k, v, log_f = (x.detach() for x in draw(N, S, H, G, E, torch.float32))
    expected = exact(*(x.double() for x in (q, k, v, log_f)), None)
    ends = before + counts
    is_empty = (torch.arange(S) >= ends[:, None]).to(DEVICE)
    sums = log_f.cumsum(1).masked_fill(is_empty[..., None], torch.nan)
    k = torch.cat([k, torch.full_like(k[..., :8], torch.nan)], -1).masked_fill(is_empty[..., None, None], torch.nan)
    v = v.masked_fill(is_empty[..., None, None], torch.nan)
    new = [(n, int(before[n]), int(ends[n])) for n in range(N)]
    wanted = torch.cat([expected[n, first:last] for n, first, last in new])
    if packed:
        tail = torch.full_like(q[0, :5], torch.nan)  # tokens of no sequence
        q = torch.cat([*(q[n, first:last] for n, first, last in new), tail])[None]
        cu_seqlens = torch.tensor([0, 20, 20, 31], dtype=torch.int32, device=DEVICE)
    else:
        padded = F.pad(q, (0, 0, 0, 0, 0, 20), value=torch.nan)
        q, cu_seqlens = torch.stack([padded[n, first : first + 20] for n, first, _ in new]), None
    o = attention_with_cache(q, k, v, sums, before.to(DEVICE), ends.to(DEVICE), SCALE, cu_seqlens)
    actual = o[0, :31] if packed else torch.cat([o[n, :count] for n, count in enumerate(counts.tolist())])
    assert error(actual, wanted) <= 1e-5
    assert not packed or not o[0, 31:].any()


@needs_triton
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_token_attends_to_its_cache(dtype, group, monkeypatch):
    """Caches of 200 slots in four parts, filled to different lengths; empty slots hold NaN."""
    monkeypatch.setattr(launches, "_PROGRAMS_PER_PROCESSOR", 10**6)
    monkeypatch.setattr(launches, "_MAX_PARTS", 4)
    B, S, G, E, V = 4, 600, 2, 24, 16
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, 1, G * group, E), (B, S, G, E), (B, S, G, V)]
    q, k, v = (torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes)
    ends = torch.tensor([0, 1, 333, 600], device=DEVICE)
    is_empty = (torch.arange(S, device=DEVICE) >= ends[:, None])[..., None, None]
    o = decode_attention(q, k.masked_fill(is_empty, torch.nan), v.masked_fill(is_empty, torch.nan), ends, SCALE)
    assert not o[0].any()
    for b in range(1, B):
        keys, values = (x[b, : ends[b]].double().repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
        scores = SCALE * q[b].double().transpose(0, 1) @ keys.mT
        assert error(o[b], (scores.softmax(-1) @ values).transpose(0, 1)) <= TOLERANCES[dtype][0]


@needs_triton
@pytest.mark.parametrize("tiles", ["keys as queries"], indirect=True)
@pytest.mark.parametrize("gates", [0.0, 20.0, 2000.0])
def test_gates_that_keep_or_forget_everything(gates, tiles):
    assert_equals_definition(draw(1, 40, 2, 1, 16, torch.float32, gates), least=1.0)


@needs_triton
@pytest.mark.parametrize("tiles", ["keys as queries"], indirect=True)
@pytest.mark.parametrize("pack", [None, [0, 31, 31, 90]])
def test_forgotten_keys_are_skipped_without_a_change_of_the_results(pack, tiles, monkeypatch):
    """With small queries the bound of the weights is sharp."""
    leaves = draw(1, 100, 2, 1, 16, torch.float32, 8.0)
    leaves[0].data *= 1e-3
    cu_seqlens = None if pack is None else torch.tensor(pack, dtype=torch.int32, device=DEVICE)
    starts, results = [], []

    def launch(phase, kernel, x, tensors, scale):
        launches.launch(phase, kernel, x, tensors, scale)
        if phase == "queries":
            starts.append(tensors["starts"] if pack is None else tensors["starts"][:, [0, 1, 3, 4, 5, 6, 8]])

    monkeypatch.setattr(operators, "launch", launch)
    for is_skipped in (True, False):
        if not is_skipped:
            monkeypatch.setattr(operators, "launch_norms", lambda kernel, x, norms: norms.fill_(torch.inf))
        o = forgetting_attention(*leaves, SCALE, cu_seqlens)
        results.append([o, *torch.autograd.grad(o.square().sum(), leaves)])
    assert starts[0].max() >= 32
    assert not starts[1].any()
    for skipped, complete in zip(*results, strict=True):
        torch.testing.assert_close(skipped, complete, rtol=1e-5, atol=1e-6)


@needs_triton
@pytest.mark.parametrize("tiles", ["keys as queries"], indirect=True)
@pytest.mark.parametrize("E", [1, 24])
def test_head_widths_that_are_no_power_of_two(E, tiles):
    assert_equals_definition(draw(1, 20, 2, 2, E, torch.float32))


@needs_triton
@pytest.mark.parametrize("tiles", ["keys as queries"], indirect=True)
def test_operands_in_rows_with_gaps(tiles):
    """As k and v are in the result of one matrix product."""
    q, k, v, log_f = (x.detach() for x in draw(2, 20, 2, 2, 16, torch.float32))
    both = torch.cat([k, v], 2).requires_grad_()
    leaves = [q.requires_grad_(), *both.chunk(2, 2), log_f.requires_grad_()]
    o = forgetting_attention(*leaves, SCALE)
    (gradient,) = torch.autograd.grad(o.square().sum(), both)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v, log_f)]
    expected = torch.autograd.grad(exact(*wide, None).square().sum(), wide[1:3])
    assert error(gradient, torch.cat(expected, 2)) <= 1e-5


@needs_triton
@pytest.mark.parametrize("tiles", ["keys as queries"], indirect=True)
def test_values_that_are_not_finite_stay_in_their_sequence(tiles):
    bounds = [0, 13, 20, 40]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    clean = draw(1, 40, 2, 1, 16, torch.float32)
    others = [*range(13), *range(20, 40)]
    results = []
    for value in (None, torch.nan, torch.inf):
        leaves = [x.detach().clone() for x in clean]
        d_o = torch.ones_like(leaves[0])
        for x in (*leaves, d_o) if value is not None else ():
            x[:, 15] = value
        leaves = [x.requires_grad_() for x in leaves]
        o = forgetting_attention(*leaves, SCALE, cu_seqlens)
        results.append([x[:, others] for x in (o, *torch.autograd.grad(o, leaves, d_o))])
    for changed in results[1:]:
        for actual, expected in zip(changed, results[0], strict=True):
            assert torch.equal(actual, expected)


@needs_triton
@pytest.mark.parametrize("tiles", ["keys as queries"], indirect=True)
def test_gates_after_a_long_forgotten_past_are_as_exact_as_at_the_start(tiles):
    """Sums reach 60,000 here. Without their low terms the error of o is 1e-3."""
    q, k, v, log_f = (x.detach() for x in draw(1, 40, 1, 1, 16, torch.float32))
    shifted = log_f.clone()
    shifted[:, 0] = -60000.0
    leaves = [x.requires_grad_() for x in (q, k, v, shifted)]
    assert_equals_definition(leaves)


@needs_triton
@pytest.mark.parametrize("tiles", ["keys as queries"], indirect=True)
def test_a_second_derivative_is_refused(tiles):
    leaves = draw(1, 20, 1, 1, 16, torch.float32)
    (first,) = torch.autograd.grad(forgetting_attention(*leaves, SCALE).square().sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        first.sum().backward()


@needs_triton
@pytest.mark.parametrize("tiles", ["keys as queries"], indirect=True)
def test_operators_pass_opcheck(tiles):
    q, k, v, log_f = (x.detach() for x in draw(1, 20, 2, 1, 16, torch.float32))
    names = ("test_schema", "test_faketensor")
    ops = torch.ops.deltazoo
    torch.library.opcheck(
        ops.triton_forgetting_attention.default, (q, k, v, log_f, None, SCALE, True), test_utils=names
    )
    results = ops.triton_forgetting_attention(q, k, v, log_f, None, SCALE, True)
    backward = ops.triton_forgetting_attention_backward.default
    torch.library.opcheck(backward, (q, k, v, log_f, *results, q, None, SCALE), test_utils=names)
    ends = torch.tensor([20], device=DEVICE)
    arguments = (q, k, v, log_f.cumsum(1), ends - 20, ends, None, SCALE)
    torch.library.opcheck(ops.triton_attention_with_cache.default, arguments, test_utils=names)
    torch.library.opcheck(ops.triton_decode_attention.default, (q[:, :1], k, v, ends, SCALE), test_utils=names)


def run_mixer(module: torch.nn.Module, mixer: torch.nn.Module, x: Tensor, context: Context) -> list[Tensor]:
    y = module(x, None, context)[0]
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *mixer.parameters()])]


@needs_triton
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("pack", [None, [0, 7, 7, 20]])
def test_fox_computes_the_same_with_and_without_the_kernels(pack, compiled, monkeypatch):
    torch._dynamo.reset()
    torch.manual_seed(0)
    mixer = FoX(heads=2, key_value_heads=1, head_width=16, qk_norm=True, rotary_theta=100.0).build(16).to(DEVICE)
    x = torch.randn(2 if pack is None else 1, 20, 16, device=DEVICE, requires_grad=True)
    context = Context(cu_seqlens=None if pack is None else torch.tensor(pack, dtype=torch.int32, device=DEVICE))
    expected = run_mixer(mixer, mixer, x, context)
    monkeypatch.setattr(fox, "refusals", lambda *_: [])
    module = torch.compile(mixer, fullgraph=True, backend="aot_eager") if compiled else mixer
    with watch() as log, torch.device(DEVICE):  # an active torch function mode
        actual = run_mixer(module, mixer, x, context)
    assert "key_gradients_kernel" in log.kernels
    for ours, reference in zip(actual, expected, strict=True):
        assert error(ours, reference.double()) <= 1e-4


needs_gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_gpu
@pytest.mark.cuda
@pytest.mark.parametrize("E", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_tuned_tiles(dtype, E):
    for gates, bounds in ((1.0, None), (30.0, None), (1.0, [0, 500, 500, 501, 900])):
        assert_equals_definition(draw(1, 1000, 4, 2, E, dtype, gates), bounds, least=1.0)


@needs_gpu
@pytest.mark.cuda
def test_gradients_of_gates_are_exact_in_long_sequences_of_bfloat16():
    """They cancel: with delta from o in bfloat16, uncorrected, the error at 1,024 tokens is 10 %."""
    assert_equals_definition(draw(1, 1024, 2, 2, 64, torch.bfloat16))
    assert_equals_definition(draw(1, 4096, 2, 2, 64, torch.bfloat16, 0.02))


@needs_gpu
@pytest.mark.cuda
def test_results_do_not_depend_on_the_run():
    leaves = draw(1, 1000, 4, 2, 64, torch.bfloat16)
    runs = []
    for _ in range(3):
        o = forgetting_attention(*leaves, SCALE)
        runs.append([o, *torch.autograd.grad(o.float().square().sum(), leaves)])
    assert all(torch.equal(x, y) for run in runs[1:] for x, y in zip(run, runs[0], strict=True))


@needs_gpu
@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pack", [None, [0, 130, 130, 290, 300]])
def test_a_compiled_fox_on_a_gpu_equals_one_on_a_cpu(pack, dtype):
    torch._dynamo.reset()
    torch.manual_seed(0)
    exact_mixer = FoX(heads=4, key_value_heads=2).build(128).double()
    mixer = copy.deepcopy(exact_mixer).to("cuda", dtype)
    exact_mixer.load_state_dict({name: value.double().cpu() for name, value in mixer.state_dict().items()})
    x = torch.randn(2 if pack is None else 1, 300, 128, device="cuda", dtype=dtype, requires_grad=True)
    wide = x.detach().double().cpu().requires_grad_()
    bounds = None if pack is None else torch.tensor(pack, dtype=torch.int32)
    expected = run_mixer(exact_mixer, exact_mixer, wide, Context(cu_seqlens=bounds))
    context = Context(cu_seqlens=None if bounds is None else bounds.cuda())
    actual = run_mixer(torch.compile(mixer, fullgraph=True), mixer, x, context)
    for ours, reference in zip(actual, expected, strict=True):
        assert error(ours.cpu(), reference) <= (2e-3 if dtype == torch.float32 else 2e-2)


@needs_gpu
@pytest.mark.cuda
def test_prefill_and_decoding_with_a_cache_equal_one_call():
    torch.manual_seed(0)
    mixer = FoX(heads=4, key_value_heads=2, head_width=64).build(256).to("cuda", torch.bfloat16)
    x = torch.randn(3, 600, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad(), watch() as log:
        expected, state, pieces = mixer(x)[0], mixer.init_state(3, 700), []
        for first, last in ((0, 300), (300, 597), (597, 598), (598, 599), (599, 600)):
            y, state, _ = mixer(x[:, first:last], state)
            pieces.append(y)
    assert log.kernels["decode_attention_kernel"] == 3
    assert log.kernels["forgetting_attention_kernel"] == 3
    assert error(torch.cat(pieces, 1), expected.double()) <= 1e-2


@pytest.mark.kernels
@pytest.mark.skipif(INTERPRETED, reason="needs Triton's compiler, not its interpreter")
@pytest.mark.parametrize(("E", "dtype"), [(64, torch.bfloat16), (128, torch.bfloat16)])
def test_the_compiled_kernels_fit_and_have_no_known_faults(E, dtype, monkeypatch):
    compiler = Compiler(all=True)
    monkeypatch.setattr("deltazoo.backends.triton.runtime.launcher.launcher", compiler)
    q, log_f = torch.empty(1, 300, 4, E, dtype=dtype), torch.empty(1, 300, 4)
    k, v = torch.empty(2, 1, 300, 2, E, dtype=dtype)
    saved = operators.attention(q, k, v, log_f, None, SCALE, True)
    operators.attention_backward(q, k, v, log_f, *saved, q, None, SCALE)
    operators.decode_attention(q[:, :1], k, v, torch.tensor([300]), SCALE)
    assert len(compiler.compiled) == 8
    for name, compiled in compiler.compiled:
        assert compiled.metadata.shared <= 99 * 1024, name  # two programs per SM on Hopper, one on smaller GPUs
        sass = disassemble(compiled.asm["cubin"])
        assert not wrong_descriptor_addresses(sass), name
        assert not missing_waits(sass), name
        assert not overwritten_operands(sass), name
