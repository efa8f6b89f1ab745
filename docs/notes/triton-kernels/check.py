"""Conformance on the GPU in many processes: python check.py FILTER..."""
import os, sys, time, random
from concurrent.futures import ProcessPoolExecutor, as_completed
import multiprocessing as mp

def build():
    import torch
    from deltazoo import UpdateSpec
    from deltazoo.backends.conformance.cases import Case
    from deltazoo.backends.shapes import Shape
    S = {
     "gdn": UpdateSpec(decay="head", beta="head"),
     "delta": UpdateSpec(beta="head"),
     "retnet": UpdateSpec(decay="fixed", transition="additive"),
     "mamba2": UpdateSpec(decay="head", transition="additive", beta="head"),
     "linear": UpdateSpec(transition="additive"),
     "comba": UpdateSpec(decay="head", beta="head", erase_key="own", erase_from="previous"),
     "own": UpdateSpec(decay="head", beta="head", erase_key="own"),
     "before": UpdateSpec(decay="head", beta="head", read="before"),
     "both early": UpdateSpec(decay="head", beta="head", read="before", erase_from="previous"),
     "neg": UpdateSpec(decay="head", beta="head", negative_eigenvalues="both"),
     "negerase": UpdateSpec(beta="head", negative_eigenvalues="erase"),
     "house": UpdateSpec(decay="head", beta="head", householders=2, negative_eigenvalues="both"),
     "efla": UpdateSpec(decay="head", beta="head", reparam="efla"),
     "longhorn": UpdateSpec(decay="fixed", beta="head", reparam="longhorn"),
    }
    shapes = {
     "128": Shape("128", 2, 200, 2, 4, 128, 128),
     "64x96": Shape("64x96", 1, 130, 2, 2, 64, 96),
     "192x384": Shape("192x384", 1, 130, 1, 1, 192, 384),
     "200x400": Shape("200x400", 1, 130, 1, 2, 200, 400),
     "256": Shape("256", 1, 130, 1, 1, 256, 256),
     "pack": Shape("pack", 1, 700, 1, 2, 128, 128, lengths=(300, 0, 1, 64, 335)),
     "long": Shape("long", 1, 2500, 1, 1, 128, 128),
     "busy": Shape("busy", 4, 330, 32, 32, 128, 128),
     "norm": Shape("norm", 1, 130, 1, 1, 64, 65),
     "tiny": Shape("tiny", 1, 70, 1, 1, 5, 9),
    }
    out = []
    for dt in (torch.bfloat16, torch.float16, torch.float32):
        for sn, s in S.items():
            for shn, sh in shapes.items():
                for reg in ("ordinary", "decays", "parallel"):
                    small = shn in ("128", "pack", "busy")
                    if not small and (sn not in ("gdn", "mamba2") or reg != "ordinary"): 
                        continue
                    if small and dt != torch.bfloat16 and sn not in ("gdn", "neg", "house"): continue
                    if shn == "pack" and reg == "ordinary": continue
                    out.append((f"{sn} {shn} {reg} {str(dt)[6:]}", Case(s, sh, dt, reg)))
    return out

def one(i):
    import torch
    torch.set_num_threads(1)
    from deltazoo.backends.triton import TritonBackend
    from deltazoo.backends.conformance.compare import compare
    name, case = build()[i]
    try:
        r = compare(TritonBackend(), case, device="cuda")
        if not r.errors: return name, None, str(r.refused or r.failures)
        e = max(r.errors, key=lambda e: e.relative / e.limit if e.relative == e.relative else 1e9)
        return name, e.relative / e.limit, " ".join(f"{x.tensor} {x.relative:.1e}" for x in r.errors)+ " ".join(r.failures)
    except Exception as ex:
        return name, None, repr(ex)[-400:]
    finally:
        torch.cuda.empty_cache()  # fifteen processes share the device

if __name__ == "__main__":
    t = time.time()
    todo = [i for i, (n, _) in enumerate(build()) if all(f in n for f in sys.argv[1:])]
    # same spec and shape in one process after the other: order by name
    results = []
    limit = float(os.environ.get("LIMIT", 400))
    with ProcessPoolExecutor(15, mp_context=mp.get_context("spawn")) as pool:
        futures = [pool.submit(one, i) for i in todo]
        try:
            for f in as_completed(futures, timeout=limit):
                results.append(f.result())
        except Exception as ex:
            print("stopped", repr(ex)[:100])
            running = list(pool._processes.values())
            pool.shutdown(wait=False, cancel_futures=True)
            for p in running: p.kill()
    bad = [r for r in results if r[1] is None or not r[1] <= 1]
    print(f"{len(results)} of {len(todo)} done in {time.time()-t:.0f} s, {len(bad)} bad")
    for r in sorted(bad): print("BAD", r[0], None if r[1] is None else f"{r[1]:.2f}", r[2][:500])
    for r in sorted(results, key=lambda r: -(r[1] or 0))[:12]: print("worst", r[0], r[1], r[2][:300])
    os._exit(0)
