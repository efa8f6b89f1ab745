"""The kernels for Hopper GPUs, which the interpreter does not run: that they compile for one, as they are launched."""

import sys
from itertools import product

import pytest
import torch
from assembly import disassemble, forgotten, miscarried
from compiling import Compiler

from deltazoo.backends.triton.config import Device, Problem, heuristic
from deltazoo.backends.triton.operands import Prepared, ScanKind, ScanOperands, Sizes

pytest.importorskip("triton", reason="the kernels need the package triton")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton brings its compiler for NVIDIA GPUs on Linux")

DEVICE = Device("a small Hopper GPU", 4, 232448, hopper=True)


@pytest.fixture
def compiler(monkeypatch):
    from deltazoo.backends.triton import backward, config
    from deltazoo.backends.triton import forward as launch

    found = Compiler()
    for module in launch, backward:
        monkeypatch.setattr(module, "launcher", found)
    monkeypatch.setattr(config, "device_of", lambda index: DEVICE)
    return found


PREPARE, REVERSE, GRADIENTS = "hopper_prepare_kernel", "hopper_reverse_kernel", "hopper_gradients_kernel"
SCANS = ["hopper_scan_kernel", "hopper_scan_kernel", "hopper_backward_sweep_kernel"]  # output, replay
AT_ONCE = [SCANS[0], "hopper_fused_backward_kernel"]


@pytest.mark.parametrize(
    ("delta", "early", "groups", "N", "packed", "dtype", "K", "V", "wanted"),
    [
        (True, False, 1, 2, False, torch.bfloat16, 128, 128, [PREPARE, *AT_ONCE]),
        (True, True, 1, 2, True, torch.float16, 104, 72, [PREPARE, *AT_ONCE]),
        (False, False, 1, 2, True, torch.bfloat16, 128, 128, AT_ONCE),
        (True, False, 1, 1, False, torch.bfloat16, 128, 128, [PREPARE, *SCANS]),
        (True, True, 2, 2, True, torch.float16, 104, 72, [PREPARE, *SCANS]),
        (True, True, 2, 1, False, torch.float16, 128, 128, [PREPARE, *SCANS]),
        (False, False, 2, 2, True, torch.bfloat16, 128, 128, SCANS),
        (True, False, 1, 2, False, torch.bfloat16, 128, 256, [PREPARE, *SCANS]),
        (False, False, 2, 2, True, torch.float16, 104, 384, SCANS),
        (True, True, 1, 2, True, torch.bfloat16, 64, 96, [PREPARE, *SCANS[:2], REVERSE, GRADIENTS]),
        (False, False, 2, 2, True, torch.float16, 72, 40, SCANS[2:]),
        (True, False, 2, 1, False, torch.float16, 128, 64, [PREPARE, *SCANS]),
        (True, True, 1, 2, True, torch.bfloat16, 128, 40, [PREPARE, *AT_ONCE]),
        (False, False, 2, 2, True, torch.float16, 64, 40, [REVERSE, GRADIENTS]),
        (True, False, 1, 2, False, torch.bfloat16, 64, 64, [PREPARE, *SCANS[:2], REVERSE, GRADIENTS]),
        (True, False, 1, 2, False, torch.bfloat16, 32, 64, [PREPARE, *SCANS[:2], REVERSE, GRADIENTS]),
        (True, False, 2, 1, False, torch.float16, 128, 24, [PREPARE, GRADIENTS]),
    ],
)  # fmt: skip
def test_they_compile_as_they_are_launched_and_find_room(
    compiler, delta, early, groups, N, packed, dtype, K, V, wanted
):
    problem = Problem("cuda", dtype, N, 200, 2, 2 * groups, K, V, delta, False, True, packed)
    assert compile_all(compiler, problem, heuristic(problem, DEVICE), early) == wanted


@pytest.mark.parametrize(
    ("delta", "K", "V"),
    [
        (True, 32, 64),
        (False, 64, 200),
        (True, 128, 136),
        (True, 192, 384),
        (False, 200, 200),
        (True, 256, 128),
        (False, 256, 128),
    ],
)
def test_where_nothing_walks_the_reverse_scan_by_itself_compiles(compiler, delta, K, V):
    problem = Problem("cuda", torch.bfloat16, 2, 200, 2, 4, K, V, delta, False, True, K == 200)
    wanted = ([PREPARE] if delta else []) + [*SCANS[:2], REVERSE, GRADIENTS]
    assert compile_all(compiler, problem, heuristic(problem, DEVICE), early=K in (64, 256)) == wanted


def compile_all(compiler, problem, config, early):
    """The names of what a forward and a backward launch, each compiled and looked at."""
    from deltazoo.backends.triton import backward
    from deltazoo.backends.triton import forward as launch

    _, dtype, N, T, H, HV, K, V, delta, _, _, packed, _ = problem
    B = 1 if packed else N
    strength = torch.empty(B, T, HV)
    x = ScanOperands(
        q=torch.empty(B, T, H, K, dtype=dtype), k=torch.empty(B, T, H, K, dtype=dtype),
        v=torch.empty(B, T, HV, V, dtype=dtype), log_decay=torch.empty(B, T, HV), b=strength, w=strength.clone(),
        state=torch.empty(N, HV, K, V),
        cu_seqlens=torch.tensor([0, 90, 200], dtype=torch.int32) if packed else None,
    )  # fmt: skip
    kind = ScanKind(delta, early, early, False, False, 0.1, config.model_dump_json())
    _, _, *saved = launch.forward(x, kind, True, config)
    *prepared, checkpoints = saved
    backward.backward(x, kind, Prepared(*prepared), checkpoints, torch.empty_like(x.v), None, config)
    for name, kernel in compiler.compiled:
        # one program a processor, or two
        assert kernel.metadata.shared <= (DEVICE.shared_memory if name in {*SCANS, *AT_ONCE, REVERSE} else 113 * 1024)
        assert "wgmma.mma_async" in kernel.asm["ptx"]
        text = disassemble(kernel.asm["cubin"])
        assert not miscarried(text)
        assert not forgotten(text)
    return [name for name, _ in compiler.compiled]


# of ptxas 12.8.93: the second product takes exp2's result before it is there, the first waits for its own
FORGOTTEN = """
        /*a1e0*/                   MUFU.EX2 R0, R8 ;                /* 0x0000000800007308 */
                                                                    /* 0x004ea20000000800 */
        /*a2b0*/                   MUFU.EX2 R5, R5 ;                /* 0x0000000500057308 */
                                                                    /* 0x000ee20000000800 */
        /*a300*/                   FMUL R213, R0, UR58 ;            /* 0x0000003a00d57c20 */
                                                                    /* 0x004fe20008400000 */
        /*a350*/                   FMUL R215, R5, UR58 ;            /* 0x0000003a05d77c20 */
                                                                    /* 0x000fe20008400000 */
"""
# of the same: the high half takes UR25, the low half, where it should take zero
MISCARRIED = """
        /*0010*/                   UIADD3 UR4, UP0, UR25, 0x20, URZ ;
        /*0020*/                   UIADD3.X UR5, UR25, 0xc0000010, URZ, UP0, !UPT ;
"""


def test_faults_of_the_assembler_are_seen_where_they_are():
    assert forgotten(FORGOTTEN) == ["FMUL R215, R5, UR58 does not wait for MUFU.EX2 R5, R5"]
    assert forgotten(FORGOTTEN.replace("0x000fe20008400000", "0x008fe20008400000")) == []
    assert len(miscarried(MISCARRIED)) == 1
    assert miscarried(MISCARRIED.replace("UIADD3.X UR5, UR25", "UIADD3.X UR5, URZ")) == []


def test_what_a_backward_is_given_has_the_shapes_that_were_prepared():
    for delta, keep in product((True, False), repeat=2):
        x = ScanOperands(*(torch.empty(1, 70, 2, 16) for _ in range(3)))
        s = Sizes.of(x, 64)
        found = Prepared.empty(x, ScanKind(delta, False, False, False, False, 1.0), s, keep)
        assert found.gates.shape == (2, 2, 3, 64)
        assert found.wy_tiles.shape == (2 if delta else 0, 2, 1, 64, 72)
