"""Statistics of recurrent layers during training: norms of states, and decays.

B batch, T time
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.update.base import UpdateInputs
from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.update import Update


def check_watchable(model: LanguageModel) -> None:
    """Raise ConfigError if the statistics cannot be computed: FSDP2 gathers weights in calls of its root only."""
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ConfigError("logging.watch needs whole weights: use parallel.mode ddp, got fsdp")


@torch.no_grad()
def recurrent_statistics(model: LanguageModel, tokens: Tensor) -> dict[str, dict[str, float]]:
    """Run the model without compilation on rows [B, T], and return statistics of each layer with an update.

    Returns: by "layer 3": state_rms, root mean square of the final state; decay_mean, decay_min and decay_max, of
        exp(log_decay) per token; forgets, the fraction of decays below 1/2.
    """
    found: dict[str, dict[str, float]] = {}
    hooks = []
    for index, layer in enumerate(model.stack.layers):
        for module in layer.modules():
            if isinstance(module, Update):
                hooks.append(module.register_forward_pre_hook(_recorder(found, f"layer {index}"), with_kwargs=True))
    try:
        with torch.compiler.set_stance("force_eager"):
            _, state = model.features(tokens, model.init_state(*tokens.shape), Context())
    finally:
        for hook in hooks:
            hook.remove()
    assert state is not None
    for index, layer_state in enumerate(state.layers):
        if f"layer {index}" in found:
            states = [x.float() for x in tree_leaves(layer_state) if isinstance(x, Tensor) and x.is_floating_point()]
            largest = max(states, key=Tensor.numel, default=None)
            if largest is not None:
                found[f"layer {index}"]["state_rms"] = float(largest.square().mean().sqrt())
    return found


def _recorder(found: dict[str, dict[str, float]], name: str) -> Callable[..., None]:
    def record(module: Update, arguments: tuple[object, ...], keywords: dict[str, object]) -> None:
        found.setdefault(name, {})
        inputs = next((x for x in (*arguments, *keywords.values()) if isinstance(x, UpdateInputs)), None)
        if inputs is not None and inputs.log_decay is not None:
            decay = inputs.log_decay.float().exp()
            found[name] |= {
                "decay_mean": float(decay.mean()),
                "decay_min": float(decay.min()),
                "decay_max": float(decay.max()),
                "forgets": float((decay < 0.5).float().mean()),
            }

    return record
