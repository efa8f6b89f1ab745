"""The elementwise kernels of the triton backend against the float64 reference.

They run on a GPU, or with TRITON_INTERPRET=1 on the CPU in Triton's interpreter.
"""

import itertools
import math

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx
from triton_cases import DEVICE, DTYPES, INTERPRETED, assert_conforms, needs_triton

from deltazoo import UpdateInputs, UpdateMeta, UpdateSpec, bind, watch
from deltazoo.backends.conformance import Case, draw
from deltazoo.backends.measure.shapes import Shape
from deltazoo.backends.torch_ext.devices import INTERPRETER, DeviceSpec
from deltazoo.backends.triton import LaunchConfig, TritonBackend
from deltazoo.backends.triton.element.complex_op import ComplexCall, complex_step_
from deltazoo.backends.triton.element.config import (
    ElementConfig,
    ElementLaunch,
    element_heuristic,
    segment_length,
    tiling,
)
from deltazoo.backends.triton.element.op import element_update
from deltazoo.backends.triton.element.show import element_plans
from deltazoo.backends.triton.lower import route_of
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.parts.ssm.diagonal_ssm import DiagonalSSM

pytestmark = needs_triton

# Small groups and segments, so that short sequences have several of each, and checkpoints inside and outside of groups.
CONFIGS = {
    "one segment": ElementConfig(
        checkpoint_tokens=4, segment_tokens=0, forward=ElementLaunch(keys=2, channels=2, warps=1, group=2),
        backward=ElementLaunch(keys=2, warps=2, group=2),
    ),
    "segments": ElementConfig(
        checkpoint_tokens=2, segment_tokens=8, forward=ElementLaunch(keys=4, warps=2, group=4),
        backward=ElementLaunch(keys=4, channels=2, warps=1, group=2),
    ),
}  # fmt: skip
SHAPES = {
    "shared keys": Shape("shared keys", B=2, T=9, H=1, HV=20, K=3, V=1),
    "keys per channel": Shape("keys per channel", B=1, T=11, H=3, HV=3, K=1, V=2),
    "grouped": Shape("grouped", B=1, T=10, H=2, HV=4, K=5, V=2),
    "two key heads": Shape("two key heads", B=1, T=5, H=2, HV=36, K=4, V=2),
    "pack": Shape("pack", B=1, T=21, H=1, HV=17, K=2, V=1, lengths=(7, 0, 1, 13)),
}
SPECS = {
    f"{decay}, {read}": UpdateSpec(decay=decay, transition="additive", read=read)
    for decay, read in itertools.product(("rate", "head", "channel", "fixed", "none"), ("after", "before"))
}


def backend(config: str) -> TritonBackend:
    return TritonBackend(LaunchConfig(element=CONFIGS[config]))


# each spec with both configs and every shape with each config; the full product is slow
COMBINATIONS = [
    (spec, config, list(SHAPES)[(2 * i + j) % len(SHAPES)])
    for i, spec in enumerate(SPECS)
    for j, config in enumerate(CONFIGS)
]


@pytest.mark.parametrize(("spec", "config", "shape"), COMBINATIONS)
def test_each_spec_conforms_with_and_without_segments(spec, config, shape):
    assert_conforms(backend(config), Case(SPECS[spec], SHAPES[shape], DTYPES[0]))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spec", SPECS)
def test_all_combinations_conform(spec, config, shape):
    for dtype, seed in itertools.product(DTYPES, (0, 1)):
        assert_conforms(backend(config), Case(SPECS[spec], SHAPES[shape], dtype, seed=seed))


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", ["rate, after", "channel, before"])
def test_strong_decays_conform(spec, dtype, config):
    assert_conforms(backend(config), Case(SPECS[spec], SHAPES["pack"], dtype, "decays"))


@pytest.mark.parametrize("spec", ["fixed, after", "fixed, before"])
def test_a_fixed_decay_per_channel_conforms(spec):
    assert_conforms(backend("segments"), Case(SPECS[spec], SHAPES["grouped"], DTYPES[1], seed=1))


@pytest.mark.parametrize("beta", ["head", "channel"])
def test_write_strengths_conform(beta):
    spec = UpdateSpec(decay="head", transition="additive", beta=beta)
    assert_conforms(backend("one segment"), Case(spec, SHAPES["grouped"], DTYPES[0], state="none"))


@pytest.mark.parametrize("config", CONFIGS)
def test_strided_operands_conform(config):
    assert_conforms(backend(config), Case(SPECS["rate, after"], SHAPES["grouped"], DTYPES[0], layout="strided"))


def test_the_heuristic_conforms():
    for shape in (SHAPES["shared keys"], SHAPES["keys per channel"]):
        assert_conforms(TritonBackend(), Case(SPECS["rate, after"], shape, DTYPES[0]))


@pytest.mark.parametrize("config", CONFIGS)
def test_rows_after_the_last_sequence_are_zero(config):
    """cu_seqlens ends before T. Uninitialised memory is NaN, so that a row that no kernel writes fails the test."""
    spec, end = SPECS["rate, after"], SHAPES["pack"].T
    whole = draw(Case(spec, SHAPES["pack"]), DEVICE)
    in_time = ("q", "k", "v", "step")
    longer = whole._replace(**{
        n: torch.cat([getattr(whole, n), torch.randn_like(getattr(whole, n))[:, :6]], 1) for n in in_time
    })  # fmt: skip

    def results(x: UpdateInputs) -> dict[str, torch.Tensor]:
        leaves = {n: t.requires_grad_() for n, t in x._asdict().items() if t is not None and t.is_floating_point()}
        out = backend(config).forward(spec, x)  # bypasses the checks, which refuse such bounds on the CPU
        grads = torch.autograd.grad(out.o.square().sum() + out.state.square().sum(), list(leaves.values()))
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
            torch.testing.assert_close(got[name], expected)


@pytest.mark.parametrize("config", CONFIGS)
def test_nan_stays_in_its_sequence_and_channel(config):
    spec = SPECS["rate, after"]
    x = draw(Case(spec, SHAPES["pack"]), DEVICE)
    want = bind(spec, backend(config))(x)
    x.v[0, 9, 3] = torch.nan  # in the last sequence, whose first token is 8
    got = bind(spec, backend(config))(x)
    assert got.o[0, 9:, 3].isnan().all() and got.state[3, 3].isnan().all()
    got.o[0, 9:, 3], got.state[3, 3] = want.o[0, 9:, 3], want.state[3, 3]
    torch.testing.assert_close(got.o, want.o, rtol=0, atol=0)
    torch.testing.assert_close(got.state, want.state, rtol=0, atol=0)


@pytest.mark.parametrize("spec", SPECS)
def test_decode_in_slots_equals_the_whole_sequence(spec):
    spec = SPECS[spec]
    x = draw(Case(spec, Shape("decode", B=2, T=3, H=2, HV=4, K=3, V=2), seed=1), DEVICE)
    bound = bind(spec, TritonBackend())
    want = bind(spec, "reference")(x)
    slots = torch.tensor([3, 0], device=DEVICE)
    states = torch.full((5, 4, 3, 2), torch.nan, device=DEVICE)
    states[slots] = x.state
    constant = ("rate", "log_decay") if spec.decay == "fixed" else ("rate",)
    for t in range(3):
        now = {n: y if n in constant else y[:, t : t + 1] for n, y in x._asdict().items() if y is not None}
        o = bound.step_(UpdateInputs(**now)._replace(state=None), states, slots)
        torch.testing.assert_close(o[:, 0], want.o[:, t], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(states[slots], want.state, rtol=2e-5, atol=2e-5)
    assert states[[1, 2, 4]].isnan().all()  # no other slot is written


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("B", "D", "N", "around"), [(3, 5, 3, "gate"), (10, 40, 32, "gelu"), (2, 8, 4, "")])
def test_a_step_of_complex_states_equals_that_of_the_layer(B, D, N, around, dtype):
    torch.manual_seed(0)
    exact = DiagonalSSM(D, N, backend="reference").to(dtype).double()
    wide = torch.randn(B, 1, 3 * D).to(dtype)
    x, factor, gate = wide.chunk(3, -1)  # the rows are apart
    with torch.no_grad():
        state = exact.init_state(B, x.double())
        state["update"].normal_()
        state["seen"] += 100 + torch.arange(B) // 2  # some rows are at equal positions
        states, seen = state["update"].float().to(DEVICE), state["seen"].clone().to(DEVICE)
        expected, after = exact(x.double() * (factor.double() if around == "gate" else 1.0), state, Context())
        expected = torch.nn.functional.gelu(expected) if around == "gelu" else expected
        expected = expected * gate.double() if around == "gate" else expected
        log_magnitude, angle, b_re, b_im = (y.to(DEVICE) for y in exact._discretise(torch.float64))
        given = (None, None) if around != "gate" else (factor[:, 0].to(DEVICE), gate[:, 0].to(DEVICE))
        call = ComplexCall(
            x[:, 0].to(DEVICE), *given, around == "gelu", angle / (2 * math.pi), log_magnitude.float(), b_re.float(),
            b_im.float(), exact.C.to(DEVICE, dtype), exact.skip.to(DEVICE, dtype), seen, states,
        )  # fmt: skip
        y = complex_step_(call)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    pairs = (y.cpu(), expected[:, 0], tolerance), (states.cpu(), after["update"], 1e-5)
    assert all((actual - exact).norm() < limit * exact.norm() for actual, exact, limit in pairs)


def test_decode_with_a_slot_outside_the_pool_accesses_no_state():
    spec = SPECS["head, after"]
    x = draw(Case(spec, Shape("decode", B=3, T=1, H=1, HV=2, K=2, V=1)), DEVICE)._replace(state=None)
    memory = torch.randn(6, 2, 2, 1, device=DEVICE)
    before, pool = memory.clone(), memory[1:5]
    o = TritonBackend().step_(spec, x, pool, torch.tensor([-1, 2, 4], device=DEVICE))
    assert not o[[0, 2]].any() and o[1].any()
    assert torch.equal(memory[[0, 1, 2, 4, 5]], before[[0, 1, 2, 4, 5]])
    assert not torch.equal(memory[3], before[3])


def test_operators_pass_opcheck():
    x = draw(Case(SPECS["rate, after"], SHAPES["shared keys"]), DEVICE)
    operands = (x.q, x.k, x.v, None, x.step, x.rate, x.state, None)
    kind = ("after", 1.0, CONFIGS["one segment"].model_dump_json())
    tests = ("test_schema", "test_faketensor")
    for save in (False, True):
        torch.library.opcheck(
            torch.ops.deltazoo.triton_element_scan.default, (*operands, *kind, save), test_utils=tests
        )
    o, state, checkpoints = torch.ops.deltazoo.triton_element_scan(*operands, *kind, True)
    backward = torch.ops.deltazoo.triton_element_scan_backward.default
    for key_gradients in (False, True):
        arguments = (*operands, checkpoints, torch.randn_like(o), torch.randn_like(state), *kind, key_gradients)
        torch.library.opcheck(backward, arguments, test_utils=tests)
    token = (x.q[:, :1], x.k[:, :1], x.v[:, :1], None, x.step[:, :1], x.rate, x.state.clone(), None, "after", 1.0)
    torch.library.opcheck(torch.ops.deltazoo.triton_element_step_.default, token, test_utils=tests)


@pytest.mark.parametrize(
    ("axes", "V", "elementwise"),
    [
        ({"decay": "rate"}, 1, True),
        ({"decay": "head"}, 2, True),
        ({"decay": "head"}, 3, False),
        ({"decay": "rate"}, 4, True),
        ({"decay": "head", "householders": 2}, 1, False),
        ({"decay": "rate", "transition": "delta"}, 1, False),
    ],
)
def test_additive_specs_with_narrow_values_or_a_rate_are_elementwise(axes, V, elementwise):
    spec = UpdateSpec(**({"transition": "additive"} | axes))
    assert route_of(spec, V) == ("elements" if elementwise else "chunks")
    assert TritonBackend().unsupported(spec, UpdateMeta(DEVICE, DTYPES[1], 1, 4, 4, V)) == []


@pytest.mark.parametrize(("transition", "V", "regime"), [("delta", 1, "ordinary"), ("additive", 3, "decays")])
def test_a_rate_decay_with_an_erase_term_or_wide_values_conforms(transition, V, regime):
    spec = UpdateSpec(decay="rate", transition=transition)
    assert_conforms(TritonBackend(), Case(spec, Shape("small", B=1, T=9, H=1, HV=2, K=3, V=V), DTYPES[0], regime))


def test_watch_reports_the_elementwise_kernels():
    x = draw(Case(SPECS["rate, after"], SHAPES["shared keys"]), DEVICE)
    x.v.requires_grad_()
    with watch() as record:
        out = bind(SPECS["rate, after"], backend("segments"))(x)
    assert list(record.kernels) == ["element_scan_kernel", "element_combine_kernel"]
    with watch() as record:
        out.o.square().sum().backward()
    assert {"element_reverse_kernel", "element_backward_kernel"} <= set(record.kernels)


@pytest.mark.parametrize("tokens", [2, 12, 64])
def test_a_distance_of_checkpoints_that_the_backward_cannot_unroll_is_refused(tokens):
    launch = ElementLaunch(keys=2, group=4)
    rule = f"checkpoint_tokens must be a power of two from backward.group = 4 to 32, got {tokens}"
    with pytest.raises(ValueError, match=rule):
        ElementConfig(checkpoint_tokens=tokens, forward=launch, backward=launch)


def test_few_channels_are_divided_into_segments():
    config = element_heuristic(16, 1)
    tile = tiling(config.forward, 1, 4096, 16, 1)
    assert segment_length(config, tile, 8, 4096, 132) == 0
    length = segment_length(config, tile, 1, 8192, 132)
    assert 0 < length < 8192 and length % config.checkpoint_tokens == 0


@pytest.mark.parametrize("config", ["one segment", "segments"])
def test_the_plan_lists_the_kernels_that_are_launched(config):
    shape, spec = SHAPES["pack"], SPECS["rate, after"]
    x = draw(Case(spec, shape), DEVICE)
    x.v.requires_grad_()
    with watch() as record:
        out = bind(spec, backend(config))(x)
        out.o.square().sum().backward()
    launched = [(run.name, run.programs, run.warps) for run in record.runs if run.name.endswith("_kernel")]
    device = INTERPRETER if INTERPRETED else DeviceSpec.current()
    (plan,) = element_plans(UpdateMeta.of(x), shape, device, backend(config).element)
    assert launched == [step[1:] for step in plan.launches]


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_one_graph_forward_and_backward_for_every_length(packed):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    spec = SPECS["rate, after"]
    bound = bind(spec, backend("one segment"))

    def run(x: UpdateInputs) -> torch.Tensor:
        out = bound(x)
        return out.o.square().sum() + out.state.square().sum()

    compiled = torch.compile(run, fullgraph=True, backend=counter, dynamic=True)
    for T in (9, 13, 4):
        shape = Shape("some", 1 if packed else 2, T, 1, 2, 3, 1, lengths=(T - 2, 0, 2) if packed else ())
        x = draw(Case(spec, shape), DEVICE)
        leaves = [t.requires_grad_() for t in x if t is not None and t.is_floating_point()]
        want = torch.autograd.grad(run(x), leaves)
        for got, grad in zip(torch.autograd.grad(compiled(x), leaves), want, strict=True):
            torch.testing.assert_close(got, grad)
    assert counter.frame_count == 1


def test_widths_may_be_symbolic():
    spec = UpdateSpec(decay="rate", transition="additive")
    inputs = draw(Case(spec, Shape("odd", B=1, T=83, H=2, HV=2, K=5, V=2)))

    def scan(q, k, v, step, rate):
        return element_update(spec, inputs._replace(q=q, k=k, v=v, step=step, rate=rate, state=None), "").o

    operands = (inputs.q, inputs.k, inputs.v, inputs.step, inputs.rate)
    graph = make_fx(scan, tracing_mode="symbolic")(*operands).graph
    assert any("triton_element_scan" in str(node.target) for node in graph.nodes)
