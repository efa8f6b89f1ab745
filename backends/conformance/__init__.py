"""The checks that any backend must pass, ours and theirs; in a plug-in's tests one line runs them:

test_conformance = deltazoo.conformance.suite("my_backend")
"""

from collections.abc import Callable, Iterable, Sequence

import torch

from deltazoo.backends.base import Backend
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
from deltazoo.backends.errors import UnknownNameError, UnsupportedError
from deltazoo.backends.registry import resolve
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
    "matches_the_reference",
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


def checks(
    backend: str | Backend,
    shapes: Sequence[Shape] = TINY,
    dtypes: Sequence[torch.dtype] = DTYPES,
    without: Sequence[str] = (),
    device: str = "cpu",
) -> list[tuple[Property, Case]]:
    """Choose what to check of a backend: the comparison, and every property, each on a pairwise cover of all axes.

    The cover is of the specs, shapes and dtypes that the backend takes.

    Args: without: the names of properties to leave out.
    Raises: UnknownNameError; UnsupportedError for a backend that takes nothing of this.
    """
    known = {found.__name__: found for found in PROPERTIES}
    for name in without:
        if name not in known:
            raise UnknownNameError("property", name, known)
    taken = _taken(resolve(backend), shapes, dtypes, device)
    pairs: list[tuple[Property, Case]] = []
    crossed = []
    for found in (found for name, found in known.items() if name not in without):
        if found is matches_the_reference:
            pairs += [(found, case) for case in pairwise_cases(*taken)]
        elif found is fused_step_matches_reference:
            pairs += [(found, case) for case in fused_cases(resolve(backend), *taken)]
        elif found is compiles_to_one_graph:
            pairs += [(found, case) for case in _GRAPH_CASES]
        elif found is unsupported_returns_sentences:
            pairs += [(found, Case(taken[2][0], taken[0][0], taken[1][0]))]
        else:
            crossed.append(found)
    return pairs + ([(found, case) for case, found in pairwise_with(crossed, *taken)] if crossed else [])


def _taken(
    backend: Backend, shapes: Sequence[Shape], dtypes: Sequence[torch.dtype], device: str
) -> tuple[list[Shape], list[torch.dtype], list[UpdateSpec]]:
    """The shapes, dtypes and specs of which a backend takes at least one combination."""

    def takes(some: Iterable[UpdateSpec], at: Sequence[Shape], on: Sequence[torch.dtype]) -> bool:
        metas = [meta_of(shape, dtype, device) for shape in at for dtype in on]
        return any(not backend.unsupported(spec, meta) for spec in some for meta in metas)

    specs = [spec for spec in every_spec() if takes([spec], shapes, dtypes)]
    if not specs:
        raise UnsupportedError(f"backend {backend.name!r} takes no spec on any of the shapes and dtypes to check")
    taken_shapes = [shape for shape in shapes if takes(specs, [shape], dtypes)]
    return taken_shapes, [dtype for dtype in dtypes if takes(specs, shapes, [dtype])], specs


def suite(
    backend: str | Backend, chosen: Sequence[tuple[Property, Case]] | None = None, device: str = "cpu"
) -> Callable[..., None]:
    """Make a pytest test of a backend, parametrised by property and case; a refused case is skipped with the reasons.

    Args: chosen: what to check; None is `checks(backend)`.
    """
    import pytest

    pairs = checks(backend, device=device) if chosen is None else chosen
    names = [f"{found.__name__}-{case}" for found, case in pairs]

    @pytest.mark.parametrize(("holds", "case"), pairs, ids=names)
    def test_conformance(holds: Property, case: Case) -> None:
        report = holds(backend, case, device)
        assert not report.failures, str(report)
        if report.refused:
            pytest.skip(" ".join(report.refused))

    return test_conformance
