"""Log-linear attention on a GPU: the kernels for sequences and for one decoded token.

    o_t = sum_l lambda_t^(l) (S_t^(l))^T q_t

S^(l) holds the writes of the tokens of level l: 0 is the token itself, and level l > 0 holds the 2^(l - 1) tokens of a
bucket of a Fenwick tree over the past; the last level holds all older tokens. The states of all levels decay and are
erased as in the gated delta rule. Source: Guo 2025, arXiv 2506.04761.
"""

import torch

from deltazoo.backends.torch_ext.modes import functorch_is_active
from deltazoo.backends.triton.levels.op import level_scan, level_step_
from deltazoo.backends.triton.levels.operands import CHUNK, LevelOperands, are_supported, runs_level_kernels

__all__ = ["CHUNK", "LevelOperands", "is_supported", "level_scan", "level_step_"]


def is_supported(x: LevelOperands) -> bool:
    """Whether the kernels run on the device of the operands, with their dtypes, widths and levels.

    They take 16-bit floats of one dtype, K <= 128 and 8 to 23 levels. They have no rule for torch.func.vmap.
    """
    if not torch.compiler.is_compiling() and functorch_is_active():
        return False
    return are_supported(x) and runs_level_kernels(x.q.device.type, x.q.device.index, x.q.dtype)
