"""Compile the package's kernels for sm_90 without a GPU; report registers, spills and shared memory.

In a venv with triton==3.6.0 and numpy only (torch is a stub here), from the repository's root:
python docs/notes/triton-kernels/offline.py "module='gradients',kernel='gradients_kernel',BV=64,BK=64,stages=3"
(module='gradients_hopper',kernel='hopper_gradients_kernel' for the one in Gluon). Further names: warps, stages, decay ('head', 'fixed', 'none'), delta, strengths, own, packed, dtype, dump=PATH (writes
TTGIR, PTX, cubin) and any constexpr.
"""

import importlib
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path

for name in ("deltazoo", "deltazoo.backends", "deltazoo.backends.triton"):  # folders, without what they import
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [str(Path.cwd().joinpath(*name.split(".")[1:]))]
sys.modules["torch"] = types.ModuleType("torch")
sys.modules["torch"].Tensor = object

sys.path.insert(0, "tests/backends")
import triton  # noqa: E402
from assembly import disassemble, forgotten, miscarried  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

BIN = triton.__path__[0] + "/backends/nvidia/bin/"
def compile(kernel, types_, constants, warps=4, stages=2, dump=None, maxnreg=None):
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants or n not in types_ else types_[n].removesuffix(":16") for n in names}
    constexprs = {(i,): constants.get(n) for i, n in enumerate(names) if signature[n] == "constexpr"}
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in types_ and types_[n].endswith(":16")}
    src = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature=signature, constexprs=constexprs, attrs=attrs)
    out = triton.compile(src, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": stages, "maxnreg": maxnreg})
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as f:
        f.write(out.asm["ptx"]); f.flush()
        log = subprocess.run([BIN + "ptxas", "-v", "--gpu-name=sm_90a", f.name, "-o", "/dev/null"], capture_output=True, text=True).stderr
    regs = re.search(r"Used (\d+) registers", log); spill = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    ttgir, ptx = out.asm["ttgir"], out.asm["ptx"]
    info = dict(regs=int(regs.group(1)), spill=spill.groups(), smem=out.metadata.shared, wgmma=ptx.count("wgmma.mma_async"), mma=ptx.count("mma.sync"), cvt=ttgir.count("convert_layout"), alloc=ttgir.count("local_alloc"), store=ttgir.count("local_store"), cp=ttgir.count("async_copy_global_to_local"), bar=ptx.count("bar.sync"))
    sass = disassemble(out.asm["cubin"])
    info |= dict(miscarried=len(miscarried(sass)), forgotten=len(forgotten(sass)), sass=len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", sass, re.M)))
    if "C75" in log or "erialized" in log: info["log"] = [l for l in log.splitlines() if "C75" in l or "erial" in l][:2]
    if dump:
        for kind in ("ttgir", "ptx"): open(f"{dump}.{kind}", "w").write(out.asm[kind])
        open(f"{dump}.cubin", "wb").write(out.asm["cubin"])
    return info
DT = {"bf16": "*bf16:16", "fp16": "*fp16:16", "fp32": "*fp32:16"}
def c_terms(kw): return kw.get("TERMS", 1)
def go(module="gradients", kernel="gradients_kernel", dtype="bf16", warps=4, stages=2, decay="head", delta=True, strengths=True, packed=False, own=False, half=True, dump=None, maxnreg=None, **kw):
    fn = getattr(importlib.import_module("deltazoo.backends.triton.kernels." + module), kernel)
    t, f, i = DT[dtype], "*fp32:16", "*i32:16"
    ty = {n: t for n in "q k v do squares o checkpoints spare states xs dstates dv du dq dk partial".split()}
    ty |= {n: f for n in "gates fades dgates kepts dw dlog_decay final starts ends begins carry sums db state".split()}
    ty |= {n: "i32" for n in "T segment segments parts N slots held".split()} | {"scale": "fp32"}
    if half and dtype == "bf16" and c_terms(kw) == 1: ty["squares"] = DT["fp16"]
    if decay != "none": ty["log_decay"] = f
    if strengths: ty |= dict(b=f, w=f)
    if own: ty |= dict(e=t, de=t)
    if packed: ty["cu"] = i
    c = dict(H=16, HV=16, K=128, V=128, C=64, K0=128, K1=0, BV=128, KP=kw.get("K0", 128) + kw.get("K1", 0), BK=128, TILES=1, VARIANT=0, DECAY=decay, DELTA=delta, OWN=own, ERASE=strengths and delta, WRITE=strengths, ERASE_EARLY=False, READ_EARLY=False, PACKED=packed, LEAST=2.0**-24, SHARED=delta and dtype != "fp16" and c_terms(kw) == 1, EVERY=16, UNIT=16, SPLIT=0, ENDS=False, TERMS=1, PREC="tf32", STAGES=stages, EARLY_LOADS=False, MODE="replay", STATE=False, TILED=True, PARTS=False) | kw
    if c["TILED"] and "TILED" in fn.arg_names: ty["v"] = f"tensordesc<{dtype}[1,{c['C']},1,{c['BV']}]>"
    ty = {n: x for n, x in ty.items() if n in fn.arg_names}
    return compile(fn, ty, {n: x for n, x in c.items() if n in fn.arg_names}, warps=warps, stages=stages, dump=dump, maxnreg=maxnreg)
if __name__ == "__main__":
    for arg in sys.argv[1:]:
        try: print(arg, go(**eval(f"dict({arg})")), flush=True)
        except Exception as error: print(arg, "ERR", str(error)[-700:], flush=True)
