"""Launch the cross entropy kernel on the logits of a chunk of tokens; imports Triton at the first launch."""

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.devices import device_type
from deltazoo.backends.triton.limits import elementwise_refusals
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import power_of_two

BLOCK = 4096  # columns that a program loads together; 16 per thread
WARPS = 8


def refusals(logits: Tensor) -> tuple[str, ...]:
    """Return why the kernel does not run on these logits; () if it does."""
    return elementwise_refusals(device_type(logits), logits.device.index, logits.dtype)


def losses_(
    logits_RL: Tensor, targets_R: Tensor, scale_R: Tensor | None, losses_R: Tensor, gradients: bool,
    ignore_index: int, z_loss: float | None, cap: float | None,
) -> None:  # fmt: skip
    """Store the losses. With `gradients` overwrite the logits by the gradients of scale_r loss_r.

    Args:
        logits_RL: [R, L], contiguous along L.
        targets_R: [R] int64.
        scale_R: [R] float32. None: 1.
        losses_R: [R] float32.
    """
    from deltazoo.backends.triton.loss.kernels import LossTraits, cross_entropy_kernel
    from deltazoo.backends.triton.runtime.launcher import launcher

    R, L = logits_RL.shape
    assert logits_RL.stride(1) == 1
    block = min(BLOCK, power_of_two(L))
    has = (cap is not None, z_loss is not None, scale_R is not None)
    traits = LossTraits(L, logits_RL.stride(0), block, *has, gradients)
    tensors = {
        "logits": logits_RL, "targets": targets_R.contiguous(), "losses": losses_R,
        "scales": None if scale_R is None else scale_R.contiguous(),
    }  # fmt: skip
    with torch.cuda.device_of(logits_RL):
        run = launcher(cross_entropy_kernel, tensors, traits._asdict(), Options(WARPS))
        run(R, {"ignore_index": ignore_index, "z_loss": z_loss or 0.0, "cap": cap or 0.0})
