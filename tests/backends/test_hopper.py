"""The Gluon kernels compile offline for sm_90 as launched, fit in shared memory, and show no known bug of ptxas."""

import re
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from assembly import disassemble, missing_waits, overwritten_operands, wrong_descriptor_addresses
from compiling import Compiler, launch_update

from deltazoo.backends.torch_ext.devices import DeviceSpec
from deltazoo.backends.triton import backend
from deltazoo.backends.triton.operands import Prepared, ScanKind, ScanOperands, problem_of
from deltazoo.backends.triton.problem import Problem

pytest.importorskip("triton", reason="the kernels need the package triton")
pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(sys.platform != "linux", reason="Triton ships its NVIDIA compiler for Linux only"),
]

DEVICE = DeviceSpec("a small Hopper GPU", "cuda", (9, 0), 4, 232448)


PREPARE, SCAN = "sm90_prepare_kernel", "sm90_scan_kernel"
REVERSE, GRADIENTS = "sm90_reverse_kernel", "sm90_gradients_kernel"
SWEEP, FUSED = "sm90_backward_sweep_kernel", "sm90_fused_backward_kernel"
BY_SWEEP = [SCAN, SCAN, SWEEP]  # scan for the output, scan to recompute states, sweep
BY_REVERSE = [SCAN, SCAN, REVERSE, GRADIENTS]
ONE_PROGRAM_PER_SM = {SCAN, REVERSE, SWEEP, FUSED}  # the other kernels run at least two
bf16, fp16 = torch.bfloat16, torch.float16


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


# Not marked slow: each kernel with and without an erase, packed and dense, with and without groups and reads before the
# update, of
# both dtypes, and the largest tiles. The slow cases repeat these with other widths and combinations.
@pytest.mark.parametrize(
    ("delta", "before", "groups", "N", "packed", "dtype", "K", "V", "kernels"),
    [
        (True, False, 1, 2, False, bf16, 128, 128, [PREPARE, SCAN, FUSED]),
        (True, True, 1, 2, True, fp16, 104, 72, [PREPARE, SCAN, FUSED]),
        (False, False, 1, 2, True, bf16, 128, 128, [SCAN, FUSED]),
        slow(True, True, 1, 2, True, bf16, 128, 40, [PREPARE, SCAN, FUSED]),
        (True, True, 2, 2, True, fp16, 104, 72, [PREPARE, *BY_SWEEP]),
        slow(True, False, 1, 1, False, bf16, 128, 128, [PREPARE, *BY_SWEEP]),
        slow(True, True, 2, 1, False, fp16, 128, 128, [PREPARE, *BY_SWEEP]),
        slow(True, False, 2, 1, False, fp16, 128, 64, [PREPARE, *BY_SWEEP]),
        slow(True, False, 1, 2, False, bf16, 128, 256, [PREPARE, *BY_SWEEP]),
        slow(False, False, 2, 2, True, bf16, 128, 128, BY_SWEEP),
        (False, False, 2, 2, True, fp16, 104, 384, BY_SWEEP),
        (False, False, 2, 2, True, fp16, 72, 40, [SWEEP]),
        (True, True, 1, 2, True, bf16, 64, 96, [PREPARE, *BY_REVERSE]),
        slow(True, False, 1, 2, False, bf16, 64, 64, [PREPARE, *BY_REVERSE]),
        slow(True, False, 1, 2, False, bf16, 32, 64, [PREPARE, *BY_REVERSE]),
        slow(True, False, 2, 2, False, bf16, 32, 64, [PREPARE, *BY_REVERSE]),
        slow(False, True, 2, 2, False, bf16, 64, 200, BY_REVERSE),
        (True, False, 2, 2, False, bf16, 128, 136, [PREPARE, *BY_REVERSE]),
        slow(True, False, 2, 2, False, bf16, 192, 384, [PREPARE, *BY_REVERSE]),
        (False, False, 2, 2, True, bf16, 200, 200, BY_REVERSE),
        (True, True, 2, 2, False, bf16, 256, 128, [PREPARE, *BY_REVERSE]),
        slow(False, True, 2, 2, False, bf16, 256, 128, BY_REVERSE),
        (False, False, 2, 2, True, fp16, 64, 40, [REVERSE, GRADIENTS]),
        (True, False, 2, 1, False, fp16, 128, 24, [PREPARE, GRADIENTS]),
    ],
)  # fmt: skip
def test_the_kernels_of_the_heuristic_compile_and_fit(delta, before, groups, N, packed, dtype, K, V, kernels):
    compiler = Compiler()
    problem = Problem(dtype, N, 200, 2, 2 * groups, K, V, delta, erase_key=False, decay="head", packed=packed)
    launch_update(problem, DEVICE, compiler, before)
    for name, kernel in compiler.compiled:
        assert_compiled_and_fits(name, kernel)
    assert [name for name, _ in compiler.compiled] == kernels


@pytest.mark.parametrize(
    ("before", "groups", "packed", "dtype", "K", "V", "decay", "terms"),
    [
        (False, 1, False, bf16, 128, 128, "head", 2),
        (True, 2, True, bf16, 72, 136, "none", 2),
        (True, 1, True, fp16, 104, 72, "head", 1),
        slow(False, 2, False, bf16, 128, 256, "head", 2),
        slow(True, 1, False, bf16, 64, 64, "head", 2),
        slow(False, 1, False, bf16, 128, 128, "head", 1),
    ],
)
def test_kernels_of_an_erase_key_compile_and_fit(before, groups, packed, dtype, K, V, decay, terms):
    compiler = Compiler()
    problem = Problem(dtype, 2, 200, 2, 2 * groups, K, V, True, True, decay, packed, terms == 2, terms == 2)
    launch_update(problem, DEVICE, compiler, before, strengths="apart" if before else "tied")
    for name, kernel in compiler.compiled:
        assert_compiled_and_fits(name, kernel)
    assert [name for name, _ in compiler.compiled] == [PREPARE, *BY_REVERSE]


@pytest.mark.parametrize(("dtype", "groups"), [(fp16, 1), (torch.float32, 2)])
def test_portable_kernels_of_a_wide_erase_key_fit_in_shared_memory(dtype, groups):
    compiler = Compiler(all=True)
    problem = Problem(dtype, 1, 130, 1, groups, 200, 400, True, erase_key=True, decay="head", packed=False)
    launch_update(problem, DEVICE, compiler, False)
    assert {name for name, _ in compiler.compiled} >= {"scan_kernel", "reverse_kernel"}
    for name, kernel in compiler.compiled:
        assert kernel.metadata.shared <= DEVICE.shared_memory, name


def assert_compiled_and_fits(name, kernel):
    assert kernel.metadata.shared <= (DEVICE.shared_memory if name in ONE_PROGRAM_PER_SM else 113 * 1024)
    assert "wgmma.mma_async" in kernel.asm["ptx"]
    sass = disassemble(kernel.asm["cubin"])
    assert not wrong_descriptor_addresses(sass)
    assert not missing_waits(sass)
    assert not overwritten_operands(sass)


@pytest.mark.parametrize(
    ("delta", "erase_key", "before", "groups", "packed", "dtype", "K"),
    [
        (True, False, False, 1, False, bf16, 128),
        (False, False, False, 1, True, bf16, 128),
        (True, True, True, 1, False, bf16, 64),
        slow(True, True, False, 2, True, fp16, 72),
        slow(True, False, True, 1, False, fp16, 256),
        slow(False, False, True, 2, False, bf16, 32),
    ],
)
def test_prepare_of_a_decay_per_channel_compiles(delta, erase_key, before, groups, packed, dtype, K):
    compiler = Compiler()
    problem = Problem(dtype, 2, 200, 2, 2 * groups, K, 64, delta, erase_key, "channel", packed)
    launch_update(problem, DEVICE, compiler, before)
    kernel = dict(compiler.compiled)["sm90_channel_prepare_kernel"]
    # three programs per SM; two with the tile of an erase key of more than 64 channels; one with more than 128
    limit = DEVICE.shared_memory if K > 128 else 78 * 1024 if erase_key and K > 64 else 74 * 1024
    assert kernel.metadata.shared <= limit
    sass = disassemble(kernel.asm["cubin"])
    assert not wrong_descriptor_addresses(sass)
    assert not missing_waits(sass)
    assert not overwritten_operands(sass)


@pytest.mark.parametrize(
    ("delta", "before", "groups", "packed", "dtype", "K", "V", "erase_key"),
    [
        (True, False, 1, False, bf16, 128, 128, False),
        (True, True, 1, True, fp16, 104, 72, True),
        (False, False, 2, False, bf16, 128, 128, False),
        slow(True, False, 1, False, bf16, 64, 64, True),
        slow(False, True, 2, True, fp16, 104, 136, False),
    ],
)
def test_the_scans_with_a_decay_per_channel_compile_and_fit(delta, before, groups, packed, dtype, K, V, erase_key):
    compiler = Compiler()
    problem = Problem(dtype, 2, 200, 2, 2 * groups, K, V, delta, erase_key, decay="channel", packed=packed)
    launch_update(problem, DEVICE, compiler, before)
    scans = [(name, kernel) for name, kernel in compiler.compiled if name in (SCAN, REVERSE)]
    for name, kernel in scans:
        assert_compiled_and_fits(name, kernel)
    assert [name for name, _ in scans] == [SCAN, SCAN, REVERSE]


@pytest.mark.parametrize(
    ("delta", "erase_key", "before", "groups", "packed", "dtype", "K", "V"),
    [
        (True, False, False, 1, False, bf16, 128, 128),  # KDA
        slow(False, False, False, 1, False, bf16, 128, 128),  # GLA
        slow(True, True, False, 1, False, bf16, 64, 64),
        slow(True, True, False, 1, False, bf16, 128, 128),
        (True, False, True, 2, True, fp16, 104, 72),
        slow(False, False, True, 2, True, fp16, 200, 200),
    ],
)
def test_gradients_of_a_decay_per_channel_compile_and_fit(delta, erase_key, before, groups, packed, dtype, K, V):
    compiler = Compiler()
    problem = Problem(dtype, 2, 200, 2, 2 * groups, K, V, delta, erase_key, decay="channel", packed=packed)
    launch_update(problem, DEVICE, compiler, before)
    kind = "channel" if delta else "additive"
    (kernel,) = [kernel for name, kernel in compiler.compiled if name == f"sm90_{kind}_gradients_kernel"]
    assert kernel.metadata.shared <= 113 * 1024  # two programs per SM
    sass = disassemble(kernel.asm["cubin"])
    assert not wrong_descriptor_addresses(sass)
    assert not missing_waits(sass)
    assert not overwritten_operands(sass)


@pytest.mark.parametrize("strengths", ["tied", "channels"])
def test_gradients_of_kda_and_gated_deltanet2_compile(strengths):
    """States are in the rows of gradients; of KDA du is recovered from dv."""
    compiler = Compiler()
    problem = Problem(bf16, 2, 256, 2, 2, 128, 128, True, strengths == "channels", "channel", False)
    launch_update(problem, DEVICE, compiler, strengths=strengths)
    names = [name for name, _ in compiler.compiled]
    assert {"sm90_channel_prepare_kernel", "sm90_channel_gradients_kernel"} < set(names)
    for name, kernel in compiler.compiled:
        assert_compiled_and_fits(name, kernel)


@pytest.mark.parametrize(
    ("K", "before", "packed"),
    [slow(64, False, False), (64, True, True), slow(128, False, True), slow(128, True, False)],
)
def test_kernels_of_dplr_compile_and_fit(K, before, packed):
    compiler = Compiler()
    problem = Problem(bf16, 2, 200, 2, 2, K, K, True, True, "channel", packed, dplr=True)
    launch_update(problem, DEVICE, compiler, before)
    assert [name for name, _ in compiler.compiled] == ["sm90_dplr_prepare_kernel", "sm90_dplr_gradients_kernel"]
    for name, kernel in compiler.compiled:
        # two programs per SM, except for the gradients of 128 values
        both = K == 64 or name == "sm90_dplr_prepare_kernel"
        assert kernel.metadata.shared <= (113 * 1024 if both else DEVICE.shared_memory)
        sass = disassemble(kernel.asm["cubin"])
        assert not wrong_descriptor_addresses(sass)
        assert not missing_waits(sass)
        assert not overwritten_operands(sass)


# SASS of ptxas 12.8.93: the second FMUL reads the result of exp2 without a wait; the first waits for its own operand
MISSING_WAIT = """
        /*a1e0*/                   MUFU.EX2 R0, R8 ;                /* 0x0000000800007308 */
                                                                    /* 0x004ea20000000800 */
        /*a2b0*/                   MUFU.EX2 R5, R5 ;                /* 0x0000000500057308 */
                                                                    /* 0x000ee20000000800 */
        /*a300*/                   FMUL R213, R0, UR58 ;            /* 0x0000003a00d57c20 */
                                                                    /* 0x004fe20008400000 */
        /*a350*/                   FMUL R215, R5, UR58 ;            /* 0x0000003a05d77c20 */
                                                                    /* 0x000fe20008400000 */
"""
# SASS of ptxas 12.8.93: the upper half of the sum adds UR25, the lower half, where it should add zero
WRONG_ADDRESS = """
        /*0010*/                   UIADD3 UR4, UP0, UR25, 0x20, URZ ;
        /*0020*/                   UIADD3.X UR5, UR25, 0xc0000010, URZ, UP0, !UPT ;
"""


def test_functions_that_triton_renamed_are_called_by_one_name():
    """gluon_versions.py chooses the name that the installed version has."""
    folder = Path(backend.__file__).parent
    renamed = re.compile(r"thread_barrier|gl\.barrier|async_copy_global_to_shared|\.async_load|[._]reinterpret\b")
    calls = {path.name for path in folder.rglob("*.py") if renamed.search(path.read_text())}
    assert calls == {"gluon_versions.py"}


PRODUCT = "HGMMA.64x64x16.F32.BF16 R56, R172, gdesc[UR16], R56, gsb0"
OVERWRITTEN = "".join(
    f"        /*0{n}00*/      {instruction} ;   /* 0x0000000000000000 */\n            /* 0x000fe20000000000 */\n"
    for n, instruction in enumerate((PRODUCT, "WARPGROUP.DEPBAR.LE gsb0, 0x1", "MOV R173, R2"))
)


def test_the_known_bugs_of_ptxas_are_detected():
    assert missing_waits(MISSING_WAIT) == ["FMUL R215, R5, UR58 does not wait for MUFU.EX2 R5, R5"]
    assert missing_waits(MISSING_WAIT.replace("0x000fe20008400000", "0x008fe20008400000")) == []
    assert len(wrong_descriptor_addresses(WRONG_ADDRESS)) == 1
    assert wrong_descriptor_addresses(WRONG_ADDRESS.replace("UIADD3.X UR5, UR25", "UIADD3.X UR5, URZ")) == []
    assert overwritten_operands(OVERWRITTEN) == [f"MOV R173, R2 overwrites {PRODUCT}"]
    assert overwritten_operands(OVERWRITTEN.replace("gsb0, 0x1", "gsb0, 0x0")) == []
    assert overwritten_operands(OVERWRITTEN.replace("R173", "R176")) == []


def test_prepared_tensors_have_the_same_shapes_with_and_without_a_backward():
    for delta, keep in product((True, False), repeat=2):
        x = ScanOperands(*(torch.empty(1, 70, 2, 16) for _ in range(3)))
        problem = problem_of(x, ScanKind(delta, "decayed", "after", False, False, 1.0))
        prepared = Prepared.empty(x.q, problem, 64, keep)
        assert prepared.gates.shape == (2, 2, 3, 64)
        assert prepared.wy_tiles.shape == (2 if delta else 0, 2, 1, 64, 72)
