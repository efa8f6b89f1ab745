"""The checks that any backend must pass; plug-ins run them too."""

from deltazoo.backends.cases import REGIMES, Case, draw
from deltazoo.backends.compare import Error, Report, compare, limit
from deltazoo.backends.shapes import SHAPES, Shape

__all__ = ["REGIMES", "SHAPES", "Case", "Error", "Report", "Shape", "compare", "draw", "limit"]
