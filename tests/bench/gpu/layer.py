"""Time a gated_deltanet layer compiled as one graph: python layer.py

Width 2048, 16 heads of 128, B = 8, T = 4096, bf16. The first step is timed in a process without caches, with
torch's compilation metrics, and in one with caches on disk; then medians of further steps. Needs a CUDA device.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time


def main() -> None:
    with tempfile.TemporaryDirectory() as caches:
        cache_folders = {"TRITON_CACHE_DIR": f"{caches}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor"}
        for name in ("cold", "caches on disk"):
            subprocess.run([sys.executable, __file__, name], env={**os.environ, **cache_folders}, check=True)


def steps(name: str) -> None:
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
    flush = torch.empty(2**28, dtype=torch.int8, device="cuda")

    def median(call: object, queued: bool, n: int = 20) -> float:
        """The median of queued calls as in training, or of calls on an idle device, which includes host time."""
        events = [(torch.cuda.Event(True), torch.cuda.Event(True)) for _ in range(n)]
        for begin, end in events:
            flush.zero_()
            begin.record()
            call()  # type: ignore[operator]
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
        f"{name}: first step {first:.1f} s; forward {forward[0]:.2f} ms, forward + backward {both[0]:.2f} ms, "
        f"on an idle device {forward[1]:.2f} and {both[1]:.2f} ms; torch "
        f"{torch.__version__}, {torch.cuda.get_device_name()}, deltazoo {deltazoo.__version__}",
        flush=True,
    )
    if name == "cold":
        from torch._dynamo.utils import compilation_time_metrics

        spent = sorted(((sum(times), part) for part, times in compilation_time_metrics.items()), reverse=True)
        print("of the first step, s:", ", ".join(f"{part} {seconds:.1f}" for seconds, part in spent[:14]), flush=True)
    else:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            torch.cuda.synchronize()
        print(profile.key_averages().table(sort_by="cuda_time_total", row_limit=24, max_name_column_width=60))


if __name__ == "__main__":
    steps(sys.argv[1]) if len(sys.argv) > 1 else main()
