"""The losses of a language model as modules, for wrappers that act on a module's forward: DDP, FSDP2, pipelines.

B batch, T time
"""

from torch import Tensor, nn

from deltazoo.blocks.model.losses import Losses
from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.mixers.core.mixer import Context


class Objective(nn.Module):
    """`model.loss` as a forward: DistributedDataParallel(Objective(model))(tokens, targets).backward().

    DDP and FSDP2 act on calls of a module; a call of the method `loss` would bypass them. With FSDP2, shard the layers
    `model.stack.layers` first and then the objective.
    """

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor, context: Context | None = None) -> Tensor:
        """Compute the loss to minimise; arguments, result and errors as for `LanguageModel.loss`."""
        return self.model.loss(tokens_BT, targets_BT, context)


class LossTerms(nn.Module):
    """`model.losses` as a forward, or the loss of each token.

    Args: z_loss: as for `LanguageModel.losses`, in training mode.
    """

    def __init__(self, model: LanguageModel, z_loss: float = 0.0) -> None:
        super().__init__()
        self.model, self.z_loss = model, z_loss

    def forward(
        self, tokens_BT: Tensor, targets_BT: Tensor, context: Context | None = None, by_token: bool = False
    ) -> Losses | Tensor:
        """Compute the losses, or with `by_token` the cross entropy of each target, [B, T] float32, 0 if ignored."""
        if by_token:
            return self.model.token_losses(tokens_BT, targets_BT, context)
        return self.model.losses(tokens_BT, targets_BT, context, self.z_loss if self.training else 0.0)
