"""Tensors that are sharded over processes, such as the parameters of FSDP2 (tested with torch 2.13)."""

from torch import Tensor, nn


def place_as(like: Tensor, tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, placed as `like` is, or the tensor if `like` is not sharded.

    Every rank has the whole tensor: nothing is communicated. The part does not share its memory.
    """
    if type(like) in (Tensor, nn.Parameter):
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor  # its import takes seconds

    if not isinstance(like, DTensor):
        return tensor
    placed = distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
    return DTensor.from_local(
        placed.to_local().clone(),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
