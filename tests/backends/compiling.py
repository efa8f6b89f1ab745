"""A replacement of `launcher` for machines without a GPU: it compiles, by default for sm_90, and launches nothing."""

import hashlib
import re
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal
from unittest.mock import patch

import torch

from deltazoo.backends.torch_ext.devices import DeviceSpec
from deltazoo.backends.triton.chunk.heuristic import heuristic
from deltazoo.backends.triton.chunk.plan import Plan, make_plan
from deltazoo.backends.triton.operands import Saved, ScanKind, ScanOperands, problem_of
from deltazoo.backends.triton.problem import Problem
from deltazoo.backends.triton.runtime.simulation import simulated_launches
from deltazoo.backends.triton.support import Options
from deltazoo.mixers import MixerConfig

_OPTIONS = Options()
FLOATS = ("scale", "z_loss", "cap")  # other scalar arguments are int32
NAMES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64",
    torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip


class Compiler:
    """Compiles Gluon kernels, or with `all` every kernel. compiled: (name, result) in the order of the launches."""

    def __init__(self, all: bool = False) -> None:
        self.all = all
        self.compiled: list[tuple[str, Any]] = []

    def __call__(
        self, kernel: Any, tensors: Mapping[str, Any], traits: Mapping[str, Hashable], options: Options = _OPTIONS
    ) -> Callable[..., None]:
        if self.all or getattr(kernel, "is_gluon", bool)():
            self.compiled.append((kernel.__name__, compile_kernel(kernel, tensors, traits, options)))
        return lambda *_: None


def compile_step(
    mixer: MixerConfig, width: int, rows: int, slots: int, dtype: torch.dtype = torch.bfloat16
) -> list[tuple[str, Any]]:
    """Compile the kernels of a decode step for sm_90. Returns: as `Compiler.compiled`."""
    compiler = Compiler(all=True)
    with torch.device("meta"):
        module, x = mixer.build(width).to(dtype), torch.empty(rows, 1, width, dtype=dtype)
    modules = ("deltazoo.backends.triton.runtime.launcher", "deltazoo.backends.triton.decode.launch")
    runtime, decode = (patch(f"{name}.launcher", compiler) for name in modules)
    with runtime, decode, torch.no_grad(), simulated_launches(DeviceSpec.named("NVIDIA H200")):
        module(x, module.init_state(rows, slots))
    return compiler.compiled


def launch_update(
    problem: Problem,
    device: DeviceSpec,
    launcher: Any,
    before: bool = False,
    grad: bool = True,
    strengths: Literal["apart", "tied", "channels"] = "apart",
) -> Plan:
    """Run the launch code of an update, forward and with gradients backward, with this launcher on CPU tensors.

    Args:
        problem: without the traits that the other arguments set.
        before: the erase reads the state before the decay, and q the state before the update.
        strengths: "apart": one for the erase and one for the write; "tied": one for both; "channels": e has the erase
            strengths.
    """
    from deltazoo.backends.triton.chunk import backward, execute, forward

    B, T, H, HV, K, V = 1 if problem.packed else problem.N, *problem[2:7]
    dtype, strength = problem.dtype, torch.empty(B, T, HV)
    log_decay = {"head": strength, "channel": torch.empty(B, T, HV, K)}.get(problem.decay)
    has_strengths = not problem.dplr and strengths != "channels"
    x = ScanOperands(
        q=torch.empty(B, T, H, K, dtype=dtype), k=torch.empty(B, T, H, K, dtype=dtype),
        v=torch.empty(B, T, HV, V, dtype=dtype), log_decay=log_decay, b=strength if has_strengths else None,
        w=strength if has_strengths else None, e=torch.empty(B, T, H, K, dtype=dtype) if problem.erase_key else None,
        v_key=torch.empty(B, T, H, K, dtype=dtype) if problem.dplr else None,
        state=torch.empty(problem.N, HV, K, V),
        cu_seqlens=torch.linspace(0, T, problem.N + 1).int() if problem.packed else None,
    )  # fmt: skip
    kind = ScanKind(
        problem.delta, "previous" if before and problem.delta else "decayed", "before" if before else "after",
        problem.split_terms, strengths == "tied", 0.1, erase_channels=strengths == "channels",
    )  # fmt: skip
    problem = problem_of(x, kind, device)._replace(saves_16_bits=problem.saves_16_bits)
    plan = make_plan(problem, device, heuristic(problem, device), grad)
    with patch.object(execute, "launcher", launcher):
        _, _, saved = forward.forward(x, kind, plan)
        if grad:
            saved = Saved.of(saved, problem, plan.config.chunk, plan.checkpoint_chunks)
            backward.backward(x, kind, saved, torch.empty_like(x.v), None, plan)
    return plan


def compile_kernel(
    kernel: Any,
    tensors: Mapping[str, Any],
    traits: Mapping[str, Hashable],
    options: Options = _OPTIONS,
    architecture: int = 90,
) -> Any:
    """Compile a kernel as `launcher` does: pointers are 16-byte aligned, scalars not specialised."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile
    from triton.experimental.gluon._runtime import GluonASTSource

    names = kernel.arg_names
    tensors = {name: tensors[name] for name in names if name in tensors}
    traits = {name: traits[name] for name in names if name in traits and name not in tensors}
    signature: dict[str, Any] = {name: "fp32" if name in FLOATS else "i32" for name in names}
    signature |= {name: _type(x) for name, x in tensors.items()}
    signature |= dict.fromkeys(traits, "constexpr")
    at: dict[tuple[int, ...], Any] = {}  # the tensors by their place: a parameter, or a field of one
    for name, x in tensors.items():
        n = names.index(name)
        at |= {(n, field): y for field, y in enumerate(x)} if isinstance(x, tuple) else {(n,): x}
    values = {(names.index(name),): value for name, value in traits.items()}
    values |= {place: None for place, x in at.items() if x is None}
    aligned = {place: [["tt.divisibility", 16]] for place, x in at.items() if isinstance(x, torch.Tensor)}
    source_type = GluonASTSource if getattr(kernel, "is_gluon", bool)() else ASTSource
    source = source_type(kernel, signature, values, aligned)
    limits = {"num_warps": options[0], "num_stages": options[1]} | ({"maxnreg": options[2]} if options[2] else {})
    return compile(source, target=GPUTarget("cuda", architecture, 32), options=limits)


def _type(x: Any) -> Any:
    if x is None:
        return "constexpr"
    if isinstance(x, tuple):
        return type(x)(*map(_type, x))
    if isinstance(x, torch.Tensor):
        return f"*{NAMES[x.dtype]}"
    return f"tensordesc<{NAMES[x.base.dtype]}[{','.join(map(str, x.block_shape))}]>"


_NOT_CODE = re.compile(r"//[^\n]*|^\s*\.(loc|file|version|target)\b[^\n]*|^\s*\$L__(tmp|func)\w*:", re.MULTILINE)


def ptx_hash(kernel: Any) -> str:
    """Hash a compiled kernel's PTX without its name, comments and debug information."""
    ptx = re.sub(r"\.section\s+\.debug.*", "", kernel.asm["ptx"], flags=re.DOTALL)
    ptx = _NOT_CODE.sub("", ptx).replace(kernel.metadata.name, "kernel")
    text = "\n".join(line.strip() for line in ptx.splitlines() if line.strip())
    return hashlib.sha256(text.encode()).hexdigest()[:16]
