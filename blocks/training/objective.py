"""The loss of a language model as a module, for wrappers that act on a module's forward: DDP, FSDP2, pipelines.

B batch, T time
"""

from torch import Tensor, nn

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
