"""Figures of matplotlib, an optional requirement."""

from typing import TYPE_CHECKING

from deltazoo.backends.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure of a size in inches. Raises: ConfigError: matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install 'deltazoo[plot]'") from error
    return Figure(figsize=(width, height), layout="constrained")
