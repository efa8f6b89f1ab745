"""Hashes of the PTX of the kernels for sm_90, which may not change without notice.

A different hash means that the compiled code changed. If that changes performance or numerics, raise the kernel's
revision in backends/triton/runtime/revisions.py. In any case regenerate the hashes:
python tests/backends/test_revisions.py
"""

import json
import sys
from pathlib import Path

import pytest
import torch
from compiling import Compiler, launch_update, ptx_hash

from deltazoo.backends.conformance.decode_step import draw_step, typical_step
from deltazoo.backends.measure.shapes import Shape
from deltazoo.backends.torch_ext.devices import DeviceSpec
from deltazoo.backends.triton.chunk.heuristic import heuristic
from deltazoo.backends.triton.decode import fused
from deltazoo.backends.triton.decode.op import decode_operands
from deltazoo.backends.triton.decode.operands import StepKind, StepOperands
from deltazoo.backends.triton.problem import Problem
from deltazoo.backends.triton.runtime.revisions import REVISIONS
from deltazoo.backends.update.base import UpdateInputs
from deltazoo.backends.update.spec import UpdateSpec

pytestmark = pytest.mark.kernels
TRITON = "3.7.1"
STORED = Path(__file__).with_name("compiled_kernels.json")
COMMAND = "python tests/backends/test_revisions.py"
HOPPER = DeviceSpec("a Hopper GPU", "cuda", (9, 0), 4, 232448, TRITON)
AMPERE = DeviceSpec("an Ampere GPU", "cuda", (8, 0), 4, 166912, TRITON)
# name: the device of the plan, and what differs from a gated delta rule of 2 sequences of 200 tokens, 2 heads of 128
CASES = {
    "fused": (HOPPER, {}),
    "sweep": (HOPPER, {"HV": 4}),
    "reverse": (HOPPER, {"K": 64, "V": 64}),
    "erase key": (HOPPER, {"erase_key": True, "split_terms": True, "saves_16_bits": True}),
    "portable segments": (AMPERE, {"T": 4200, "N": 1, "HV": 1, "H": 1}),
    "portable additive": (AMPERE, {"delta": False, "HV": 4}),
}


def compile_case(name: str) -> dict[str, str]:
    """Compile what one case launches forward and backward. Returns the hash of each kernel by case and position."""
    device, change = CASES[name]
    sizes = {"N": 2, "T": 200, "H": 2, "HV": 2, "K": 128, "V": 128}
    traits = {"dtype": torch.bfloat16, "delta": True, "erase_key": False, "decay": "head", "packed": False}
    problem = Problem(**(sizes | traits | change))
    # segments need a GPU with more SMs than programs
    compiler = Compiler(all=True)
    launch_update(problem, device._replace(processors=132) if problem.T > 1000 else device, compiler)
    return hashes(name, compiler)


def compile_steps() -> dict[str, str]:
    """Compile the kernels of a decode step, of the update and of a mixer."""
    from deltazoo.backends.triton.decode import launch as decode

    spec, dplr = UpdateSpec(decay="head", beta="head"), UpdateSpec(decay="channel", transition="dplr")
    launch = heuristic(Problem(torch.bfloat16, 4, 1, 2, 2, 128, 128, True, False, "head", False), HOPPER).decode
    step = typical_step(spec, Shape("rows", 4, 1, 2, 4, 128, 128))
    states, accepted = torch.empty(4, 2, 128, 128), torch.empty(4, dtype=torch.int32)
    compiler = Compiler(all=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "launcher", compiler)
        patch.setattr("deltazoo.backends.triton.runtime.launcher.launcher", compiler)
        decode.step_(*_tokens(spec, 1), states, None, launch)
        fused.fused_decode_step_(step, *draw_step(step, (), 4, torch.bfloat16, torch.device("cpu"))[:2], None)
        for update in (spec, dplr):
            x, kind = _tokens(update, 4)
            _, values = decode.verify(x, kind, states, None, launch)
            decode.commit_(x, kind, values, states, None, accepted, launch)
    return hashes("step", compiler)


def _tokens(spec: UpdateSpec, T: int) -> tuple[StepOperands, StepKind]:
    shapes = spec.operands(4, T, 2, 2, 128, 128)
    x = {
        name: torch.empty(shape, dtype=torch.float32 if name == "log_decay" else torch.bfloat16)
        for name, shape in shapes.items()
    }
    return decode_operands(spec, UpdateInputs(**x), "")


def hashes(case: str, compiler: Compiler) -> dict[str, str]:
    """Return hashes by case and position, which do not change when a kernel is renamed."""
    return {f"{case} {n}": ptx_hash(kernel) for n, (_, kernel) in enumerate(compiler.compiled)}


def supported() -> bool:
    """Whether the pinned Triton is installed with its compiler."""
    try:
        import triton
    except ImportError:
        return False
    return sys.platform == "linux" and triton.__version__ == TRITON and not triton.knobs.runtime.interpret


@pytest.mark.skipif(not supported(), reason=f"needs the compiler of Triton {TRITON}, and not its interpreter")
@pytest.mark.parametrize("case", [*CASES, "step"])
def test_compiled_kernels_have_the_stored_hashes(case):
    stored = json.loads(STORED.read_text())
    current = compile_steps() if case == "step" else compile_case(case)
    expected = {name: value for name, value in stored["hashes"].items() if name.rpartition(" ")[0] == case}
    changed = sorted(name for name in {*current, *expected} if current.get(name) != expected.get(name))
    assert not changed, (
        f"the compiled code of {', '.join(changed)} changed: if performance or numerics changed, raise the revision in "
        f"backends/triton/runtime/revisions.py; then regenerate {STORED.name} by: {COMMAND}"
    )


def test_stored_hashes_belong_to_the_current_revisions():
    assert json.loads(STORED.read_text())["revisions"] == REVISIONS, f"regenerate {STORED.name} by: {COMMAND}"


if __name__ == "__main__":
    current = {key: value for case in CASES for key, value in compile_case(case).items()} | compile_steps()
    text = json.dumps({"triton": TRITON, "revisions": REVISIONS, "hashes": current}, indent=1)
    STORED.write_text(text + "\n")
