"""Time a decode step, fused and in separate parts: python decode.py [LAYER]... [TILE,WARPS]...

Layers of width 2048, bf16, float32 state: the update and the fused step alone, then the layer, eager, captured,
compiled, and compiled and captured. Medians per step over 16 steps in a CUDA graph, or 16 calls. The results of the
fused and the separate step are compared. LAYER is a prefix of a name below; TILE,WARPS adds a launch config of the
fused step. Needs a CUDA device.
"""

import statistics
import sys
import time

import torch

import deltazoo
from deltazoo import bind
from deltazoo.backends.triton import Launch, LaunchConfig, TritonBackend
from deltazoo.mixers import GatedDeltaNet, Mamba2
from deltazoo.mixers.core.state import snapshot

STEPS = 16
LAYERS = {
    "16 x 128": GatedDeltaNet(heads=16, key_width=128, value_width=128),
    "16/32 x 128": GatedDeltaNet(heads=16, value_heads=32, key_width=128, value_width=128),
    "6 x 256/512": GatedDeltaNet(heads=6, key_width=256, value_width=512),
    "mamba2": Mamba2(),
}


class Unfused(TritonBackend):
    """The same update kernels without the fused step."""

    def fused_decode_unsupported(self, step, dtype):
        return ["disabled for this measurement."]


def median(call, times=30):
    """The median of the calls in us per step."""
    torch.cuda.synchronize()
    samples = []
    for _ in range(times):
        start, stop = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(stop))
    return 1000 * statistics.median(samples) / STEPS


def captured(step):
    """A call that replays a CUDA graph of 16 steps."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(STEPS):
            step()
    return graph.replay


def repeated(step):
    """A call that runs 16 eager steps."""
    for _ in range(3):
        step()
    return lambda: [step() for _ in range(STEPS)]


def operands(mixer, x, state):
    """The fused step of a mixer, its inputs, and the operands of the update from the mixer's parts."""
    fusion = mixer.decode_fusion()
    inputs = fusion.inputs(x, state["project"].clone())
    q, k, v = mixer.project(x, state["project"].clone(), deltazoo.mixers.Context())[0][:3]
    update_inputs = deltazoo.UpdateInputs(q.contiguous(), k.contiguous(), v.contiguous())
    for part in mixer.operands.values():
        update_inputs = part(x, update_inputs, None, deltazoo.mixers.Context())[0]
    return fusion.step, inputs, update_inputs


@torch.no_grad()
def time_kernels(mixer, B, variants):
    """Time the update and the fused step alone."""
    x = torch.randn(B, 1, 2048, device="cuda", dtype=torch.bfloat16)
    step, inputs, update_inputs = operands(mixer, x, mixer.init_state(B))
    bound, states = mixer.update.bound, mixer.init_state(B)[mixer.update_key]
    line = [f"update {median(captured(lambda: bound.step_(update_inputs, states))):.1f}"]
    line.append(f"fused {median(captured(lambda: bound.fused_decode_step_(step, inputs, states))):.1f}")
    for tile, warps in variants:
        launch = Launch(tile=tile, warps=warps, stages=1)
        other = bind(step.spec, TritonBackend(LaunchConfig(fused_step=launch)))
        began = time.perf_counter()
        try:
            result = f"{median(captured(lambda other=other: other.fused_decode_step_(step, inputs, states))):.1f}"
        except Exception as error:
            result = f"{type(error).__name__}: {str(error)[:60]}"
        took = time.perf_counter() - began
        line.append(f"{tile},{warps}: {result}" + (f" ({took:.0f} s)" if took > 5 else ""))
    return "; ".join(line)


@torch.no_grad()
def time_steps(mixer, backend, x, state):
    """Time the step of a layer. Returns the times, its outputs and the state of the update."""
    mixer.rebind(backend)
    torch._dynamo.reset()
    compiled = torch.compile(mixer, fullgraph=True, dynamic=False)
    y = torch.cat([mixer(x[:, t : t + 1], state)[0] for t in range(x.shape[1])], 1)
    after, now = state[mixer.update_key].clone(), x[:, :1].contiguous()
    steps = [lambda: mixer(now, state), lambda: compiled(now, state)]
    return [median(mode(step)) for step in steps for mode in (repeated, captured)], (y, after)


@torch.no_grad()
def time_layer(mixer, B):
    """Time the whole layer, in separate parts and fused."""
    x = torch.randn(B, 3, 2048, device="cuda", dtype=torch.bfloat16)
    state = mixer(x, mixer.init_state(B))[1]
    (separate, want), (fused, got) = (
        time_steps(mixer, backend, x, snapshot(state)) for backend in (Unfused(), TritonBackend())
    )
    kinds = ("eager", "captured", "compiled", "compiled and captured")
    times = [f"{kind} {s:.1f} -> {f:.1f}" for kind, s, f in zip(kinds, separate, fused, strict=True)]
    differences = [f"{float((a - b).float().norm() / b.float().norm()):.1e}" for a, b in zip(got, want, strict=True)]
    return f"{'; '.join(times)}; relative difference {' and '.join(differences)}"


def main():
    variants = [tuple(map(int, word.split(","))) for word in sys.argv[1:] if "," in word]
    layers = tuple(word for word in sys.argv[1:] if "," not in word) or ("",)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, deltazoo {deltazoo.__version__}; us a step")
    for name, config in LAYERS.items():
        if not name.startswith(layers):
            continue
        torch.manual_seed(0)
        mixer = config.build(2048, backend="triton").to("cuda", torch.bfloat16)
        for B in (1, 8, 64, 256):
            print(f"{name}, B = {B}: {time_kernels(mixer, B, variants)}", flush=True)
            if B in (1, 64):
                print(f"    layer: {time_layer(mixer, B)}", flush=True)


if __name__ == "__main__":
    main()
