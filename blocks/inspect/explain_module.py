"""Explain a mixer, a layer or a model: what computes each operator, and which kernels are launched.

A module runs on meta tensors as on the device (`simulated_launches`): its operators choose between their kernels and
plain torch, and prepare their launches, by the code that does so on the device.

B batch, T time, D width
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from deltazoo.backends.io.errors import ConfigError, UnsupportedError, cut
from deltazoo.backends.measure.shapes import Shape
from deltazoo.backends.torch_ext.devices import DeviceSpec
from deltazoo.backends.triton.runtime.simulation import simulated_launches
from deltazoo.backends.update.check import check_integer
from deltazoo.backends.update.watch import RunRecord, watch
from deltazoo.blocks.model.layer import Layer
from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.mixers.core.activations import activation_like
from deltazoo.mixers.core.mixer import Mixer

Phase = Literal["training", "prompt", "decoding"]
M = TypeVar("M", bound=nn.Module)

_PHASES: dict[Phase, str] = {
    "training": "forward and backward",
    "prompt": "without gradients, with a state",
    "decoding": "one token",
}


class Runs(NamedTuple):
    """What runs in one phase. runs: the records of `watch`, in order."""

    phase: Phase
    runs: tuple[RunRecord, ...]

    @property
    def operators(self) -> list[RunRecord]:
        """The calls of operators, each computed by a backend or by plain torch."""
        return [run for run in self.runs if not run.programs]

    @property
    def launches(self) -> list[RunRecord]:
        """The launches of kernels, in order."""
        return [run for run in self.runs if run.programs]

    def lines(self) -> Iterator[str]:
        """Print the operators, then the kernels; equal ones once with their number."""
        for run, count in Counter(self.operators).items():
            backend = "plain torch" if run.backend == "torch" else run.backend
            why = f": {run.reason.rstrip('.')}" if run.reason else ""
            yield f"  {count} x {run.name} by {backend}{why}"
        launches = Counter(self.launches)
        if launches:
            yield "  kernels:"
        for run, count in launches.items():
            yield f"    {count} x {run.name}, {run.programs} programs of {run.warps} warps"


class ModuleExplanation(NamedTuple):
    """What computes the operators of a module on a device. `str` prints it.

    Operations without a kernel of this package, such as linear maps, are not listed.
    """

    device: str
    batch: int
    length: int
    phases: tuple[Runs, ...]

    def of(self, phase: Phase) -> Runs:
        """Return what runs in a phase."""
        return next(runs for runs in self.phases if runs.phase == phase)

    def __str__(self) -> str:
        lines = []
        for runs in self.phases:
            length = 1 if runs.phase == "decoding" else self.length
            title = f"{runs.phase} ({_PHASES[runs.phase]}), B = {self.batch}, T = {length}, on {self.device}:"
            lines += [title, *(list(runs.lines()) or ["  nothing but operations without kernels of this package"])]
        return "\n".join(lines)


def explain_module(
    module: nn.Module, shape: Shape | tuple[int, int] | None, device: DeviceSpec | str | None
) -> ModuleExplanation:
    """List what a module runs on a device; see `explain`."""
    if not isinstance(module, Mixer | Layer | LanguageModel):
        hint = "; build it first" if hasattr(module, "build") else ""
        raise ConfigError(f"explain takes an UpdateSpec, or a built mixer, layer or model, got {cut(module)}{hint}")
    if not isinstance(shape, tuple) or isinstance(shape, Shape) or len(shape) != 2:
        raise ConfigError(f"shape must be (B, T) for a module, got {cut(shape)}")
    for name, size in zip(("B", "T"), shape, strict=True):
        check_integer(name, size)
    (batch, length), gpu = shape, _gpu(device)
    module = _on_meta(module)
    phases = {"training": _training, "prompt": _reading(length), "decoding": _reading(1)}
    runs = []
    for phase in _PHASES:
        with watch() as log, simulated_launches(gpu):
            phases[phase](module, batch, length)
        runs.append(Runs(phase, tuple(log.runs)))
    return ModuleExplanation(gpu.name, batch, length, tuple(runs))


def _gpu(device: DeviceSpec | str | None) -> DeviceSpec:
    """Return the device. Raises: ConfigError if it is no GPU."""
    if isinstance(device, str):
        device = DeviceSpec.named(device)
    device = DeviceSpec.current() if device is None else device
    if device.platform == "interpreter":
        raise ConfigError('device must be the name of a GPU, such as "NVIDIA H200", because this machine has none')
    return device


def _on_meta(module: M) -> M:
    """Copy a module with its hooks, but with weights on the meta device. Raises: UnsupportedError."""
    weights: dict[int, object] = {}
    for name, x in chain(module.named_parameters(), module.named_buffers()):
        if type(x) not in (nn.Parameter, Tensor):
            raise UnsupportedError(f"explain needs plain weights, got {name} of class {type(x).__name__}")
        empty = torch.empty_like(x, device="meta")
        weights[id(x)] = nn.Parameter(empty, x.requires_grad) if isinstance(x, nn.Parameter) else empty
    return copy.deepcopy(module, weights)


def _training(module: nn.Module, batch: int, length: int) -> None:
    with torch.enable_grad():
        module.train()
        if isinstance(module, LanguageModel):
            tokens = torch.empty(batch, length, dtype=torch.int64, device="meta")
            module.loss(tokens, tokens).backward()
        else:
            y: Tensor = module(_input(module, batch, length).requires_grad_())[0]
            y.backward(torch.empty_like(y))


def _reading(tokens: int) -> Callable[[nn.Module, int, int], None]:
    def run(module: nn.Module, batch: int, length: int) -> None:
        assert isinstance(module, Mixer | Layer | LanguageModel)
        module.eval()
        with torch.no_grad():
            state = module.init_state(batch, length + 1)
            if isinstance(module, LanguageModel):
                module(torch.empty(batch, tokens, dtype=torch.int64, device="meta"), state)
            else:
                module(_input(module, batch, tokens), state)

    return run


def _input(module: nn.Module, batch: int, tokens: int) -> Tensor:
    return torch.empty(batch, tokens, _width(module), dtype=activation_like(module).dtype, device="meta")


def _width(module: nn.Module) -> int:
    """Return D of a mixer or layer. Raises: ConfigError for a mixer of a plug-in without the attribute `width`."""
    if isinstance(module, Layer):
        norm = module.norm or module.mlp_norm
        assert norm is not None and norm.weight is not None
        return len(norm.weight)
    width = getattr(module, "width", None)
    if not isinstance(width, int):
        raise ConfigError(f"{type(module).__name__} must have the attribute width, to be explained, got {cut(width)}")
    return width
