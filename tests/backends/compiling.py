"""A stand-in for `launcher` where there is no GPU: it compiles for compute capability 9.0, and launches nothing."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

NUMBERS = {"scale": "fp32"}  # the others are int32
POINTERS = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip


class Compiler:
    """What stands in; `compiled`: the kernels by name, of those in Gluon alone unless `all`."""

    def __init__(self, all: bool = False) -> None:
        self.all = all
        self.compiled: list[tuple[str, Any]] = []

    def __call__(
        self,
        kernel: Any,
        tensors: Sequence[torch.Tensor | None],
        constants: Sequence[Hashable],
        warps: int = 4,
        stages: int = 1,
        registers: int | None = None,
    ) -> Callable[..., None]:
        gluon = getattr(kernel, "is_gluon", bool)()
        if gluon or self.all:
            from triton.backends.compiler import GPUTarget
            from triton.compiler import ASTSource, compile
            from triton.experimental.gluon._runtime import GluonASTSource

            names = kernel.arg_names
            of_tensors, of_constants = names[: len(tensors)], names[len(names) - len(constants) :]
            signature = {name: NUMBERS.get(name, "i32") for name in names}
            signature |= {
                name: "constexpr" if x is None else POINTERS[x.dtype]
                for name, x in zip(of_tensors, tensors, strict=True)
            }
            signature |= dict.fromkeys(of_constants, "constexpr")
            values = dict(zip(of_constants, constants, strict=True))
            values |= {name: None for name, x in zip(of_tensors, tensors, strict=True) if x is None}
            wide = {(i,): [["tt.divisibility", 16]] for i, x in enumerate(tensors) if x is not None}
            source = (GluonASTSource if gluon else ASTSource)(
                kernel, signature, {(names.index(name),): value for name, value in values.items()}, wide
            )
            options = {"num_warps": warps, "num_stages": stages} | ({"maxnreg": registers} if registers else {})
            found = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            self.compiled.append((kernel.__name__, found))
        return lambda *_: None
