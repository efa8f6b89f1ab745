"""Triton's interpreter without work that it repeats, which takes two thirds of the time of the tests.

Each use of a dtype builds a table of all dtypes, each call of a device function lists and replaces all members of
triton.language, each tensor describes its shape anew, each sum of integers computes an overflow check that is dropped
without debugging, and a reduction or scan with a function of its own calls that function for every element. Here
results are kept, members are replaced once per kernel, no overflow is computed, and the function is called for whole
slices, in the same order. This relies on private functions of Triton 3.6 and 3.7, and the interpreter works without it.
"""

import functools
import math
import os
from types import SimpleNamespace

if os.environ.get("TRITON_INTERPRET") == "1":
    import numpy as np
    from triton import language as tl
    from triton.runtime import interpreter

    @functools.cache
    def names_of_builtins(package: object) -> tuple[str, ...]:
        """Return the members that the interpreter replaces; called before the first replacement."""
        return tuple(name for name in dir(package) if tl.core.is_builtin(getattr(package, name, None)))

    def patch_builtin(package: object, builder: object, *scope: object) -> None:
        for name in names_of_builtins(package):
            member = getattr(package, name)
            if tl.core.is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, *scope)

    find_dtype = interpreter._get_np_dtype
    find_dtype_once = functools.cache(find_dtype)

    def numpy_dtype(dtype: tl.dtype) -> object:
        scalar = dtype.scalar  # a block has the dtype of its elements; a pointer has no hash
        return find_dtype(scalar) if scalar.is_ptr() else find_dtype_once(scalar)

    patch_lang = interpreter._patch_lang
    whole_language = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})

    class Replacement:
        """The replaced members, until the kernel that replaced them ends. Its device functions replace none."""

        active = False

        def __init__(self) -> None:
            self.scope = None if Replacement.active else patch_lang(whole_language)
            Replacement.active = True

        def restore(self) -> None:
            assert self.scope is not None
            self.scope.restore()
            Replacement.active = False

    @functools.cache
    def sizes(*shape: int) -> tuple[tl.constexpr, tl.tuple]:
        return tl.constexpr(math.prod(shape)), tl.tuple([tl.constexpr(size) for size in shape])

    def init_tensor(self: tl.tensor, handle: object, type: tl.dtype) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = sizes(*(type.shape if type.is_block() else ()))

    @functools.cache
    def block_sizes(*shape: int | tl.constexpr) -> tuple[tl.tuple, int, str]:
        if any(isinstance(size, tl.constexpr) for size in shape):
            return block_sizes(*(getattr(size, "value", size) for size in shape))
        block = object.__new__(tl.block_type)
        init_block(block, tl.int1, list(shape))
        return block.shape, block.numel, str(block.shape)

    def init_block_once(self: tl.block_type, element_ty: tl.dtype, shape: list) -> None:
        self.element_ty = element_ty
        self.shape, self.numel, text = block_sizes(*shape)
        self.name = f"<{text}, {element_ty}>"

    def broadcast_once(self: object, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
        blocks = lhs.type.is_block(), rhs.type.is_block()
        is_equal = lhs.type.shape is rhs.type.shape if all(blocks) else not any(blocks)
        return (lhs, rhs) if is_equal else broadcast(self, lhs, rhs)

    def combine(self: interpreter.ReduceScanOpInterface, input: tuple[tl.tensor, ...], axis: int) -> list[list]:
        """Return the results up to each index of the axis, for each input."""
        dtypes = [x.dtype for x in input]
        slices = [np.moveaxis(x.handle.data, axis, 0) for x in input]
        results = [[x[0]] for x in slices]
        for i in range(1, len(slices[0])):
            numbers = [*(x[-1] for x in results), *(x[i] for x in slices)]
            values = self.combine_fn.fn(*(self.to_tensor(x, of) for x, of in zip(numbers, 2 * dtypes, strict=True)))
            for so_far, value, x in zip(results, values if len(dtypes) > 1 else [values], slices, strict=True):
                so_far.append(value.handle.data.astype(x.dtype).reshape(x.shape[1:]))
        return results

    def reduce(self: interpreter.ReduceOps, input: tuple[tl.tensor, ...]) -> list[tl.tensor]:
        rank = input[0].handle.data.ndim
        flat, axis = self.unravel(input, self.axis)
        results = [of[-1] for of in combine(self, flat, axis)]
        if self.keep_dims:
            results = [np.expand_dims(x, axis if self.axis is not None else tuple(range(rank))) for x in results]
        return [self.to_tensor(x, of.dtype) for x, of in zip(results, input, strict=True)]

    def scan(self: interpreter.ScanOps, input: tuple[tl.tensor, ...]) -> list[tl.tensor]:
        results = combine(self, input, self.axis)
        return [self.to_tensor(np.stack(x, self.axis), of.dtype) for x, of in zip(results, input, strict=True)]

    for module in (tl, tl.core, tl.math, tl.core.tensor, tl.core.tensor_descriptor_base):
        names_of_builtins(module)
    interpreter._patch_builtin = patch_builtin
    interpreter._get_np_dtype = numpy_dtype
    interpreter._patch_lang = lambda function: Replacement()
    interpreter.ReduceOps.generic_reduce = reduce
    interpreter.ScanOps.generic_scan = scan
    semantic = type(interpreter.interpreter_semantic)
    broadcast = semantic.broadcast_impl_value
    semantic.broadcast_impl_value = broadcast_once
    semantic.binary_op_sanitize_overflow_impl = lambda *_: None
    init_block = tl.block_type.__init__
    tl.block_type.__init__ = init_block_once
    tl.tensor.__init__ = init_tensor
