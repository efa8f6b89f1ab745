"""Costs of a model layer by layer: parameters, state and cache bytes, FLOPs, and the backend of each update."""

from torch import nn

from deltazoo.backends.update.explain import explain
from deltazoo.blocks.inspect.layer_table import Description, LayerRow
from deltazoo.blocks.model.layer import Layer, LayerSpec
from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.blocks.spec.parsing import MlpConfig
from deltazoo.mixers.attention import AttentionMixer
from deltazoo.mixers.core.activations import activation_like
from deltazoo.mixers.core.part import active_parameters
from deltazoo.mixers.core.state import nbytes
from deltazoo.mixers.core.update import Update

DEVICES = ("cpu", "cuda")


def describe(model: LanguageModel) -> Description:
    """Count the costs of a model. Nothing is computed, so the model may be on the meta device."""
    layers, specs, names = list(model.stack.layers), model.spec.expand(), model.spec.layer_names()
    rows = []
    for i, (spec, layer) in enumerate(zip(specs, layers, strict=True)):
        repeats = i > 0 and (spec, names[i]) == (specs[i - 1], names[i - 1])
        row = _row(i, names[i], repeats, spec, layer, model.spec.width)
        again = {"parameters": 0, "active_parameters": 0}
        rows.append(row.model_copy(update=again) if layer in layers[:i] else row)
    return Description(
        layers=rows,
        parameters=parameter_count(model),
        active_parameters=active_parameters(model),
        embedding_parameters=sum(parameter_count(x) for x in (model.embedding, model.head) if x is not None),
        flops=sum(row.flops for row in rows) + 2 * model.spec.width * model.spec.vocab,
        flops_context=sum(row.flops_context for row in rows),
        state_bytes=sum(row.state_bytes for row in rows),
        cache_bytes=sum(row.cache_bytes for row in rows),
        dtype=str(activation_like(model).dtype).removeprefix("torch."),
    )


def _row(index: int, name: str, repeats: bool, spec: LayerSpec, layer: Layer, width: int) -> LayerRow:
    costs = [config.cost(width) for config in spec.mixers]
    # A sliding window allocates min(window, capacity) slots, which is constant from a capacity of `full_window` on. The
    # difference of two larger capacities is then the cache per token of full attention.
    full_window = max([1, *(m.window or 1 for m in layer.modules() if isinstance(m, AttentionMixer))])
    smaller, larger = (nbytes(layer.init_state(1, capacity)) for capacity in (full_window, full_window + 1))
    cache_bytes = larger - smaller
    return LayerRow(
        layer=index,
        name=name,
        mixer=spec.title,
        mlp=spec.mlp.title(width) if isinstance(spec.mlp, MlpConfig) else "",
        equation="\n".join(config.equation() for config in spec.mixers),
        repeats=repeats,
        parameters=parameter_count(layer),
        active_parameters=active_parameters(layer),
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
