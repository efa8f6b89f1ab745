"""Gluon functions whose names differ between Triton 3.6 and 3.9, under one name each.

| here | Triton 3.6 | 3.7 | 3.8 | 3.9 |
|---|---|---|---|---|
| barrier() | thread_barrier | barrier | barrier | barrier |
| async_load(buffer, pointers, mask=None) | async_copy_global_to_shared | the same | async_load | async_load |
| reinterpret(buffer, dtype, shape, layout) | method _reinterpret | the same | the same | method reinterpret |
"""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # bar.sync over the warps of the partition

# cp.async of a block of pointers into shared memory; elements outside the mask become zero
async_load = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared

# a view of the same bytes in shared memory
_buffer = gl.shared_memory_descriptor
reinterpret = _buffer.reinterpret if hasattr(_buffer, "reinterpret") else _buffer._reinterpret
