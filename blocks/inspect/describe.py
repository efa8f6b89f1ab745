"""Costs of a model layer by layer: parameters, state and cache bytes, FLOPs, and the backend of each update."""

from pydantic import BaseModel, ConfigDict
from torch import nn

from deltazoo.backends.explain import explain
from deltazoo.blocks.layer import Layer, LayerSpec
from deltazoo.blocks.stack import LanguageModel
from deltazoo.mixers.attention import AttentionMixer
from deltazoo.mixers.core.activations import activation_like
from deltazoo.mixers.core.delta_mixer import Update
from deltazoo.mixers.core.state import nbytes

DEVICES = ("cpu", "cuda")


class LayerRow(BaseModel):
    """The costs of one layer.

    Args:
        layer: index, from 0.
        mixer: the names of its mixers, or "mlp".
        equation: the recurrences of its mixers, one per line.
        parameters: number of parameters, with the MLP and the norms; 0 for a shared module after its first place.
        flops: FLOPs per token in the forward pass, with the MLP; a multiply-add counts as two.
        flops_context: additional FLOPs per token for each token of context that is read.
        state_bytes: recurrent state per sequence, including the whole cache of a sliding window.
        cache_bytes: key-value cache per token.
        backends: for each device, the backend that computes the update in training; None if no installed backend
            can. Empty for a mixer without an update.
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
    """The costs of a model: a row per layer, and totals.

    Args:
        layers: the rows. The other figures are totals of the fields of `LayerRow`.
        parameters: includes the embedding, the last norm and the head.
        embedding_parameters: those of the embedding, and of the head if it is not tied.
        flops: includes the head.
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

    def fold(self) -> list[tuple[int, LayerRow]]:
        """Return the rows that differ in more than the index, each with the number of layers that equal it."""
        folded: list[tuple[int, LayerRow]] = []
        for row in self.layers:
            for i, (count, first) in enumerate(folded):
                if row.model_copy(update={"layer": first.layer}) == first:
                    folded[i] = (count + 1, first)
                    break
            else:
                folded.append((1, row))
        return folded


def describe(model: LanguageModel) -> Description:
    """Count the costs of a model. Nothing is computed, so the model may be on the meta device."""
    layers = list(model.stack.layers)
    rows = []
    for i, (spec, layer) in enumerate(zip(model.spec.expand(), layers, strict=True)):
        row = _row(i, spec, layer, model.spec.width)
        rows.append(row.model_copy(update={"parameters": 0}) if layer in layers[:i] else row)
    return Description(
        layers=rows,
        parameters=parameter_count(model),
        embedding_parameters=sum(parameter_count(x) for x in (model.embedding, model.head) if x is not None),
        flops=sum(row.flops for row in rows) + 2 * model.spec.width * model.spec.vocab,
        flops_context=sum(row.flops_context for row in rows),
        state_bytes=sum(row.state_bytes for row in rows),
        cache_bytes=sum(row.cache_bytes for row in rows),
        dtype=str(activation_like(model).dtype).removeprefix("torch."),
    )


def _row(index: int, spec: LayerSpec, layer: Layer, width: int) -> LayerRow:
    costs = [config.cost(width) for config in spec.mixers]
    # A sliding window allocates min(window, capacity) slots, which is constant from a capacity of `full_window` on. The
    # difference of two larger capacities is then the cache per token of full attention.
    full_window = max([1, *(m.window or 1 for m in layer.modules() if isinstance(m, AttentionMixer))])
    smaller, larger = (nbytes(layer.init_state(1, capacity)) for capacity in (full_window, full_window + 1))
    cache_bytes = larger - smaller
    return LayerRow(
        layer=index,
        mixer=spec.title,
        equation="\n".join(config.equation() for config in spec.mixers),
        parameters=parameter_count(layer),
        flops=sum(cost.flops for cost in costs) + (0 if layer.mlp is None else layer.mlp.flops),
        flops_context=sum(cost.flops_context for cost in costs),
        state_bytes=smaller - full_window * cache_bytes,
        cache_bytes=cache_bytes,
        backends=_backends(layer),
    )


def _backends(layer: Layer) -> dict[str, str | None]:
    """Return the backend of the layer's updates for each device; several different ones are joined."""
    chosen: dict[str, str | None] = {}
    for update in layer.modules():
        if not isinstance(update, Update):
            continue
        dtype = activation_like(layer).dtype
        for device in DEVICES:
            name = explain(update.spec, update.meta(device, dtype, grad=True), update.bound.requested).chosen
            differs = device in chosen and chosen[device] != name
            chosen[device] = f"{chosen[device]}, {name}" if differs else name
    return chosen


def parameter_count(module: nn.Module) -> int:
    """Return the number of parameters of a module; a shared one counts once."""
    return sum(parameter.numel() for parameter in module.parameters())
