"""The compilation of a training run: which layer is being compiled, and what training without it would take."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from deltazoo.backends.io.errors import count
from deltazoo.blocks.model.layer import Layer, LayerSpec
from deltazoo.blocks.model.stack import LanguageModel

_log = logging.getLogger("deltazoo")

Report = Callable[[str], None]


def compile_with_progress(model: LanguageModel, call: Callable[[], None], steps: int, report: Report) -> float:
    """Call `call`, a forward and backward pass that compiles the layers of the model, and return its seconds.

    On a CPU, where the compilation takes minutes, an eager call precedes it. Its time is logged as that of a step of a
    run that does not compile.

    Args: steps: number of steps that follow; report: called with each layer that is compiled.
    """
    kinds = list(dict.fromkeys(model.spec.expand()))
    if next(model.parameters()).device.type == "cpu":
        report("timing a step without compilation")
        seconds = _eager_seconds(call)
        _log.info(
            "compiling %s of layer; without compilation (--no-compile) %s take %s, %s each",
            *(count(len(kinds), "kind"), count(steps, "step"), _duration(steps * seconds), _duration(seconds)),
        )
    start = time.perf_counter()
    with _reported(model, kinds, report):
        call()
    seconds = time.perf_counter() - start
    _log.info("compiled in %s", _duration(seconds))
    return seconds


def _eager_seconds(call: Callable[[], None]) -> float:
    """Return the time of a call without torch.compile: of a second one if it is short, because the first allocates."""
    seconds = 0.0
    with torch.compiler.set_stance("force_eager"):
        for _ in range(2):
            if seconds < 1:
                start = time.perf_counter()
                call()
                seconds = time.perf_counter() - start
    return seconds


@contextmanager
def _reported(model: LanguageModel, kinds: list[LayerSpec], report: Report) -> Iterator[None]:
    """Report the first forward and the first backward of each kind of layer."""
    seen: set[str] = set()

    def announce(note: str) -> None:
        if note not in seen:
            seen.add(note)
            report(note)

    with ExitStack() as hooks:
        for spec, layer in zip(model.spec.expand(), model.stack.layers, strict=True):
            label = f"layer {kinds.index(spec) + 1} of {len(kinds)} ({spec.title})"

            def forward(layer: Layer, arguments: Any, label: str = label) -> None:
                announce(f"compiling {label}")

            def backward(layer: Layer, arguments: Any, output: Any, label: str = label) -> None:
                for leaf in tree_leaves(output):
                    if isinstance(leaf, Tensor) and leaf.requires_grad:
                        leaf.register_hook(lambda gradient: announce(f"compiling the backward of {label}"))

            hooks.callback(layer.register_forward_pre_hook(forward).remove)
            hooks.callback(layer.register_forward_hook(backward).remove)
        yield


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
    )
