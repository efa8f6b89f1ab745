"""Tuning of the triton backend for stacks, mixers, shapes and dtypes given by name."""

import functools
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import torch

from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.io.progress import Progress, silent
from deltazoo.backends.measure.shapes import Shape
from deltazoo.backends.torch_ext.devices import KNOWN_DEVICES, DeviceSpec
from deltazoo.backends.tuning.candidates import Target
from deltazoo.backends.tuning.measure import CudaRunner, refusals
from deltazoo.backends.tuning.tune import Planned, TuneConfig, Tuned, plan, tune
from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.blocks.inspect.benchmark import parse_shape, parse_update
from deltazoo.blocks.inspect.step_tuning import (
    ModelTuned,
    cuda_seconds,
    plan_model_operators,
    step_gains,
    tune_model_operators,
)
from deltazoo.blocks.spec.stack_spec import StackSpec
from deltazoo.mixers.core.update import Update

DEFAULT_SHAPES = ("dense_1x2048", "decode_64")  # without a stack and without shapes: a training row and decode steps
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def build_targets(
    stack: str | None,
    shapes: Sequence[str],
    mixers: Sequence[str],
    dtypes: Sequence[str],
    tokens: tuple[int, int],
    trust: bool = False,
) -> list[Target]:
    """List the tuning targets: the updates of a stack, and those of mixers on named shapes.

    Args:
        stack: a file or the name of a preset.
        shapes: names or sizes for the mixers, as for `parse_shape`; without a stack, [] means `DEFAULT_SHAPES`.
        mixers: as for `parse_update`.
        tokens: batch size B and length T for the stack.
        trust: as for `StackSpec.load`.
    Raises: ConfigError; PatternError; UnknownNameError.
    """
    unknown = [dtype for dtype in dtypes if dtype not in DTYPES]
    if unknown or not dtypes:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {', '.join(unknown) or 'none'}")
    pairs = [] if stack is None else _stack_updates(StackSpec.load(stack, trust), stack, *tokens)
    for mixer, shape in product(mixers, shapes or (DEFAULT_SHAPES if stack is None else ())):
        pairs.append((parse_update(mixer), parse_shape(shape)))
    return list(dict.fromkeys(Target(spec, shape, DTYPES[dtype]) for (spec, shape), dtype in product(pairs, dtypes)))


def tune_targets(
    device: str, targets: Sequence[Target], config: TuneConfig, out: Path | None, progress: Progress = silent
) -> Tuned:
    """Tune on a CUDA device; see `tune`. Raises: ConfigError: there is no CUDA device."""
    runner = CudaRunner(device)
    return tune(_supported(targets, runner.refusals), runner, config, out, progress)


def tune_stack_steps(
    stack: str, size: tuple[int, int], dtypes: Sequence[str], device: str, config: TuneConfig, out: Path | None,
    progress: Progress = silent, trust: bool = False,
) -> ModelTuned:  # fmt: skip
    """Tune the kernels beside the updates of a stack in its first dtype, and measure its steps.

    Args:
        stack: a file or the name of a preset. size: B and T. trust: as for `StackSpec.load`.
    Raises: ConfigError: there is no CUDA device.
    """
    device = str(CudaRunner(device).cuda)  # refuses a machine without a GPU
    spec, dtype = StackSpec.load(stack, trust), DTYPES[dtypes[0]]
    operators = tune_model_operators(spec, size, dtype, device, config, out, progress)
    steps = step_gains(spec, size, dtype, device, cuda_seconds(device), out)
    return ModelTuned(dtype=dtypes[0], operators=operators, steps=steps)


def plan_stack_operators(
    stack: str, size: tuple[int, int], dtypes: Sequence[str], device: DeviceSpec | str, config: TuneConfig,
    trust: bool = False,
) -> list[Planned]:  # fmt: skip
    """List the kernels beside the updates that `tune_stack_steps` would measure; arguments as there.

    Args: device: as for `plan_targets`.
    """
    spec = StackSpec.load(stack, trust)
    where = device if isinstance(device, DeviceSpec) else CudaRunner(device).device
    return plan_model_operators(spec, size, DTYPES[dtypes[0]], where, config)


def plan_targets(
    device: DeviceSpec | str, targets: Sequence[Target], config: TuneConfig, out: Path | None
) -> list[Planned]:
    """List the measurements that `tune_targets` would make.

    Args: device: the name of a CUDA device of this machine, or a DeviceSpec, for which no GPU is needed.
    Raises: ConfigError: there is no CUDA device with this name.
    """
    if isinstance(device, DeviceSpec):
        return plan(_supported(targets, functools.partial(refusals, device=device)), device, config, out)
    try:
        runner = CudaRunner(device)
    except ConfigError as error:
        known = ", ".join(repr(known.name) for known in KNOWN_DEVICES)
        raise ConfigError(f"{error}. A plan needs none if --device-name is one of {known}") from error
    return plan(_supported(targets, runner.refusals), runner.device, config, out)


def _supported(targets: Sequence[Target], reasons_against: Callable[[Target], list[str]]) -> list[Target]:
    """Return the targets that the kernels support. Raises: ConfigError with the reasons if there are none."""
    reasons = {target: reasons_against(target) for target in targets}
    supported = [target for target in targets if not reasons[target]]
    if not supported:
        sentences = "; ".join(sorted({sentence for refused in reasons.values() for sentence in refused}))
        raise ConfigError(f"the triton backend supports none of the shapes: {sentences or 'got no shapes'}")
    return supported


def _stack_updates(spec: StackSpec, name: str, batch: int, length: int) -> list[tuple[UpdateSpec, Shape]]:
    with torch.device("meta"):
        model = spec.build()
    updates: dict[tuple[UpdateSpec, Shape], None] = {}
    for update in model.modules():
        if isinstance(update, Update):
            _, H, HV, K, V, _ = update.shape
            updates[update.spec, Shape(f"{name} {batch}x{length}", batch, length, H, HV, K, V)] = None
    return list(updates)
