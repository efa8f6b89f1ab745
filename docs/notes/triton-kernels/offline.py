"""Compile kernels for sm_90 without a GPU and report registers, spills, shared memory.

/tmp/t36/bin/python offline.py (a venv with triton==3.6.0 and numpy only; torch is stubbed)
"""

import re
import subprocess
import sys
import tempfile
import types

try:
    import torch
except ImportError:
    sys.modules["torch"] = types.ModuleType("torch")
    sys.modules["torch"].Tensor = object
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

BIN = triton.__path__[0] + "/backends/nvidia/bin/"


def compile(kernel, types_, constants, *, warps=4, stages=2, dump=None, maxnreg=None):
    """types_: argument name -> '*bf16:16' etc.; constants: the rest."""
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants or n not in types_ else types_[n].split(":")[0] for n in names}
    constexprs = {(i,): constants.get(n) for i, n in enumerate(names) if signature[n] == "constexpr"}
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in types_ and types_[n].endswith(":16")}
    src = ASTSource(kernel, signature=signature, constexprs=constexprs, attrs=attrs)
    out = triton.compile(src, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": stages, "maxnreg": maxnreg})
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as f:
        f.write(out.asm["ptx"])
        f.flush()
        log = subprocess.run(
            [BIN + "ptxas", "-v", "--gpu-name=sm_90a", f.name, "-o", "/dev/null"], capture_output=True, text=True
        ).stderr
    regs = re.search(r"Used (\d+) registers", log)
    spill = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    ttgir, ptx = out.asm["ttgir"], out.asm["ptx"]
    info = dict(
        regs=int(regs.group(1)), spill=spill.group(1), smem=out.metadata.shared, wgmma=ptx.count("wgmma.mma_async"),
        mma=ptx.count("mma.sync"), cvt=ttgir.count("convert_layout"), alloc=ttgir.count("local_alloc"),
        store=ttgir.count("local_store"), cp=ttgir.count("async_copy_global_to_local"), bar=ptx.count("bar.sync"),
    )  # fmt: skip
    if dump:
        for kind in ("ttgir", "ptx"):
            open(f"{dump}.{kind}", "w").write(out.asm[kind])
        open(f"{dump}.cubin", "wb").write(out.asm["cubin"])
    return info


DT = {"bf16": "*bf16:16", "fp16": "*fp16:16", "fp32": "*fp32:16"}


def forward(which, dtype="bf16", H=16, HV=16, K=128, V=128, BV=64, C=64, K0=128, K1=0, stages=2, warps=4, decay="head",
            delta=True, strengths=True, packed=True, state=False, every=0, prec="tf32", operand="fp16", inv="tf32", block=16, reads=False, own=False, replay=False, split=0, ends=False, prefetch=False, dump=None, maxnreg=None):
    import triton.language as tl
    from forward import prepare_kernel, scan_kernel

    t, f, i = DT[dtype], "*fp32:16", "*i32:16"
    operand = {"fp32": tl.float32, "fp16": tl.float16, "bf16": tl.bfloat16}[operand]
    if which == "prepare":
        types_ = dict(q=t, k=t, gates=f, inverse=t, reads=t, N="i32", T="i32", scale="fp32")
        if decay: types_["log_decay"] = f
        if strengths: types_ |= dict(b=f, w=f)
        if packed: types_["cu"] = i
        consts = dict(H=H, HV=HV, K=K, C=C, K0=K0, K1=K1, DECAY=decay or "none", DELTA=delta, OWN=False, ERASE=strengths, WRITE=strengths,
                      PACKED=packed, OPERAND=operand, PREC=prec, PREC_INV=inv, BLOCK=block, READS=reads)
        return compile(prepare_kernel, types_, consts, warps=warps, stages=stages, dump=dump, maxnreg=maxnreg)
    types_ = dict(q=t, k=t, v=t, gates=f, inverse=t, reads=t, o=t, final=f, checkpoints=f, scale="fp32", T="i32", segment="i32", parts="i32", starts=f, ends=f, states=t, xs=t)
    if state: types_["state"] = f
    if packed: types_["cu"] = i
    if own: types_["e"] = t
    consts = dict(H=H, HV=HV, K=K, V=V, C=C, K0=K0, K1=K1, BV=BV, DECAY=bool(decay), DELTA=delta, OWN=own, WRITE=strengths, STATE=state,
                  PACKED=packed, EVERY=every, PREC=prec, STAGES=stages, READS=reads, REPLAY=replay, WHOLE=False, SPLIT=split, ENDS=ends, CONTRACTS=True, PREFETCH=prefetch)
    return compile(scan_kernel, types_, consts, warps=warps, stages=stages, dump=dump, maxnreg=maxnreg)


def backward(which, dtype="bf16", H=16, HV=16, K=128, V=128, BV=64, BK=64, C=64, K0=128, K1=0, stages=2, warps=4, decay="head",
             delta=True, strengths=True, packed=True, own=False, prec="tf32", reads=True, prefetch=False, dump=None, maxnreg=None):
    from backward import gradients_kernel, reverse_scan_kernel

    t, f, i = DT[dtype], "*fp32:16", "*i32:16"
    types_ = dict(q=t, k=t, do=t, gates=f, inverse=t, reads=t, dstate=f, dstates=t, states=t, xs=t, du=t, v=t, dv=t, dq=t, dk=t,
                  dgates=f, kepts=f, dw=f, sums=f, N="i32", scale="fp32", T="i32", segment="i32", slots="i32")
    if strengths: types_ |= dict(b=f)
    if own: types_ |= dict(e=t, de=t)
    if packed: types_["cu"] = i
    consts = dict(H=H, HV=HV, K=K, V=V, C=C, K0=K0, K1=K1, BK=BK, BV=BV, DECAY=bool(decay), DELTA=delta, OWN=own, ERASE=strengths,
                  WRITE=strengths, PACKED=packed, SEGMENT=16, WHOLE=False, PREC=prec, STAGES=stages, READS=reads, PREFETCH=prefetch)
    kernel = reverse_scan_kernel if which == "reverse" else gradients_kernel
    types_ = {n: x for n, x in types_.items() if n in kernel.arg_names}
    return compile(kernel, types_, {n: x for n, x in consts.items() if n in kernel.arg_names}, warps=warps, stages=stages, dump=dump, maxnreg=maxnreg)


if __name__ == "__main__":
    for arg in sys.argv[1:]:
        kw = eval(f"dict({arg})")
        try:
            print(arg, globals()[kw.pop("family", "forward")](**kw), flush=True)
        except Exception as error:
            print(arg, str(error)[-900:], flush=True)
