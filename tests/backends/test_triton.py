"""The triton backend: every kind of update on every way of launching against float64, operators, one graph, decode.

The kernels run on a GPU, or on the CPU under Triton's interpreter: TRITON_INTERPRET=1, as `make test` sets it.
"""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from triton_cases import (
    ABLE,
    CONFIGS,
    DEVICE,
    DTYPES,
    GATED,
    INTERPRETED,
    SHAPES,
    SPECS,
    backend,
    case_of,
    conforms,
    errors,
    gated,
    runs,
)

from deltazoo import UpdateInputs, UpdateMeta, UpdateSpec, bind, conformance, update, watch
from deltazoo.backends.conformance import Case, draw
from deltazoo.backends.measure.benchmark import BenchConfig, bench
from deltazoo.backends.reference import ReferenceBackend
from deltazoo.backends.shapes import TINY, Shape
from deltazoo.backends.triton import Launch, LaunchConfig, TritonBackend
from deltazoo.backends.triton.op import chunk_scan
from deltazoo.backends.triton.operands import ScanKind, ScanOperands, Sizes

pytestmark = runs

# Each spec in one and on one other way of launching, over the shapes by turns; parts and segments need a long one.
_LONG = ("many chunks", "pack")
_OTHERS = list(CONFIGS)[1:]
WAYS = [(spec, "in one", list(SHAPES)[i % len(SHAPES)]) for i, spec in enumerate(SPECS)]
WAYS += [(spec, _OTHERS[i % len(_OTHERS)], _LONG[i // 2 % 2]) for i, spec in enumerate(SPECS)]


@pytest.mark.parametrize(("spec", "way", "shape"), WAYS)
def test_every_spec_in_one_and_on_another_way_of_launching(spec, way, shape):
    agrees(spec, way, shape)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("way", CONFIGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_spec_on_every_way_of_launching_and_shape(way, shape):
    for spec in SPECS:
        for dtype in DTYPES:
            agrees(spec, way, shape, dtype)


@pytest.mark.parametrize("regime", ["parallel", "decays"])
@pytest.mark.parametrize(
    ("spec", "dtype"),
    [("gated delta", DTYPES[0]), ("comba", DTYPES[-1]), ("negative", DTYPES[1]), ("mamba2", DTYPES[0])],
    ids=str,
)
def test_adversarial_inputs(spec, dtype, regime):
    agrees(spec, "in one", "pack", dtype, regime)


@pytest.mark.parametrize(("spec", "way"), list(zip(SPECS, ["in one", "parts and segments"] * len(SPECS), strict=False)))
def test_no_state_comes_and_none_goes_on(spec, way):
    conforms(backend(way), Case(SPECS[spec], SHAPES["pack"], DTYPES[0], state="none"))


def agrees(spec: str, way: str, shape: str, dtype: torch.dtype = DTYPES[0], regime: str = "ordinary") -> None:
    conforms(backend(way), case_of(spec, shape, dtype, regime))


@pytest.mark.parametrize("at", [6, 7, 21])
@pytest.mark.parametrize("strength", [1e3, 1e5, 1e9])
@pytest.mark.parametrize("name", ["gated delta", "mamba2", "both before"])
def test_a_decay_that_leaves_nothing_costs_its_neighbours_no_digits(name, strength, at):
    dtype = DTYPES[0] if INTERPRETED else torch.bfloat16
    x = draw(Case(SPECS[name], SHAPES["grouped"], dtype), DEVICE)
    x.log_decay[:, at] = -strength
    got = bind(SPECS[name], backend())(x)
    exact = {n: t.double() if t is not None and t.is_floating_point() else t for n, t in x._asdict().items()}
    want = bind(SPECS[name], ReferenceBackend())(UpdateInputs(**exact))
    limit = 1e-4 if dtype == torch.float32 else 1e-2
    for y, exactly in zip((got.o, got.state), (want.o, want.state), strict=True):
        assert (y - exactly).norm() <= limit * exactly.norm()


@pytest.mark.parametrize(("decay", "tokens"), [(-1e4, 32), (-1e4, 60), (-50.0, 32), (-50.0, 60), (-8.0, 32)])
@pytest.mark.parametrize("name", ["gated delta", "mamba2", "both before"])
def test_strong_decays_one_after_the_other_cost_those_after_them_no_digits(name, decay, tokens):
    case = Case(SPECS[name], Shape("run", B=1, T=64, H=1, HV=1, K=16, V=16), torch.float32, state="none")
    x = draw(case, DEVICE)
    x.log_decay[:] = -0.02
    x.log_decay[:, :tokens] = decay
    for tensor, error in errors(TritonBackend(), case, x).items():
        assert error <= (3e-4 if tensor == "d_log_decay" else 1e-4), (tensor, error)


# Under the interpreter small shapes, and no graph through Inductor: below there is one without it.
_SMALL_SHAPES = [shape for shape in TINY if shape.name in ("plain", "one_token", "column")]
_CHECKS = (_SMALL_SHAPES, DTYPES[:1], ["compiles_to_one_graph"], DEVICE) if INTERPRETED else (TINY, DTYPES, [], DEVICE)
test_conforms = conformance.suite(backend(), conformance.checks(backend(), *_CHECKS) if ABLE else [], DEVICE)


def operands(x: UpdateInputs) -> ScanOperands:
    strength = x.beta
    return ScanOperands(x.q, x.k, x.v, x.log_decay, strength, strength.clone(), None, x.state, None)


def test_the_kernels_of_a_forward_and_of_a_backward_are_seen():
    x = gated(2, 70)
    x.v.requires_grad_()
    with watch() as seen:
        out = update(GATED, x, backend="triton")
    assert seen.runs[0] == ("triton", "update", 0, 0)
    assert list(seen.kernels) == ["prepare_kernel", "scan_kernel"]
    assert all(ran.programs > 0 and ran.warps > 0 for ran in seen.runs[1:])
    with watch() as seen:
        out.o.square().sum().backward()
    assert {"scan_kernel", "reverse_kernel", "gradients_kernel", "gate_gradients_kernel"} <= set(seen.kernels)
    assert "programs of" in str(seen)


def test_a_benchmark_says_which_kernels_a_row_launched():
    config = BenchConfig(directions=("forward",), device=DEVICE, rounds=3, errors=False)
    rows = bench(GATED, [Shape("small", 1, 70, 1, 1, 16, 16)], ["compile", "triton"], config).rows
    assert [row.kernels for row in rows] == [{}, {"prepare_kernel": 1, "scan_kernel": 1}]


def test_the_operators_pass_torchs_checks():
    x, way = operands(gated(2, 37)), backend("parts").config
    kind = ScanKind(True, False, False, False, False, 0.25, way)
    tests = ("test_schema", "test_faketensor")
    for keep in (False, True):
        torch.library.opcheck(torch.ops.deltazoo.triton_scan.default, (*x, *kind, keep), test_utils=tests)
    o, state, *kept = torch.ops.deltazoo.triton_scan(*x, *kind, True)
    arguments = (*x, *kept, torch.randn_like(o), torch.randn_like(state), *kind)
    torch.library.opcheck(torch.ops.deltazoo.triton_scan_backward.default, arguments, test_utils=tests)
    one = operands(gated(2, 1))
    states = torch.randn(5, 2, 16, 16, device=DEVICE)
    for slots in (None, torch.tensor([3, 1], device=DEVICE)):
        held = states if slots is not None else states[:2].clone()
        arguments = (*one[:7], held, slots, *kind)
        torch.library.opcheck(torch.ops.deltazoo.triton_step_.default, arguments, test_utils=tests)


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


@pytest.mark.parametrize("spec", ["gated delta", "comba", "retnet", "householders, before", "read before"])
def test_steps_in_slots_equal_the_whole(spec):
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
    assert states[[1, 2, 4]].isnan().all()  # no other slot is touched


def test_what_feeds_back_in_two_terms_is_nearer_to_the_numbers_than_in_one():
    spec = SPECS["negative"]
    x = draw(Case(spec, SHAPES["many chunks"], torch.float16, "parallel"), DEVICE)
    want = bind(spec, "reference")(UpdateInputs(*(t if t is None else t.double() for t in x)))
    strength = 2 * x.beta.float()
    args = ScanOperands(x.q, x.k, x.v, x.log_decay, strength, strength.clone(), None, x.state, None)
    errors = []
    for precise in (False, True):
        o, state = chunk_scan(args, ScanKind(True, False, False, precise, False, 0.25, backend().config))
        pairs = ((o, want.o), (state, want.state))
        errors.append([conformance.relative_error(got, expected, expected) for got, expected in pairs])
    (_, one), (_, two) = errors
    assert two < one / 8
    assert all(error < 1e-3 for error in errors[1])  # one rounding of the output to float16 is left


@pytest.mark.parametrize("reparam", ["efla", "longhorn"])
def test_long_keys_leave_a_step_so_small_that_it_still_counts(reparam):
    spec = UpdateSpec(decay="head", beta="head", reparam=reparam)
    x = draw(Case(spec, Shape("long keys", 1, 40, 1, 2, 16, 16)), DEVICE)
    x = x._replace(k=1e5 * x.k, beta=torch.ones_like(x.beta))
    found = []
    for of in (backend(), "reference"):
        leaves = {name: t.double() if of == "reference" else t for name, t in x._asdict().items() if t is not None}
        leaves = {name: t.clone().requires_grad_() for name, t in leaves.items()}
        bind(spec, of)(UpdateInputs(**leaves)).o.sum().backward()
        found.append({name: t.grad for name, t in leaves.items() if name != "beta"})  # rounding is all of that one
    for name, got in found[0].items():
        want = found[1][name]
        assert (got - want).norm() < 1e-4 * want.norm(), name


@pytest.mark.parametrize(
    ("spec", "K", "dtype", "wanted"),
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
def test_a_delta_rule_in_a_few_keys_feeds_back_in_two_terms_in_bfloat16(spec, K, dtype, wanted):
    x = draw(Case(spec, Shape("few", 1, 3, 1, 1, K, 8), dtype), "cpu")
    assert TritonBackend()._operands(spec, x)[1].precise is wanted


@pytest.mark.parametrize("way", CONFIGS if INTERPRETED else ["in one"])
def test_no_token_gives_the_initial_state_back(way):
    x = gated(2, 0)
    out = bind(GATED, backend(way))(x)
    assert out.o.shape == (2, 0, 2, 16)
    torch.testing.assert_close(out.state, x.state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_one_head_whose_stride_is_any_number(dtype):
    x = draw(Case(GATED, Shape("one head", 2, 20, 1, 1, 16, 16), dtype), DEVICE)
    v = x.v.reshape(2, 20, 16).unflatten(-1, (16, 1)).transpose(2, 3)
    assert v.is_contiguous() and v.stride(2) == 1
    torch.testing.assert_close(bind(GATED, backend())(x._replace(v=v)), bind(GATED, backend())(x), rtol=0, atol=0)


def test_a_decode_step_asks_nothing_of_the_other_kernels_launches():
    x = draw(Case(GATED, Shape("token", 3, 1, 2, 2, 12, 20)), DEVICE)
    states, step = x.state, x._replace(state=None)
    given = TritonBackend(LaunchConfig(scan=Launch(tile=64, hopper=True)))  # refused here, or for 12 keys
    got, want = (bind(GATED, of).step_(step, states.clone()) for of in (given, TritonBackend(LaunchConfig())))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_parts_begin_at_checkpoints():
    with pytest.raises(ValueError, match="split must be 0 or a power of two and a multiple of every = 16, got 24"):
        LaunchConfig(split=24)


def test_what_the_kernels_do_not_take_is_said_in_sentences():
    def reasons(dtype: torch.dtype = torch.float16, K: int = 64, **axes: str) -> list[str]:
        return backend().unsupported(UpdateSpec(**axes), UpdateMeta(DEVICE, dtype, 2, 2, K, 64))

    assert reasons() == []
    assert reasons(decay="channel") == ["decay must be 'none', 'fixed' or 'head', got 'channel'."]
    assert reasons(transition="dplr") == ["transition must be 'additive' or 'delta', got 'dplr'."]
    assert reasons(beta="channel") == ["beta must be 'none' or 'head', got 'channel'."]
    assert reasons(K=257) == ["K must be at most 256, got 257."]
    assert any("got float64" in reason for reason in reasons(torch.float64))


def test_units_are_small_where_sequences_are_few_and_as_checkpoints_are_where_they_are_many():
    from deltazoo.backends.triton.backward import segments_of

    def sizes(N: int, T: int) -> Sizes:
        return Sizes(N, T, T // 64 + N, 16, 16, 128, 128, 64, True)

    assert segments_of(sizes(8, 32768), 8, 0, 128) == (1, 5, 112)
    assert segments_of(sizes(64, 32768), 8, 0, 128)[0] == 8
    assert segments_of(sizes(8, 32768), 8, 32, 128)[0] == 32
    assert segments_of(Sizes(8, 4096, 512, 16, 16, 128, 128, 64, False), 16, 0, 128) == (16, 4, 128)


@pytest.mark.parametrize(
    ("lengths", "heads"), [((), 1), ((17, 0, 1, 65), 2), ((5,) * 9, 1), ((40, 43), 1), ((83, 0, 0), 1)], ids=str
)
def test_any_number_of_segments_gives_the_same_bits(lengths, heads):
    shape = Shape("cut", 1 if lengths else 3, sum(lengths) or 83, 1, heads, 16, 16, lengths=lengths)
    x = draw(Case(GATED, shape), DEVICE)
    leaves = [t.requires_grad_() for t in x if t is not None and t.is_floating_point()]

    def gradients(scratch: int) -> tuple[torch.Tensor, ...]:
        way = CONFIGS["in one"].model_copy(update={"every": 1, "scratch": heads * scratch})
        out = bind(GATED, TritonBackend(way))(x)
        return torch.autograd.grad([out.o.sum() + out.state.sum()], leaves)

    whole = gradients(2**30)
    for scratch in (0, 4500, 15000, 35000):
        for got, want in zip(gradients(scratch), whole, strict=True):
            assert torch.equal(got, want), scratch


@pytest.mark.parametrize(("lengths", "heads"), [((300, 41), 2), ((341,), 1), ((200, 141), 1)], ids=str)
def test_a_segment_may_begin_between_checkpoints(lengths, heads):
    from deltazoo.backends.triton.backward import segments_of

    x = draw(Case(GATED, Shape("between", 1, 341, 1, heads, 16, 16, lengths=lengths)), DEVICE)
    leaves = [t.requires_grad_() for t in x if t is not None and t.is_floating_point()]

    def gradients(scratch: int) -> tuple[torch.Tensor, ...]:
        way = CONFIGS["in one"].model_copy(update={"every": 4, "scratch": scratch})
        out = bind(GATED, TritonBackend(way))(x)
        return torch.autograd.grad([out.o.sum() + out.state.sum()], leaves)

    N = len(lengths)
    s = Sizes(N, 341, 341 // 16 + N, 1, heads, 16, 16, 16, True)
    unit, segments, _ = segments_of(s, 4, 0, 8 * N)
    assert unit < 4 and segments > 1
    a_place = heads * 16 * (2 * 16 + 16) * 4
    for got, want in zip(gradients(8 * N * a_place), gradients(2**30), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_a_pack_of_more_sequences_than_one_look_of_the_search():
    lengths = (3, 0, 17, 1, 16, 33, 0) * 5 + (40,)  # 36; a look of the search takes in 32
    case = Case(GATED, Shape("many", 1, sum(lengths), 1, 1, 16, 16, lengths=lengths))
    found = conformance.compare(backend("segments"), case, device=DEVICE)
    assert found.errors and not found.failures, found.failures


@pytest.mark.parametrize("spec", ["gated delta", "delta with a beta"])
def test_a_beta_of_0_has_its_gradient(spec):
    """x = b z tells nothing of z there, and neither does dv = b du of du."""
    spec = {"delta with a beta": UpdateSpec(beta="head")}.get(spec) or SPECS[spec]
    x = gated(2, 45, spec=spec)
    x.beta[:, ::3] = 0
    x.beta[:, 1::9] = 1e-12
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v, x.beta)]

    def gradients(found: UpdateInputs, to: list[torch.Tensor], by: object) -> tuple[torch.Tensor, ...]:
        o = bind(spec, by)(found).o
        return torch.autograd.grad(o.double().square().sum(), to)

    wide = {n: None if t is None else t.detach().double().requires_grad_() for n, t in x._asdict().items()}
    want = gradients(UpdateInputs(**wide), [wide[n] for n in ("q", "k", "v", "beta")], "reference")
    got = gradients(x, leaves, backend())
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.double(), w, rtol=1e-4, atol=1e-5)
    small = got[3][:, ::3]
    torch.testing.assert_close(small.double(), want[3][:, ::3], rtol=1e-4, atol=1e-5)
    assert small.abs().max() > 1e-3
