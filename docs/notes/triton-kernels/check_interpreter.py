"""Check the kernels on the CPU: TRITON_INTERPRET=1 python check_interpreter.py [forward|backward|...]"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"
import torch

torch.set_num_threads(1)
import triton.language as tl

import reference

CASES = {
    "gdn": dict(shape=(1, 40, 1, 2, 16, 16)),
    "two key tiles": dict(shape=(1, 20, 1, 1, 160, 16), with_state=True),
    "pack": dict(shape=(1, 41, 1, 2, 16, 24), lengths=[17, 0, 1, 23], with_state=True),
    "own": dict(shape=(2, 33, 1, 1, 32, 16), own=True),
    "fixed": dict(shape=(1, 33, 1, 2, 16, 16), decay="fixed"),
    "none": dict(shape=(1, 33, 1, 1, 16, 16), decay="none", strengths=False),
    "additive": dict(shape=(1, 33, 1, 2, 16, 16), delta=False),
    "additive bare": dict(shape=(1, 33, 1, 1, 16, 16), delta=False, decay="none", strengths=False),
    "hard": dict(shape=(1, 64, 1, 1, 16, 16), hard=True),
}


def check_forward():
    from forward import forward

    for name, case in CASES.items():
        case = dict(case)
        delta = case.get("delta", True)
        x = reference.inputs(*case.pop("shape"), **case)
        want, S = reference.recurrence(**x, delta=delta)
        chunk, Sc = reference.chunked(**x, delta=delta, C=16)
        for block, reads in ((16, False), (4, True)):
          o, final, _ = forward(**x, delta=delta, config=dict(C=16, OPERAND=tl.float32, BV=16, PREC="ieee", PREC_INV="ieee", BLOCK=block, READS=reads), every=2)
          print(f"{name:16s} o {reference.rms(o, want):.1e} state {reference.rms(final, S):.1e} (chunked {reference.rms(chunk, want):.1e})", flush=True)


def check_split():
    from forward import forward

    for name, case in CASES.items():
        case = dict(case)
        delta = case.get("delta", True)
        B, T, *shape = case.pop("shape")
        if "lengths" in case:
            T, case["lengths"] = 170, [90, 0, 1, 79]
        else:
            T = 100
        x = reference.inputs(B, T, *shape, **case)
        if name == "own":
            x["log_decay"] = x["log_decay"] * 50
        want, S = reference.recurrence(**x, delta=delta)
        for split in (1, 2, 3):
            config = dict(C=16, OPERAND=tl.float32, BV=16, PREC="ieee", PREC_INV="ieee", SPLIT=split, PREC_JOIN="ieee", CONTRACTS=split != 2)
            o, final, _ = forward(**x, delta=delta, config=config, every=split)
            print(f"{name:16s} split {split} o {reference.rms(o, want):.1e} state {reference.rms(final, S):.1e}", flush=True)


def check_half():
    from forward import forward

    for name in ("gdn", "pack"):
        case = dict(CASES[name])
        x = reference.inputs(*case.pop("shape"), **case, dtype=torch.float16)
        want, S = reference.recurrence(**x)
        o, final, _ = forward(**x, config=dict(C=16, BV=16, STAGES=1))
        print(f"{name} in float16: o {reference.rms(o, want):.1e} state {reference.rms(final, S):.1e}", flush=True)


def check_backward():
    from backward import backward
    from forward import forward

    for name, case in CASES.items():
        case = dict(case)
        delta = case.get("delta", True)
        x = reference.inputs(*case.pop("shape"), **case)
        if "b" in x:
            x["b"] = x["b"].clone()  # a gradient of its own
        want = reference.gradients(x, delta=delta, C=16)
        for every, scratch in ((1, 0), (2, 0), (2, 2**40), (64, 0)):
            config = dict(C=16, OPERAND=tl.float32, PREC="ieee", PREC_INV="ieee", BV=16, replay_BV=16, reverse_BV=16, gradients_BV=16, gradients_BK=16, scratch=scratch)
            _, _, saved = forward(**x, delta=delta, config=config, every=every)
            got = backward(want["do"], want["dfinal"], saved, **x, delta=delta, config=config, every=every)
            line = {n: reference.rms(got[n], g) for n, g in want["grads"].items()}
            print(f"{name:16s} every {every:2d} {scratch > 0:d} " + " ".join(f"{n} {r:.0e}" for n, r in line.items()), flush=True)


def check_decode():
    from decode import decode

    for name, case in CASES.items():
        case = dict(case)
        delta = case.get("delta", True)
        B, T, H, HV, K, V = case.pop("shape")
        case.pop("lengths", None)
        case["with_state"] = True
        x = reference.inputs(3, 1, H, HV, K, V, **case)
        slots = torch.tensor([4, 0, 2])
        states = torch.randn(5, HV, K, V)
        states[slots] = x["state"]
        want, S = reference.recurrence(**x, delta=delta)
        o = decode(*(x.get(n) for n in ("q", "k", "v", "log_decay", "b", "w", "e")), states, slots, delta=delta)
        print(f"{name:16s} o {reference.rms(o, want):.1e} state {reference.rms(states[slots], S):.1e}", flush=True)


if __name__ == "__main__":
    for what in sys.argv[1:] or ["forward"]:
        globals()[f"check_{what}"]()
