"""The table of linear maps in docs/integrations.md names those of every mixer."""

import re
from pathlib import Path

import torch
from torch import nn

from deltazoo.backends.update import registry
from deltazoo.mixers.core.config import parse
from deltazoo.mixers.core.mixer import Place

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"


def rows() -> list[str]:
    """Return the rows of the table: the names of the nn.Linear modules in a mixer with default fields."""
    table = []
    for name in registry.names(registry.MIXERS):
        if not registry.owner(registry.MIXERS, name).startswith("deltazoo "):
            continue
        with torch.device("meta"):
            mixer = parse({"mixer": name}).build(256, Place(1, 2), backend="reference")
        maps = [path for path, module in mixer.named_modules() if isinstance(module, nn.Linear)]
        if name == "mom":  # its memories have maps of their own
            maps = list(dict.fromkeys(re.sub(r"\.\d$", ".N", path) for path in maps))
        table.append(f"| `{name}` | {', '.join(f'`{path}`' for path in maps)} |")
    return table


def test_page_names_every_linear_map() -> None:
    page = PAGE.read_text().splitlines()
    start = page.index("| mixer | linear maps |") + 2
    expected = rows()
    assert page[start : start + len(expected)] == expected
    assert page[start + len(expected)] == ""
