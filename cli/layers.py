"""Output of the costs of a model, for `deltazoo build` and `deltazoo show`."""

from typing import TYPE_CHECKING

from deltazoo.cli.output import print_line, print_notes, print_table, print_text

if TYPE_CHECKING:
    from deltazoo.blocks.inspect.describe import Description

# Field of a row -> title of its column, and title in units of 10^6.
_COLUMNS = {
    "parameters": ("parameters", "parameters,\nmillions"),
    "flops": ("FLOPs per\ntoken", "MFLOPs per\ntoken"),
    "flops_context": ("FLOPs per\ncontext", "MFLOPs per\ncontext"),
    "state_bytes": ("state,\nbytes", "state,\nMB"),
    "cache_bytes": ("cache,\nbytes", "cache,\nMB"),
}
_MAX_EXACT = 10**8  # a column with a larger figure is in units of 10^6


def print_layers(description: "Description") -> None:
    """Print the costs of the layers, equal layers once with their number, and the totals."""
    folded = description.fold()
    digits = len(str(max(count for count, _ in folded)))
    columns = {"layers": [*(f"{count:{digits}} x {row.mixer}" for count, row in folded), "all"]}
    for field, (title, title_in_millions) in _COLUMNS.items():
        figures = [*(getattr(row, field) for _, row in folded), getattr(description, field)]
        if max(figures) > _MAX_EXACT:
            columns[f">{title_in_millions}"] = [f"{figure / 1e6:,.1f}" for figure in figures]
        elif any(figures):  # a model without a cache has no such column
            columns[f">{title}"] = [f"{figure:,}" for figure in figures]
    print_table(list(columns), zip(*columns.values(), strict=True))
    print_line()
    print_notes((row.mixer, f"update by {_join_devices(row.backends)}") for row in description.layers if row.backends)
    terms = [
        f"Figures of one layer; all: with embedding and head, in {description.dtype}.",
        "FLOPs per token: forward, a multiply-add counts as two.",
        "FLOPs per context: additional ones per token for each token of context." if description.flops_context else "",
        "State: per sequence." if description.state_bytes else "",
        "Cache: per token." if description.cache_bytes else "",
    ]
    print_text(" ".join(term for term in terms if term))


def _join_devices(backends: dict[str, str | None]) -> str:
    """Return the name of the backend if it is the same on all devices, else each name with its device."""
    names = {device: name or "no backend" for device, name in backends.items()}
    if len(set(names.values())) == 1:
        return next(iter(names.values()))
    return ", ".join(f"{name} on {device}" for device, name in names.items())
