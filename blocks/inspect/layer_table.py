"""The costs of a model's layers as a table: rows and totals, and their text, which fits a width, and Markdown."""

import shutil
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from deltazoo.backends.io.text_layout import group_by_text, table_lines, wrap

_PIPE_WIDTH = 100  # columns of the sentences where the width is not limited
_MAX_EXACT = 100_000  # larger figures have a unit where exact ones do not fit


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
        return _text_lines(self, width, rule)

    def markdown(self) -> str:
        """Return the table of the layers as Markdown."""
        return _markdown(self)

    def __str__(self) -> str:
        return "\n".join(self.lines(shutil.get_terminal_size().columns))


class _Figure(NamedTuple):
    """A column of figures: field of `LayerRow`, title and units of 10^3, 10^6, 10^9 and 10^12."""

    field: str
    title: str
    units: str


_FIGURES = (
    _Figure("parameters", "params", "KMBT"),
    _Figure("active_parameters", "active\nparams", "KMBT"),
    _Figure("flops", "FLOPs/\ntoken", "KMGT"),
    _Figure("flops_context", "FLOPs/\ncontext", "KMGT"),
    _Figure("state_bytes", "state,\nbytes", "KMGT"),
    _Figure("cache_bytes", "cache,\nbytes", "KMGT"),
)


def _text_lines(description: Description, width: int | None, rule: str) -> list[str]:
    """Format the table, the backends of the updates and a legend; arguments as for `Description.lines`."""
    lines, exact = table_lines(*_cells(description, exact=True, stacked=False), None, rule), True
    if width is not None and _width(lines) > width:
        exact, limit = False, width
        # texts that wrap within three columns, or in one: the one that fits, else the one with fewer lines
        tables = [table_lines(*_cells(description, exact, stacked), width, rule) for stacked in (False, True)]
        lines = min(tables, key=lambda table: (max(_width(table), limit), len(table)))
    updates = ((row.mixer, f"update by {_join_devices(row.backends)}") for row in description.layers if row.backends)
    notes = [f"{', '.join(names)}: {text}" for text, names in group_by_text(updates).items()]
    sentences = [*notes, " ".join(_legend(description, exact))]
    return [*lines, "", *(line for text in sentences for line in wrap(text, width or _PIPE_WIDTH, rest="  "))]


def _markdown(description: Description) -> str:
    """Format the table with exact figures as Markdown."""
    columns, rows = _cells(description, exact=True, stacked=False)
    kept = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    titles = [columns[i].removeprefix(">").replace("/\n", "/").replace("\n", " ") for i in kept]
    rules = ["---:" if columns[i].startswith(">") else "---" for i in kept]
    lines = [titles, rules, *([row[i].replace("|", "\\|") for i in kept] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _width(lines: list[str]) -> int:
    return max(map(len, lines))


def _cells(description: Description, exact: bool, stacked: bool) -> tuple[list[str], list[list[str]]]:
    """Return the titles and the rows; a column that does not apply to the model is empty.

    Args: exact: figures without a unit. stacked: name, mixer and MLP are lines of one cell.
    """
    folded = description.fold()
    texts = [_texts(row) for _, _, row in folded]
    titles = [title for i, title in enumerate(("name", "mixer", "MLP")) if any(text[i] for text in texts)]
    columns = ["layers", *([", ".join(titles)] if stacked else ("name", "mixer", "MLP"))]
    rows = []
    for (first, last, _), text in zip(folded, texts, strict=True):
        layers = str(first) if first == last else f"{first}-{last}"
        rows.append([layers, *(["\n".join(part for part in text if part not in ("", "none"))] if stacked else text)])
    rows.append(["all", *[""] * (len(columns) - 1)])
    for field, title, units in _FIGURES:
        figures = [*(getattr(row, field) for _, _, row in folded), getattr(description, field)]
        same = field == "active_parameters" and description.active_parameters == description.parameters
        columns.append(f">{title}")
        for row, figure in zip(rows, figures, strict=True):
            row.append("" if same or not any(figures) else f"{figure:,}" if exact else _short(figure, units))
    return columns, rows


def _texts(row: LayerRow) -> tuple[str, str, str]:
    """Return the name, the mixer and the MLP; the name is omitted if it is that of the mixer."""
    return "" if row.name == row.mixer else row.name, row.mixer, row.mlp or "none"


def _short(figure: int, units: str) -> str:
    """Format a figure with four digits and a unit if it is large: 2.924B."""
    if figure < _MAX_EXACT:
        return f"{figure:,}"
    scaled, unit = figure / 1000, 0
    while float(f"{scaled:.4g}") >= 1000 and unit < len(units) - 1:
        scaled, unit = scaled / 1000, unit + 1
    return f"{scaled:.4g}{units[unit]}"


def _legend(description: Description, exact: bool) -> list[str]:
    rows = description.layers
    sentences = {
        f"Figures of one layer; all: with embedding and head, in {description.dtype}.": True,
        "K, M, B or G: 10^3, 10^6, 10^9.": not exact,
        "0 params: the layer shares the weights of an earlier one.": any(row.parameters == 0 for row in rows),
        "MoE k/E x F + S: k of E experts of the hidden width F, and a shared one of width S.": any(
            row.mlp.startswith("MoE") for row in rows
        ),
        "Active: those that a token uses.": description.active_parameters < description.parameters,
        "FLOPs/token: forward, a multiply-add counts as two.": True,
        "FLOPs/context: additional ones per token for each token of context.": description.flops_context > 0,
        "State: per sequence.": description.state_bytes > 0,
        "Cache: per token.": description.cache_bytes > 0,
    }
    return [sentence for sentence, applies in sentences.items() if applies]


def _join_devices(backends: dict[str, str | None]) -> str:
    """Return the name of the backend if it is the same on all devices, else each name with its device."""
    names = {device: name or "no backend" for device, name in backends.items()}
    if len(set(names.values())) == 1:
        return next(iter(names.values()))
    return ", ".join(f"{name} on {device}" for device, name in names.items())
