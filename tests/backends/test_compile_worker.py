"""The worker process that compiles kernels into Triton's cache, and the compilation in threads where it cannot."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from triton_cases import GATED, INTERPRETED

from deltazoo.backends.conformance import Case, draw
from deltazoo.backends.measure.shapes import Shape
from deltazoo.backends.torch_ext.devices import DeviceSpec, simulated_device
from deltazoo.backends.triton.chunk import op
from deltazoo.backends.triton.chunk.kernels.portable.zero_tail import zero_rows, zero_tail_kernel
from deltazoo.backends.triton.loss.kernels import cross_entropy_kernel
from deltazoo.backends.triton.norm import op as norm
from deltazoo.backends.triton.norm.kernels import rms_norm_kernel
from deltazoo.backends.triton.operands import ScanKind
from deltazoo.backends.triton.runtime import compile_worker, precompile

triton = pytest.importorskip("triton", reason="the kernels need the package triton")
pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing"),
    pytest.mark.skipif(sys.platform != "linux", reason="Triton ships its NVIDIA compiler for Linux only"),
]
DEVICE = 77  # an index that no GPU has, so that Triton's own tables of compiled kernels stay as they are
HOPPER = DeviceSpec("a Hopper GPU", "cuda", (9, 0), 132, 232448, triton.__version__)
PATH = os.pathsep.join(sys.path)
SCAN = ("sm90_prepare_kernel", "sm90_scan_kernel", "zero_tail_kernel")
ORPHAN = """
import os
from deltazoo.backends.triton.runtime.compile_worker import CompileWorker
worker = CompileWorker()
try:
    worker.compile("no source", None, {})
except RuntimeError:
    print(worker.process.pid)
os._exit(0)
"""


@triton.jit
def foreign_kernel(x):
    """A kernel of a module that the worker does not import."""
    triton.language.store(x, 1.0)


@pytest.fixture
def hopper(monkeypatch, tmp_path):
    """Replace the cache by an empty one and the driver by its target; list the functions that Triton translates."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    target = GPUTarget("cuda", 90, 32)
    active = SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: DEVICE, get_current_stream=lambda device: 0
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", active)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    translated = []

    def watch(translate):
        def watched(src, *arguments):
            translated.append(src.name)
            return translate(src, *arguments)

        return watched

    for source in (ASTSource, GluonASTSource):
        monkeypatch.setattr(source, "make_ir", watch(source.make_ir))
    return SimpleNamespace(target=target, translated=translated)


@pytest.fixture
def worker():
    worker = compile_worker.CompileWorker()
    yield worker
    if worker.process is not None:
        kill(worker)


def kill(worker):
    with suppress(ProcessLookupError):
        os.killpg(worker.process.pid, signal.SIGKILL)
    worker.process.wait(10)


def compile_by(worker, kernel, warm_up):
    """Compile a kernel as a thread of `precompile` does, and forget it."""
    try:
        with compile_worker.compiled_by(worker, kernel, DEVICE):
            return warm_up()
    finally:
        del kernel.device_caches[DEVICE]


def zero_rows_by(worker, block=32):
    """Compile the smallest kernel. Blocks have a power of two of numbers."""
    return compile_by(worker, zero_rows, lambda: zero_rows.warmup(torch.float32, 3, 8, 4, block, grid=(1,)))


def launches(monkeypatch, body, *arguments):
    """Return the kernels that a body would launch on a Hopper GPU, and the functions that compile them, by name."""
    found = {}
    monkeypatch.setattr(
        precompile, "compile_kernel", lambda key, kernel, warm_up: found.update({kernel.__name__: (kernel, warm_up)})
    )
    monkeypatch.setattr(precompile.tracing, "device", torch.device("cuda", DEVICE))
    with simulated_device(HOPPER):
        body(*arguments)
    return found


def test_kernels_that_the_worker_compiled_are_in_the_cache_of_the_parent(monkeypatch, hopper, worker):
    """A Gluon kernel, kernels whose tensors are fields of a NamedTuple, and operands that are None."""
    shape = Shape("pack", B=1, T=300, H=2, HV=2, K=64, V=64, lengths=(100, 200))
    x = draw(Case(GATED, shape, torch.bfloat16))
    kind = tuple(ScanKind(True, "decayed", "after", False, True, 1.0))
    arguments = (x.q, x.k, x.v, x.log_decay, x.beta, None, None, None, x.state, x.cu_seqlens, *kind, False)
    found = launches(monkeypatch, op._scan_impl, *arguments)
    assert tuple(found) == SCAN
    tokens, weight = torch.empty(20, 64, dtype=torch.bfloat16), torch.empty(64)
    found |= launches(monkeypatch, norm._forward, tokens, None, None, weight, 1e-5, "none")
    for name in ("sm90_prepare_kernel", "zero_tail_kernel", "rms_norm_kernel"):
        compiled = compile_by(worker, *found[name])
        assert compiled.asm["cubin"]
        assert compiled.metadata.target == hopper.target
    assert not hopper.translated


def test_the_threads_of_precompile_use_the_worker(monkeypatch, hopper):
    """From the launch of a traced operator to its launch on the device."""
    launchers = []
    monkeypatch.setattr(triton.runtime.driver.active, "launcher_cls", lambda *x: launchers.append(x), raising=False)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(precompile, "_pool", precompile._Pool())
    monkeypatch.setattr(precompile.tracing, "device", torch.device("cuda", DEVICE))
    x, weight = torch.empty(20, 64, dtype=torch.bfloat16), torch.empty(64)
    with simulated_device(HOPPER):
        norm._forward(x, None, None, weight, 1e-5, "none")
    try:
        for key in precompile._pool.kernels:
            precompile.await_kernel(key)
            del rms_norm_kernel.device_caches[DEVICE]
    finally:
        kill(precompile._pool.worker)
    assert [src.name for src, _ in launchers] == ["rms_norm_kernel"]
    assert not hopper.translated


def test_a_kernel_in_the_cache_starts_no_worker(hopper, worker):
    compile_by(None, zero_rows, lambda: zero_rows.warmup(torch.float32, 3, 8, 4, 32, grid=(1,)))
    assert hopper.translated == ["zero_rows"]
    assert zero_rows_by(worker).asm["cubin"]
    assert worker.process is None
    assert hopper.translated == ["zero_rows"]


def test_the_worker_imports_neither_torch_nor_cuda(worker, hopper):
    zero_rows_by(worker)
    maps = Path(f"/proc/{worker.process.pid}/maps").read_text()
    assert "libtriton" in maps
    assert "libtorch" not in maps
    assert "libcuda" not in maps


@pytest.mark.parametrize("why", ["another package", "other source", "hook", "disabled"])
def test_the_thread_compiles_what_the_worker_may_not(why, monkeypatch, hopper, worker):
    kernel, warm_up = zero_rows, lambda: zero_rows.warmup(torch.float32, 3, 8, 4, 32, grid=(1,))
    if why == "another package":
        kernel, warm_up = foreign_kernel, lambda: foreign_kernel.warmup(torch.float32, grid=(1,))
    elif why == "other source":
        monkeypatch.setattr(zero_rows, "_src", zero_rows.src + "    tl.device_assert(True)\n")
        monkeypatch.setattr(zero_rows, "hash", None)
    elif why == "hook":
        hook = lambda *_: ("", "")  # noqa: E731, nothing for Triton's key
        monkeypatch.setattr(triton.knobs.runtime, "add_stages_inspection_hook", hook)
    else:
        monkeypatch.setattr(compile_worker, "ENABLED", False)
    assert compile_by(worker, kernel, warm_up).asm["cubin"]
    assert hopper.translated == [kernel.__name__]


def test_kernels_compile_in_the_threads_of_triton(hopper, worker):
    """Triton passes its `compile` another argument there."""
    with ThreadPoolExecutor(1) as pool, compile_worker.compiled_by(worker, zero_rows, DEVICE):
        try:
            with triton.AsyncCompileMode(pool):
                kernel = zero_rows.warmup(torch.float32, 3, 8, 4, 32, grid=(1,))
            assert kernel.result().asm["cubin"]
        finally:
            del zero_rows.device_caches[DEVICE]


def test_the_digest_of_a_function_covers_its_constants_and_what_it_calls(monkeypatch):
    digests = {compile_worker._digest(zero_tail_kernel), compile_worker._digest(cross_entropy_kernel)}
    monkeypatch.setattr(zero_rows, "_src", zero_rows.src + "    pass\n")
    digests.add(compile_worker._digest(zero_tail_kernel))
    monkeypatch.setattr("deltazoo.backends.triton.loss.kernels._LOWEST", triton.language.constexpr(-1e4))
    digests.add(compile_worker._digest(cross_entropy_kernel))
    assert len(digests) == 4


def test_a_worker_that_does_not_answer_is_ended(monkeypatch, hopper, worker):
    zero_rows_by(worker, block=64)
    os.killpg(worker.process.pid, signal.SIGSTOP)
    monkeypatch.setattr(compile_worker, "_TIMEOUT", 0.2)
    assert zero_rows_by(worker).asm["cubin"]
    assert worker.process.wait(10) == -signal.SIGKILL
    assert zero_rows_by(worker, block=128).asm["cubin"]
    assert hopper.translated == ["zero_rows", "zero_rows"]


def test_a_kernel_that_does_not_compile_raises_in_the_thread_and_the_worker_goes_on(caplog, hopper, worker):
    caplog.set_level("DEBUG", compile_worker.__name__)
    with pytest.raises(triton.CompilationError):
        zero_rows_by(worker, block=24)
    assert "the compile worker reports: exit code 1" in caplog.text
    assert hopper.translated == ["zero_rows"]
    assert zero_rows_by(worker, block=32).asm["cubin"]
    assert hopper.translated == ["zero_rows"]


@pytest.mark.parametrize("when", ["idle", "busy"])
def test_the_thread_compiles_when_the_worker_was_killed(when, hopper, worker):
    zero_rows_by(worker, block=64)
    if when == "idle":
        kill(worker)
    else:
        os.killpg(worker.process.pid, signal.SIGSTOP)
        threading.Timer(0.5, kill, (worker,)).start()
    assert zero_rows_by(worker).asm["cubin"]
    assert zero_rows_by(worker, block=128).asm["cubin"]
    assert hopper.translated == ["zero_rows", "zero_rows"]


def test_the_worker_ends_with_its_parent():
    command = [sys.executable, "-c", ORPHAN]
    pid = int(subprocess.run(command, stdout=subprocess.PIPE, check=True, env=os.environ | {"PYTHONPATH": PATH}).stdout)
    end = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]:
        assert time.monotonic() < end
        time.sleep(0.01)
