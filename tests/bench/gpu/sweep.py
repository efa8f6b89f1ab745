"""Compile the kernels for sm_90 over what the heuristic gives; name what spills much, is miscarried or forgets a wait.

As offline.py beside it, in its venv: python tests/bench/gpu/sweep.py [WORD OF A NAME]...
"""

import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

WIDTHS = (
    (16, 16), (32, 32), (32, 64), (64, 16), (64, 64), (64, 128), (72, 104), (104, 40), (128, 32), (128, 64), (128, 128),
    (128, 256), (192, 384), (200, 400), (256, 256),
)  # fmt: skip
AS_SCAN = {"BV": 128, "TILED": False, "maxnreg": 168}
OF_GRADIENTS = {"module": "gradients", "kernel": "gradients_kernel"}


def tiles(K):
    """As config.key_tiles."""
    first = min(128, max(64, 1 << (K - 1).bit_length()))
    return first, max(64, 1 << (K - first - 1).bit_length()) if first < K else 0


def wide(most, V):
    return min(most, max(16, 1 << (V - 1).bit_length()))


def jobs():
    """What config.heuristic gives on a Hopper GPU, for each kernel."""
    for (K, V), dtype, delta, own, terms, packed, decay, group in product(
        WIDTHS, ("bf16", "fp16", "fp32"), (True, False), (False, True), (1, 2), (False, True), ("head", "none"), (1, 4)
    ):
        single = dtype == "fp32"
        if (own and not delta) or (terms == 2 and (not delta or dtype != "bf16")):
            continue
        if own and terms == 1 and not single:
            continue
        if (packed or group == 4 or decay == "none") and (K, V) not in ((16, 16), (128, 128)):
            continue
        K0, K1 = tiles(K)
        common = {
            "K": K, "V": V, "K0": K0, "K1": K1, "dtype": dtype, "delta": delta, "own": own, "TERMS": terms,
            "packed": packed, "decay": decay, "H": 16, "HV": 16 * group, "PREC": "tf32x3" if single else "tf32",
        }  # fmt: skip
        yield from for_any(common, 8 if packed else 16)
        if not single and terms == 1 and not own:
            yield from for_hopper(common, 8 if packed else 16)


def for_any(common, every):
    K, V, dtype, delta, terms = (common[name] for name in ("K", "V", "dtype", "delta", "TERMS"))
    single = dtype == "fp32"
    if single:
        scan, gradients = {"BV": 32, "stages": 1}, {"BV": 32, "BK": 32, "stages": 1}
    elif terms == 2:
        scan, gradients = {"BV": 64, "stages": 1}, {"BV": 32, "BK": 32, "stages": 1}
    elif K <= 128 and V > 64:
        stages = 3 if common["decay"] == "head" and delta else 2
        scan, gradients = {"BV": 128, "warps": 8, "stages": 3}, {"BV": 64, "BK": 64, "stages": stages}
    else:
        scan, gradients = {"BV": 64}, {"BV": 64, "BK": 64}
    scan = common | {"module": "scan", "kernel": "scan_kernel"} | scan | {"BV": wide(scan["BV"], V)}
    reverse = scan | {"module": "reverse", "kernel": "reverse_kernel"}
    gradients = gradients | {"BV": wide(gradients["BV"], V), "BK": min(gradients["BK"], common["K0"]), "UNIT": every}
    if not delta and not single:
        gradients["maxnreg"] = 168
    if delta:
        exact = terms == 2 or single
        yield common | {
            "module": "prepare", "kernel": "prepare_kernel", "stages": 1, "BLOCK": 16,
            "OPERAND": "float32" if exact else "float16", "PREC_INVERSE": "tf32x3" if exact else "tf32",
            "maxnreg": 160 if common["HV"] == common["H"] and not exact else None,
        }  # fmt: skip
    for kept in (every, 0):
        yield scan | {"MODE": "output", "EVERY": kept}
    yield scan | {"MODE": "replay", "EVERY": every, "SPLIT": 16}
    yield reverse | {"EVERY": every, "UNIT": every}
    yield common | OF_GRADIENTS | gradients
    if delta and terms == 1 and dtype != "fp16":  # an erase and a write of their own
        yield common | OF_GRADIENTS | gradients | {"SHARED": False}
    if delta and common["decay"] == "head" and not common["packed"] and K in (64, 128):
        for mode in ("ends", "maps"):
            yield scan | {"MODE": mode, "SPLIT": 32}
        yield reverse | {"UNIT": 32, "SPLIT": 32, "ENDS": True}


def for_hopper(common, every):
    K, V, delta = common["K"], common["V"], common["delta"]
    for erase_early, read_early in product((False, True) if delta else (False,), (False, True)):
        hopper = common | {"UNIT": every, "ERASE_EARLY": erase_early, "READ_EARLY": read_early, "stages": 1}
        yield hopper | {"module": "hopper.gradients", "kernel": "hopper_gradients_kernel", "BV": 64, "BK": 64}
        if V > 32 and not erase_early:
            scan = hopper | AS_SCAN | {"module": "hopper.scan", "kernel": "hopper_scan_kernel", "HAS_STATE": True}
            for more in ({"EVERY": every}, {"EVERY": 0}, {"EVERY": every, "SPLIT": 32}):
                yield scan | {"MODE": "output"} | more
            if not read_early:
                yield scan | {"MODE": "replay", "EVERY": every, "SPLIT": 16}
            reverse = hopper | AS_SCAN | {"module": "hopper.reverse", "kernel": "hopper_reverse_kernel"}
            for split, shared in product((0, 32), (True, False) if delta else (False,)):
                yield reverse | {"SPLIT": split, "SHARED": shared}
        if 64 < K <= 128 and V > 32 and (V <= 128 or V % 128 == 0):
            hopper |= {"warps": 8, "maxnreg": 168}
            walk = hopper | {"module": "hopper.sweep", "kernel": "hopper_backward_sweep_kernel"}
            for split, strengths in product((0, 32), (True, False)):
                yield walk | {"SPLIT": split, "strengths": strengths}
            both = hopper | {
                "module": "hopper.fused_backward",
                "kernel": "hopper_fused_backward_kernel",
                "EVERY": every,
            }
            if common["HV"] == common["H"] and V <= 128:
                for given, strengths in product((False, True), repeat=2):
                    yield both | {"HAS_STATE": given, "strengths": strengths}


def one(job):
    import offline
    import triton

    if "OPERAND" in job:
        job = job | {"OPERAND": getattr(triton.language, job["OPERAND"])}
    try:
        return offline.go(**job)
    except Exception as error:
        return {"error": str(error)[-300:]}


def name(job):
    hidden = ("module", "PREC", "PREC_INVERSE", "K0", "K1", "BLOCK")
    return " ".join(f"{key}={value}" for key, value in job.items() if key not in hidden)


def wants_a_look(info):
    return "error" in info or info["miscarried"] or info["forgotten"] or "log" in info or int(info["spill"][0]) > 600


if __name__ == "__main__":
    todo = [job for job in jobs() if all(word in name(job) for word in sys.argv[1:])]
    print(len(todo), "kernels", flush=True)
    with ProcessPoolExecutor(1) as pool:
        for n, (job, info) in enumerate(zip(todo, pool.map(one, todo), strict=True)):
            if wants_a_look(info):
                print(n, name(job), info, flush=True)
    print("done")
