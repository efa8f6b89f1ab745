"""Plot of a stack: the parameters of each layer, and the memory of a sequence against its length."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from deltazoo.backends.io.output_path import output_path
from deltazoo.blocks.inspect.describe import parameter_count
from deltazoo.blocks.inspect.figure import check_suffix, new_figure
from deltazoo.blocks.model.layer import LayerSpec
from deltazoo.blocks.model.mlp import Dense
from deltazoo.blocks.spec.stack_spec import StackSpec
from deltazoo.mixers.attention import Attention
from deltazoo.mixers.core.mixer import FIRST_PLACE
from deltazoo.mixers.core.state import nbytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LENGTHS = [2**n for n in range(8, 21)]  # tokens
_MAX_LABELS = 16  # layers with a label of their number of parameters


def plot_stack(spec: StackSpec, path: Path) -> None:
    """Plot the layers as blocks and the bytes of a sequence against its length, beside those of a transformer.

    The height of a block is its number of parameters: in one colour per kind of mixer, with the MLP in grey above.

    Raises: ConfigError: matplotlib is not installed, or the file has another suffix than .svg, .png or .pdf.
    """
    check_suffix(path)
    figure = new_figure(11, 6)
    above, below = figure.subplots(2)
    _plot_layers(spec, above)
    _plot_memory(spec, below)
    figure.savefig(output_path(path), metadata={"Date": None} if path.suffix == ".svg" else None)


def transformer_of(spec: StackSpec) -> StackSpec:
    """Return a transformer of the same width and, to the nearest layer, the same number of parameters.

    Its attention is the first full attention of the stack, or one with the default fields; its MLP is the stack's most
    frequent one, or the default.
    """
    layers = spec.expand()
    attention = next((m for layer in layers for m in layer.mixers if isinstance(m, Attention)), Attention())
    mlps = Counter(layer.mlp for layer in layers if layer.mlp not in (None, "none"))
    layer = LayerSpec(mixer=attention, mlp=mlps.most_common(1)[0][0] if mlps else Dense())
    with torch.device("meta"):
        size = parameter_count(layer.build(spec.width, FIRST_PLACE))
    depth = max(1, round(sum(row.parameters for row in spec.describe().layers) / size))
    return StackSpec(width=spec.width, depth=depth, vocab=spec.vocab, pattern=layer, tied=spec.tied)


def memory(spec: StackSpec, lengths: list[int]) -> list[int]:
    """Return the bytes of states and caches of one sequence of each length, in tokens."""
    with torch.device("meta"):
        model = spec.build()
        return [nbytes(model.init_state(1, capacity=length)) for length in lengths]


def _plot_layers(spec: StackSpec, axes: "Axes") -> None:
    with torch.device("meta"):
        layers = spec.build_layers()
    colours: dict[str, str] = {}
    labels: set[str] = set()

    def draw(i: int, height: int, bottom: int, title: str, colour: str) -> None:
        alpha = 0.3 if layers[i] in layers[:i] else 1.0  # pale: a shared layer; its parameters count once
        label = None if title in labels else title
        axes.bar(i, height, width=0.9, bottom=bottom, color=colour, alpha=alpha, label=label)
        labels.add(title)

    for i, (config, layer) in enumerate(zip(spec.expand(), layers, strict=True)):
        total = parameter_count(layer)
        mlp = 0 if layer.mlp is None else parameter_count(layer.mlp)
        if config.mixers:
            draw(i, total - mlp, 0, config.title, colours.setdefault(config.title, f"C{len(colours)}"))
        if mlp:
            draw(i, mlp, total - mlp, "mlp", "0.8")
        if len(layers) <= _MAX_LABELS:
            axes.text(i, total, _short(total), ha="center", va="bottom", fontsize="x-small")
    axes.set(xlabel="layer", ylabel="parameters")
    axes.set_title(f"{_short(spec.describe().parameters)} parameters, {spec.pattern}", fontsize="small", wrap=True)
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _plot_memory(spec: StackSpec, axes: "Axes") -> None:
    for name, stack in (("this stack", spec), ("a transformer", transformer_of(spec))):
        label = f"{name}\n{stack.depth} layers\n{_short(stack.describe().parameters)} parameters"
        axes.plot(_LENGTHS, memory(stack, _LENGTHS), marker=".", label=label)
    axes.set(xlabel="context, tokens", ylabel=f"state and cache, bytes ({spec.describe().dtype})", yscale="log")
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _short(count: float) -> str:
    """Format a count with three digits and a unit: 8.65B."""
    for unit in ("", "K", "M", "B"):
        text = f"{count:.3g}"
        if float(text) < 1000:
            return text + unit
        count /= 1000
    return f"{count:.3g}T"
