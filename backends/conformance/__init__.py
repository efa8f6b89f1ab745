"""Conformance checks for every backend. A plug-in runs them in its tests with one line:

test_conformance = deltazoo.conformance.suite("my_backend")
"""

import itertools
from collections.abc import Callable, Iterable, Sequence

import torch

from deltazoo.backends.conformance.cases import REGIMES, Case, draw
from deltazoo.backends.conformance.check_file import CheckFile, read_check, run_checks
from deltazoo.backends.conformance.compare import Error, Report, compare, limit, meta_of, relative_error
from deltazoo.backends.conformance.decode_step import fused_cases
from deltazoo.backends.conformance.pairwise import DTYPES, every_case, every_spec, pairwise_cases, pairwise_with
from deltazoo.backends.conformance.properties import (
    PROPERTIES,
    Property,
    compiles_to_one_graph,
    fused_step_matches_reference,
    matches_the_reference,
    unsupported_returns_sentences,
)
from deltazoo.backends.io.errors import UnknownNameError, UnsupportedError
from deltazoo.backends.measure.shapes import SHAPES, TINY, Shape
from deltazoo.backends.update.base import Backend
from deltazoo.backends.update.registry import resolve
from deltazoo.backends.update.spec import UpdateSpec

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
    "checks",
    "compare",
    "draw",
    "every_case",
    "every_spec",
    "limit",
    "matches_the_reference",
    "pairwise_cases",
    "read_check",
    "relative_error",
    "run_checks",
    "suite",
]

# Tracing takes seconds per case, so these few differ in everything that changes the graph.
_GRAPH_CASES = (
    Case(UpdateSpec(decay="head", beta="head"), SHAPES["grouped"]),
    Case(UpdateSpec(decay="rate", transition="additive"), SHAPES["pack"], state="none"),
    Case(UpdateSpec(decay="fixed", transition="dplr"), SHAPES["plain"], torch.bfloat16),
    Case(UpdateSpec(beta="channel", negative_eigenvalues="both", householders=2), SHAPES["one_token"]),
)


def checks(
    backend: str | Backend,
    shapes: Sequence[Shape] = TINY,
    dtypes: Sequence[torch.dtype] = DTYPES,
    without: Sequence[str] = (),
    device: str = "cpu",
) -> list[tuple[Property, Case]]:
    """Return the properties of a backend to check, each with cases from a pairwise cover of all axes.

    The cover consists of the specs, shapes and dtypes that the backend supports.

    Args: without: names of properties to leave out.
    Raises: UnknownNameError; UnsupportedError for a backend that supports none of the combinations.
    """
    known = {check.__name__: check for check in PROPERTIES}
    for name in without:
        if name not in known:
            raise UnknownNameError("property", name, known)
    supported = _supported(resolve(backend), shapes, dtypes, device)
    pairs: list[tuple[Property, Case]] = []
    crossed = []
    for check in (check for name, check in known.items() if name not in without):
        if check is matches_the_reference:
            pairs += [(check, case) for case in pairwise_cases(*supported)]
        elif check is fused_step_matches_reference:
            pairs += [(check, case) for case in fused_cases(resolve(backend), *supported)]
        elif check is compiles_to_one_graph:
            pairs += [(check, case) for case in _GRAPH_CASES]
        elif check is unsupported_returns_sentences:
            pairs += [(check, Case(supported[2][0], supported[0][0], supported[1][0]))]
        else:
            crossed.append(check)
    return pairs + ([(check, case) for case, check in pairwise_with(crossed, *supported)] if crossed else [])


def _supported(
    backend: Backend, shapes: Sequence[Shape], dtypes: Sequence[torch.dtype], device: str
) -> tuple[list[Shape], list[torch.dtype], list[UpdateSpec]]:
    """Return the shapes, dtypes and specs that a backend supports in at least one combination."""

    metas = {(shape, dtype): meta_of(shape, dtype, device) for shape in shapes for dtype in dtypes}

    def supports(specs: Iterable[UpdateSpec], shapes: Sequence[Shape], dtypes: Sequence[torch.dtype]) -> bool:
        keys = itertools.product(shapes, dtypes)
        return any(not backend.unsupported(spec, metas[key]) for key in keys for spec in specs)

    specs = [spec for spec in every_spec() if supports([spec], shapes, dtypes)]
    if not specs:
        raise UnsupportedError(f"backend {backend.name!r} supports no spec on any of the shapes and dtypes to check")
    supported_shapes = [shape for shape in shapes if supports(specs, [shape], dtypes)]
    return supported_shapes, [dtype for dtype in dtypes if supports(specs, shapes, [dtype])], specs


def suite(
    backend: str | Backend, chosen: Sequence[tuple[Property, Case]] | None = None, device: str = "cpu"
) -> Callable[..., None]:
    """Return a pytest test of a backend, parametrised by property and case; a refused case is skipped with the reasons.

    Args: chosen: properties and cases; None is `checks(backend)`.
    """
    import pytest

    pairs = checks(backend, device=device) if chosen is None else chosen
    names = [f"{check.__name__}-{case}" for check, case in pairs]

    @pytest.mark.parametrize(("check", "case"), pairs, ids=names)
    def test_conformance(check: Property, case: Case) -> None:
        report = check(backend, case, device)
        assert not report.failures, str(report)
        if report.refused:
            pytest.skip(" ".join(report.refused))

    return test_conformance
