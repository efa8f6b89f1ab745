"""Tune the triton backend by names: for the updates of a stack, or of a mixer on named shapes."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch

from deltazoo.backends.errors import ConfigError
from deltazoo.backends.progress import Progress, silent
from deltazoo.backends.shapes import Shape
from deltazoo.backends.spec import UpdateSpec
from deltazoo.backends.tuning.candidates import Target
from deltazoo.backends.tuning.measure import CudaRunner
from deltazoo.backends.tuning.tune import Planned, TuneConfig, Tuned, plan, tune
from deltazoo.blocks.inspect.benchmark import shape_of
from deltazoo.blocks.spec import StackSpec
from deltazoo.mixers.core.config import config_class
from deltazoo.mixers.core.delta_mixer import Update

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def targets_of(
    stack: str | None,
    shapes: Sequence[str],
    mixers: Sequence[str],
    dtypes: Sequence[str],
    tokens: tuple[int, int],
    trust: bool = False,
) -> list[Target]:
    """What to tune for: the updates inside a stack, on `tokens`, and the mixers' with their default fields, on shapes.

    Args: stack: a file or a preset; shapes: as for `shape_of`; tokens: B and T of the stack's batches; trust: as for
        `StackSpec.load`.
    Raises: ConfigError; PatternError; UnknownNameError.
    """
    wrong = [dtype for dtype in dtypes if dtype not in DTYPES]
    if wrong or not dtypes:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {', '.join(wrong) or 'none'}")
    pairs = [] if stack is None else _inside(StackSpec.load(stack, trust), stack, *tokens)
    for mixer, shape in product(mixers, shapes):
        spec = config_class(mixer)().spec()
        if spec is None:
            raise ConfigError(f"mixer {mixer!r} has no update; there is nothing to tune")
        pairs.append((spec, shape_of(shape)))
    return list(dict.fromkeys(Target(spec, shape, DTYPES[dtype]) for (spec, shape), dtype in product(pairs, dtypes)))


def tune_on(
    device: str, targets: Sequence[Target], config: TuneConfig, out: Path | None, progress: Progress = silent
) -> Tuned:
    """Tune on a CUDA device; see `tune`. Raises: ConfigError, where there is none."""
    runner = CudaRunner(device)
    return tune(_taken(targets, runner), runner, config, out, progress)


def plan_on(device: str, targets: Sequence[Target], config: TuneConfig, out: Path | None) -> list[Planned]:
    """List what `tune_on` would measure. Raises: ConfigError, where there is no CUDA device."""
    runner = CudaRunner(device)
    return plan(_taken(targets, runner), runner, config, out)


def _taken(targets: Sequence[Target], runner: CudaRunner) -> list[Target]:
    """The targets that the kernels take. Raises: ConfigError with the reasons, where there is none."""
    reasons = {target: runner.refusals(target) for target in targets}
    taken = [target for target in targets if not reasons[target]]
    if not taken:
        said = "; ".join(sorted({sentence for refused in reasons.values() for sentence in refused}))
        raise ConfigError(f"the triton backend takes none of the shapes: {said or 'no shape was given'}")
    return taken


def _inside(spec: StackSpec, stack: str, batch: int, length: int) -> list[tuple[UpdateSpec, Shape]]:
    with torch.device("meta"):
        model = spec.build()
    found: dict[tuple[UpdateSpec, Shape], None] = {}
    for update in model.modules():
        if isinstance(update, Update):
            _, H, HV, K, V, _ = update.shape
            found[update.spec, Shape(f"{stack} {batch}x{length}", batch, length, H, HV, K, V)] = None
    if not found:
        raise ConfigError(f"{stack} has no layer with an update; there is nothing to tune")
    return list(found)
