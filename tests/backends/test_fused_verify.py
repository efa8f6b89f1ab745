"""Drafted tokens of a fused decode step, and the advance of states and histories, against steps of one token.

The kernels run on a GPU, or with TRITON_INTERPRET=1 on the CPU in Triton's interpreter.
"""

import sys

import pytest
import torch
from assembly import disassemble
from compiling import Compiler
from test_fused_step import STEPS
from torch import Tensor
from triton_cases import DEVICE, DTYPES, INTERPRETED, needs_triton

from deltazoo import UpdateSpec, bind, mixers
from deltazoo.backends.conformance.decode_step import FusedOperands, draw_step, make_fused_step, reference_step
from deltazoo.backends.io.errors import ShapeError
from deltazoo.backends.ops import conv_history
from deltazoo.backends.ops.conv_history import advance_history_
from deltazoo.backends.ops.decode_step import FusedDecodeInputs, FusedDecodeStep
from deltazoo.backends.triton import Launch
from deltazoo.backends.triton.decode import fused_verify
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.state import snapshot

B, T = 2, 3
OPTIONS = {"none": (), "all": ("bias", "each", "norm_bias")}
CASES = [
    pytest.param("gated delta", "all", marks=pytest.mark.kernel_smoke),
    ("kda", "none"),
    ("comba", "all"),
    ("householders, before", "none"),
    ("mamba2", "all"),
    ("strengths of channels", "none"),
    ("fixed decay", "all"),
    ("no convolution", "none"),
    ("sigmoid of channels", "all"),
]
SLOW_CASES = [pytest.param(name, option, marks=pytest.mark.slow) for name in STEPS for option in OPTIONS]
STEP_FIELDS = {"taps": 4, "norm": "rms", "eps": 1e-5, "gate": "silu"}
_PER_TOKEN = ("qkv", "beta", "decay", "gate", "erase", "write")


def draw(step: FusedDecodeStep, options: tuple[str, ...], dtype: torch.dtype = torch.float32) -> FusedOperands:
    """Draw T tokens per row."""
    inputs, states, _ = draw_step(step, options, B * T, dtype, DEVICE)
    tokens = {
        name: torch.unflatten(x[:, 0], 0, (B, T)) for name in _PER_TOKEN if (x := getattr(inputs, name)) is not None
    }
    history = None if inputs.history is None else inputs.history[:B].clone()
    return FusedOperands(inputs._replace(**tokens, history=history), states[:B].clone(), None)


def run_steps(step: FusedDecodeStep, operands: FusedOperands) -> tuple[Tensor, list[FusedOperands]]:
    """Decode token by token in float64. Returns: o [B, T, HV, V], and the operands after 0 to T tokens."""
    outputs, after = [], [operands]
    for t in range(T):
        inputs, states, _ = after[-1]
        tokens = {name: x[:, t : t + 1] for name in _PER_TOKEN if (x := getattr(operands.inputs, name)) is not None}
        o, new = reference_step(step, FusedOperands(inputs._replace(**tokens), states, None))
        outputs.append(o)
        after.append(new)
    return torch.cat(outputs, 1), after


def error(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


def assert_agrees(step: FusedDecodeStep, options: tuple[str, ...], dtype: torch.dtype = torch.float32) -> None:
    operands = draw(step, options, dtype)
    inputs, states, _ = operands
    want, after = run_steps(step, operands)
    bound, limit = bind(step.spec, "triton"), {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}[dtype]
    before = snapshot(operands)
    o, draft = bound.fused_verify_(step, inputs, states)
    assert o.dtype == dtype and error(o, want) < limit
    assert torch.equal(states, before.states)
    accepted = torch.tensor([0, 2], dtype=torch.int32, device=DEVICE)
    bound.commit_(draft, states, None, accepted)
    expected = torch.stack([after[0].states[0].double(), after[2].states[1].double()])
    assert error(states, expected) < limit
    if inputs.history is not None and inputs.history.shape[1]:
        advance_history_(inputs.history, inputs.qkv, accepted)
        kept = [after[count].inputs.history[row].double() for row, count in enumerate((0, 2))]
        assert torch.equal(inputs.history.double(), torch.stack(kept))


@needs_triton
@pytest.mark.parametrize(("name", "options"), [*CASES, *SLOW_CASES])
def test_drafted_tokens_equal_steps_of_one_token(name: str, options: str) -> None:
    assert_agrees(STEPS[name], OPTIONS[options])


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("name", ["gated delta", "comba", "householders"])
def test_drafted_tokens_in_16_bits(name: str, dtype: torch.dtype) -> None:
    assert_agrees(STEPS[name], OPTIONS["all"], dtype)


@needs_triton
def test_rows_of_a_joint_projection_may_be_apart() -> None:
    step = STEPS["gated delta"]
    operands = draw(step, ())
    joint = torch.cat([operands.inputs.qkv, operands.inputs.gate], -1)
    qkv, gate = joint.split([operands.inputs.qkv.shape[2], operands.inputs.gate.shape[2]], -1)
    bound, apart = bind(step.spec, "triton"), operands.inputs._replace(qkv=qkv, gate=gate)
    expected = bound.fused_verify_(step, operands.inputs, operands.states)[0]
    assert torch.equal(bound.fused_verify_(step, apart, operands.states)[0], expected)
    with pytest.raises(ShapeError, match="beta must have shape"):
        bound.fused_verify_(
            step, FusedDecodeInputs(**operands.inputs._asdict() | {"beta": apart.beta[:, :1]}), operands.states
        )


@needs_triton
def test_the_history_keeps_the_last_accepted_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    for past in (1, 3, 6):
        history, x = torch.randn(5, past, 300, device=DEVICE), torch.randn(5, 4, 400, device=DEVICE)[..., 50:350]
        accepted = torch.arange(5, dtype=torch.int32, device=DEVICE)
        inputs = torch.cat([history, x], 1)
        expected = torch.stack([inputs[row, row : row + past] for row in range(5)])
        plain = history.clone()
        advance_history_(history, x, accepted)
        assert torch.equal(history, expected)
        with monkeypatch.context() as patch:
            patch.setattr(conv_history, "kernel_refusals", lambda _: ["it is not asked for."])
            advance_history_(plain, x, accepted)
        assert torch.equal(plain, expected)


@needs_triton
@torch.no_grad()
@pytest.mark.parametrize(
    "config",
    [
        mixers.GatedDeltaNet(heads=2, key_width=8, value_width=16),
        mixers.KDA(heads=2, key_width=8, value_width=8),
        mixers.Comba(heads=2, key_width=8),
    ],
    ids=lambda config: config.name,
)
def test_a_mixer_with_fused_drafts_equals_one_that_runs_its_parts(config: mixers.MixerConfig) -> None:
    torch.manual_seed(0)
    mixer = config.build(32, backend="triton").to(DEVICE)
    plain = config.build(32, backend="reference").to(DEVICE)
    plain.load_state_dict(mixer.state_dict())
    x, accepted = torch.randn(2, 12, 32, device=DEVICE), torch.tensor([1, 3], dtype=torch.int32, device=DEVICE)
    with_kernels = INTERPRETED or torch.device(DEVICE).type == "cuda"
    assert with_kernels and mixer.decode_fusion() is not None
    states = [module(x[:, :4], module.init_state(2)).state for module in (plain, mixer)]
    outputs = []
    for module, state in zip((plain, mixer), states, strict=True):
        y, draft, _ = module(x[:, 4:7], state, Context(verify=True))
        module.commit_(draft, state, accepted)
        outputs.append(torch.cat([y, module(x[:, 7:8], state).y], 1))
    assert error(outputs[1], outputs[0]) < 1e-4
    for name in states[0]:
        assert error(states[1][name], states[0][name]) < 1e-4


@pytest.mark.kernels
@pytest.mark.skipif(INTERPRETED or sys.platform != "linux", reason="needs Triton's compiler, not its interpreter")
def test_the_kernels_compile_for_hopper_without_spills(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(all=True)
    monkeypatch.setattr("deltazoo.backends.triton.runtime.launcher.launcher", compiler)
    monkeypatch.setattr("deltazoo.backends.triton.decode.launch.launcher", compiler)
    monkeypatch.setattr(fused_verify, "overlaps", lambda _: True)
    monkeypatch.setattr(fused_verify, "resolve_decode", lambda *_: Launch(tile=32, warps=2))
    step = make_fused_step(UpdateSpec(decay="head", beta="head"), H=9, HV=9, K=200, V=400, **STEP_FIELDS)
    inputs, states, _ = draw_step(step, (), 4, torch.bfloat16, "cpu")
    fused_verify.fused_verify(step, inputs, states)
    history, accepted = inputs.history, torch.ones(4, dtype=torch.int32)
    conv_history.kernel_(history, inputs.qkv, accepted)
    names = [name for name, _ in compiler.compiled]
    assert names == ["drafted_operands_kernel", "verify_kernel", "finish_step_kernel", "advance_history_kernel"]
    for _, kernel in compiler.compiled:
        assert "LDL" not in disassemble(kernel.asm["cubin"])
