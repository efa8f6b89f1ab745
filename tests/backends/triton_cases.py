"""What the tests of the triton backend run on: specs, shapes, ways of launching, and where.

The kernels run on a GPU, or on the CPU under Triton's interpreter: TRITON_INTERPRET=1, as `make test` sets it.
"""

import os
from functools import partial

import pytest
import torch

from deltazoo import UpdateInputs, UpdateSpec, conformance
from deltazoo.backends.conformance import Case, draw
from deltazoo.backends.conformance.compare import draw_cotangents, reference_results, relative_error, run
from deltazoo.backends.shapes import Shape

pytest.importorskip("triton", reason="the kernels need the package triton")
from deltazoo.backends.triton import Launch, LaunchConfig, TritonBackend

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
ABLE = INTERPRETED or torch.cuda.is_available()
runs = pytest.mark.skipif(
    not ABLE,
    reason="needs a CUDA device, or TRITON_INTERPRET=1 as make test sets it",
)

# Small tiles, so that small shapes have several of everything: chunks, parts, segments, tiles of values and of keys.
_SMALL = Launch(tile=16, stages=1)
_TILES = {
    "prepare": _SMALL,
    "scan": _SMALL,
    "replay": _SMALL,
    "reverse": _SMALL,
    "gradients": Launch(tile=16, stages=1, keys=32),
    "decode": _SMALL,
}
CONFIGS = {
    "in one": LaunchConfig(chunk=16, every=2, **_TILES),
    "parts": LaunchConfig(chunk=16, every=1, split=2, **_TILES),
    "segments": LaunchConfig(chunk=16, every=2, scratch=0, **_TILES),
    "few segments": LaunchConfig(chunk=16, every=1, scratch=30000, **_TILES),
    "parts and segments": LaunchConfig(chunk=16, every=1, split=2, scratch=0, **_TILES),
    "longer chunks": LaunchConfig(chunk=32, every=1, **(_TILES | {"prepare": Launch(tile=16, stages=1)})),
}


def backend(way: str = "in one") -> TritonBackend:
    """Small tiles under the interpreter; on a GPU what users get, unless a way of launching is named."""
    return TritonBackend(CONFIGS[way] if INTERPRETED or way != "in one" else None)


SPECS = {
    "gated delta": UpdateSpec(decay="head", beta="head"),
    "delta": UpdateSpec(),
    "retnet": UpdateSpec(decay="fixed", transition="additive"),
    "mamba2": UpdateSpec(decay="head", transition="additive", beta="head"),
    "linear": UpdateSpec(transition="additive"),
    "comba": UpdateSpec(decay="head", beta="head", erase_key="own", erase_from="previous"),
    "read before": UpdateSpec(decay="head", transition="additive", read="before"),
    "both before": UpdateSpec(decay="head", beta="head", read="before", erase_from="previous"),
    "negative": UpdateSpec(decay="head", beta="head", negative_eigenvalues="both"),
    "householders": UpdateSpec(decay="head", beta="head", householders=2, negative_eigenvalues="erase"),
    "householders, before": UpdateSpec(
        decay="fixed", beta="head", householders=3, erase_from="previous", read="before"
    ),
    "efla": UpdateSpec(decay="head", beta="head", reparam="efla"),
}
# these the kernels for Hopper GPUs take; the others keep float32 states
IN_16_BITS = ("gated delta", "delta", "retnet", "mamba2", "linear", "read before", "both before", "efla")
SHAPES = {
    "grouped": Shape("grouped", B=2, T=37, H=1, HV=2, K=12, V=20),
    "pack": Shape("pack", B=1, T=83, H=1, HV=2, K=16, V=16, lengths=(17, 0, 1, 65)),
    "many chunks": Shape("many chunks", B=1, T=150, H=1, HV=1, K=16, V=16),
    "two key tiles": Shape("two key tiles", B=1, T=40, H=1, HV=1, K=144, V=16),
    "odd widths": Shape("odd widths", B=1, T=33, H=1, HV=1, K=5, V=9),
}
DTYPES = (torch.float32, torch.float16) if INTERPRETED else (torch.float32, torch.bfloat16, torch.float16)

GATED = SPECS["gated delta"]


def gated(B: int, T: int, dtype: torch.dtype = torch.float32, seed: int = 0, spec: UpdateSpec = GATED) -> UpdateInputs:
    return draw(Case(spec, Shape("drawn", B, T, 1, 2, 16, 16), dtype, seed=seed), DEVICE)


def case_of(spec: str, shape: str, dtype: torch.dtype, regime: str = "ordinary") -> Case:
    """A case of SPECS and SHAPES, drawn by seed 0; but the one d_log_decay of retnet in odd widths is a sum over all
    tokens that cancels there to a fifth, so that rounding to bfloat16 alone costs up to 3.2e-2 (limit 2e-2) by every
    kernel alike: by seed 10 it does not cancel, in any regime."""
    seed = 10 if (spec, shape) == ("retnet", "odd widths") else 0
    return Case(SPECS[spec], SHAPES[shape], dtype, regime, seed=seed)


def errors(of: TritonBackend, case: Case, x: UpdateInputs) -> dict[str, float]:
    """The relative RMS error of each result and gradient on other operands than the case draws."""
    got, want = (found(case.spec, x, draw_cotangents(case, x)) for found in (partial(run, of), reference_results))
    return {name: relative_error(got[name], want[name], want[name]) for name in want}


def conforms(of: TritonBackend, case: Case) -> None:
    outputs = "both" if case.state == "given" else "o"  # as in training: no state comes, and none goes on
    report = conformance.compare(of, case, device=DEVICE, outputs=outputs)
    assert report.errors, str(report)
    assert not report.failures, str(report)
