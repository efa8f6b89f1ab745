"""The checks that any backend must pass, ours and theirs; in a plug-in's tests one line runs them:

test_conformance = deltazoo.conformance.suite("my_backend")
"""

from collections.abc import Callable, Sequence

import torch

from deltazoo.backends.base import Backend
from deltazoo.backends.cases import REGIMES, Case, draw
from deltazoo.backends.checkfile import CheckFile, read_check, run_checks
from deltazoo.backends.compare import Error, Report, compare, limit, relative_error
from deltazoo.backends.cover import every_case, every_spec, pairwise_cases, pairwise_with
from deltazoo.backends.errors import UnknownNameError
from deltazoo.backends.properties import (
    PROPERTIES,
    Property,
    agrees_with_the_reference,
    one_graph_gives_the_same_numbers,
)
from deltazoo.backends.shapes import SHAPES, TINY, Shape
from deltazoo.backends.spec import UpdateSpec

__all__ = [
    "PROPERTIES",
    "REGIMES",
    "SHAPES",
    "TINY",
    "Case",
    "CheckFile",
    "Error",
    "Property",
    "Report",
    "Shape",
    "agrees_with_the_reference",
    "checks",
    "compare",
    "draw",
    "every_case",
    "every_spec",
    "limit",
    "pairwise_cases",
    "read_check",
    "relative_error",
    "run_checks",
    "suite",
]

# Tracing takes seconds a case: a few that differ in all that changes a graph.
_GRAPH_CASES = (
    Case(UpdateSpec(decay="head", beta="head"), SHAPES["grouped"]),
    Case(UpdateSpec(decay="rate", transition="additive"), SHAPES["pack"], state="none"),
    Case(UpdateSpec(decay="fixed", transition="dplr"), SHAPES["plain"], torch.bfloat16),
    Case(UpdateSpec(beta="channel", negative_eigenvalues="both", householders=2), SHAPES["one_token"]),
)


def checks(without: Sequence[str] = ()) -> list[tuple[Property, Case]]:
    """Choose what to check: the comparison and every property, each on a pairwise cover of all axes.

    Args: without: the names of properties to leave out.
    Raises: UnknownNameError.
    """
    known = {found.__name__: found for found in PROPERTIES}
    for name in without:
        if name not in known:
            raise UnknownNameError("property", name, known)
    left = [found for name, found in known.items() if name not in without]
    crossed = [found for found in left if found not in (agrees_with_the_reference, one_graph_gives_the_same_numbers)]
    pairs = [(found, case) for case, found in pairwise_with(crossed)] if crossed else []
    if one_graph_gives_the_same_numbers in left:
        pairs = [(one_graph_gives_the_same_numbers, case) for case in _GRAPH_CASES] + pairs
    if agrees_with_the_reference in left:
        pairs = [(agrees_with_the_reference, case) for case in pairwise_cases()] + pairs
    return pairs


def suite(
    backend: str | Backend, chosen: Sequence[tuple[Property, Case]] | None = None, device: str = "cpu"
) -> Callable[..., None]:
    """Make a pytest test of a backend, parametrised by property and case; a refused case is skipped with the reasons.

    Args: chosen: what to check; None is `checks()`.
    """
    import pytest

    pairs = checks() if chosen is None else chosen
    names = [f"{found.__name__}-{case}" for found, case in pairs]

    @pytest.mark.parametrize(("holds", "case"), pairs, ids=names)
    def test_conformance(holds: Property, case: Case) -> None:
        report = holds(backend, case, device)
        assert not report.failures, str(report)
        if report.refused:
            pytest.skip(" ".join(report.refused))

    return test_conformance
