"""Compile the kernels for sm_90 over what the heuristic gives, and name what spills much, is miscarried or forgets a wait.

As offline.py beside it, whose venv and stand-ins it takes: python docs/notes/triton-kernels/sweep.py [WORD OF A NAME]...
"""

import itertools
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

WIDTHS = ((16, 16), (32, 32), (32, 64), (64, 16), (64, 64), (64, 128), (72, 104), (104, 40), (128, 32), (128, 64), (128, 128), (128, 256), (192, 384), (200, 400), (256, 256))


def tiles(K):
    first = min(128, max(64, 1 << (K - 1).bit_length()))
    return first, 0 if K <= first else max(64, 1 << (K - first - 1).bit_length())


def wide(most, V):
    return min(most, max(16, 1 << (V - 1).bit_length()))


def jobs():
    """What config.heuristic gives on a Hopper GPU, for each kernel."""
    for (K, V), dtype, delta, own, terms, packed, decay, group in itertools.product(
        WIDTHS, ("bf16", "fp16", "fp32"), (True, False), (False, True), (1, 2), (False, True), ("head", "none"), (1, 4)
    ):
        if (own and not delta) or (terms == 2 and (not delta or dtype != "bf16")) or (own and terms == 1 and dtype != "fp32"):
            continue
        if (packed or group == 4 or decay == "none") and (K, V) not in ((16, 16), (128, 128)):
            continue
        K0, K1 = tiles(K)
        common = dict(K=K, V=V, K0=K0, K1=K1, dtype=dtype, delta=delta, own=own, TERMS=terms, packed=packed, decay=decay,
                      H=16, HV=16 * group, PREC="tf32x3" if dtype == "fp32" else "tf32")
        every = 8 if packed else 16
        if dtype == "fp32":
            scan, gradients = dict(BV=32, stages=1), dict(BV=32, BK=32, stages=1)
        elif terms == 2:
            scan, gradients = dict(BV=64, stages=1), dict(BV=32, BK=32, stages=1)
        elif K <= 128 and V > 64:
            scan, gradients = dict(BV=128, warps=8, stages=3), dict(BV=64, BK=64, stages=3 if decay == "head" and delta else 2)
        else:
            scan, gradients = dict(BV=64), dict(BV=64, BK=64)
        scan["BV"], gradients["BV"], gradients["BK"] = wide(scan["BV"], V), wide(gradients["BV"], V), min(gradients["BK"], K0)
        if delta:
            operand = "triton.language.float32" if terms == 2 or dtype == "fp32" else "triton.language.float16"
            inverse = "tf32x3" if operand.endswith("32") else "tf32"
            registers = 160 if group == 1 and operand.endswith("16") else None
            yield common | dict(module="prepare", kernel="prepare_kernel", stages=1, BLOCK=16, OPERAND=operand, PREC_INVERSE=inverse, maxnreg=registers)
        for kept in (every, 0):
            yield common | scan | dict(module="scan", kernel="scan_kernel", MODE="output", EVERY=kept)
        yield common | scan | dict(module="scan", kernel="scan_kernel", MODE="replay", EVERY=every, SPLIT=16)
        yield common | scan | dict(module="reverse", kernel="reverse_kernel", EVERY=every, UNIT=every)
        if not delta and dtype != "fp32":
            gradients["maxnreg"] = 168
        yield common | gradients | dict(module="gradients", kernel="gradients_kernel", UNIT=every)
        if dtype != "fp32" and terms == 1 and not own:
            for early in itertools.product((False, True), repeat=2) if delta else ((False, False), (False, True)):
                hopper = common | dict(UNIT=every, ERASE_EARLY=early[0], READ_EARLY=early[1], stages=1)
                if V <= 512:
                    yield hopper | dict(module="gradients_hopper", kernel="hopper_gradients_kernel", BV=64, BK=64)
                if 32 < V and not early[0]:
                    scans = hopper | dict(module="scan_hopper", kernel="hopper_scan_kernel", BV=128, TILED=False, maxnreg=168)
                    for more in (dict(EVERY=every), dict(EVERY=0), dict(EVERY=every, SPLIT=32)):
                        yield scans | more | dict(MODE="output", STATE=True)
                    if not early[1]:
                        yield scans | dict(MODE="replay", STATE=True, EVERY=every, SPLIT=16)
                if 32 < V and not early[0]:
                    for split, shared in itertools.product((0, 32), (True, False) if delta else (False,)):
                        walk = dict(module="reverse_hopper", kernel="hopper_reverse_kernel", SPLIT=split, SHARED=shared)
                        yield hopper | walk | dict(BV=128, TILED=False, maxnreg=168)
                if 64 < K <= 128 and 32 < V and (V <= 128 or V % 128 == 0):
                    for split, strengths in itertools.product((0, 32), (True, False)):
                        walk = dict(module="walk_hopper", kernel="hopper_walk_kernel", SPLIT=split, strengths=strengths, warps=8, maxnreg=168)
                        yield hopper | walk
                    for given, strengths in itertools.product((False, True), repeat=2) if group == 1 and V <= 128 else ():
                        both = dict(module="replay_walk", kernel="hopper_backward_kernel", GIVEN=given, EVERY=every)
                        yield hopper | both | dict(strengths=strengths, warps=8, maxnreg=168)
        if delta and terms == 1 and dtype != "fp16":  # an erase and a write of their own
            yield common | gradients | dict(module="gradients", kernel="gradients_kernel", UNIT=every, SHARED=False)
        if delta and decay == "head" and not packed and K in (64, 128):
            for mode in ("ends", "maps"):
                yield common | scan | dict(module="scan", kernel="scan_kernel", MODE=mode, SPLIT=32)
            yield common | scan | dict(module="reverse", kernel="reverse_kernel", UNIT=32, SPLIT=32, ENDS=True)


def one(job):
    import offline
    import triton

    job = dict(job)
    if "OPERAND" in job:
        job["OPERAND"] = getattr(triton.language, job["OPERAND"].rsplit(".", 1)[1])
    try:
        return offline.go(**job)
    except Exception as error:
        return {"error": str(error)[-300:]}


def name(job):
    return " ".join(f"{k}={v}" for k, v in job.items() if k not in ("module", "PREC", "PREC_INVERSE", "K0", "K1", "BLOCK"))


if __name__ == "__main__":
    todo = [job for job in jobs() if all(word in name(job) for word in sys.argv[1:])]
    print(len(todo), "kernels", flush=True)
    with ProcessPoolExecutor(1) as pool:
        for n, (job, info) in enumerate(zip(todo, pool.map(one, todo))):
            if "error" in info or info["miscarried"] or info["forgotten"] or "log" in info or int(info["spill"][0]) > 600:
                print(n, name(job), info, flush=True)
    print("done")
