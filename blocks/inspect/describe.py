"""What a model costs and who computes it, layer by layer, as a value; printing is the CLI's."""

from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict
from torch import nn

from deltazoo.backends.explain import explain
from deltazoo.blocks.layer import Layer
from deltazoo.blocks.stack import LanguageModel
from deltazoo.mixers.attention import AttentionMixer
from deltazoo.mixers.core.delta_mixer import Update
from deltazoo.mixers.core.mixer import MixerConfig
from deltazoo.mixers.core.state import nbytes

DEVICES = ("cpu", "cuda")


class LayerRow(BaseModel):
    """One layer.

    Args:
        layer: its place, from 0; mixer: its mixers' names; equation: their recurrences, a line each.
        parameters: of mixers, MLP and norms.
        flops: floating-point operations a token, forward, the MLP's included; a multiply-add counts as two.
        flops_context: more of them for each token of context that is looked back on.
        state_bytes: the recurrent state of a sequence, and the whole cache of a sliding window.
        cache_bytes: the key-value cache, more for every token kept.
        backends: device -> the backend that computes the update there in training; None: no installed one can.
            Empty for a mixer without an update.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    layer: int
    mixer: str
    equation: str
    parameters: int
    flops: int
    flops_context: int
    state_bytes: int
    cache_bytes: int
    backends: dict[str, str | None]


class Description(BaseModel):
    """A model: its layers, and sums over them.

    Args:
        layers: a row each; the other figures are those of `LayerRow` over all layers, with the embedding, the last
            norm and the head in `parameters` and the head in `flops`.
        embedding_parameters: the embedding's, and the head's where it has its own.
        dtype: of the parameters and of key-value caches.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: list[LayerRow]
    parameters: int
    embedding_parameters: int
    flops: int
    flops_context: int
    state_bytes: int
    cache_bytes: int
    dtype: str


def describe(model: LanguageModel) -> Description:
    """Count what a model has; nothing is run, and a model on the meta device will do."""
    pairs = zip(model.spec.expand(), model.stack.layers, strict=True)
    rows = [_row(i, spec.mixers, layer, model.spec.width) for i, (spec, layer) in enumerate(pairs)]
    return Description(
        layers=rows,
        parameters=_count(model),
        embedding_parameters=_count(model.embedding) + (0 if model.head is None else _count(model.head)),
        flops=sum(row.flops for row in rows) + 2 * model.spec.width * model.spec.vocab,
        flops_context=sum(row.flops_context for row in rows),
        state_bytes=sum(row.state_bytes for row in rows),
        cache_bytes=sum(row.cache_bytes for row in rows),
        dtype=str(model.head_weight.dtype).removeprefix("torch."),
    )


def _row(i: int, configs: Iterable[MixerConfig], layer: Layer, width: int) -> LayerRow:
    costs = [config.cost(width) for config in configs]
    # beyond any window: below it a ring has as many slots as tokens may come
    beyond = max([1, *(m.window or 1 for m in layer.modules() if isinstance(m, AttentionMixer))])
    less, more = (nbytes(layer.init_state(1, capacity)) for capacity in (beyond, beyond + 1))
    return LayerRow(
        layer=i,
        mixer=" | ".join(config.name for config in configs),
        equation="\n".join(config.equation() for config in configs),
        parameters=_count(layer),
        flops=sum(cost.flops for cost in costs) + (0 if layer.mlp is None else layer.mlp.flops),
        flops_context=sum(cost.flops_context for cost in costs),
        state_bytes=less - beyond * (more - less),
        cache_bytes=more - less,
        backends=_backends(layer),
    )


def _backends(layer: Layer) -> dict[str, str | None]:
    chosen: dict[str, str | None] = {}
    for update in layer.modules():
        if not isinstance(update, Update):
            continue
        dtype = next(layer.parameters()).dtype
        for device in DEVICES:
            name = explain(update.spec, update.meta(device, dtype, grad=True), update.bound.requested).chosen
            both = device in chosen and chosen[device] != name
            chosen[device] = f"{chosen[device]}, {name}" if both else name
    return chosen


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
