"""Time a gated_deltanet layer compiled as one graph: python layer.py

Width 2048, 16 heads of 128, B = 8, T = 4096, bf16. The layer runs in two processes: with empty caches, then with the
caches of the first on disk. Each prints the time of the first step, and medians of later forwards and steps. The first
also prints torch's compilation metrics, the second a kernel profile of one step. Needs a CUDA device.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable


def main() -> None:
    with tempfile.TemporaryDirectory() as caches:
        cache_folders = {"TRITON_CACHE_DIR": f"{caches}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor"}
        for name in ("cold", "caches on disk"):
            subprocess.run([sys.executable, __file__, name], env={**os.environ, **cache_folders}, check=True)


def time_steps(caches: str) -> None:
    import torch

    import deltazoo
    from deltazoo.mixers import GatedDeltaNet

    torch.manual_seed(0)
    mixer = GatedDeltaNet(heads=16, key_width=128, value_width=128).build(2048).to("cuda", torch.bfloat16)
    x = torch.randn(8, 4096, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn_like(x)
    torch.cuda.synchronize()
    layer = torch.compile(lambda x: mixer(x)[0], fullgraph=True)

    def step() -> None:
        layer(x).backward(weight)
        x.grad = None
        mixer.zero_grad()

    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    l2_flush = torch.empty(2**28, dtype=torch.int8, device="cuda")

    def median(call: Callable[[], object], queued: bool, n: int = 20) -> float:
        """Return the median of all but the first three calls, in ms: queued, or with a synchronisation after each.

        With synchronisation, host time that exceeds the flush of the L2 cache counts.
        """
        events = [(torch.cuda.Event(True), torch.cuda.Event(True)) for _ in range(n)]
        for begin, end in events:
            l2_flush.zero_()
            begin.record()
            call()
            end.record()
            if not queued:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        return statistics.median([begin.elapsed_time(end) for begin, end in events[3:]])

    with torch.no_grad():
        layer(x)
        forward = [median(lambda: layer(x), queued) for queued in (True, False)]
    both = [median(step, queued) for queued in (True, False)]
    print(
        f"{caches}: first step {first:.1f} s; forward {forward[0]:.2f} ms, forward + backward {both[0]:.2f} ms, "
        f"on an idle device {forward[1]:.2f} and {both[1]:.2f} ms; torch "
        f"{torch.__version__}, {torch.cuda.get_device_name()}, deltazoo {deltazoo.__version__}",
        flush=True,
    )
    if caches == "cold":
        from torch._dynamo.utils import compilation_time_metrics

        spent = sorted(((sum(times), part) for part, times in compilation_time_metrics.items()), reverse=True)
        print("of the first step, s:", ", ".join(f"{part} {seconds:.1f}" for seconds, part in spent[:14]), flush=True)
    else:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            torch.cuda.synchronize()
        print(profile.key_averages().table(sort_by="cuda_time_total", row_limit=24, max_name_column_width=60))


if __name__ == "__main__":
    time_steps(sys.argv[1]) if len(sys.argv) > 1 else main()
