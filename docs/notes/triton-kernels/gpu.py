"""Check and time on a GPU: python gpu.py forward decode ... ; prints tables, writes $OUT/results.json."""

import json
import os
import statistics
import sys
import time

import torch
import triton
import triton.language as tl

import reference

DEV = "cuda"
RESULTS = {}
SHAPES = {  # B, T, H, HV, lengths
    "8x4096p 16/16": (1, 32768, 16, 16, [4096] * 8),
    "4x8192p 16/64": (1, 32768, 16, 64, [8192] * 4),
    "1x8192 16/32": (1, 8192, 16, 32, None),
    "1x32768 2/8": (1, 32768, 2, 8, None),
    "8x4096 16/16": (8, 4096, 16, 16, None),
}
MUST = {"8x4096p 16/16": 0.32, "4x8192p 16/64": 1.2, "1x8192 16/32": 0.28, "1x32768 2/8": 0.30, "8x4096 16/16": 0.32}
FP = {"fp32": tl.float32, "fp16": tl.float16, "bf16": tl.bfloat16}


def graphed(fn):
    """fn captured in a CUDA graph."""
    for _ in range(2):
        fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    return graph.replay


def bench(fn, rep=60, flush=True, graph=False):
    """Median ms over events, L2 flushed between."""
    if graph:
        fn = graphed(fn)
    cache = torch.empty(256 * 2**20 // 4, dtype=torch.int32, device=DEV)
    for _ in range(3):
        fn()
    torch.cuda.synchronize()
    start = time.time()
    fn()
    torch.cuda.synchronize()
    n = int(max(5, min(40, rep / 1000 / max(1e-5, time.time() - start))))
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(n)]
    for a, b in events:
        if flush:
            cache.zero_()
        a.record()
        fn()
        b.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in events)


def safely(name, fn):
    try:
        return fn()
    except Exception as error:
        print(f"{name}: {type(error).__name__} {str(error)[:200]}", flush=True)


def ceilings():
    x = torch.randn(2**30, device=DEV)
    y = torch.empty_like(x)
    ms = bench(lambda: y.copy_(x))
    a = torch.randn(8192, 8192, device=DEV, dtype=torch.bfloat16)
    mm = bench(lambda: a @ a)
    props = torch.cuda.get_device_properties(0)
    print(f"{props.name} torch {torch.__version__} triton {triton.__version__} copy {2 * x.nbytes / ms / 1e9:.2f} TB/s "
          f"bf16 product {2 * 8192**3 / mm / 1e9:.0f} TFLOP/s L2 {props.L2_cache_size >> 20} MiB")


FORWARD_CONFIGS = {
    "base": dict(),
    "no reads": dict(READS=False),
    "prefetch": dict(PREFETCH=True),
    "prepare free": dict(prepare_maxnreg=None),
    "no reads free": dict(READS=False, prepare_maxnreg=None),
}
SPLITS = {f"split {n}": dict(SPLIT=n, CONTRACTS=True) for n in (32, 40)}
CASES = {
    "gdn": dict(shape=(2, 200, 2, 4, 128, 128), with_state=True),
    "pack": dict(shape=(1, 1000, 2, 2, 128, 128), lengths=[300, 0, 1, 64, 635], with_state=True),
    "hard": dict(shape=(1, 512, 2, 2, 128, 128), hard=True),
    "own": dict(shape=(1, 300, 2, 2, 128, 128), own=True),
    "fixed": dict(shape=(1, 300, 2, 2, 128, 128), decay="fixed"),
    "none": dict(shape=(1, 300, 2, 2, 128, 128), decay="none"),
    "additive": dict(shape=(1, 300, 2, 4, 128, 128), delta=False),
    "additive bare": dict(shape=(1, 300, 2, 2, 128, 128), delta=False, decay="none", strengths=False),
    "K64 V96": dict(shape=(1, 300, 2, 2, 64, 96)),
    "K192 V384": dict(shape=(1, 300, 2, 2, 192, 384)),
    "K200 V400": dict(shape=(1, 300, 1, 2, 200, 400)),
    "K256 V256": dict(shape=(1, 300, 2, 2, 256, 256)),
    "long weak": dict(shape=(1, 2500, 1, 2, 128, 128), decay="fixed", with_state=True),
    "long none": dict(shape=(1, 1500, 1, 2, 128, 128), decay="none"),
    "long": dict(shape=(1, 4000, 1, 1, 128, 128), with_state=True),
    "V129": dict(shape=(1, 300, 2, 2, 128, 129), delta=False),
}


def forward_errors(configs, cases, dtypes=(torch.bfloat16,), seeds=1):
    from forward import forward

    for cname, config in configs.items():
        worst, line = 0, []
        for name in cases:
            for dtype in dtypes:
                for seed in range(seeds):
                    case = dict(CASES[name])
                    delta = case.get("delta", True)
                    x = reference.inputs(*case.pop("shape"), **case, dtype=dtype, device=DEV, seed=seed)
                    o_ref, S_ref = reference.chunked(**x, delta=delta)
                    def go():
                        o, S, _ = forward(**x, delta=delta, config=config)
                        return reference.rms(o, o_ref), reference.rms(S, S_ref)
                    out = safely(f"{cname}/{name}/{dtype}", go)
                    if out:
                        bound = 5e-3 * (3 if case.get("hard") else 1)
                        if not max(out) < bound:
                            line.append(f"{name}/{str(dtype)[6:]}/{seed} o {out[0]:.1e} S {out[1]:.1e}")
                        worst = max(worst, *out) if out[0] == out[0] else float("nan")
        RESULTS[f"forward error {cname}"] = worst
        print(f"errors {cname:14s} worst {worst:.1e} beyond bound: {line or 'none'}", flush=True)


def forward_times(configs, shapes=SHAPES):
    from forward import forward, launch_config, prepare, scan

    for sname in shapes:
        B, T, H, HV, lengths = SHAPES[sname]
        x = reference.inputs(B, T, H, HV, 128, 128, dtype=torch.bfloat16, device=DEV, lengths=lengths)
        a = [x.get(n) for n in ("q", "k", "v", "log_decay", "b", "w", "e")]
        for cname, config in configs.items():
            def go():
                c = launch_config(torch.bfloat16, 128, 128, False, config)
                t = bench(lambda: forward(**x, config=config), graph=True)
                p = bench(lambda: prepare(*a, x.get("cu"), delta=True, scale=0.1, config=c), graph=True)
                g, i, r = prepare(*a, x.get("cu"), delta=True, scale=0.1, config=c)
                s = bench(lambda: scan(a[0], a[1], a[2], g, i, r, a[3], a[5], None, None, x.get("cu"), delta=True, scale=0.1, config=c, every=0), graph=True)
                return t, p, s
            out = safely(f"{sname} {cname}", go)
            if out:
                RESULTS[f"forward {sname} {cname}"] = out
                units = T * B / 64 * HV / 132 / 1000
                print(f"forward {sname:14s} {cname:14s} {out[0]:.3f} ms = prepare {out[1]:.3f} + scan {out[2]:.3f} (must {MUST[sname]}) us/SM {out[0] / units:.2f}", flush=True)


def forward():
    forward_errors({"base": {}}, CASES, (torch.bfloat16, torch.float16))
    forward_errors({"split 32": SPLITS["split 32"]}, ["long", "long weak", "long none"])
    forward_times({"base": {}, "no reads": dict(READS=False), "BV128 w8": dict(BV=128, scan_warps=8)}, ["8x4096p 16/16", "4x8192p 16/64"])
    forward_times({"base": {}}, ["8x4096 16/16"])
    forward_times(SPLITS, ["1x8192 16/32", "1x32768 2/8"])


BACKWARD_CONFIGS = {
    "base": {},
    "r168": dict(gradients_maxnreg=168),
    "r128": dict(gradients_maxnreg=128),
    "BV128 s1": dict(gradients_STAGES=1, gradients_BV=128),
    "BV32 s3": dict(gradients_STAGES=3, gradients_BV=32),
    "BK128 w8 BV32 s3": dict(gradients_BK=128, gradients_warps=8, gradients_STAGES=3, gradients_BV=32),
    "scans w8": dict(replay_BV=128, replay_warps=8, reverse_BV=128, reverse_warps=8),
}


def backward_errors(configs, cases, dtypes=(torch.bfloat16,), seeds=1, every=16):
    from backward import backward
    from forward import forward

    for cname, config in configs.items():
        worst, line = {}, []
        for name in cases:
            for dtype in dtypes:
                for seed in range(seeds):
                    case = dict(CASES[name])
                    delta = case.get("delta", True)
                    x = reference.inputs(*case.pop("shape"), **case, dtype=dtype, device=DEV, seed=seed)
                    if "b" in x:
                        x["b"] = x["b"].clone()
                    want = reference.gradients(x, delta=delta)

                    def go():
                        _, _, saved = forward(**x, delta=delta, every=every)
                        got = backward(want["do"], want["dfinal"], saved, **x, delta=delta, config=config, every=every)
                        return {n: reference.rms(got[n], g) for n, g in want["grads"].items()}

                    out = safely(f"{cname}/{name}/{dtype}", go) or {}
                    for n, r in out.items():
                        bound = (2e-2 if n in ("log_decay", "b", "w") else 1e-2) * (3 if case.get("hard") else 1)
                        worst[n] = max(worst.get(n, 0), r) if r == r else float("nan")
                        if not r < bound:
                            line.append(f"{name}/{str(dtype)[6:]}/{seed} {n} {r:.1e}")
        RESULTS[f"backward error {cname}"] = worst
        print(f"errors {cname:14s} " + " ".join(f"{n} {r:.0e}" for n, r in worst.items()) + f" beyond bound: {line or 'none'}", flush=True)


def backward_times(configs, shapes, every=16, delta=True, **kind):
    from backward import backward
    from forward import forward

    for sname in shapes:
        B, T, H, HV, lengths = SHAPES[sname]
        x = reference.inputs(B, T, H, HV, 128, 128, dtype=torch.bfloat16, device=DEV, lengths=lengths, delta=delta, **kind)
        do = torch.randn_like(x["v"])
        for cname, config in configs.items():
            ev = config.get("every", every)
            def go():
                _, _, saved = forward(**x, delta=delta, every=ev)
                run = lambda **k: bench(lambda: backward(do, None, saved, **x, delta=delta, config=config, every=ev, **k), graph=True)
                t = run()
                parts = [run(phases=(p,)) for p in ("replay", "reverse", "gradients")]
                fwd = bench(lambda: forward(**x, delta=delta, every=ev), graph=True)
                torch.cuda.synchronize(); torch.cuda.empty_cache(); torch.cuda.reset_peak_memory_stats(); base = torch.cuda.memory_allocated()
                del saved
                o, _, saved = forward(**x, delta=delta, every=ev)
                got = backward(do, None, saved, **x, delta=delta, config=config, every=ev)
                torch.cuda.synchronize()
                peak = (torch.cuda.max_memory_allocated() - base) / 2**20
                del o, saved, got
                return t, *parts, fwd, peak
            out = safely(f"{sname} {cname}", go)
            if out:
                RESULTS[f"backward {sname} {cname}"] = out
                t, *p, fwd, peak = out
                units = T * B / 64 * HV / 132 / 1000
                print(f"backward {sname:14s} {cname:16s} {t:.3f} ms = replay {p[0]:.3f} + reverse {p[1]:.3f} + gradients {p[2]:.3f}; us/SM {t / units:.1f}; forward {fwd:.3f}, both {t + fwd:.3f}; peak {peak:.0f} MiB", flush=True)


def backward():
    backward_errors({"base": {}}, CASES, (torch.bfloat16, torch.float16))
    backward_times({"base": {}}, ["8x4096 16/16", "8x4096p 16/16"])
    print("delta without decay:")
    backward_times({"base": {}}, ["8x4096 16/16"], decay="none")
    print("additive, head decay:")
    backward_times({"base": {}}, ["8x4096 16/16"], delta=False)


def last():
    """The defaults: errors of every case, forward times with and without parts, backward times."""
    forward_errors({"base": {}}, CASES, (torch.bfloat16, torch.float16))
    narrow = dict(BV=64, STAGES=2, scan_warps=4)
    forward_times({"base": {}}, ["8x4096p 16/16", "4x8192p 16/64", "8x4096 16/16"])
    forward_times({"parts of 32": dict(SPLIT=32, CONTRACTS=True), "parts of 32, BV 64": dict(SPLIT=32, CONTRACTS=True) | narrow, "parts of 32 with maps": dict(SPLIT=32)}, ["1x8192 16/32", "1x32768 2/8"])
    backward_times({"base": {}}, ["8x4096 16/16"])
    print("delta without decay:")
    backward_times({"base": {}}, ["8x4096 16/16"], decay="none")
    print("additive, head decay:")
    backward_times({"base": {}}, ["8x4096 16/16"], delta=False)


def stress(seconds=25):
    """Many seeds against float64, and the same call twice to the last bit: a hazard of the compiler or a race moves."""
    from backward import backward as run_backward
    from forward import forward as run_forward

    until, seed, worst = time.time() + seconds, 0, {}
    while time.time() < until:
        name = ("gdn", "pack", "own", "none", "additive", "K192 V384", "hard")[seed % 7]
        case = dict(CASES[name])
        delta = case.get("delta", True)
        x = reference.inputs(*case.pop("shape"), **case, dtype=torch.bfloat16, device=DEV, seed=1000 + seed)
        if "b" in x:
            x["b"] = x["b"].clone()
        want = reference.gradients(x, delta=delta)
        runs = []
        for _ in range(3):
            o, final, saved = run_forward(**x, delta=delta, every=4)
            got = run_backward(want["do"], want["dfinal"], saved, **x, delta=delta, every=4)
            runs.append([o, final, *(got[n] for n in want["grads"])])
        for again in runs[1:]:
            if not all(torch.equal(p, r) for p, r in zip(runs[0], again)):
                print(f"NOT DETERMINISTIC {name} {seed}", flush=True)
        refs = [want["o"], want["final"], *want["grads"].values()]
        for n, p, r in zip(["o", "final", *want["grads"]], runs[0], refs):
            kind = "hard" if name == "hard" else "plain"
            worst[kind, n] = max(worst.get((kind, n), 0), reference.rms(p, r))
        seed += 1
    for kind in ("plain", "hard"):
        print(f"stress, {seed} seeds, {kind}: " + " ".join(f"{n} {r:.1e}" for (k, n), r in worst.items() if k == kind), flush=True)
    x = reference.inputs(8, 4096, 16, 16, 128, 128, dtype=torch.bfloat16, device=DEV)
    do = torch.randn_like(x["v"])
    first = None
    for _ in range(20):
        o, final, saved = run_forward(**x, every=16)
        got = run_backward(do, None, saved, **x, every=16)
        now = [o, final, *(t for t in got.values() if t is not None)]
        if first is None:
            first = now
        elif not all(torch.equal(p, r) for p, r in zip(first, now)):
            print("NOT DETERMINISTIC at 8x4096 16/16", flush=True)
    print("twenty runs at 8x4096 16/16 compared bit by bit", flush=True)


def profile():
    """A few launches for ncu."""
    from backward import backward
    from forward import forward

    x = reference.inputs(8, 4096, 16, 16, 128, 128, dtype=torch.bfloat16, device=DEV)
    do = torch.randn_like(x["v"])
    _, _, saved = forward(**x, every=16)
    backward(do, None, saved, **x, every=16)
    torch.cuda.synchronize()


def decode():
    from decode import decode as step

    for B in (1, 64, 256):
        HV = 32
        x = reference.inputs(B, 1, HV, HV, 128, 128, dtype=torch.bfloat16, device=DEV)
        a = [x.get(n) for n in ("q", "k", "v", "log_decay", "b", "w", "e")]
        states = torch.randn(B, HV, 128, 128, device=DEV)
        before = states.clone()
        for BV in (8, 16, 32, 64, 128):
            for warps in (1, 2, 4, 8):
                def go():
                    states.copy_(before)
                    want, S = reference.recurrence(**x, state=before)
                    o = step(*a, states, config=dict(BV=BV, warps=warps))
                    err = max(reference.rms(o, want), reference.rms(states, S))
                    g = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(g):
                        for _ in range(10):
                            step(*a, states, config=dict(BV=BV, warps=warps))
                    return bench(g.replay, flush=False) * 100, err
                out = safely(f"decode {B} {BV} {warps}", go)
                if out:
                    RESULTS[f"decode {B} {BV} {warps}"] = out
        best = sorted((v[0], k, v[1]) for k, v in RESULTS.items() if k.startswith(f"decode {B} "))[:4]
        print(f"decode B={B}: " + ", ".join(f"{k.split()[2:]} {t:.1f} us ({e:.0e})" for t, k, e in best), flush=True)


if __name__ == "__main__":
    t = time.time()
    for what in sys.argv[1:]:
        globals()[what]()
        print(f"-- {what} done at {time.time() - t:.0f} s", flush=True)
    if os.environ.get("OUT"):
        json.dump(RESULTS, open(os.environ["OUT"] + "/results.json", "w"), indent=0)
