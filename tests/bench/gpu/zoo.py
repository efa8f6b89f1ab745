"""Time every mixer's layer beside FLA's: python zoo.py [--compile] [--seconds=LIMIT] [MIXER...]

Width 2048, 4 x 4096 tokens, bf16, forward, and forward and backward; ms and peak MiB. Each layer has a process, several
per GPU, which compiles at the same time as the others; then the layers are timed, one alone on each GPU. With LIMIT a
layer that has not compiled after so many seconds is left out. The first call is that of training, with compilation,
while the other processes compile. Uses all visible GPUs.

FLA's kernels choose among many configurations when they first run, which takes minutes. --compile only compiles these
configurations into Triton's cache, each process a part of them, and prints the seconds. What FLA has chosen stays in
that cache, too: a layer that was left out can run again.
"""

import contextlib
import itertools
import multiprocessing
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from deltazoo.backends.io.progress import silent
from deltazoo.backends.measure.timing import peak_bytes, time_alone, time_once

PER_GPU = 10  # layers that compile on one GPU at a time: each takes up to 10 GB of its memory
PARTS = 4  # of the configurations of a layer of FLA


def main() -> None:
    from deltazoo.backends.update import registry

    limit = next((float(word.partition("=")[2]) for word in sys.argv[1:] if word.startswith("--seconds=")), 600.0)
    names = [word for word in sys.argv[1:] if not word.startswith("--")] or registry.names(registry.MIXERS)
    devices = gpus()
    if "--compile" in sys.argv:
        compile_configurations(names, devices)
        return
    print(torch.cuda.get_device_name(), "layer, library, forward ms, both ms, peak MiB, first call s", flush=True)
    for first in range(0, len(names), PER_GPU * len(devices)):
        group = names[first : first + PER_GPU * len(devices)]
        started = {name: start(name, devices[i % len(devices)]) for i, name in enumerate(group)}
        pipes = {name: pipe for name, (pipe, _) in started.items()}
        ready = wait_for(pipes, time.monotonic() + limit)
        for name, (_, process) in started.items():
            if name not in ready:
                process.kill()  # it would use the GPU while the others are timed
        with ThreadPoolExecutor(len(devices)) as pool:  # one layer at a time on each GPU
            for i in range(len(devices)):
                pool.submit(time_layers, [name for name in group[i :: len(devices)] if name in ready], pipes)


def start(name: str, gpu: str) -> tuple[Connection, Any]:
    """Start the process of a layer, and return the pipe to it and the process."""
    pipe, far_end = multiprocessing.get_context("spawn").Pipe()
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    process = multiprocessing.get_context("spawn").Process(target=work, args=(name, far_end), daemon=True)
    process.start()
    far_end.close()  # so that the pipe ends if the process dies
    return pipe, process


def wait_for(pipes: dict[str, Connection], until: float) -> set[str]:
    """Return the layers that have compiled, and print the others."""
    ready: set[str] = set()
    missing = dict(pipes)
    while missing and (left := until - time.monotonic()) > 0:
        for pipe in wait(list(missing.values()), left):
            name = next(name for name in missing if missing[name] is pipe)
            del missing[name]
            with contextlib.suppress(EOFError):
                pipe.recv()
                ready.add(name)
    for name in sorted(set(pipes) - ready):
        print(name, "has not compiled", flush=True)
    return ready


def time_layers(names: list[str], pipes: dict[str, Connection]) -> None:
    """Let the processes time their layers one after the other."""
    for name in names:
        with contextlib.suppress(EOFError, OSError):  # the process has died
            pipes[name].send("time")
            pipes[name].recv()


def work(name: str, pipe: Connection) -> None:
    """Compile the layers of one mixer, and time them when the pipe says so."""
    from deltazoo.blocks.inspect.layer_calls import FlaLayer, LayerInput, OurLayer
    from deltazoo.mixers.core.config import parse

    size = LayerInput(4, 4096, 2048, torch.device("cuda"), torch.bfloat16, 0)
    rows: dict[str, dict[str, Any]] = {}
    for library, layer_class in {"deltazoo": OurLayer, "fla": FlaLayer}.items():
        try:
            layer = layer_class(parse({"mixer": name}), size)
            calls: dict[str, Any] = {}
            first = time_once(lambda: calls.update(both=layer.begin("backward")), size.device)  # noqa: B023
            rows[library] = {"forward": layer.begin("forward"), **calls, "first": first}
        except Exception as failure:  # the other layer is still measured
            print(name, library, f"{type(failure).__name__}: {str(failure)[:160]}", flush=True)
    pipe.send("ready")
    pipe.recv()
    for library, row in rows.items():
        times = [time_alone(name, row[key], size.device, 20, 0.7, silent)["median_ms"] for key in ("forward", "both")]
        peak = (peak_bytes(row["both"], size.device) or 0) / 2**20
        print(f"{name}  {library}  {times[0]:.3f}  {times[1]:.3f}  {peak:.0f}  {row['first']:.1f}", flush=True)
    pipe.send("timed")


def compile_configurations(names: list[str], devices: list[str]) -> None:
    """Compile the configurations of FLA's layers, by as many processes as there are CPU cores or memory for."""
    with ThreadPoolExecutor(min(os.cpu_count() or 1, PER_GPU * len(devices))) as pool:
        for i, (name, part) in enumerate(itertools.product(names, range(PARTS))):
            pool.submit(compile_part, name, part, devices[i % len(devices)])


def compile_part(name: str, part: int, gpu: str) -> None:
    """Compile a part of the configurations of FLA's layer in another process."""
    start = time.monotonic()
    command = [sys.executable, __file__, "--part", name, str(part)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    failure = done.stderr.strip().rpartition("\n")[2][:160] if done.returncode else ""
    print(name, part, f"{time.monotonic() - start:.0f} s", failure, flush=True)


def run_part(name: str, part: int) -> None:
    """Run FLA's layer with every PARTS-th configuration of its kernels, without timing them."""
    import triton.testing
    from triton.runtime.autotuner import Autotuner

    from deltazoo.blocks.inspect.layer_calls import FlaLayer, LayerInput
    from deltazoo.mixers.core.config import parse

    original = Autotuner.__init__

    def with_part(self: Any, fn: Any, arg_names: Any, configs: Any, *arguments: Any, **options: Any) -> None:
        own = (configs[part::PARTS] or configs[:1]) if configs else configs
        original(self, fn, arg_names, own, *arguments, **options)

    def run_once(fn: Any, **_: Any) -> list[float]:
        fn()
        return [1.0, 1.0, 1.0]

    Autotuner.__init__, triton.testing.do_bench = with_part, run_once
    layer = FlaLayer(parse({"mixer": name}), LayerInput(4, 4096, 2048, torch.device("cuda"), torch.bfloat16, 0))
    layer.begin("backward")


def gpus() -> list[str]:
    """Return the visible GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]


if __name__ == "__main__":
    run_part(sys.argv[2], int(sys.argv[3])) if "--part" in sys.argv else main()
