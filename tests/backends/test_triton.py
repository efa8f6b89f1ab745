"""The triton backend against the float64 reference: specs, launch configs, operators, graphs, decode.

The kernels run on a GPU, or with TRITON_INTERPRET=1 on the CPU in Triton's interpreter.
"""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from triton_cases import (
    CAN_RUN_KERNELS,
    CONFIGS,
    DEVICE,
    DTYPES,
    GATED,
    INTERPRETED,
    SHAPES,
    SHORT_PACK,
    SPECS,
    assert_conforms,
    backend,
    case_of,
    errors,
    gated,
    needs_triton,
)

from deltazoo import UpdateInputs, UpdateMeta, UpdateSpec, bind, conformance, update, watch
from deltazoo.backends.conformance import Case, draw
from deltazoo.backends.conformance.drafts import compare_draft
from deltazoo.backends.io.errors import OperandError
from deltazoo.backends.measure.benchmark import BenchConfig, bench
from deltazoo.backends.measure.shapes import TINY, Shape
from deltazoo.backends.triton import Launch, LaunchConfig, TritonBackend
from deltazoo.backends.triton.chunk.op import chunk_scan
from deltazoo.backends.triton.chunk.plan import windows_of
from deltazoo.backends.triton.decode.op import decode_operands
from deltazoo.backends.triton.operands import ScanKind, ScanOperands
from deltazoo.backends.triton.problem import Problem
from deltazoo.backends.update.base import slice_tokens
from deltazoo.backends.update.reference import ReferenceBackend

pytestmark = needs_triton

# Each spec runs with one segment and with one other launch config; the shapes alternate. Segments and windows need a
# long shape.
_LONG = ("many chunks", "pack")
_OTHERS = list(CONFIGS)[1:]
COMBINATIONS = [(spec, "one segment", list(SHAPES)[i % len(SHAPES)]) for i, spec in enumerate(SPECS)]
COMBINATIONS += [
    (name, _OTHERS[i % len(_OTHERS)], _LONG[i // 2 % 2] if spec.householders == 1 else SHORT_PACK.name)
    for i, (name, spec) in enumerate(SPECS.items())
]


@pytest.mark.parametrize(("spec", "config", "shape"), COMBINATIONS)
def test_each_spec_conforms_with_two_launch_configs(spec, config, shape):
    assert_case_conforms(spec, config, shape)


@pytest.mark.slow  # the full product; the test above covers each spec, config and shape
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_all_combinations_of_spec_config_and_shape_conform(config, shape):
    for spec in SPECS:
        for dtype in DTYPES:
            assert_case_conforms(spec, config, shape, dtype)


# One case for each phase of the kernels: prepare, scan, recompute, combine, reverse, gradients; delta and additive.
SMOKE = [
    ("gated delta", "segments and windows", Shape("pack", 1, 83, 1, 1, 16, 16, lengths=(17, 0, 66))),
    ("gated delta", "segments", Shape("pack", 1, 124, 1, 1, 16, 16, lengths=(66, 1, 0, 40, 17))),
    ("own", "one segment", Shape("grouped", 1, 20, 1, 2, 12, 20)),
    ("mamba2", "one segment", Shape("short", 1, 20, 1, 1, 16, 16)),
]


@pytest.mark.kernel_smoke
@pytest.mark.parametrize(("spec", "config", "shape"), SMOKE, ids=[f"{spec}, {config}" for spec, config, _ in SMOKE])
def test_each_kernel_conforms(spec, config, shape):
    assert_conforms(backend(config), Case(SPECS[spec], shape, DTYPES[0]))


@pytest.mark.parametrize("regime", ["parallel", "decays"])
@pytest.mark.parametrize(
    ("spec", "dtype"),
    [("gated delta", DTYPES[0]), ("own", DTYPES[-1]), ("negative", DTYPES[1]), ("mamba2", DTYPES[0])],
    ids=str,
)
def test_adversarial_inputs_conform(spec, dtype, regime):
    assert_case_conforms(spec, "one segment", "pack", dtype, regime)


# HAS_STATE is a flag of the scan alone, so one spec per branch of the kernels is enough.
@pytest.mark.parametrize(
    ("spec", "config"),
    [
        ("gated delta", "segments and windows"),
        ("gated delta", "segments"),
        ("retnet", "segments and windows"),
        ("own", "one segment"),
    ],
)
def test_without_initial_or_final_state(spec, config):
    assert_conforms(backend(config), Case(SPECS[spec], SHAPES["pack"], DTYPES[0], state="none"))


@pytest.mark.parametrize("spec", ["gated delta", "retnet", "own"])
def test_rows_after_the_last_sequence_are_zero(spec):
    """cu_seqlens ends before T. Uninitialised memory is NaN, so that a row that no kernel writes fails the test."""
    lengths, end = (17, 0, 1, 19), 37
    shape = Shape("short pack", 1, end, 1, 2, 16, 16, lengths=lengths)
    whole = draw(Case(SPECS[spec], shape), DEVICE)

    def padded(t: torch.Tensor) -> torch.Tensor:
        return torch.cat([t, torch.randn(1, 23, *t.shape[2:], device=DEVICE, dtype=t.dtype)], 1)

    in_time = [n for n, t in whole._asdict().items() if t is not None and t.dim() > 2 and n != "state"]
    longer = whole._replace(**{n: padded(getattr(whole, n)) for n in in_time})

    def results(x: UpdateInputs) -> dict[str, torch.Tensor]:
        leaves = {n: t.requires_grad_() for n, t in x._asdict().items() if t is not None and t.is_floating_point()}
        out = backend("windows").forward(SPECS[spec], x)  # bypasses the checks, which refuse such bounds on the CPU
        d = torch.linspace(-1, 1, out.o.shape[-1], device=DEVICE).expand_as(out.o)
        grads = torch.autograd.grad([out.o, out.state], list(leaves.values()), [d, torch.ones_like(out.state)])
        return {"o": out.o, "final": out.state} | dict(zip(leaves, grads, strict=True))

    torch.use_deterministic_algorithms(True)
    try:
        got, want = results(longer), results(whole)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, expected in want.items():
        if name in ("o", *in_time):
            assert not got[name][:, end:].any(), name
            torch.testing.assert_close(got[name][:, :end], expected, rtol=0, atol=0)
        else:
            torch.testing.assert_close(got[name], expected, rtol=1e-5, atol=1e-6)


def assert_case_conforms(
    spec: str, config: str, shape: str, dtype: torch.dtype = DTYPES[0], regime: str = "ordinary"
) -> None:
    assert_conforms(backend(config), case_of(spec, shape, dtype, regime))


@pytest.mark.parametrize("at", [6, 7, 21])
@pytest.mark.parametrize("strength", [1e3, 1e5, 1e9])
@pytest.mark.parametrize("name", ["gated delta", "mamba2", "both before"])
def test_a_decay_to_zero_does_not_change_other_tokens(name, strength, at):
    dtype = DTYPES[0] if INTERPRETED else torch.bfloat16
    x = draw(Case(SPECS[name], SHAPES["grouped"], dtype), DEVICE)
    x.log_decay[:, at] = -strength
    got = bind(SPECS[name], backend())(x)
    wide = {n: t.double() if t is not None and t.is_floating_point() else t for n, t in x._asdict().items()}
    want = bind(SPECS[name], ReferenceBackend())(UpdateInputs(**wide))
    limit = 1e-4 if dtype == torch.float32 else 1e-2
    for y, expected in zip((got.o, got.state), (want.o, want.state), strict=True):
        assert (y - expected).norm() <= limit * expected.norm()


@pytest.mark.parametrize(("decay", "tokens"), [(-1e4, 32), (-1e4, 60), (-50.0, 32), (-50.0, 60), (-8.0, 32)])
@pytest.mark.parametrize("name", ["gated delta", "mamba2", "both before"])
def test_a_run_of_strong_decays_does_not_change_later_tokens(name, decay, tokens):
    case = Case(SPECS[name], Shape("run", B=1, T=64, H=1, HV=1, K=16, V=16), torch.float32, state="none")
    x = draw(case, DEVICE)
    x.log_decay[:] = -0.02
    x.log_decay[:, :tokens] = decay
    for tensor, error in errors(TritonBackend(), case, x).items():
        assert error <= (3e-4 if tensor == "d_log_decay" else 1e-4), (tensor, error)


# The interpreter runs small shapes, and no graph through Inductor; a test below compiles one without Inductor.
# The column has two chunks, and enough tokens after the one whose decay is 0: with 18 to 22 tokens the sum of d_rate
# cancels in the case of that check. The checks of isolation add a second row.
_SMALL_SHAPES = [
    Shape("plain", B=1, T=7, H=2, HV=2, K=4, V=4),
    Shape("one_token", B=3, T=1, H=1, HV=2, K=8, V=5),
    Shape("column", B=1, T=24, H=1, HV=3, K=6, V=1),
]
_CHECKS = (_SMALL_SHAPES, DTYPES[:1], ["compiles_to_one_graph"], DEVICE) if INTERPRETED else (TINY, DTYPES, [], DEVICE)
test_conforms = conformance.suite(backend(), conformance.checks(backend(), *_CHECKS) if CAN_RUN_KERNELS else [], DEVICE)


def operands(x: UpdateInputs) -> ScanOperands:
    strength = x.beta
    return ScanOperands(x.q, x.k, x.v, x.log_decay, strength, strength.clone(), state=x.state)


def test_watch_reports_the_kernels_of_forward_and_backward():
    x = gated(2, 70)
    x.v.requires_grad_()
    with watch() as record:
        out = update(GATED, x, backend="triton")
    assert record.runs[0] == ("triton", "update", 0, 0, "")
    assert list(record.kernels) == ["prepare_kernel", "scan_kernel"]
    assert all(ran.programs > 0 and ran.warps > 0 for ran in record.runs[1:])
    with watch() as record:
        out.o.square().sum().backward()
    assert {"scan_kernel", "reverse_kernel", "gradients_kernel", "gate_gradients_kernel"} <= set(record.kernels)
    assert "programs of" in str(record)


def test_a_benchmark_row_lists_its_kernels():
    config = BenchConfig(directions=("forward",), device=DEVICE, rounds=3, errors=False)
    rows = bench(GATED, [Shape("small", 1, 70, 1, 1, 16, 16)], ["compile", "triton"], config).rows
    assert [row.kernels for row in rows] == [{}, {"prepare_kernel": 1, "scan_kernel": 1}]


def test_operators_pass_opcheck():
    x, config = operands(gated(2, 37)), backend("segments").config
    kind = ScanKind(True, "decayed", "after", False, False, 0.25, config)
    tests = ("test_schema", "test_faketensor")
    for save in (False, True):
        torch.library.opcheck(torch.ops.deltazoo.triton_scan.default, (*x, *kind, save), test_utils=tests)
    o, state, saved = torch.ops.deltazoo.triton_scan(*x, *kind, True)
    arguments = (*x, saved, torch.randn_like(o), torch.randn_like(state), *kind)
    torch.library.opcheck(torch.ops.deltazoo.triton_scan_backward.default, arguments, test_utils=tests)
    one, kind = decode_operands(GATED, gated(2, 1), config)
    drafted, _ = decode_operands(GATED, gated(2, 3), config)
    values, accepted = (
        torch.randn(2, 3, 1, 2, 16, device=DEVICE),
        torch.tensor([3, 1], dtype=torch.int32, device=DEVICE),
    )
    states = torch.randn(5, 2, 16, 16, device=DEVICE)
    ops = torch.ops.deltazoo
    for slots in (None, torch.tensor([3, 1], device=DEVICE)):
        pool = states if slots is not None else states[:2].clone()
        torch.library.opcheck(ops.triton_step_.default, (*one, pool, slots, *kind), test_utils=tests)
        torch.library.opcheck(ops.triton_verify.default, (*drafted, pool, slots, *kind), test_utils=tests)
        commit = (*drafted, values, pool, slots, accepted, *kind)
        torch.library.opcheck(ops.triton_commit_.default, commit, test_utils=tests)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_one_graph_forward_and_backward_for_every_length(packed):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    bound = bind(GATED, backend())

    def run(x: UpdateInputs) -> tuple[torch.Tensor, ...]:
        out = bound(x)
        return out.o.square().sum() + out.state.square().sum()

    compiled = torch.compile(run, fullgraph=True, backend=counter, dynamic=True)
    for T in (40, 70, 17):
        shape = Shape("some", 1 if packed else 2, T, 1, 2, 16, 16, lengths=(T - 9, 0, 9) if packed else ())
        x = draw(Case(GATED, shape), DEVICE)
        leaves = [t.requires_grad_() for t in x if t is not None and t.is_floating_point()]
        want = torch.autograd.grad(run(x), leaves)
        for got, grad in zip(torch.autograd.grad(compiled(x), leaves), want, strict=True):
            torch.testing.assert_close(got, grad)
    assert counter.frame_count == 1


@pytest.mark.parametrize("spec", ["gated delta", "own", "comba", "retnet", "householders, before", "read before"])
def test_decode_in_slots_equals_the_whole_sequence(spec):
    spec = SPECS[spec]
    x = gated(2, 6, spec=spec)
    bound = bind(spec, backend())
    want = bound(x)
    slots = torch.tensor([3, 0], device=DEVICE)
    states = torch.full((5, 2, 16, 16), torch.nan, device=DEVICE)
    states[slots] = x.state
    step = torch.compile(bound.step_, fullgraph=True, backend="aot_eager")
    constant = ("log_decay",) if spec.decay == "fixed" else ()
    for t in range(6):
        now = {n: y if n in constant else y[:, t : t + 1] for n, y in x._asdict().items() if y is not None}
        o = step(UpdateInputs(**now)._replace(state=None), states, slots)
        torch.testing.assert_close(o[:, 0], want.o[:, t], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(states[slots], want.state, rtol=2e-5, atol=2e-5)
    assert states[[1, 2, 4]].isnan().all()  # no other slot is written


@pytest.mark.kernel_smoke
@pytest.mark.parametrize("spec", ["gated delta", "householders, before"])
def test_decode_with_a_slot_outside_the_pool_accesses_no_state(spec):
    """Rows of guard values surround the pool; the output of such a slot is zero."""
    spec = SPECS[spec]
    x = gated(4, 1, spec=spec)._replace(state=None)
    memory = torch.randn(7, 2, 16, 16, device=DEVICE)
    memory[[0, 6]] = 7.0
    before, pool = memory.clone(), memory[1:6]
    slots = torch.tensor([3, -1, 5, 0], device=DEVICE)
    o = backend().step_(spec, x, pool, slots)  # bypasses the checks, which refuse such slots on the CPU
    assert not o[[1, 2]].any()
    assert torch.equal(memory[[0, 2, 3, 5, 6]], before[[0, 2, 3, 5, 6]])
    valid = UpdateInputs(*(t if t is None or t.shape[0] != 4 else t[[0, 3]] for t in x))
    want_pool = before[1:6].clone()
    want = backend().step_(spec, valid, want_pool, slots[[0, 3]])
    assert torch.equal(o[[0, 3]], want)
    assert torch.equal(pool, want_pool)


# Every flag of the decode kernels, which read the operands of the spec directly.
DRAFTS = {
    "gated delta": SPECS["gated delta"],
    "householders, before": SPECS["householders, before"],
    "own": SPECS["own"],
    "comba": SPECS["comba"],
    "comba, householders": SPECS["comba, householders"],
    "efla": SPECS["efla"],
    "kda": UpdateSpec(decay="channel", beta="head", negative_eigenvalues="both"),
    "channels": UpdateSpec(decay="channel", beta="channel", reparam="longhorn"),
    "dplr": UpdateSpec(decay="channel", transition="dplr", beta="channel"),
    "linear": SPECS["linear"],
}


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("spec", DRAFTS)
def test_drafted_tokens_equal_decoding(spec, dtype):
    """H < HV = V, so that a strength per channel cannot be mistaken for one per head; even seed: with slots."""
    shape = Shape("draft", 6, 3, 2, 4, 12, 4 if spec == "channels" else 20)
    report = compare_draft(backend(), Case(DRAFTS[spec], shape, dtype, seed=2), DEVICE)
    assert report.errors and not report.failures, str(report)


@pytest.mark.parametrize("spec", ["gated delta", "dplr"])
def test_verify_and_commit_compile_to_one_graph(spec):
    spec = DRAFTS[spec]
    x = gated(3, 4, spec=spec)._replace(state=None)
    bound, slots = bind(spec, backend()), torch.tensor([3, -1, 0], device=DEVICE)
    pool = torch.randn(5, 2, 16, 16, device=DEVICE)
    accepted = torch.tensor([2, 4, 4], dtype=torch.int32, device=DEVICE)

    def decode(x: UpdateInputs, pool: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
        o, draft = bound.verify_(x, pool, slots)
        bound.commit_(draft, pool, slots, accepted)
        return o

    torch._dynamo.reset()
    got, want = pool.clone(), pool.clone()
    o = torch.compile(decode, fullgraph=True, backend="aot_eager")(x, got, accepted)
    torch.testing.assert_close(o, decode(x, want, accepted), rtol=0, atol=0)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert not torch.equal(got, pool)


@pytest.mark.kernel_smoke
def test_drafts_with_a_slot_outside_the_pool_access_no_state():
    """Rows of guard values surround the pool; counts far outside of the draft do not leave its memory."""
    x = gated(4, 3)._replace(state=None)
    memory = torch.randn(7, 2, 16, 16, device=DEVICE)
    memory[[0, 6]] = 7.0
    before, pool = memory.clone(), memory[1:6]
    slots = torch.tensor([3, -1, 5, 0], device=DEVICE)
    accepted = torch.tensor([2**31 - 1, 3, 3, -(2**31)], dtype=torch.int32, device=DEVICE)
    o, draft = backend().verify_(GATED, x, pool, slots)  # bypasses the checks, which refuse such slots on the CPU
    assert not o[[1, 2]].any() and o[[0, 3]].any()
    assert torch.equal(memory, before)
    backend().commit_(GATED, draft, pool, slots, accepted)
    assert torch.equal(memory[[0, 1, 2, 3, 5, 6]], before[[0, 1, 2, 3, 5, 6]])
    first = UpdateInputs(*(t if t is None else t[:1] for t in x))
    want = before[4:5].clone()
    for t in range(3):
        backend().step_(GATED, slice_tokens(first, t, t + 1), want, None)
    torch.testing.assert_close(pool[3:4], want, rtol=1e-6, atol=1e-6)


def test_watch_reports_the_kernels_of_a_draft():
    x, states = gated(2, 3)._replace(state=None), torch.randn(2, 2, 16, 16, device=DEVICE)
    bound = bind(GATED, backend())
    with watch() as record:
        _, draft = bound.verify_(x, states)
        bound.commit_(draft, states, None, torch.ones(2, dtype=torch.int32, device=DEVICE))
        bound.step_(slice_tokens(x, 0, 1), states)
    assert record.kernels == {"verify_kernel": 1, "commit_kernel": 1, "decode_kernel": 1}


def test_decode_kernels_take_a_decay_of_step_and_rate():
    spec = UpdateSpec(decay="rate", transition="additive")
    x, states = gated(2, 1, spec=spec)._replace(state=None), torch.randn(2, 2, 16, 16, device=DEVICE)
    want_states = states.clone()
    o = backend().step_(spec, x, states, None)  # bypasses `unsupported`, which refuses it for the chunked kernels
    torch.testing.assert_close(o, ReferenceBackend().step_(spec, x, want_states, None), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states, want_states, rtol=1e-5, atol=1e-5)


class RecordOperators(TorchDispatchMode):
    """Records the names of the operators that torch calls."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("spec", DRAFTS)
def test_decode_calls_one_operator(spec):
    """No launch before the kernel, such as for strengths, repeated heads or the micro-steps of dplr."""
    spec = DRAFTS[spec]
    x, states = gated(2, 1, spec=spec)._replace(state=None), torch.randn(2, 2, 16, 16, device=DEVICE)
    accepted = torch.ones(2, dtype=torch.int32, device=DEVICE)
    with RecordOperators() as record:
        backend().step_(spec, x, states, None)
        _, draft = backend().verify_(spec, x, states, None)
        backend().commit_(spec, draft, states, None, accepted)
    assert record.names == [f"deltazoo::triton_{name}" for name in ("step_", "verify", "commit_")]


def test_a_draft_of_another_backend_is_refused():
    x, states = gated(2, 3)._replace(state=None), torch.randn(2, 2, 16, 16, device=DEVICE)
    _, draft = bind(GATED, "reference").verify_(x, states)
    with pytest.raises(OperandError, match=r"draft\.values is missing: backend 'triton' must have made the draft"):
        bind(GATED, backend()).commit_(draft, states, None, torch.ones(2, dtype=torch.int32, device=DEVICE))


def test_splitting_the_feedback_in_two_terms_reduces_the_error():
    spec = SPECS["negative"]
    x = draw(Case(spec, SHAPES["many chunks"], torch.float16, "parallel"), DEVICE)
    want = bind(spec, "reference")(UpdateInputs(*(t if t is None else t.double() for t in x)))
    strength = 2 * x.beta.float()
    args = ScanOperands(x.q, x.k, x.v, x.log_decay, strength, strength.clone(), state=x.state)
    errors = []
    for split_terms in (False, True):
        o, state = chunk_scan(args, ScanKind(True, "decayed", "after", split_terms, False, 0.25, backend().config))
        pairs = ((o, want.o), (state, want.state))
        errors.append([conformance.relative_error(got, expected, expected) for got, expected in pairs])
    (_, one), (_, two) = errors
    # In the interpreter the factor is 6,800, and 480 if the erase reads the state in one term.
    assert two < one / (1000 if INTERPRETED else 8)
    assert all(error < 1e-3 for error in errors[1])  # what remains is one rounding of the output to float16


@pytest.mark.parametrize("reparam", ["efla", "longhorn"])
def test_gradients_are_accurate_for_small_step_sizes_of_long_keys(reparam):
    spec = UpdateSpec(decay="head", beta="head", reparam=reparam)
    x = draw(Case(spec, Shape("long keys", 1, 40, 1, 2, 16, 16)), DEVICE)
    x = x._replace(k=1e5 * x.k, beta=torch.ones_like(x.beta))
    grads = []
    for tested in (backend(), "reference"):
        leaves = {name: t.double() if tested == "reference" else t for name, t in x._asdict().items() if t is not None}
        leaves = {name: t.clone().requires_grad_() for name, t in leaves.items()}
        bind(spec, tested)(UpdateInputs(**leaves)).o.sum().backward()
        grads.append({name: t.grad for name, t in leaves.items() if name != "beta"})  # d_beta is rounding error
    for name, got in grads[0].items():
        want = grads[1][name]
        assert (got - want).norm() < 1e-4 * want.norm(), name


@pytest.mark.parametrize(
    ("spec", "K", "dtype", "splits"),
    [
        (UpdateSpec(), 16, torch.bfloat16, True),
        (UpdateSpec(decay="head"), 16, torch.bfloat16, True),
        (UpdateSpec(beta="head"), 5, torch.bfloat16, True),
        (UpdateSpec(beta="head"), 17, torch.bfloat16, False),
        (UpdateSpec(), 32, torch.bfloat16, True),
        (UpdateSpec(), 33, torch.bfloat16, False),
        (UpdateSpec(), 16, torch.float16, False),
        (GATED, 5, torch.bfloat16, False),
        (UpdateSpec(transition="additive"), 5, torch.bfloat16, False),
    ],
)
def test_narrow_keys_without_decay_split_terms_in_bfloat16(spec, K, dtype, splits):
    x = draw(Case(spec, Shape("few", 1, 3, 1, 1, K, 8), dtype), "cpu")
    assert decode_operands(spec, x, "")[1].split_terms is splits


@pytest.mark.parametrize("config", CONFIGS if INTERPRETED else ["one segment"])
def test_an_empty_sequence_returns_its_initial_state(config):
    x = gated(2, 0)
    out = bind(GATED, backend(config))(x)
    assert out.o.shape == (2, 0, 2, 16)
    torch.testing.assert_close(out.state, x.state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_stride_of_an_axis_of_size_one_is_ignored(dtype):
    x = draw(Case(GATED, Shape("one head", 2, 20, 1, 1, 16, 16), dtype), DEVICE)
    v = x.v.reshape(2, 20, 16).unflatten(-1, (16, 1)).transpose(2, 3)
    assert v.is_contiguous() and v.stride(2) == 1
    torch.testing.assert_close(bind(GATED, backend())(x._replace(v=v)), bind(GATED, backend())(x), rtol=0, atol=0)


def test_decode_ignores_the_launches_of_other_kernels():
    x = draw(Case(GATED, Shape("token", 3, 1, 2, 2, 12, 20)), DEVICE)
    states, step = x.state, x._replace(state=None)
    # invalid without a Hopper GPU, and for K = 12
    hopper = TritonBackend(LaunchConfig(scan=Launch(tile=64, kernel="sm90")))
    got, want = (bind(GATED, tested).step_(step, states.clone()) for tested in (hopper, TritonBackend(LaunchConfig())))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("every", [0, -16])
def test_checkpoints_are_at_least_one_chunk_apart(every):
    with pytest.raises(ValueError, match="checkpoint_chunks"):
        LaunchConfig(checkpoint_chunks=every)


def test_split_must_be_a_multiple_of_the_checkpoint_distance():
    rule = "segment_chunks must be 0 or a power of two and a multiple of checkpoint_chunks = 16, got 24"
    with pytest.raises(ValueError, match=rule):
        LaunchConfig(segment_chunks=24)


def test_unsupported_specs_are_refused_with_reasons():
    def reasons(dtype: torch.dtype = torch.float16, K: int = 64, **axes: str) -> list[str]:
        return backend().unsupported(UpdateSpec(**axes), UpdateMeta(DEVICE, dtype, 2, 2, K, 64))

    assert reasons() == []
    assert reasons(transition="dplr", decay="channel") == []
    assert reasons(K=257) == ["K must be at most 256, got 257."]
    assert any("got float64" in reason for reason in reasons(torch.float64))


def test_window_units_of_a_pack_grow_with_the_number_of_sequences():
    pack = Problem(torch.bfloat16, 8, 32768, 16, 16, 128, 128, True, False, "head", packed=True)
    assert windows_of(pack, 64, 8, 0, 128) == (1, 5, 112)
    assert windows_of(pack._replace(N=64), 64, 8, 0, 128)[0] == 8
    assert windows_of(pack, 64, 8, 32, 128)[0] == 32
    assert windows_of(pack._replace(T=4096, packed=False), 64, 16, 0, 128) == (16, 4, 128)


@pytest.mark.parametrize(
    ("lengths", "heads"), [((), 1), ((17, 0, 1, 65), 2), ((5,) * 9, 1), ((40, 43), 1), ((83, 0, 0), 1)], ids=str
)
def test_gradients_do_not_depend_on_the_number_of_windows(lengths, heads):
    shape = Shape("windows", 1 if lengths else 3, sum(lengths) or 83, 1, heads, 16, 16, lengths=lengths)
    x = draw(Case(GATED, shape), DEVICE)
    leaves = [t.requires_grad_() for t in x if t is not None and t.is_floating_point()]

    def gradients(scratch: int) -> tuple[torch.Tensor, ...]:
        config = CONFIGS["one segment"].model_copy(update={"checkpoint_chunks": 1, "scratch": heads * scratch})
        out = bind(GATED, TritonBackend(config))(x)
        return torch.autograd.grad([out.o.sum() + out.state.sum()], leaves)

    whole = gradients(2**30)
    for scratch in (0, 4500, 15000, 35000):
        for got, want in zip(gradients(scratch), whole, strict=True):
            assert torch.equal(got, want), scratch


@pytest.mark.parametrize(("lengths", "heads"), [((300, 41), 2), ((341,), 1), ((200, 141), 1)], ids=str)
def test_a_window_may_start_between_checkpoints(lengths, heads):
    x = draw(Case(GATED, Shape("between", 1, 341, 1, heads, 16, 16, lengths=lengths)), DEVICE)
    leaves = [t.requires_grad_() for t in x if t is not None and t.is_floating_point()]

    def gradients(scratch: int) -> tuple[torch.Tensor, ...]:
        config = CONFIGS["one segment"].model_copy(update={"checkpoint_chunks": 4, "scratch": scratch})
        out = bind(GATED, TritonBackend(config))(x)
        return torch.autograd.grad([out.o.sum() + out.state.sum()], leaves)

    N = len(lengths)
    pack = Problem(torch.float32, N, 341, 1, heads, 16, 16, True, False, "head", packed=True)
    unit, windows, _ = windows_of(pack, 16, 4, 0, 8 * N)
    assert unit < 4 and windows > 1
    bytes_per_slot = heads * 16 * (2 * 16 + 16) * 4
    for got, want in zip(gradients(8 * N * bytes_per_slot), gradients(2**30), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_pack_of_more_sequences_than_one_search_round_compares():
    lengths = (3, 0, 17, 1, 16, 33, 0) * 5 + (40,)  # 36 sequences; find_sequence compares 32 per round
    case = Case(GATED, Shape("many", 1, sum(lengths), 1, 1, 16, 16, lengths=lengths))
    report = conformance.compare(backend("windows"), case, device=DEVICE)
    assert report.errors and not report.failures, report.failures


@pytest.mark.parametrize("spec", ["gated delta", "delta with a beta"])
def test_gradients_are_accurate_where_beta_is_zero(spec):
    """Where b is 0, z cannot be computed from x = b z, nor du from dv = b du."""
    spec = {"delta with a beta": UpdateSpec(beta="head")}.get(spec) or SPECS[spec]
    x = gated(2, 45, spec=spec)
    x.beta[:, ::3] = 0
    x.beta[:, 1::9] = 1e-12
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v, x.beta)]

    def gradients(inputs: UpdateInputs, leaves: list[torch.Tensor], backend: object) -> tuple[torch.Tensor, ...]:
        o = bind(spec, backend)(inputs).o
        return torch.autograd.grad(o.double().square().sum(), leaves)

    wide = {n: None if t is None else t.detach().double().requires_grad_() for n, t in x._asdict().items()}
    want = gradients(UpdateInputs(**wide), [wide[n] for n in ("q", "k", "v", "beta")], "reference")
    got = gradients(x, leaves, backend())
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.double(), w, rtol=1e-4, atol=1e-5)
    at_zero = got[3][:, ::3]
    torch.testing.assert_close(at_zero.double(), want[3][:, ::3], rtol=1e-4, atol=1e-5)
    assert at_zero.abs().max() > 1e-3
