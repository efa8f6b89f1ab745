"""A replacement of `launcher` for machines without a GPU: it compiles for sm_90 and launches nothing."""

import hashlib
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

FLOATS = ("scale",)  # other scalar arguments are int32
NAMES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip


class Compiler:
    """Compiles Gluon kernels, or with `all` every kernel. compiled: (name, result) in the order of the launches."""

    def __init__(self, all: bool = False) -> None:
        self.all = all
        self.compiled: list[tuple[str, Any]] = []

    def __call__(
        self,
        kernel: Any,
        tensors: Sequence[Any],
        constants: Sequence[Hashable],
        warps: int = 4,
        stages: int = 1,
        registers: int | None = None,
    ) -> Callable[..., None]:
        if self.all or getattr(kernel, "is_gluon", bool)():
            self.compiled.append(
                (kernel.__name__, compile_kernel(kernel, tensors, constants, warps, stages, registers))
            )
        return lambda *_: None


def compile_kernel(
    kernel: Any, tensors: Sequence[Any], constants: Sequence[Hashable], warps: int, stages: int, registers: int | None
) -> Any:
    """Compile a kernel for sm_90 as `launcher` does: pointers are 16-byte aligned, scalars not specialised."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile
    from triton.experimental.gluon._runtime import GluonASTSource

    names = kernel.arg_names
    tensor_names, constant_names = names[: len(tensors)], names[len(names) - len(constants) :]
    signature = {name: "fp32" if name in FLOATS else "i32" for name in names}
    signature |= {name: _type(x) for name, x in zip(tensor_names, tensors, strict=True)}
    signature |= dict.fromkeys(constant_names, "constexpr")
    values = dict(zip(constant_names, constants, strict=True))
    values |= {name: None for name, x in zip(tensor_names, tensors, strict=True) if x is None}
    aligned = {(i,): [["tt.divisibility", 16]] for i, x in enumerate(tensors) if isinstance(x, torch.Tensor)}
    source_type = GluonASTSource if getattr(kernel, "is_gluon", bool)() else ASTSource
    source = source_type(kernel, signature, {(names.index(name),): value for name, value in values.items()}, aligned)
    options = {"num_warps": warps, "num_stages": stages} | ({"maxnreg": registers} if registers else {})
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def _type(x: Any) -> str:
    if x is None:
        return "constexpr"
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
