"""Compile the package's kernels for sm_90 without a GPU; report registers, spills and shared memory.

In a venv with triton==3.6.0 and numpy only (torch is a stub here), from the repository's root:
python tests/bench/gpu/offline.py "module='gradients',kernel='gradients_kernel',BV=64,BK=64,stages=3"
(module='hopper.gradients',kernel='hopper_gradients_kernel' for the one in Gluon). Further names: warps, stages, decay
('head', 'fixed', 'none'), delta, strengths, own, packed, dtype, maxnreg, dump=PATH (writes TTGIR, PTX, cubin) and any
constexpr.
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

PTXAS = Path(triton.__path__[0]) / "backends/nvidia/bin/ptxas"
POINTERS = {"bf16": "*bf16:16", "fp16": "*fp16:16", "fp32": "*fp32:16"}
OPERANDS = (
    "q", "k", "v", "do", "wy_tiles", "o", "checkpoints", "spare", "states", "xs", "dstates", "dv", "du", "dq", "dk",
    "partial",
)  # fmt: skip
IN_FLOAT32 = (
    "gates", "decay_bounds", "dgates", "state_products", "dw", "dlog_decay", "final", "starts", "ends", "begins", "dstate", "sums", "db",
    "state",
)  # fmt: skip
NUMBERS = ("T", "segment", "segments", "parts", "N", "slots", "held")


def compiled(kernel, types_, constants, options):
    """What Triton makes of a kernel; types_ of the parameters that it has, by name, all others are constants."""
    names = kernel.arg_names
    signature = {name: types_[name].removesuffix(":16") if name in types_ else "constexpr" for name in names}
    constexprs = {(i,): constants.get(name) for i, name in enumerate(names) if name not in types_}
    aligned = [["tt.divisibility", 16]]
    attrs = {(i,): aligned for i, name in enumerate(names) if types_.get(name, "").endswith(":16")}
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    source = source(kernel, signature=signature, constexprs=constexprs, attrs=attrs)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def assembled(ptx):
    """What ptxas says of it."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [PTXAS, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        return subprocess.run(command, capture_output=True, text=True).stderr


def report(kernel):
    """Registers, bytes of spills (stores, loads) and of shared memory, instructions, faults, and ptxas's warnings."""
    asm = kernel.asm
    log, sass = assembled(asm["ptx"]), disassemble(asm["cubin"])
    counts = {
        "wgmma": ("ptx", "wgmma.mma_async"), "mma": ("ptx", "mma.sync"), "bar": ("ptx", "bar.sync"),
        "cvt": ("ttgir", "convert_layout"), "alloc": ("ttgir", "local_alloc"), "store": ("ttgir", "local_store"),
        "cp": ("ttgir", "async_copy_global_to_local"),
    }  # fmt: skip
    info = {
        "regs": int(re.search(r"Used (\d+) registers", log).group(1)),
        "spill": re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log).groups(),
        "smem": kernel.metadata.shared,
        **{name: asm[text].count(word) for name, (text, word) in counts.items()},
        "miscarried": len(miscarried(sass)),
        "forgotten": len(forgotten(sass)),
        "sass": len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", sass, re.MULTILINE)),
    }
    warned = [line for line in log.splitlines() if "C75" in line or "erialized" in line]
    return info | ({"log": warned[:2]} if warned else {})


def go(
    module="gradients", kernel="gradients_kernel", dtype="bf16", warps=4, stages=2, decay="head", delta=True,
    strengths=True, packed=False, own=False, half=True, dump=None, maxnreg=None, **asked,
):  # fmt: skip
    """Compile one; half: T in float16 beside bfloat16 operands."""
    function = getattr(importlib.import_module("deltazoo.backends.triton.kernels." + module), kernel)
    terms = asked.get("TERMS", 1)
    constants = {
        "H": 16, "HV": 16, "K": 128, "V": 128, "C": 64, "K0": 128, "K1": 0, "BV": 128, "BK": 128, "DECAY": decay,
        "DELTA": delta, "OWN": own, "ERASE": strengths and delta, "WRITE": strengths, "ERASE_EARLY": False,
        "READ_EARLY": False, "PACKED": packed, "MIN_BETA": 2.0**-24, "DU_IS_DV": delta and dtype != "fp16" and terms == 1,
        "CHECKPOINT_EVERY": 16, "UNIT": 16, "SPLIT": 0, "ENDS": False, "TERMS": 1, "PREC": "tf32", "STAGES": stages,
        "MODE": "replay", "HAS_STATE": False, "TILED": True, "BOUND_DECAYS": False,
    } | asked  # fmt: skip
    of_operands, of_float32, of_int32 = POINTERS[dtype], POINTERS["fp32"], "*i32:16"
    types_ = dict.fromkeys(OPERANDS, of_operands) | dict.fromkeys(IN_FLOAT32, of_float32)
    types_ |= dict.fromkeys(NUMBERS, "i32") | {"scale": "fp32"}
    if half and dtype == "bf16" and terms == 1:
        types_["wy_tiles"] = POINTERS["fp16"]
    if decay != "none":
        types_["log_decay"] = of_float32
    if strengths:
        types_ |= {"b": of_float32, "w": of_float32}
    if own:
        types_ |= {"e": of_operands, "de": of_operands}
    if packed:
        types_["cu"] = of_int32
    names = function.arg_names
    if constants["TILED"] and "TILED" in names:
        types_["v"] = f"tensordesc<{dtype}[1,{constants['C']},1,{constants['BV']}]>"
    options = {"num_warps": warps, "num_stages": stages, "maxnreg": maxnreg}
    found = compiled(
        function,
        {name: type_ for name, type_ in types_.items() if name in names},
        {name: value for name, value in constants.items() if name in names},
        options,
    )
    if dump:
        for kind in ("ttgir", "ptx"):
            Path(f"{dump}.{kind}").write_text(found.asm[kind])
        Path(f"{dump}.cubin").write_bytes(found.asm["cubin"])
    return report(found)


if __name__ == "__main__":
    for asked in sys.argv[1:]:
        try:
            print(asked, go(**eval(f"dict({asked})")), flush=True)
        except Exception as error:
            print(asked, "ERR", str(error)[-700:], flush=True)
