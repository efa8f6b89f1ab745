"""Figures of matplotlib, an optional requirement."""

from pathlib import Path
from typing import TYPE_CHECKING

from deltazoo.backends.io.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png", ".pdf")


def why_no_plots() -> str | None:
    """Return why plots cannot be drawn, or None. Call it before work whose result is plotted."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return "plots need matplotlib: pip install 'deltazoo[plot]'"
    return None


def check_suffix(path: Path) -> None:
    """Raise ConfigError unless a picture can have the suffix of this file."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"a plot must end in {', '.join(SUFFIXES)}, got {str(path)!r}")


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure of a size in inches. Raises: ConfigError: matplotlib is not installed."""
    if reason := why_no_plots():
        raise ConfigError(reason)
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")
