"""Triton's interpreter without two searches that it repeats, which take a quarter of the time of the tests.

Each use of a dtype builds a table of all dtypes, and each call of a device function lists all members of
triton.language. The results are kept here. This relies on private functions of Triton 3.7, and the interpreter works
without it.
"""

import functools
import os

if os.environ.get("TRITON_INTERPRET") == "1":
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

    for module in (tl, tl.core, tl.math, tl.core.tensor, tl.core.tensor_descriptor_base):
        names_of_builtins(module)
    interpreter._patch_builtin = patch_builtin
    interpreter._get_np_dtype = numpy_dtype
