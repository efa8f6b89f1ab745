"""Log-linear attention on a GPU: the kernels for sequences and for one decoded token.

    o_t = sum_l lambda_t^(l) (S_t^(l))^T q_t

S^(l) holds the writes of the tokens of level l: 0 is the token itself, and level l > 0 holds the 2^(l - 1) tokens of a
bucket of a Fenwick tree over the past; the last level holds all older tokens. The states of all levels decay and are
erased as in the gated delta rule. Source: Guo 2025, arXiv 2506.04761.
"""

from deltazoo.backends.torch_ext.devices import device_type
from deltazoo.backends.triton.levels.op import level_scan, level_step_
from deltazoo.backends.triton.levels.operands import CHUNK, LevelOperands, level_refusals, operand_refusals
from deltazoo.backends.triton.limits import kernel_refusals

__all__ = ["CHUNK", "LevelOperands", "level_scan", "level_step_", "refusals"]


def refusals(x: LevelOperands) -> list[str]:
    """Return why the kernels do not compute the operands, one sentence each; [] if they do.

    They take operands of one dtype, float32 or 16-bit floats, K <= 128 and 8 to 23 levels.
    """
    reasons = operand_refusals(x) or kernel_refusals(x.q)
    return reasons or [*level_refusals(device_type(x.q), x.q.device.index, x.q.dtype)]
