"""The fused decode step: the kernel against float64 and against unfused mixers, which mixers fuse, graphs.

The kernels run on a GPU, or with TRITON_INTERPRET=1 on the CPU in Triton's interpreter.
"""

import copy
import re
import sys

import pytest
import torch
from assembly import disassemble
from compiling import Compiler
from pairs import cover
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from triton_cases import DEVICE, DTYPES, INTERPRETED, needs_triton

from deltazoo import UpdateSpec, bind, mixers, watch
from deltazoo.backends.conformance import decode_step as conformance
from deltazoo.backends.conformance.decode_step import FusedOperands, draw_step, reference_step
from deltazoo.backends.io.errors import (
    DeviceError,
    DtypeError,
    OperandError,
    ShapeError,
    UnsupportedError,
    ValueRangeError,
)
from deltazoo.backends.measure.shapes import Shape
from deltazoo.backends.ops.decode_step import FusedDecodeInputs, FusedDecodeStep
from deltazoo.backends.ops.short_conv import ConvPart
from deltazoo.backends.triton import Launch, LaunchConfig, TritonBackend
from deltazoo.backends.triton.decode import fused
from deltazoo.backends.triton.tiles import cdiv, limit_warps, power_of_two
from deltazoo.backends.tuning import measure
from deltazoo.backends.tuning.candidates import Target
from deltazoo.backends.tuning.measure import checks_of
from deltazoo.backends.update import registry
from deltazoo.backends.update.base import UpdateInputs, UpdateMeta
from deltazoo.backends.update.dispatch import BoundUpdate
from deltazoo.backends.update.reference import ReferenceBackend
from deltazoo.mixers import Context, MixerConfig
from deltazoo.mixers.core.delta_mixer import DeltaMixer
from deltazoo.mixers.core.part import OutputArguments
from deltazoo.mixers.core.state import rollback_, snapshot
from deltazoo.mixers.core.update import Update
from deltazoo.mixers.parts.norms import HeadNorm

GATED = UpdateSpec(decay="head", beta="head")
H, HV, K, V = 2, 4, 12, 20


def make_fused_step(spec: UpdateSpec = GATED, silu: str = "qkv", unit: str = "qk", **fields: object) -> FusedDecodeStep:
    sizes = {name: fields.pop(name, size) for name, size in {"H": H, "HV": HV, "K": K, "V": V}.items()}
    fields = {"taps": 4, "norm": "rms", "eps": 1e-5, "gate": "silu"} | fields
    return conformance.make_fused_step(spec, **sizes, silu=silu, unit=unit, **fields)


STEPS = {
    "gated delta": make_fused_step(),
    "one key head per value head": make_fused_step(HV=2),
    "delta": make_fused_step(UpdateSpec(beta="head"), gate=""),
    "delta without beta": make_fused_step(UpdateSpec()),
    "additive": make_fused_step(UpdateSpec(transition="additive"), silu="", unit="", norm="", gate=""),
    "mamba2": make_fused_step(
        UpdateSpec(decay="head", transition="additive"), unit="", scale_v_by_dt=True, gate_first=True
    ),
    "additive, householders": make_fused_step(
        UpdateSpec(decay="head", transition="additive", householders=2), unit="", scale_v_by_dt=True
    ),
    "additive with beta": make_fused_step(UpdateSpec(decay="head", transition="additive", beta="head"), unit="k"),
    "bounded decay": make_fused_step(decay_bound=-5.0),
    "kda": make_fused_step(UpdateSpec(decay="channel", beta="head"), gate="sigmoid"),
    "bounded decays of channels": make_fused_step(
        UpdateSpec(decay="channel", beta="head", erase_from="previous"), HV=2, decay_bound=-5.0
    ),
    "gla": make_fused_step(UpdateSpec(decay="channel", transition="additive"), unit=""),
    "sigmoid of channels": make_fused_step(
        UpdateSpec(decay="channel", transition="additive"), unit="", temperature=16.0
    ),
    "sigmoid": make_fused_step(UpdateSpec(decay="head", transition="additive"), unit="", temperature=2.0, taps=0),
    "fixed decay": make_fused_step(UpdateSpec(decay="fixed", transition="additive", scale=1.0), gate="sigmoid"),
    "strengths of channels": make_fused_step(UpdateSpec(decay="channel", beta="channel"), gate="sigmoid"),
    "strengths of channels, longhorn": make_fused_step(
        UpdateSpec(decay="head", beta="channel", reparam="longhorn", negative_eigenvalues="off"), unit="q"
    ),
    "strengths of channels, householders": make_fused_step(
        UpdateSpec(beta="channel", householders=2, negative_eigenvalues="both")
    ),
    "negative": make_fused_step(GATED.model_copy(update={"negative_eigenvalues": "both"})),
    "negative erase": make_fused_step(UpdateSpec(beta="head", negative_eigenvalues="erase")),
    "negative without beta": make_fused_step(UpdateSpec(negative_eigenvalues="both")),
    "efla": make_fused_step(UpdateSpec(decay="head", beta="head", reparam="efla"), unit="q"),
    "efla without beta": make_fused_step(UpdateSpec(reparam="efla"), unit="q"),
    "longhorn": make_fused_step(UpdateSpec(decay="head", beta="head", reparam="longhorn"), silu="v", unit=""),
    "feedback": make_fused_step(UpdateSpec(decay="head", beta="separate")),
    "feedback, householders": make_fused_step(
        UpdateSpec(decay="head", beta="separate", householders=2, negative_eigenvalues="erase"), HV=4
    ),
    "comba": make_fused_step(UpdateSpec(decay="head", beta="separate", erase_from="previous"), gate="sigmoid"),
    "read before": make_fused_step(UpdateSpec(decay="head", beta="head", read="before", scale=1.0)),
    "householders": make_fused_step(UpdateSpec(decay="head", beta="head", householders=3, negative_eigenvalues="both")),
    "householders, before": make_fused_step(
        UpdateSpec(decay="head", beta="head", householders=2, erase_from="previous", read="before"), HV=2
    ),
    "no convolution": make_fused_step(taps=0),
    "one tap": make_fused_step(taps=1),
    "two taps": make_fused_step(taps=2, HV=2),
    "eight taps": make_fused_step(taps=8),
    "layer norm": make_fused_step(norm="layer", gate="gelu"),
    "layer norm after the gate": make_fused_step(norm="layer", gate="none", gate_first=True),
    "gate alone": make_fused_step(norm="", gate="sigmoid"),
    "scalar heads": make_fused_step(K=1, V=1, unit=""),
}
WIDE = {"K = V = 128": (128, 128), "200/400": (200, 400), "256/512": (256, 512), "64/64": (64, 64)}
# optional operands
OPTIONS = {"none": (), "all": ("bias", "skip", "each", "norm_bias"), "slots": ("slots",)}


def draw(
    step: FusedDecodeStep,
    options: tuple[str, ...],
    B: int = 3,
    dtype: torch.dtype = torch.float32,
    device: str = DEVICE,
) -> dict:
    """Draw the arguments of a step: inputs, states and slots."""
    operands = draw_step(step, options, B, dtype, device)._asdict()
    return operands | ({"slots": torch.tensor([3, 0, 4], device=device)[:B]} if "slots" in options else {})


def error(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-30))


def assert_agrees(
    step: FusedDecodeStep,
    options: tuple[str, ...],
    dtype: torch.dtype = torch.float32,
    B: int = 3,
    backend: str | TritonBackend = "triton",
) -> None:
    arguments = draw(step, options, B, dtype)
    want, exact = reference_step(step, FusedOperands(**arguments))
    o = bind(step.spec, backend).fused_decode_step_(step, **arguments)
    assert o.dtype == dtype
    limit = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}[dtype]
    assert error(o, want) < limit
    # The state is float32 and is computed from operands that are rounded once; the token is stored unchanged.
    assert error(arguments["states"], exact.states) < 3e-6
    if step.taps > 1:
        assert torch.equal(arguments["inputs"].history.double(), exact.inputs.history)


SMOKE = [("gated delta", "slots"), ("comba", "all"), ("mamba2", "all")]


@needs_triton
@pytest.mark.parametrize(("name", "options"), cover(list(STEPS), list(OPTIONS), SMOKE))
def test_kernel_matches_the_reference_step(name, options):
    assert_agrees(STEPS[name], OPTIONS[options])


@needs_triton
@pytest.mark.parametrize(
    ("form", "name"),
    cover(range(conformance.FORMS), ["gated delta", "mamba2", "comba", "householders", "efla"]),
)
def test_kernel_matches_the_reference_for_each_norm_and_gate(name, form):
    step = conformance.typical_step(STEPS[name].spec, Shape("sizes", 3, 1, H, HV, K, V), form)
    assert_agrees(step, conformance.OPTIONS if form % 2 else ())


@needs_triton
@pytest.mark.parametrize("tiles", [1, 2])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gated delta", "slots"),
        ("mamba2", "all"),
        ("no convolution", "all"),
        ("householders, before", "none"),
        ("layer norm after the gate", "all"),
        ("strengths of channels, householders", "slots"),
        ("additive", "none"),
        ("gate alone", "none"),
        ("two taps", "slots"),
    ],
)
def test_a_head_split_over_programs_equals_the_reference_step(name, options, tiles, monkeypatch):
    step = STEPS[name]
    monkeypatch.setattr(fused, "_split_tile", lambda *_: 8)
    monkeypatch.setattr(fused, "_SPLIT_TILES", tiles)
    with watch() as record:
        assert_agrees(step, OPTIONS[options])
    programs = [run.programs for run in record.runs if run.name == "fused_step_kernel"]
    assert programs == [3 * step.HV * cdiv(step.V, 8 * tiles)]


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("name", ["gated delta", "mamba2", "comba", "householders", "efla"])
def test_results_in_16_bits_are_rounded_once(name, dtype):
    assert_agrees(STEPS[name], OPTIONS["all"], dtype)


@needs_triton
@pytest.mark.parametrize(
    ("name", "launch"),
    cover(["gated delta", "layer norm", "householders", "mamba2", "scalar heads"], [(16, 1), (32, 8), (64, 4)]),
)
def test_the_result_does_not_depend_on_the_launch_config(name, launch):
    tile, warps = launch
    backend = TritonBackend(LaunchConfig(fused_step=Launch(tile=tile, warps=warps, stages=1)))
    with watch() as record:
        assert_agrees(STEPS[name], OPTIONS["all"] if name != "scalar heads" else (), backend=backend)
    numbers = power_of_two(STEPS[name].K) * min(tile, power_of_two(STEPS[name].V))
    assert {run.warps for run in record.runs if run.name == "fused_step_kernel"} == {limit_warps(warps, numbers)}


@needs_triton
@pytest.mark.parametrize("spec", [GATED, UpdateSpec(decay="head", transition="additive")], ids=["delta", "additive"])
def test_the_tuner_accepts_a_correct_launch_and_reports_the_error_of_a_wrong_one(spec, monkeypatch):
    target = Target(spec, Shape("rows", 5, 1, 2, 4, 12, 20), torch.float16)
    config = LaunchConfig(fused_step=Launch(tile=16, warps=1, stages=1))
    cases = checks_of(target, "fused_step", config)
    expected = measure.expected_results(cases[0], "fused_step", DEVICE)
    with watch() as record:
        assert measure.numeric_error(config, cases[0], expected, DEVICE) == ""
        measure._run_once(target, "fused_step", config, DEVICE)
    assert [(run.programs, run.warps) for run in record.runs if run.name == "fused_step_kernel"] == [(12, 1), (20, 1)]
    correct = fused.fused_decode_step_
    monkeypatch.setattr(fused, "fused_decode_step_", lambda *arguments: 1.02 * correct(*arguments))
    reason = measure.numeric_error(config, cases[0], expected, DEVICE)
    assert re.match(r"o has relative RMS error 2\.0e-02, above 5e-03, on ", reason)


@needs_triton
@pytest.mark.parametrize("widths", WIDE)
def test_widths_of_published_models(widths):
    K, V = WIDE[widths]
    assert_agrees(make_fused_step(H=1, HV=2, K=K, V=V), OPTIONS["all"], B=1)


@needs_triton
@pytest.mark.parametrize("name", ["gated delta", "householders"])
def test_batches_of_zero_and_one_rows(name):
    assert_agrees(STEPS[name], (), B=1)
    arguments = draw(STEPS[name], (), B=0)
    assert bind(STEPS[name].spec, "triton").fused_decode_step_(STEPS[name], **arguments).shape == (0, 1, HV, V)


@needs_triton
def test_small_step_sizes_are_accurate_in_relative_terms():
    """softplus far below 0, and the EFLA factor of short keys."""
    step = STEPS["mamba2"]._replace(norm="", gate="")
    arguments = draw(step, ())
    arguments["inputs"].decay.fill_(-14.0)
    arguments["states"].zero_()
    _, exact = reference_step(step, FusedOperands(**arguments))
    bind(step.spec, "triton").fused_decode_step_(step, **arguments)
    assert error(arguments["states"], exact.states) < 3e-6
    for factor in (1e-4, 0.2, 0.3, 4.0):
        step = make_fused_step(UpdateSpec(beta="head", reparam="efla"), silu="", unit="", taps=0)
        arguments = draw(step, ())
        arguments["inputs"].qkv.mul_(factor)
        want, exact = reference_step(step, FusedOperands(**arguments))
        assert error(bind(step.spec, "triton").fused_decode_step_(step, **arguments), want) < 1e-5
        assert error(arguments["states"], exact.states) < 1e-5


@needs_triton
def test_only_the_requested_slots_change():
    step = STEPS["gated delta"]
    arguments = draw(step, ("slots",))
    arguments["states"][[1, 2]] = torch.nan
    arguments["inputs"].history[[1, 2]] = torch.nan
    o = bind(step.spec, "triton").fused_decode_step_(step, **arguments)
    assert not o.isnan().any()
    for tensor in (arguments["states"], arguments["inputs"].history):
        assert tensor[[1, 2]].isnan().all()
        assert not tensor[[0, 3, 4]].isnan().any()


@needs_triton
@pytest.mark.kernel_smoke
@pytest.mark.parametrize("name", ["gated delta", "householders, before"])
def test_a_slot_outside_the_pool_accesses_no_state_and_no_history(name):
    """Rows of guard values surround the pool; the output of such a slot is zero."""
    step = STEPS[name]
    arguments = draw(step, (*OPTIONS["all"], "slots"), B=3)
    slots = torch.tensor([3, -1, 5], device=DEVICE)

    def guarded(pool: Tensor) -> Tensor:
        guard = torch.full_like(pool[:1], 7.0)
        return torch.cat([guard, pool, guard])

    memory = {"states": guarded(arguments["states"]), "history": guarded(arguments["inputs"].history)}
    before = {part: tensor.clone() for part, tensor in memory.items()}
    inputs = arguments["inputs"]._replace(history=memory["history"][1:6])
    o = fused.fused_decode_step_(step, inputs, memory["states"][1:6], slots)  # bypasses the checks
    assert not o[1:].any()
    want = fused.fused_decode_step_(
        step,
        FusedDecodeInputs(
            *(t[:1] if n in ("qkv", "beta", "decay", "gate") else t for n, t in arguments["inputs"]._asdict().items())
        ),
        arguments["states"],
        slots[:1],
    )
    assert torch.equal(o[:1], want)
    for part, tensor in memory.items():
        assert torch.equal(tensor[[0, 1, 2, 3, 5, 6]], before[part][[0, 1, 2, 3, 5, 6]])
        assert not torch.equal(tensor[4], before[part][4])


@needs_triton
def test_tensors_that_are_not_contiguous():
    step = STEPS["gated delta"]
    arguments = draw(step, (*OPTIONS["all"], "slots"))
    want = bind(step.spec, "triton").fused_decode_step_(step, **copy.deepcopy(arguments))

    def with_stride_two(x: Tensor | None) -> Tensor | None:
        return None if x is None else torch.stack([x, x + 1], -1)[..., 0]

    strided = {
        "inputs": FusedDecodeInputs(*map(with_stride_two, arguments["inputs"])),
        "states": with_stride_two(arguments["states"]),
        "slots": with_stride_two(arguments["slots"]),
    }
    assert strided["slots"].stride() == (2,)
    got = bind(step.spec, "triton").fused_decode_step_(step, **strided)
    after = bind(step.spec, "triton").fused_decode_step_(step, **arguments)
    assert torch.equal(got, want)
    assert torch.equal(after, want)
    assert torch.equal(strided["states"], arguments["states"])
    assert torch.equal(strided["inputs"].history, arguments["inputs"].history)


@needs_triton
@pytest.mark.parametrize("name", ["gated delta", "no convolution", "comba"])
def test_the_operator_passes_opcheck(name):
    step = STEPS[name]
    arguments = draw(step, OPTIONS["all"])
    flat = (*arguments["inputs"], arguments["states"], None, *fused.StepOptions.of(step), "")
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.deltazoo.triton_fused_step_.default, flat, test_utils=tests)


# These cover every flag of the kernel; the other steps are slow.
COMPILED = (
    "gated delta", "kda", "mamba2", "householders, before", "feedback", "longhorn", "layer norm after the gate",
    "eight taps",
)  # fmt: skip


@pytest.mark.skipif(INTERPRETED or sys.platform != "linux", reason="needs Triton's compiler, not its interpreter")
@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=pytest.mark.kernels if x in COMPILED else pytest.mark.slow) for x in STEPS],
)
def test_the_kernels_compile_for_hopper_without_spills(name, monkeypatch):
    compiler = Compiler(all=True)
    monkeypatch.setattr("deltazoo.backends.triton.runtime.launcher.launcher", compiler)
    step = STEPS[name]
    for dtype, options in ((torch.bfloat16, ("slots",)), (torch.float32, OPTIONS["all"])):
        arguments = draw(step, options, dtype=dtype, device="cpu")
        fused.fused_decode_step_(step, **arguments)
    shares = step.taps > 0 and step.H < step.HV
    assert [kernel for kernel, _ in compiler.compiled] == 2 * [*["convolve_step_kernel"] * shares, "fused_step_kernel"]
    # small enough for several programs per SM
    assert all(kernel.metadata.shared <= 2**15 for _, kernel in compiler.compiled)
    assert not any("LDL" in disassemble(kernel.asm["cubin"]) for _, kernel in compiler.compiled)


# Mixers

FULLY_FUSED = {
    "gated_deltanet": mixers.GatedDeltaNet(heads=2, key_width=8, value_width=12),
    "shared key heads": mixers.GatedDeltaNet(heads=1, value_heads=3, key_width=8, value_width=12),
    "gated_efla": mixers.GatedEFLA(heads=2),
    "gated_longhorn": mixers.GatedLonghorn(heads=2),
    "gated_deltaproduct": mixers.GatedDeltaProduct(heads=2, householders=3),
    "deltanet": mixers.DeltaNet(heads=2),
    "negative eigenvalues": mixers.DeltaNet(heads=2, negative_eigenvalues="both"),
    "deltaproduct": mixers.DeltaProduct(heads=2),
    "efla": mixers.EFLA(heads=2),
    "longhorn": mixers.Longhorn(heads=2),
    "comba": mixers.Comba(heads=2),
    "kda": mixers.KDA(heads=2, key_width=16, value_width=16),
    "gla": mixers.GLA(heads=2, key_width=8, value_width=16),
    "simple_gla": mixers.SimpleGLA(heads=2, key_width=8, value_width=16),
    "gated_deltanet2": mixers.GatedDeltaNet2(heads=2, key_width=8, value_width=16),
    "no convolution": mixers.GatedDeltaNet(heads=2, conv_width=0),
    "mamba2, one norm per head": mixers.Mamba2(heads=4, key_width=16, value_width=16),
    "mamba2 without a norm": mixers.Mamba2(key_width=16, value_width=16, norm=False),
}
# These differ from another mixer of the list only in the decay.
GATED_VARIANTS = ("gated_longhorn", "deltaproduct", "efla", "deltanet")
PARTLY_FUSED = {
    "mamba2": mixers.Mamba2(key_width=16, value_width=16),
    "lightning_attention": mixers.LightningAttention(heads=2),
}
REMAINING = {"mamba2": ["HeadNorm"], "lightning_attention": ["HeadNorm", "OutputGate"]}


def build_pair(config: MixerConfig) -> tuple[DeltaMixer, DeltaMixer]:
    """Build a mixer with the kernels and its float64 copy on the reference backend, with random weights."""
    torch.manual_seed(0)
    mixer = config.build(32, backend="reference").to(DEVICE)
    with torch.no_grad():
        for p in mixer.parameters():
            p += 0.2 * torch.randn_like(p)
    exact = copy.deepcopy(mixer).double()
    mixer.rebind("triton")
    return mixer, exact


def decode(mixer: DeltaMixer, x: Tensor, prefilled: int = 4) -> tuple[Tensor, dict[str, Tensor]]:
    y, state, _ = mixer(x[:, :prefilled], mixer.init_state(len(x)))
    addresses = {name: tensor.data_ptr() for name, tensor in state.items()}
    pieces = [y]
    for t in range(prefilled, x.shape[1]):
        y, state, _ = mixer(x[:, t : t + 1], state)
        pieces.append(y)
    assert addresses == {name: tensor.data_ptr() for name, tensor in state.items()}
    return torch.cat(pieces, 1), state


@needs_triton
@torch.no_grad()
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in GATED_VARIANTS)) for n in (*FULLY_FUSED, *PARTLY_FUSED)]
)
def test_a_fused_mixer_decodes_like_the_unfused_one(name):
    mixer, exact = build_pair((FULLY_FUSED | PARTLY_FUSED)[name])
    x = torch.randn(3, 9, 32, device=DEVICE)
    with watch() as record:
        y, state = decode(mixer, x)
    want, state_want = decode(exact, x.double())
    assert error(y, want) < 1e-5
    for part, tensor in state.items():
        if tensor.numel():
            assert error(tensor, state_want[part]) < 1e-5, part
    assert record.kernels["fused_step_kernel"] == 5
    assert "decode_kernel" not in record.kernels
    shares = mixer.project.conv is not None and mixer.update.shape.heads < mixer.update.shape.value_heads
    assert record.kernels.get("convolve_step_kernel", 0) == (5 if shares else 0)
    assert "5 x triton: fused step" in str(record)
    remaining = [type(part).__name__ for part in mixer.decode_fusion().remaining]
    assert remaining == REMAINING.get(name, [])


def test_mixers_that_fuse():
    """With default configs; the others have a part that does not fuse before the update, or an unsupported spec."""
    builtin = [
        name
        for name in registry.names(registry.MIXERS)
        if registry.owner(registry.MIXERS, name).startswith("deltazoo ")
    ]
    assert {name for name in builtin if fuses(mixers.parse({"mixer": name}))} == {
        "comba", "deltanet", "deltaproduct", "efla", "gated_deltanet", "gated_deltanet2",
        "gated_deltaproduct", "gated_efla", "gated_longhorn", "gla", "kda", "lightning_attention", "longhorn", "mamba2",
        "simple_gla",
    }  # fmt: skip


def fuses(config: MixerConfig) -> bool:
    with torch.device("meta"):
        mixer = config.build(256, backend="reference")
    fusion = mixer.decode_fusion() if isinstance(mixer, DeltaMixer) else None
    if fusion is None:
        return False
    meta = UpdateMeta("cuda", torch.bfloat16, *fusion.step[1:5])
    return not [*spec_reasons(fusion.step.spec, meta), *fused.unsupported(fusion.step)]


def spec_reasons(spec: UpdateSpec, meta: UpdateMeta) -> list[str]:
    """Return why the backend does not support a spec, without reasons that concern this machine."""
    return [reason for reason in TritonBackend().unsupported(spec, meta) if "it " not in reason[:3]]


class OtherNorm(HeadNorm):
    def transform(self, o: Tensor, x: Tensor) -> Tensor:
        return super().transform(o, x) + 1


class OtherForward(HeadNorm):
    def forward(
        self, o: Tensor, flow: OutputArguments, state: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor | None]:
        return 2 * super().forward(o, flow, state, context)[0], None


class UpdatePlusOne(Update):
    def forward(self, inputs: UpdateInputs, state: Tensor | None, context: Context) -> tuple[Tensor, Tensor | None]:
        o, state = super().forward(inputs, state, context)
        return o + 1, state


def with_another_norm(mixer: DeltaMixer) -> None:
    mixer.outputs["norm"] = OtherForward(mixer.update.shape, 0.1).to(mixer.out.weight)


def with_another_update(mixer: DeltaMixer) -> None:
    mixer.update.__class__ = UpdatePlusOne


def with_another_forward(mixer: DeltaMixer) -> None:
    part = mixer.outputs["gate"]
    part.forward = lambda *arguments: (type(part).forward(part, *arguments)[0] + 1, None)


def with_another_convolution(mixer: DeltaMixer) -> None:
    part = mixer.project.conv

    def negated(*arguments):
        streams, after = type(part).forward(part, *arguments)
        return tuple(-y for y in streams), after

    part.forward = negated


@needs_triton
@torch.no_grad()
@pytest.mark.parametrize(
    "change", [with_another_norm, with_another_update, with_another_forward, with_another_convolution]
)
def test_a_replaced_part_is_used(change):
    mixer, exact = build_pair(FULLY_FUSED["gated_deltanet"])
    for m in (mixer, exact):
        change(m)
    x = torch.randn(2, 6, 32, device=DEVICE)
    assert error(decode(mixer, x)[0], decode(exact, x.double())[0]) < 1e-5


def hook(mixer: DeltaMixer, module: torch.nn.Module) -> list[Tensor]:
    called: list[Tensor] = []
    module.register_forward_hook(lambda m, arguments, out: called.append(out))
    return called


@needs_triton
@torch.no_grad()
@pytest.mark.parametrize("part", ["project", "project.conv", "operands.beta", "update", "outputs.norm"])
def test_a_part_with_a_hook_is_not_fused(part):
    mixer, exact = build_pair(FULLY_FUSED["gated_deltanet"])
    called = hook(mixer, mixer.get_submodule(part))
    x = torch.randn(2, 6, 32, device=DEVICE)
    y, _ = decode(mixer, x)
    assert len(called) == 3
    assert error(y, decode(exact, x.double())[0]) < 1e-5


@needs_triton
@torch.no_grad()
def test_the_projections_around_a_fused_step_are_called_as_modules():
    """Wrappers of linear layers and hooks on them keep working."""
    mixer, _ = build_pair(FULLY_FUSED["gated_deltanet"])
    maps = ["project.to_qkv", "operands.beta.proj", "operands.decay.proj", "outputs.gate.proj", "out"]
    called = [hook(mixer, mixer.get_submodule(name)) for name in maps]
    with watch() as record:
        decode(mixer, torch.randn(2, 6, 32, device=DEVICE))
    assert record.kernels["fused_step_kernel"] == 2
    assert [len(calls) for calls in called] == [3] * len(maps)


@needs_triton
@torch.no_grad()
def test_a_part_replaced_after_a_step_is_used():
    mixer, exact = build_pair(FULLY_FUSED["gated_deltanet"])
    x = torch.randn(2, 6, 32, device=DEVICE)
    for m in (mixer, exact):
        m.outputs["norm"].eps = 0.5
    assert error(decode(mixer, x)[0], decode(exact, x.double())[0]) < 1e-5
    for m in (mixer, exact):
        norm = m.outputs["norm"]
        m.outputs["norm"] = OtherNorm(m.update.shape, 0.1).to(norm.weight)
    assert mixer.decode_fusion() is None  # until `rebind` plans the fusion again
    assert error(decode(mixer, x)[0], decode(exact, x.double())[0]) < 1e-5
    mixer.rebind(mixer.update.bound.requested)
    # the gate follows a norm that does not fuse, so it does not fuse, either
    assert isinstance(mixer.decode_fusion().remaining[0], OtherNorm)
    assert error(decode(mixer, x)[0], decode(exact, x.double())[0]) < 1e-5
    mixer.project.conv = torch.nn.Identity()
    assert mixer.decode_fusion() is None


@needs_triton
def test_calls_that_are_not_plain_decode_steps_are_not_fused():
    mixer, _ = build_pair(FULLY_FUSED["gated_deltanet"])
    x = torch.randn(2, 1, 32, device=DEVICE)
    two = torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE)
    with watch() as record:
        mixer(x, mixer.init_state(2))  # gradients are enabled
        with torch.no_grad():
            mixer(x)
            mixer(x.expand(-1, 2, -1), mixer.init_state(2))
            mixer(x, mixer.init_state(2), Context(mask=torch.tensor([[True], [False]], device=DEVICE)))
            mixer(x.view(1, 2, 32), mixer.init_state(2), Context(cu_seqlens=two))
    assert "fused_step_kernel" not in record.kernels
    with watch() as record, torch.inference_mode():
        mixer(x, mixer.init_state(2))
    assert "fused_step_kernel" in record.kernels


@needs_triton
@pytest.mark.parametrize("fuses", [True, False])
def test_backward_through_a_state_that_a_step_has_changed_is_refused(fuses):
    """A step updates its state in place, which autograd must detect."""
    mixer, _ = build_pair(FULLY_FUSED["gated_deltanet"])
    if not fuses:
        hook(mixer, mixer.update)
    x = torch.randn(2, 6, 32, device=DEVICE)
    with torch.no_grad():
        _, state, _ = mixer(x[:, :4], mixer.init_state(2))
    before = {name: tensor._version for name, tensor in state.items()}
    y = mixer(x[:, 4:], state).y
    with torch.no_grad():
        mixer(x[:, :1], state)
    assert all(tensor._version > before[name] for name, tensor in state.items())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.square().sum().backward()


@needs_triton
@torch.no_grad()
def test_float64_under_autocast_uses_the_backend_that_supports_it():
    mixer, _ = build_pair(FULLY_FUSED["gated_deltanet"])
    exact = copy.deepcopy(mixer).double()
    both = BoundUpdate(exact.update.spec, {"": (TritonBackend(), ReferenceBackend())}, None)
    exact.update.bound = both
    x = torch.randn(2, 6, 32, device=DEVICE, dtype=torch.float64)
    want, _ = decode(exact, x)
    with torch.autocast(DEVICE, dtype=torch.float16):
        got, _ = decode(exact, x)
    assert torch.equal(got, want)


@needs_triton
def test_forward_mode_differentiation_is_refused():
    step = STEPS["gated delta"]
    arguments = draw(step, ())
    bound, qkv = bind(step.spec, "triton"), arguments["inputs"].qkv
    with forward_ad.dual_level():
        arguments["inputs"] = arguments["inputs"]._replace(qkv=forward_ad.make_dual(qkv, torch.ones_like(qkv)))
        with pytest.raises(UnsupportedError, match="forward-mode"):
            bound.fused_decode_step_(step, **arguments)


def test_step_that_does_not_match_the_bound_spec_is_refused():
    step = STEPS["gated delta"]
    arguments = draw(step, (), device="cpu")
    with pytest.raises(OperandError, match="spec must be the one that was bound"):
        bind(UpdateSpec(), "reference").fused_decode_step_(step, **arguments)
    with pytest.raises(UnsupportedError, match="'reference' cannot fuse this decode step: it has no fused decode step"):
        bind(GATED, "reference").fused_decode_step_(step, **arguments)
    wrong = {
        r"parts must be of q, k and v, of \[24, 24, 80\] channels, got \[\]": {"parts": ()},
        "the heads of v must be a multiple of the heads of q, got HV=4, H=3": {
            "H": 3,
            "parts": (ConvPart(36), ConvPart(36), ConvPart(80)),
        },
    }
    for match, fields in wrong.items():
        with pytest.raises(ShapeError, match=match):
            bind(GATED, "reference").fused_decode_step_(step._replace(**fields), **arguments)
    with pytest.raises(OperandError, match="scale_v_by_dt must be False with decay='none'"):
        bind(UpdateSpec(), "reference").fused_decode_step_(
            STEPS["delta without beta"]._replace(scale_v_by_dt=True), **arguments
        )


class WithoutFusedStep(ReferenceBackend):
    """A backend that overrides none of the methods of a fused step."""

    name = "older"


@torch.no_grad()
def test_a_backend_without_a_fused_step_decodes_unfused():
    mixer = FULLY_FUSED["gated_deltanet"].build(32, backend=WithoutFusedStep())
    with watch() as record:
        mixer(torch.randn(2, 1, 32), mixer.init_state(2))
    assert "older: step" in str(record)
    assert "fused" not in str(record)
    reasons = WithoutFusedStep().fused_decode_unsupported(mixer.decode_fusion().step, torch.float32)
    assert reasons == ["it has no fused decode step; the mixer computes its parts one by one."]


@needs_triton
@torch.no_grad()
@pytest.mark.parametrize("name", ["gated_deltanet", "mamba2"])
def test_a_decode_step_of_a_mixer_is_one_graph(name):
    torch._dynamo.reset()
    mixer, _ = build_pair((FULLY_FUSED | PARTLY_FUSED)[name])
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(mixer, fullgraph=True, backend=counter)
    x = torch.randn(2, 6, 32, device=DEVICE)
    (y, state, _), (z, other, _) = (mixer(x[:, :2], mixer.init_state(2)) for _ in range(2))
    for t in range(2, 6):
        y, state, _ = mixer(x[:, t : t + 1], state)
        z, other, _ = step(x[:, t : t + 1], other)
        torch.testing.assert_close(z, y, rtol=1e-5, atol=1e-6)
    for part, tensor in state.items():
        torch.testing.assert_close(other[part], tensor, rtol=1e-5, atol=1e-6)
    assert counter.frame_count == 1
    assert "triton_fused_step_" in str(counter.graphs[0].graph)


@needs_triton
@torch.no_grad()
def test_a_decode_step_is_exported():
    mixer, _ = build_pair(FULLY_FUSED["gated_deltanet"])
    state = mixer.init_state(2)
    exported = torch.export.export(mixer, (torch.randn(2, 1, 32, device=DEVICE), snapshot(state)))
    x = torch.randn(2, 3, 32, device=DEVICE)
    other = snapshot(state)
    for t in range(3):
        y, state, _ = mixer(x[:, t : t + 1], state)
        z, other, _ = exported.module()(x[:, t : t + 1], other)
        torch.testing.assert_close(z, y, rtol=1e-5, atol=1e-6)


@needs_triton
@torch.no_grad()
def test_autocast_sets_the_dtype_of_a_fused_step():
    mixer, exact = build_pair(FULLY_FUSED["gated_deltanet"])
    plain = copy.deepcopy(exact).float()
    low = torch.float16 if INTERPRETED else torch.bfloat16
    x = torch.randn(2, 6, 32, device=DEVICE)
    with watch() as record, torch.autocast(DEVICE, dtype=low):
        y, state = decode(mixer, x)
        reference, _ = decode(plain, x)
    assert record.kernels["fused_step_kernel"] == 2
    expected, _ = decode(exact, x.double())
    # the projections alone round by 0.005 to 0.04, depending on the weights
    assert error(y, expected) < 1.5 * error(reference, expected)
    assert state["project"].dtype == torch.float32


WRONG = [
    ({"beta": None}, OperandError, r"beta is missing: this step needs it with shape \[3, 1, 4\]"),
    ({"skip": torch.ones(5)}, ShapeError, r"skip must have shape \[4\], got \[5\]"),
    ({"feedback": torch.ones(2)}, OperandError, "feedback must be None: the operands of this step are qkv, weight"),
    ({"history": torch.ones(5, 4, 128)}, ShapeError, r"history must have shape \[5, 3, 128\], got \[5, 4, 128\]"),
    ({"A_log": torch.ones(4, device="meta")}, DeviceError, "A_log must be on cpu, where qkv is, got meta"),
    ({"gate": torch.ones(3, 1, 80).int()}, DtypeError, "gate must be float64, .*got torch.int32"),
    ({"qkv": torch.ones(3, 128)}, ShapeError, r"qkv must be a tensor of shape \[B, 1, 128\], got \[3, 128\]"),
    ({"states": [1.0]}, OperandError, "states must be a tensor, got list"),
    ({"states": torch.ones(5, 4, 12, 21)}, ShapeError, r"states must have shape \[5, 4, 12, 20\]"),
    ({"states": torch.ones(5, 4, 12, 20).half()}, DtypeError, "states must be torch.float32, got torch.float16"),
    (
        {"slots": torch.tensor([0, 1, 1])},
        ValueRangeError,
        r"slots must be -1 or distinct rows of the 5 states, got \[0, 1, 1\]",
    ),
    ({"slots": None}, ShapeError, r"history must have shape|states must have shape \[3, 4, 12, 20\]"),
]


@pytest.mark.parametrize(
    ("changed", "kind", "match"), WRONG, ids=[next(iter(w[0])) + str(i) for i, w in enumerate(WRONG)]
)
def test_invalid_operands_are_refused_by_name(changed, kind, match):
    step = STEPS["gated delta"]
    arguments = draw(step, ("bias", "slots"), device="cpu")
    inputs = {name: tensor for name, tensor in changed.items() if name in FusedDecodeInputs._fields}
    arguments |= {name: tensor for name, tensor in changed.items() if name not in inputs}
    arguments["inputs"] = arguments["inputs"]._replace(**inputs)
    with pytest.raises(kind, match=match):
        bind(step.spec, "reference").fused_decode_step_(step, **arguments)


def test_unsupported_steps_are_refused_with_reasons():
    step = STEPS["gated delta"]
    assert fused.unsupported(step) == []
    assert fused.unsupported(step._replace(taps=9)) == ["a short convolution must have at most 8 taps, got 9."]
    assert fused.unsupported(step._replace(V=513)) == ["V must be at most 512 in a fused step, got 513."]
    many = make_fused_step(UpdateSpec(beta="head", householders=5), V=128, K=128)
    assert fused.unsupported(many) == ["householders must be at most 4 in a fused step with V = 128, got 5."]
    rate = step._replace(spec=UpdateSpec(decay="rate", transition="additive"))
    own = step._replace(spec=UpdateSpec(decay="head", beta="head", erase_key="own"))
    assert fused.unsupported(own) == ["erase_key must be 'key' in a fused step, got 'own'."]
    assert fused.unsupported(rate) == [
        "decay must be 'none', 'fixed', 'head' or 'channel' in a fused step, got 'rate'."
    ]
    parts = (*step.parts[:2], step.parts[2]._replace(unit=20))
    assert fused.unsupported(step._replace(parts=parts)) == [
        "heads of q and k alone, of K = 12 channels, may have a norm, got [12, 12, 20]."
    ]


@pytest.mark.cuda
@pytest.mark.skipif(DEVICE != "cuda" or not torch.cuda.is_available(), reason="needs a CUDA device")
@torch.no_grad()
def test_a_decode_step_of_a_mixer_replays_in_a_cuda_graph():
    mixer, exact = build_pair(FULLY_FUSED["gated_deltanet"])
    x = torch.randn(3, 9, 32, device="cuda")
    token, state = x[:, :1].clone(), mixer.init_state(3)
    initial = snapshot(state)
    mixer(token, state)
    rollback_(state, initial)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = mixer(token, state).y
    rollback_(state, initial)
    got = []
    for t in range(9):
        token.copy_(x[:, t : t + 1])
        graph.replay()
        got.append(y.clone())
    assert error(torch.cat(got, 1), decode(exact, x.double(), 1)[0]) < 1e-5


@pytest.mark.cuda
@pytest.mark.skipif(DEVICE != "cuda" or not torch.cuda.is_available(), reason="needs a CUDA device")
@torch.no_grad()
def test_repeated_steps_give_the_same_bits():
    """No program reads a history that another program has updated already."""
    step = make_fused_step(H=16, HV=32, K=128, V=128)
    for options in ((), ("slots",)):
        arguments = draw(step, options, B=64 if not options else 3, dtype=torch.bfloat16)
        bound, first = bind(step.spec, "triton"), None
        for _ in range(50):
            again = copy.deepcopy(arguments)
            o = bound.fused_decode_step_(step, **again)
            results = (o, again["states"], again["inputs"].history)
            first = results if first is None else first
            assert all(torch.equal(a, b) for a, b in zip(results, first, strict=True))
