"""PaTH attention by kernels against float64, token by token: in Triton's interpreter, or on a GPU.

B batch, T time, H query heads, G key-value heads, D key width, V value width, S slots, N sequences
"""

from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compiling import Compiler
from torch import Tensor
from triton_cases import CAN_RUN_KERNELS, DEVICE, INTERPRETED, needs_triton

from deltazoo import watch
from deltazoo.backends.ops import path_attention as module
from deltazoo.backends.ops.path_attention import (
    PathCache,
    PathInputs,
    PathPast,
    PathToken,
    path_attention,
    path_decode_,
    path_prefill,
    refusals,
    settled_keys,
)
from deltazoo.backends.torch_ext.devices import DeviceSpec
from deltazoo.backends.triton import limits
from deltazoo.backends.triton.attention import path_decode_op, path_op
from deltazoo.mixers import PathAttention
from deltazoo.mixers import path_attention as mixer_module
from deltazoo.mixers.core.mixer import Context

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 1e-2}  # o: half of it; gates: twice
SCALE = 0.3
TILES = {
    "tiles of 64": path_op.PathLaunch(64, 64, 4, 1),
    "tiles of 128": path_op.PathLaunch(128, 128, 4 if INTERPRETED else 8, 1),
    "tiles of 128 queries": path_op.PathLaunch(128, 64, 4, 1),
}


@pytest.fixture(autouse=True)
def products_in_tf32_truncate(monkeypatch):
    """Let the interpreter drop the last 13 bits of float32 operands, as tensor cores do."""
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    def truncated(x):
        return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) if x.dtype == np.float32 else x

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        operands = [np.ascontiguousarray(x.data) for x in (a, b)]
        if input_precision == interpreter._ir.INPUT_PRECISION.TF32:
            operands = [truncated(x) for x in operands]
        product = np.matmul(*operands, dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


class Case(NamedTuple):
    """Sizes; cu: bounds of a pack; gate: mean of the logits of the forget gates, None: no gates; beta: of beta."""

    B: int
    T: int
    H: int
    G: int
    D: int
    V: int
    gate: float | None = None
    cu: tuple[int, ...] | None = None
    beta: float = 0.0


CASES = {
    "one token": Case(2, 1, 1, 1, 16, 16),
    "two blocks": Case(1, 70, 1, 1, 64, 24),
    "gates": Case(1, 200, 2, 2, 16, 32, gate=2.0),
    "pack, gates, grouped heads": Case(1, 160, 2, 1, 24, 16, gate=2.0, cu=(0, 0, 130, 130, 150)),
    "reflections": Case(1, 330, 1, 1, 16, 16, beta=8.0),
    "strong gates": Case(1, 150, 1, 1, 16, 16, gate=-60.0),
}
RUNS = [  # each branch once in the interpreter
    pytest.param("pack, gates, grouped heads", "tiles of 64", torch.float32, marks=pytest.mark.kernel_smoke),
    ("pack, gates, grouped heads", "tiles of 128", torch.float16),
    ("one token", "tiles of 64", torch.float32),
    ("two blocks", "tiles of 64", torch.float16),
    ("gates", "tiles of 128", torch.float32),
    ("reflections", "tiles of 128 queries", torch.float32),
    ("reflections", "tiles of 64", torch.float16),
    ("strong gates", "tiles of 64", torch.float32),
    *([] if INTERPRETED else [(name, "tiles of 64", torch.bfloat16) for name in CASES]),
]


def draw(case: Case, dtype: torch.dtype, seed: int = 0) -> tuple[list[Tensor], Tensor | None]:
    """Return q, k, v, w, beta and with gates log f, and the bounds."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    B, T, H, G, D, V = case[:6]
    q, k, v, w = normal(B, T, H, D), normal(B, T, G, D), normal(B, T, G, V), F.normalize(normal(B, T, G, D), dim=-1)
    tensors = [x.to(dtype) for x in (q, k, v, w)]
    tensors.append(2 * torch.sigmoid(normal(B, T, G) + case.beta).float())
    if case.gate is not None:
        tensors.append(F.logsigmoid(normal(B, T, H) + case.gate))
    cu = None if case.cu is None else torch.tensor(case.cu, dtype=torch.int32, device=DEVICE)
    return [x.to(DEVICE) for x in tensors], cu


def spans(case: Case) -> list[tuple[int, int, int]]:
    """Return row, first token and end of each sequence."""
    if case.cu is None:
        return [(b, 0, case.T) for b in range(case.B)]
    return [(0, first, end) for first, end in zip(case.cu, case.cu[1:], strict=False)]


class Past(NamedTuple):
    """Cached keys [n, G, D] and values [n, G, V] of one sequence; bias [n, H]: the log gates to its first token."""

    k: Tensor
    v: Tensor
    bias: Tensor


def attend(x: list[Tensor], past: Past | None = None) -> tuple[Tensor, Tensor]:
    """Attend within one sequence, x without its batch dimension. Returns o, and the keys after the last token."""
    q, k, v, w, beta, *gates = x
    repeats = q.shape[1] // k.shape[1]
    keys, values, log_gate = k[:0], v[:0], q[:0, :, 0]
    if past is not None:
        keys, values, log_gate = past
    rows = [v.new_zeros(0, q.shape[1], v.shape[2])]
    for t in range(q.shape[0]):
        erased = torch.einsum("sgd,gd->sg", keys, w[t]) * beta[t]
        keys = torch.cat([keys - erased[..., None] * w[t], k[t : t + 1]])
        values = torch.cat([values, v[t : t + 1]])
        log_gate = torch.cat([log_gate + (gates[0][t] if gates else 0.0), torch.zeros_like(q[:1, :, 0])])
        scores = SCALE * torch.einsum("hd,shd->sh", q[t], keys.repeat_interleave(repeats, 1)) + log_gate
        rows.append(torch.einsum("sh,shv->hv", scores.softmax(0), values.repeat_interleave(repeats, 1))[None])
    return torch.cat(rows), keys


def reference(case: Case, x: list[Tensor]) -> Tensor:
    B, T, H, V = case.B, case.T, case.H, case.V
    o = [x[0].new_zeros(T, H, V) for _ in range(B)]
    for b, first, end in spans(case):
        rows = attend([y[b, first:end] for y in x])[0]
        o[b] = torch.cat([o[b][:first], rows, o[b][end:]])
    return torch.stack(o)


def inputs_of(case: Case, x: list[Tensor], cu: Tensor | None) -> PathInputs:
    sums = None
    if case.gate is not None:
        sums = torch.stack([y.double() for y in x[5]])
        pieces = [sums[b, first:end].cumsum(0) for b, first, end in spans(case)]
        tail = sums[0, case.cu[-1] :] if case.cu else sums[0, :0]
        sums = torch.cat([*pieces, tail]).view(sums.shape)
    return PathInputs(*x[:5], sums, cu)


def error_of(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).detach().norm() / expected.detach().norm().clamp(min=1e-30))


@needs_triton
@pytest.mark.parametrize(("name", "tiles", "dtype"), RUNS)
def test_the_attention_and_its_gradients_equal_the_equation(name, tiles, dtype, monkeypatch):
    case, launch = CASES[name], TILES[tiles]
    monkeypatch.setattr(path_op, "config_of", lambda *_: path_op.PathConfig(launch, launch, launch))
    x, cu = draw(case, dtype)
    leaves = [y.requires_grad_() for y in x]
    o = path_attention(inputs_of(case, leaves, cu), SCALE)
    d_o = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o)
    gradients = torch.autograd.grad(o, leaves, d_o)
    exact = [y.detach().double().requires_grad_() for y in leaves]
    expected = reference(case, exact)
    references = torch.autograd.grad(expected, exact, d_o.double())
    assert error_of(o, expected) <= TOLERANCE[dtype] / 2
    for i, (actual, wanted) in enumerate(zip(gradients, references, strict=True)):
        assert actual.dtype == leaves[i].dtype
        size = wanted.norm() if wanted.norm() > 1e-6 * d_o.norm() else d_o.norm()  # weights of 0 and 1: no gradient
        assert (actual - wanted).norm() <= TOLERANCE[dtype] * (2 if i > 3 else 1) * size, i
    if cu is not None:
        assert not o[:, case.cu[-1] :].any()
        assert not any(gradient[:, case.cu[-1] :].any() for gradient in gradients)


@needs_triton
def test_a_gate_after_many_strong_ones_is_exact():
    """The sums reach -4e5, where float32 has steps of 0.03."""
    case = Case(1, 140, 1, 1, 16, 16, gate=2.0)
    x, _ = draw(case, torch.float32)
    x[5][:, :64] = -6e3
    exact = [y.double() for y in x]
    assert error_of(path_attention(inputs_of(case, x, None), SCALE), reference(case, exact)) < 1e-6


@needs_triton
@pytest.mark.parametrize("operand", [0, 3, 5])
def test_what_is_not_finite_stays_in_its_sequence_and_head(operand):
    case = Case(1, 150, 2, 2, 16, 16, gate=2.0, cu=(0, 70, 150))
    x, cu = draw(case, torch.float32)
    clean = path_attention(inputs_of(case, x, cu), SCALE)
    x[operand][0, 30, 0] = float("nan")
    inputs = inputs_of(case, x, cu)
    o = path_attention(inputs, SCALE)
    assert o[0, 30:70, 0].isnan().any()
    assert torch.equal(o[0, 70:], clean[0, 70:])
    assert torch.equal(o[0, :, 1], clean[0, :, 1])


@needs_triton
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(CASES["pack, gates, grouped heads"], marks=pytest.mark.kernel_smoke),
        Case(2, 150, 2, 1, 16, 16, gate=2.0),
        Case(1, 64, 1, 1, 16, 16, cu=(0, 64, 64)),
        Case(3, 20, 1, 1, 16, 16),
    ],
)
def test_prefill_continues_from_cached_keys(case):
    """The cache has more channels than the keys, as with forget gates."""
    x, cu = draw(case, torch.float32)
    N, S, generator = len(spans(case)), 40, torch.Generator().manual_seed(2)
    k = torch.randn(N, S, case.G, case.D + 8, generator=generator).to(DEVICE)
    v = torch.randn(N, S, case.G, case.V, generator=generator).to(DEVICE)
    bias = None if case.gate is None else -torch.rand(N, S, case.H, generator=generator).to(DEVICE)
    seen = torch.tensor([S, 0, 7, 3, 2], device=DEVICE)[:N]
    o, keys, product = path_prefill(inputs_of(case, x, cu), PathPast(k, v, seen, bias), SCALE)
    for n, (b, first, end) in enumerate(spans(case)):
        m, tokens = int(seen[n]), [y[b, first:end].double() for y in x]
        old = k[n, :m, :, : case.D].double()
        zero = old.new_zeros(m, case.H)
        past = Past(old, v[n, :m].double(), zero if bias is None else bias[n, :m].double())
        expected, all_keys = attend(tokens, past)
        moved = old - torch.einsum("sgd,ged->sge", old, product[n].double())
        assert error_of(o[b, first:end], expected) < 1e-5
        assert error_of(torch.cat([moved, keys[b, first:end].double()]), all_keys) < 1e-5


@needs_triton
@pytest.mark.parametrize(
    ("case", "splits", "most", "dtype"),
    [
        pytest.param(Case(3, 5, 4, 2, 12, 20), 4, 3, torch.float32, marks=pytest.mark.kernel_smoke),
        (Case(2, 2, 1, 1, 16, 16), 1, 1, torch.float32),
        (Case(2, 4, 3, 1, 24, 16), 2, 4, torch.float32),
        (Case(3, 7, 2, 2, 16, 24), 1, 2, torch.bfloat16),
    ],
)
def test_decoded_tokens_update_the_cache_in_place(case, splits, most, dtype, monkeypatch):
    """most: tokens whose matrices update the cached keys together. The third row has a token every other time."""
    monkeypatch.setattr(path_decode_op, "_MIN_SLOTS", 16)
    device = path_decode_op.device_spec(None if INTERPRETED else 0)
    device = device._replace(processors=splits * case.B * case.G)
    monkeypatch.setattr(path_decode_op, "device_spec", lambda _: device)
    monkeypatch.setattr(path_decode_op, "_PROGRAMS_PER_SM", 1)
    x, _ = draw(case, dtype)
    B, S, generator = case.B, 70, torch.Generator().manual_seed(2)
    k = torch.randn(B, S, case.G, case.D, generator=generator).to(DEVICE)
    v = torch.randn(B, S, case.G, case.V, generator=generator).to(x[2])
    seen = torch.tensor([S - case.T, 0, 5], device=DEVICE)[:B]
    before = k.clone(), v.clone(), seen.clone()
    pending = torch.zeros_like(seen)
    cache = PathCache(k, v, torch.zeros(B, most, case.G, 2, case.D, device=DEVICE), pending, seen)
    steps, counted, operands = [], seen.clone(), [*x[:4], torch.logit(x[4] / 2)]
    for t in range(case.T):
        real = torch.tensor([True, True, t % 2 == 1], device=DEVICE)[:B]
        with watch() as log:
            steps.append(path_decode_(PathToken(*(y[:, t : t + 1] for y in operands), real), cache, SCALE))
        launched = {"path_decode_kernel": 1, "path_count_kernel": 1}
        assert log.kernels == launched | ({"path_combine_kernel": 1} if splits > 1 else {})
        counted += real
        assert torch.equal(seen, counted) and torch.equal(pending, (counted - before[2]) % most)
    o, settled = torch.cat(steps, 1), settled_keys(cache)
    assert o.isfinite().all()  # also where there is no token
    assert most > 1 or torch.equal(settled, k)
    for b in range(B):
        m, tokens = int(before[2][b]), slice(1 if b == 2 else 0, None, 2 if b == 2 else 1)
        zero = torch.zeros(m, case.H, device=DEVICE).double()
        past = Past(before[0][b, :m].double(), before[1][b, :m].double(), zero)
        expected, keys = attend([y[b, tokens].double() for y in x], past)
        n = len(keys)
        assert n == int(seen[b]) and o.dtype == dtype
        assert error_of(o[b, tokens], expected) < TOLERANCE[dtype] / 2
        assert error_of(settled[b, :n], keys) < 1e-6
        assert torch.equal(k[b, n:], before[0][b, n:])
        assert torch.equal(v[b, :m], before[1][b, :m])
        assert torch.equal(v[b, m:n], x[2][b, tokens])
        assert torch.equal(v[b, n:], before[1][b, n:])


GATES = "gates, grouped heads"
MIXERS = {
    "default": PathAttention(heads=2, head_width=16, rank=4),
    GATES: PathAttention(heads=4, key_value_heads=2, head_width=16, rank=None, forget_gate=True, qk_norm=True),
}


def run_mixer(mixer: torch.nn.Module, x: Tensor, context: Context | None, rows: int) -> list[Tensor]:
    """Train on x, then prefill it twice and decode three tokens. Returns outputs, gradients and the state."""
    mixer.zero_grad()
    leaf = x.clone().requires_grad_()
    mask = torch.ones_like(x[..., 0]) if context is None or context.mask is None else context.mask.to(x.dtype)
    y = mixer(leaf, None, context)[0] * mask[..., None]
    y.square().sum().backward()
    results = [y.detach(), leaf.grad, *(parameter.grad.clone() for parameter in mixer.parameters())]
    with torch.no_grad():
        state = mixer.init_state(rows, 200)
        token, padding = x[:1, :1].expand(rows, -1, -1).contiguous(), None
        if context is not None and context.mask is not None:
            padding = Context(mask=context.mask[:, 12:13])
        steps = [(x, context), *[(token, padding)] * 4, (x, context), *[(token, None)] * 3]
        for tokens, packing in steps:
            y, state = mixer(tokens, state, packing)[:2]
            results.append(y if packing is None or packing.mask is None else y * packing.mask[..., None])
    in_use = (torch.arange(200, device=x.device) < state["seen"][:, None])[..., None, None]
    cache = PathCache(*(state[name] for name in PathCache._fields))
    return [*results, settled_keys(cache) * in_use, state["v"] * in_use]


@needs_triton
@pytest.mark.parametrize(
    ("name", "layout"), [("default", "dense"), ("default", "pack"), (GATES, "pack"), (GATES, "mask")]
)
def test_a_mixer_computes_the_same_with_and_without_the_kernels(name, layout, monkeypatch):
    monkeypatch.setattr(mixer_module, "PENDING", 3)
    torch.manual_seed(0)
    mixer = MIXERS[name].build(32).to(DEVICE)
    x = torch.randn(2 if layout != "pack" else 1, 80, 32).to(DEVICE)
    mask = torch.ones(2, 80, dtype=torch.bool, device=DEVICE)
    mask[0, :13] = False
    cu = torch.tensor([0, 0, 70, 80], dtype=torch.int32, device=DEVICE)
    context = {"dense": None, "pack": Context(cu_seqlens=cu), "mask": Context(mask=mask)}[layout]
    results = []
    for allowed in (True, False):
        refused = () if allowed else ("this test runs plain torch.",)
        monkeypatch.setattr(limits, "elementwise_refusals", lambda *_, refused=refused: refused)
        monkeypatch.setattr(module, "runs_flash_kernels", lambda *_, allowed=allowed: allowed)
        with watch() as log:
            results.append(run_mixer(mixer, x, context, 3 if layout == "pack" else 2))
        launched = {"path_attention_kernel": 3, "path_past_kernel": 2, "path_decode_kernel": 7}
        assert launched.items() <= log.kernels.items() if allowed else not log.kernels.keys() & launched
    for actual, expected in zip(*results, strict=True):
        assert error_of(actual, expected.double()) < 1e-5


@needs_triton
@torch.no_grad()
@pytest.mark.parametrize("name", MIXERS)
def test_a_decode_step_is_one_graph(name, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(mixer_module, "PENDING", 2)
    monkeypatch.setattr(limits, "elementwise_refusals", lambda *_: ())
    torch.manual_seed(0)
    mixer = MIXERS[name].build(32).to(DEVICE)
    compiled = torch.compile(mixer, fullgraph=True, backend="eager")
    states = [mixer.init_state(2, 8) for _ in range(2)]
    for x in torch.randn(3, 2, 1, 32, device=DEVICE):
        with watch() as log:
            torch.testing.assert_close(mixer(x, states[0]).y, compiled(x, states[1]).y)
        assert log.kernels["path_decode_kernel"] == log.kernels["path_count_kernel"] == 2
    torch.testing.assert_close(dict(states[1]), dict(states[0]))
    assert states[0]["seen"].tolist() == [3, 3] and states[0]["pending"].tolist() == [1, 1]


@needs_triton
@torch.no_grad()
def test_a_packed_token_is_not_a_row(monkeypatch):
    monkeypatch.setattr(limits, "elementwise_refusals", lambda *_: ())
    mixer, x = MIXERS["default"].build(32).to(DEVICE), torch.randn(1, 1, 32, device=DEVICE)
    pack = Context(cu_seqlens=torch.tensor([0, 0, 1], dtype=torch.int32, device=DEVICE))
    state = mixer.init_state(2, 8)
    torch.testing.assert_close(mixer(x, state, pack).y, mixer(x, mixer.init_state(1, 8)).y)
    assert state["seen"].tolist() == [0, 1]


@needs_triton
def test_the_decode_operator_passes_opcheck():
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    x, _ = draw(Case(2, 1, 2, 1, 16, 24), torch.float32)
    cache = [x[1].new_zeros(2, 20, 1, 16), x[1].new_zeros(2, 20, 1, 24), x[1].new_zeros(2, 3, 1, 2, 16)]
    counts = [torch.tensor(y, device=DEVICE) for y in ([2, 0], [5, 3])]
    torch.library.opcheck(
        torch.ops.deltazoo.triton_path_decode.default, (*x, None, *cache, *counts, SCALE), test_utils=tests
    )


@needs_triton
def test_a_second_derivative_is_refused():
    x, _ = draw(CASES["one token"], torch.float32)
    q = x[0].requires_grad_()
    o = path_attention(PathInputs(q, *x[1:], None, None), SCALE)
    (d_q,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        d_q.sum().backward()


def test_the_kernels_refuse_what_they_do_not_compute(monkeypatch):
    q = torch.ones(1, 2, 1, 16)
    assert refusals(q, q)  # a CPU
    monkeypatch.setattr(limits, "elementwise_refusals", lambda *_: ())
    for capability in ((9, 0), (8, 0)):
        device = DeviceSpec("a GPU", "cuda", capability, 4, 232448, "3.7.1")
        monkeypatch.setattr(DeviceSpec, "current", staticmethod(lambda _, device=device: device))
        assert module.runs_flash_kernels(0) == (capability == (9, 0))
    monkeypatch.setattr(module, "runs_flash_kernels", lambda *_: True)
    assert not refusals(q, q)
    assert refusals(q[:, :0], q[:, :0])
    assert refusals(torch.ones(1, 2, 1, 72), q)  # float32 of more than 64
    wide = torch.ones(1, 2, 1, 136, dtype=torch.bfloat16)
    assert not refusals(wide[..., :128], wide[..., :128])
    assert refusals(wide, wide[..., :128])
    assert refusals(wide[..., :128], wide)
    assert torch.func.vmap(lambda row: torch.tensor(bool(refusals(row[None], row[None]))))(q).all()


@pytest.mark.kernels
@pytest.mark.skipif(INTERPRETED, reason="needs Triton's compiler, not its interpreter")
def test_the_compiled_flash_kernels_use_wgmma_without_spills(monkeypatch):
    compiler = Compiler(all=True)
    launch = path_op._Launcher.run

    def run(self, kernel, *arguments, **options):
        if options.get("launch") is not None:
            launch(self, kernel, *arguments, **options)

    monkeypatch.setattr("deltazoo.backends.triton.runtime.launcher.launcher", compiler)
    monkeypatch.setattr(path_op._Launcher, "run", run)
    row = torch.empty(1, 512, 2, 64, dtype=torch.bfloat16)
    x = PathInputs(row, row, row, row, torch.empty(1, 512, 2), torch.empty(1, 512, 2, dtype=torch.float64), None)
    o, lse = path_op._forward(*x, SCALE)
    path_op._backward(*x, o, lse, o, SCALE)
    assert [name for name, _ in compiler.compiled] == [
        "path_attention_kernel",
        "path_query_gradients_kernel",
        "path_key_gradients_kernel",
    ]
    for _, compiled in compiler.compiled:
        assert "wgmma" in compiled.asm["ptx"]
        assert "ld.global.v4" in compiled.asm["ptx"] or "cp.async.cg" in compiled.asm["ptx"]
        assert compiled.metadata.shared <= 232448


@pytest.mark.cuda
@pytest.mark.skipif(not CAN_RUN_KERNELS or INTERPRETED, reason="needs a CUDA device")
@pytest.mark.parametrize("width", [64, 128])
def test_a_compiled_layer_is_one_graph_and_deterministic(width):
    torch.manual_seed(0)
    layer = PathAttention(heads=4, head_width=width, forget_gate=True).build(256).to(DEVICE).bfloat16()
    compiled = torch.compile(layer, fullgraph=True)
    x = torch.randn(2, 1000, 256, device=DEVICE).bfloat16().requires_grad_()
    results = []
    for _ in range(2):
        y = compiled(x)[0]
        results.append([y, *torch.autograd.grad(y, [x, *layer.parameters()], y)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
