"""Check the decode step of every mixer against its bound: python decode_rows.py [--compile | --kernels] [MIXER...]

Layers of width 2048 with default fields, bf16, 64 rows after 512 tokens, compiled and captured. The bound of a row is
1.5 times the floor plus 10 us. The floor reads weights and caches, and reads and writes the other states, at the speed
of a copy on the same device. The exit code is 1 if a row misses its bound or fails.

Several processes capture a step each; then the steps are timed, one alone on the device. --compile only fills the
caches of Triton and Inductor, and prints the seconds of each first call. --kernels also prints the kernels of each
step. Needs a CUDA device.
"""

import contextlib
import gc
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from step_profile import kernel_lines

from deltazoo.backends.torch_ext.cuda_graph import Call

PROCESSES, STEPS, COPIED = 10, 6, 2**30  # the caches have room for 64 steps


def main() -> int:
    from deltazoo.backends.update import registry

    names = [name for name in sys.argv[1:] if not name.startswith("--")] or registry.names(registry.MIXERS)
    only_compile, context = "--compile" in sys.argv, multiprocessing.get_context("spawn")
    count, missed = min(PROCESSES, len(names)), 0
    speed = 1.0 if only_compile else copy_speed()
    if not only_compile:
        print(f"{torch.cuda.get_device_name()}, copy {speed / 1e6:.3f} TB/s", flush=True)
        print("layer  us  floor  bound  step / floor", flush=True)
    pipes = []
    for first in range(count):
        pipe, far_end = context.Pipe()
        context.Process(target=work, args=(names[first::count], far_end, only_compile), daemon=True).start()
        far_end.close()  # so that the pipe ends if the process dies
        pipes.append(pipe)
    for _ in range(-(-len(names) // count)):
        ready = [message for pipe in pipes if (message := receive(pipe)) is not None]
        for _, name, text, captured in ready:
            print(name, text, flush=True)
            missed += not captured
        if only_compile:
            continue
        for pipe, name, _, captured in ready:
            pipe.send("time")
            result = receive(pipe) if captured else None
            if result is not None:
                _, us, nbytes, kernels = result
                floor = nbytes / speed
                bound = 1.5 * floor + 10
                missed += us > bound
                verdict = "passes" if us <= bound else "MISSES"
                row = f"{name}  {us:.1f}  {floor:.1f}  {bound:.1f}  {us / floor:.2f}  {verdict}"
                print(row, *kernels, sep="\n", flush=True)
        for pipe, *_ in ready:
            with contextlib.suppress(OSError):  # the process has died
                pipe.send("go on")
    return int(missed > 0)


def receive(pipe: Connection) -> tuple[Any, ...] | None:
    """Return the next message after the pipe; None if the process has died or has no more mixers."""
    with contextlib.suppress(EOFError):
        message = pipe.recv()
        return None if message is None else (pipe, *message)
    return None


def work(names: list[str], pipe: Connection, only_compile: bool) -> None:
    """Capture the step of one mixer after the other, and time each when all processes have captured theirs."""
    from deltazoo.blocks.inspect.layer_calls import LayerInput, OurLayer
    from deltazoo.mixers.core.config import parse

    size = LayerInput(64, 512, 2048, torch.device("cuda"), torch.bfloat16, 0)
    for name in names:
        start = time.perf_counter()
        layer = step = None
        try:
            layer = OurLayer(parse({"mixer": name}), size)
            step = layer.begin("decode")
            pipe.send((name, f"first call {time.perf_counter() - start:.1f} s", True))
        except Exception as failure:  # the other rows are still measured
            pipe.send((name, f"FAILS: {type(failure).__name__}: {str(failure)[:200]}", False))
        if not only_compile:
            pipe.recv()
            if layer is not None and step is not None:
                kernels = kernel_lines(step)[0] if "--kernels" in sys.argv else []
                pipe.send((microseconds(step), layer.decoded_bytes(), kernels))
            pipe.recv()
        del layer, step
        gc.collect()
        torch.compiler.reset()
        torch.cuda.empty_cache()
    pipe.send(None)


def microseconds(step: Call) -> float:
    """Return the median time of a step: of `STEPS` in a row, so that the host does not count."""
    for _ in range(3):
        step()
    samples = []
    for _ in range(7):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(STEPS):
            step()
        stop.record()
        torch.cuda.synchronize()
        samples.append(1e3 * start.elapsed_time(stop) / STEPS)
    return sorted(samples)[3]


def copy_speed() -> float:
    """Return the bytes that a copy reads and writes per microsecond."""
    source = torch.zeros(COPIED, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPIED / microseconds(lambda: target.copy_(source))


if __name__ == "__main__":
    sys.exit(main())
