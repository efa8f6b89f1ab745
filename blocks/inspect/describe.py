"""Costs of a model layer by layer: parameters, state and cache bytes, FLOPs, and the backend of each update."""

import shutil

from pydantic import BaseModel, ConfigDict
from torch import nn

from deltazoo.backends.update.explain import explain
from deltazoo.blocks.inspect.layer_table import markdown, text_lines
from deltazoo.blocks.model.layer import Layer, LayerSpec
from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.blocks.spec.parsing import MlpConfig
from deltazoo.mixers.attention import AttentionMixer
from deltazoo.mixers.core.activations import activation_like
from deltazoo.mixers.core.delta_mixer import Update
from deltazoo.mixers.core.part import active_parameters
from deltazoo.mixers.core.state import nbytes

DEVICES = ("cpu", "cuda")


class LayerRow(BaseModel):
    """The costs of one layer.

    Args:
        layer: index, from 0.
        name: its name in the pattern of the stack.
        mixer: the names of its mixers, or "mlp".
        mlp: the type and the sizes of its MLP; "" without one.
        equation: the recurrences of its mixers, one per line.
        repeats: whether its name and config equal those of the layer before.
        parameters: number of parameters, with the MLP and the norms; 0 for a shared module after its first place.
        active_parameters: those that a token passes through: not the experts or memories that it is not sent to.
        flops: FLOPs per token in the forward pass, with the MLP; a multiply-add counts as two.
        flops_context: additional FLOPs per token for each token of context that is read.
        state_bytes: recurrent state per sequence, including the whole cache of a sliding window.
        cache_bytes: key-value cache per token.
        backends: for each device, the backend that computes the update in training; None if no installed backend
            can. Empty for a mixer without an update.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    layer: int
    name: str
    mixer: str
    mlp: str
    equation: str
    repeats: bool
    parameters: int
    active_parameters: int
    flops: int
    flops_context: int
    state_bytes: int
    cache_bytes: int
    backends: dict[str, str | None]


class Description(BaseModel):
    """The costs of a model: a row per layer, and totals. `print` shows them as a table.

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
    active_parameters: int
    embedding_parameters: int
    flops: int
    flops_context: int
    state_bytes: int
    cache_bytes: int
    dtype: str

    def fold(self) -> list[tuple[int, int, LayerRow]]:
        """Return the runs of equal layers in order: the first and the last index, and the row of the first."""
        runs: list[tuple[int, int, LayerRow]] = []
        for row in self.layers:
            # a shared module has its parameters in the first row only
            if row.repeats and row.parameters == self.layers[row.layer - 1].parameters:
                first, _, same = runs.pop()
                runs.append((first, row.layer, same))
            else:
                runs.append((row.layer, row.layer, row))
        return runs

    def lines(self, width: int | None = None, rule: str = "-") -> list[str]:
        """Return the table of the layers, the backends of the updates and a legend as lines of text.

        Args: width: columns of the text; figures get units, and texts wrap, if they do not fit. rule: the character of
            the line below the header.
        """
        return text_lines(self, width, rule)

    def markdown(self) -> str:
        """Return the table of the layers as Markdown."""
        return markdown(self)

    def __str__(self) -> str:
        return "\n".join(self.lines(shutil.get_terminal_size().columns))


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
