"""Language models of one layer around each mixer and MLP, and what they must compute with other libraries' layers."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from small_configs import ZOO
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.blocks.spec.stack_spec import StackSpec
from deltazoo.mixers.core.conformance import relative_error

WIDTH, VOCAB, BATCH, T = 32, 29, 2, 6  # wide enough that the maps to decay and beta are computed by one product
DENSE: dict[str, Any] = {"width": 24}
MOE: dict[str, Any] = {"type": "moe", "experts": 3, "width": 16, "shared_width": 16, "shared_gate": True}
MLPS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "dense without a gate, with biases": {"width": 24, "gated": False, "bias": True, "activation": "gelu"},
    "moe": MOE,
}


def build(
    mixer: str, mlp: Any = DENSE, tied: bool = False, depth: int = 1, dtype: torch.dtype = torch.float32
) -> LanguageModel:
    """Build a model, by default of one layer.

    Every call gives the same weights, which are large enough that every map changes the logits.
    """
    torch.manual_seed(0)
    spec = StackSpec(width=WIDTH, depth=depth, vocab=VOCAB, pattern=ZOO[mixer], mlp=mlp, tied=tied)
    model = spec.build("reference")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("embedding.weight", "head.weight", "out.weight", "to_hidden.weight")):
                parameter.mul_(10)
    return model.to(dtype)


def tokens() -> Tensor:
    return torch.randint(VOCAB, (BATCH, T + 1), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def decode(model: Any, tokens_BT: Tensor) -> Tensor:
    """Return the logits of one call per token. Args: model: a LanguageModel, possibly inside a wrapper."""
    state, logits = model.init_state(tokens_BT.shape[0], tokens_BT.shape[1]), []
    for token_B1 in tokens_BT.split(1, 1):
        logits_B1L, state = model(token_B1, state)
        logits.append(logits_B1L)
    return torch.cat(logits, 1)


def assert_computes(model: Any, expected: LanguageModel, limit: float) -> None:
    """The relative errors of logits, decoded logits and the loss are below `limit`; states are plain tensors.

    If float32 is less exact than that, as with the small divisors of ReBased, they are below four times its error.
    """
    inputs, targets = tokens()[:, :-1], tokens()[:, 1:]
    with torch.no_grad():
        logits = expected(inputs)[0]
        rounding = relative_error(logits, copy.deepcopy(expected).double()(inputs)[0])
        assert rounding < 5e-3
        limit = limit if rounding < limit else 4 * rounding
        assert relative_error(model(inputs)[0], logits) < limit
        assert relative_error(decode(model, inputs), logits) < limit
        assert relative_error(model.loss(inputs, targets), expected.loss(inputs, targets)) < limit
    kinds = [
        [(type(x), x.dtype, x.device, x.shape) for x in tree_leaves(m.init_state(BATCH, T))] for m in (model, expected)
    ]
    assert kinds[0] == kinds[1]


@torch.no_grad()
def copy_weights(model: nn.Module, layers: dict[str, Any], weight: Callable[[Any], Tensor]) -> None:
    """Set the weights of linear maps of `model` to those of other layers. Args: weight: returns that of a layer."""
    for name, layer in layers.items():
        model.get_parameter(f"{name}.weight").copy_(weight(layer))
