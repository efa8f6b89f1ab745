"""Check the decode step of every mixer against its bound: python decode_rows.py [--compile] [MIXER...]

Layers of width 2048 with default fields, bf16, 64 rows after 512 tokens, compiled and captured. The bound of a row is
1.5 times the floor plus 10 us. The floor reads weights and caches, and reads and writes the other states, at the speed
of a copy on the same device. The exit code is 1 if a row misses its bound or fails.

Several processes build and capture the steps; then each step is timed alone on the device. --compile only fills the
caches of Triton and Inductor, and prints the seconds of each first call. Needs a CUDA device.
"""

import contextlib
import multiprocessing
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from deltazoo.backends.torch_ext.cuda_graph import Call

PROCESSES, STEPS, COPIED = 12, 20, 2**30


def main() -> int:
    from deltazoo.backends.update import registry

    names = [name for name in sys.argv[1:] if name != "--compile"] or registry.names(registry.MIXERS)
    context = multiprocessing.get_context("spawn")
    queue: multiprocessing.Queue[str | None] = context.Queue()
    count = min(PROCESSES, len(names))
    for name in [*names, *[None] * count]:
        queue.put(name)
    pipes = []
    for _ in range(count):
        pipe, far_end = context.Pipe()
        context.Process(target=work, args=(queue, far_end), daemon=True).start()
        far_end.close()  # so that the pipe ends if the process dies
        pipes.append(pipe)
    ready = [name for pipe in pipes for name in captured(pipe)]
    if "--compile" in sys.argv:
        return int(len(ready) < len(names))
    speed, missed = copy_speed(), len(names) - len(ready)
    print(
        f"{torch.cuda.get_device_name()}, copy {speed / 1e6:.3f} TB/s\nlayer  us  floor  bound  step / floor",
        flush=True,
    )
    for pipe in pipes:
        pipe.send("time")
        for name, us, nbytes in messages(pipe):
            floor = nbytes / speed
            bound = 1.5 * floor + 10
            missed += us > bound
            verdict = "passes" if us <= bound else "MISSES"
            print(f"{name}  {us:.1f}  {floor:.1f}  {bound:.1f}  {us / floor:.2f}  {verdict}", flush=True)
    return int(missed > 0)


def captured(pipe: Connection) -> list[str]:
    """Print the messages of a process until it has captured its steps, and return the names of these."""
    ready = []
    for name, message, is_ready in messages(pipe):
        print(name, message, flush=True)
        ready += [name] * is_ready
    return ready


def messages(pipe: Connection) -> Iterator[tuple[Any, ...]]:
    """Receive until None, or until the process has died."""
    with contextlib.suppress(EOFError):
        yield from iter(pipe.recv, None)


def work(queue: "multiprocessing.Queue[str | None]", pipe: Connection) -> None:
    """Capture the steps of the mixers of the queue, then time them when asked."""
    from deltazoo.blocks.inspect.layer_calls import LayerInput, OurLayer
    from deltazoo.mixers.core.config import parse

    size = LayerInput(64, 512, 2048, torch.device("cuda"), torch.bfloat16, 0)
    steps = {}
    for name in iter(queue.get, None):
        start = time.perf_counter()
        try:
            layer = OurLayer(parse({"mixer": name}), size)
            steps[name] = layer.begin("decode"), layer.decoded_bytes(), layer
            pipe.send((name, f"first call {time.perf_counter() - start:.1f} s", True))
        except Exception as failure:  # the other rows are still measured
            pipe.send((name, f"FAILS: {type(failure).__name__}: {str(failure)[:200]}", False))
        torch.compiler.reset()
        torch.cuda.empty_cache()
    pipe.send(None)
    if pipe.recv() == "time":
        for name, (step, nbytes, _) in steps.items():
            pipe.send((name, microseconds(step), nbytes))
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
