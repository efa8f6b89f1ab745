"""Check the triton backend on a GPU against float64, in fifteen processes: python check.py [WORD]...

Cases are specs by widths (K/V from 5/9 to 256/256), dtypes and regimes. WORDs select the cases whose names contain all
of them. LIMIT=SECONDS stops the run. Prints the failures, and the largest errors relative to their limits. The exit
code is 1 if a case fails or has not run.
"""

import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch

from deltazoo import UpdateSpec
from deltazoo.backends.conformance import Case
from deltazoo.backends.conformance.compare import compare
from deltazoo.backends.measure.shapes import Shape
from deltazoo.backends.triton import TritonBackend

SPECS = {
    "gdn": UpdateSpec(decay="head", beta="head"),
    "delta": UpdateSpec(beta="head"),
    "retnet": UpdateSpec(decay="fixed", transition="additive"),
    "mamba2": UpdateSpec(decay="head", transition="additive", beta="head"),
    "linear": UpdateSpec(transition="additive"),
    "comba": UpdateSpec(decay="head", beta="separate", erase_from="previous"),
    "own early": UpdateSpec(decay="head", beta="head", erase_key="own", erase_from="previous"),
    "own": UpdateSpec(decay="head", beta="head", erase_key="own"),
    "own neg": UpdateSpec(beta="head", erase_key="own", negative_eigenvalues="both"),
    "beta per channel": UpdateSpec(decay="head", beta="channel"),
    "dplr": UpdateSpec(decay="head", transition="dplr"),
    "before": UpdateSpec(decay="head", beta="head", read="before"),
    "both early": UpdateSpec(decay="head", beta="head", read="before", erase_from="previous"),
    "neg": UpdateSpec(decay="head", beta="head", negative_eigenvalues="both"),
    "negerase": UpdateSpec(beta="head", negative_eigenvalues="erase"),
    "house": UpdateSpec(decay="head", beta="head", householders=2, negative_eigenvalues="both"),
    "efla": UpdateSpec(decay="head", beta="head", reparam="efla"),
    "longhorn": UpdateSpec(decay="fixed", beta="head", reparam="longhorn"),
    "kda": UpdateSpec(decay="channel", beta="head"),
    "kda neg": UpdateSpec(decay="channel", beta="head", negative_eigenvalues="both"),
    "kda early": UpdateSpec(decay="channel", beta="head", read="before", erase_from="previous"),
    "kda efla": UpdateSpec(decay="channel", beta="head", reparam="efla"),
    "gla": UpdateSpec(decay="channel", transition="additive"),
    "rwkv6": UpdateSpec(decay="channel", transition="additive", read="before"),
    "gdn2": UpdateSpec(decay="channel", beta="channel"),
    "rwkv7": UpdateSpec(decay="channel", transition="dplr"),
    "rwkv7 before": UpdateSpec(decay="channel", transition="dplr", read="before"),
    "house channel": UpdateSpec(decay="channel", beta="head", householders=2, negative_eigenvalues="both"),
}
ALL_SPECS = {  # shapes that run with every spec
    "128": Shape("128", 2, 200, 2, 4, 128, 128),
    "pack": Shape("pack", 1, 700, 1, 2, 128, 128, lengths=(300, 0, 1, 64, 335)),
    "busy": Shape("busy", 4, 330, 32, 32, 128, 128),
    "whole": Shape("whole", 4, 256, 2, 2, 128, 128),  # whole chunks: states are stored in the rows of gradients
}
FIVE_SPECS = {  # shapes that run with gdn, mamba2, own, kda and rwkv7
    "64x96": Shape("64x96", 1, 130, 2, 2, 64, 96),
    "192x384": Shape("192x384", 1, 130, 1, 1, 192, 384),
    "200x400": Shape("200x400", 1, 130, 1, 2, 200, 400),
    "200 long": Shape("200 long", 2, 2300, 2, 2, 200, 80),
    "200 pack": Shape("200 pack", 1, 2700, 1, 2, 200, 144, lengths=(300, 0, 1, 2064, 335)),
    "uneven pack": Shape("uneven pack", 1, 1900, 4, 8, 128, 128, lengths=(1500, 0, 64, 130, 206)),
    "144x16": Shape("144x16", 3, 200, 2, 2, 144, 16),
    "256": Shape("256", 1, 130, 1, 1, 256, 256),
    "long": Shape("long", 1, 2500, 1, 1, 128, 128),
    "norm": Shape("norm", 1, 130, 1, 1, 64, 65),
    "tiny": Shape("tiny", 1, 70, 1, 1, 5, 9),
}


HEADS_OF_64 = Shape("heads of 64", 2, 300, 3, 3, 64, 64)  # with RWKV-7


def cases():
    """Names and cases, ordered so that those that share compiled kernels are adjacent."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for spec in SPECS:
            for shape in ALL_SPECS:
                for regime in ("ordinary", "decays", "parallel"):
                    if dtype != torch.bfloat16 and spec not in ("gdn", "neg", "house", "kda"):
                        continue
                    if shape != "pack" or regime != "ordinary":
                        name = f"{spec} {shape} {regime} {str(dtype)[6:]}"
                        yield name, Case(SPECS[spec], ALL_SPECS[shape], dtype, regime)
        for spec in ("gdn", "mamba2", "own", "kda", "rwkv7"):
            for shape in FIVE_SPECS:
                yield f"{spec} {shape} ordinary {str(dtype)[6:]}", Case(SPECS[spec], FIVE_SPECS[shape], dtype)
        for spec in ("rwkv7", "rwkv7 before"):
            for regime in ("ordinary", "decays", "parallel"):
                name = f"{spec} {HEADS_OF_64.name} {regime} {str(dtype)[6:]}"
                yield name, Case(SPECS[spec], HEADS_OF_64, dtype, regime)


def run_case(name):
    """Run one case. Returns its name, the largest error over its limit (None without errors), and details."""
    torch.set_num_threads(1)
    try:
        report = compare(TritonBackend(), dict(cases())[name], device="cuda")
        if not report.errors:
            return name, None, str(report.refused or report.failures)
        worst = max(float("inf") if x.relative != x.relative else x.relative / x.limit for x in report.errors)
        errors = " ".join(f"{x.tensor} {x.relative:.1e}" for x in report.errors)
        return name, worst, " ".join([errors, *report.failures])
    except Exception as error:
        return name, None, repr(error)[-400:]
    finally:
        torch.cuda.empty_cache()  # fifteen processes share the device


def main(words):
    began, results = time.time(), []
    names = [name for name, _ in cases() if all(word in name for word in words)]
    if not names:
        sys.exit(f"no case has all of these words in its name: {' '.join(words)}")
    with ProcessPoolExecutor(15, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            futures = [pool.submit(run_case, name) for name in names]
            for future in as_completed(futures, timeout=float(os.environ.get("LIMIT", 400))):
                results.append(future.result())
        except TimeoutError:
            print("stopped by LIMIT")
            running = list(pool._processes.values())
            pool.shutdown(wait=False, cancel_futures=True)
            for process in running:
                process.kill()
    failed = [result for result in results if result[1] is None or not result[1] <= 1]
    print(f"{len(results)} of {len(names)} done in {time.time() - began:.0f} s, {len(failed)} failed")
    for result in sorted(failed):
        print("FAILED", *result)
    for result in sorted(results, key=lambda result: -(result[1] or 0))[:12]:
        print("worst", *result)
    sys.stdout.flush()
    os._exit(len(failed) > 0 or len(results) < len(names))  # without waiting for the killed processes


if __name__ == "__main__":
    main(sys.argv[1:])
