"""The optimizer of a run: groups of parameters, float32 copies of 16-bit weights, and the learning rate of a step."""

import math
from collections.abc import Iterator
from fnmatch import fnmatch
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from deltazoo.backends.io.errors import ConfigError
from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.blocks.training.adamw import KernelAdamW, Update
from deltazoo.blocks.training.config import OptimizerConfig, TrainConfig
from deltazoo.mixers.core.initialization import no_weight_decay

# Elements whose gradients an optimizer of torch receives in float32 at once: the conversion then takes little memory.
_AT_ONCE = 1 << 25


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the learning rate of a step; steps count from 0."""
    schedule, peak = config.schedule, config.optimizer.learning_rate
    if step < schedule.warmup:
        return peak * (step + 1) / schedule.warmup
    fraction = (step - schedule.warmup) / max(1, config.steps - schedule.warmup)
    kept = schedule.final
    if schedule.name == "cosine":
        return peak * (kept + (1 - kept) / 2 * (1 + math.cos(math.pi * fraction)))
    if schedule.name == "linear":
        return peak * (1 - (1 - kept) * fraction)
    if schedule.name == "wsd":
        left = (config.steps - step) / max(1.0, schedule.decay * config.steps)
        return peak * (kept + (1 - kept) * min(1.0, left))
    return peak


class Weight(NamedTuple):
    """A parameter, and the tensor that the optimizer updates.

    updated: this process's part of the parameter itself, or a float32 copy of it.
    """

    name: str
    parameter: nn.Parameter
    updated: Tensor

    @property
    def is_copy(self) -> bool:
        """Whether `updated` has memory of its own."""
        return self.updated.dtype != self.parameter.dtype

    def gradient(self) -> Tensor | None:
        """Return this process's part of the gradient."""
        gradient = self.parameter.grad
        return gradient.to_local() if isinstance(gradient, DTensor) else gradient

    def update(self, gradient: Tensor) -> Update:
        """Return what the kernel of AdamW updates."""
        return Update(self.updated, gradient, self.parameter.detach() if self.is_copy else None)

    def whole(self, local: Tensor) -> Tensor:
        """Return a tensor of the part's shape as one of the parameter's shape, which FSDP2 has sharded, or not."""
        x = self.parameter
        if not isinstance(x, DTensor) or local.shape != self.updated.shape:
            return local
        return DTensor.from_local(local, x.device_mesh, x.placements, shape=x.shape, stride=x.stride())


class Optimizer:
    """AdamW, or Muon for the matrices of layers, over this process's parts of the weights.

    The optimizer sees plain tensors, also under FSDP2: each element is on exactly one of the sharding processes.

    Args: captured: whether a CUDA graph captures steps.
    """

    def __init__(self, model: LanguageModel, config: OptimizerConfig, sharded: bool, captured: bool = False) -> None:
        if config.name == "muon" and sharded:
            raise ConfigError("optimizer.name muon needs whole matrices: use parallel.mode ddp, got fsdp")
        self.weights = [_weight(name, parameter) for name, parameter in model.named_parameters()]
        unused = [pattern for pattern in config.rates if not any(fnmatch(w.name, pattern) for w in self.weights)]
        if unused:
            raise ConfigError(
                f"optimizer.rates: no parameter has a name like {unused[0]!r}, such as {self.weights[0].name}"
            )
        excluded = {id(getattr(module, name)) for module in model.modules() for name in no_weight_decay(module)}
        maps = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
        groups: dict[tuple[bool, bool, float], list[Weight]] = {}
        for weight in self.weights:
            matrix = weight.parameter.dim() >= 2 and id(weight.parameter) not in excluded
            in_layer = id(weight.parameter) in maps and matrix and weight.name.startswith("stack.layers.")
            factor = next((f for pattern, f in config.rates.items() if fnmatch(weight.name, pattern)), 1.0)
            groups.setdefault((config.name == "muon" and in_layer, matrix, factor), []).append(weight)
        self.parts: list[_Part] = []
        for (by_muon, decays, factor), members in sorted(groups.items(), reverse=True, key=lambda item: item[0]):
            by_kernel = not (by_muon or captured) and all(KernelAdamW.takes(w.updated) for w in members)
            build = _muon if by_muon else KernelAdamW if by_kernel else _adamw
            group = {"weight_decay": config.weight_decay if decays else 0.0, "decays": decays, "factor": factor}
            for part in _by_dtype(members) if by_kernel else _in_parts(members):
                self.parts.append(_Part(build([{"params": [w.updated for w in part], **group}], config), part))

    @property
    def groups(self) -> Iterator[dict[str, Any]]:
        """The groups of parameters of all parts."""
        return (group for part in self.parts for group in part.optimizer.param_groups)

    @torch.no_grad()
    def step(self, rate: float | Tensor, scale: Tensor, skip: Tensor) -> None:
        """Update the weights by the gradients times `scale`, unless `skip` is 1. Only Muon waits for the device.

        Args: rate: a tensor if a CUDA graph captures the step.
        """
        for group in self.groups:
            group["lr"] = rate * group["factor"]
        inverse, found_inf = 1 / scale.float(), skip.float()
        for optimizer, weights in self.parts:
            if isinstance(optimizer, KernelAdamW):
                found = [(weight, weight.gradient()) for weight in weights]
                optimizer.update([w.update(g) for w, g in found if g is not None], scale.float(), found_inf)
                continue
            for weight in weights:
                gradient = weight.gradient()
                weight.updated.grad = gradient.to(weight.updated.dtype) if gradient is not None else None
            if getattr(optimizer, "_step_supports_amp_scaling", False):  # the interface of torch.amp.GradScaler
                optimizer.grad_scale, optimizer.found_inf = inverse, found_inf  # type: ignore[attr-defined]
                optimizer.step()
            elif not bool(skip):
                gradients = [w.updated.grad for w in weights if w.updated.grad is not None]
                if gradients:
                    torch._foreach_mul_(gradients, scale.to(gradients[0].dtype))
                    optimizer.step()
            for weight in weights:
                if weight.updated is not weight.parameter:
                    weight.updated.grad = None
            _round(weights)

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Round the float32 copies into the weights of the model."""
        _round(self.weights)

    def state(self) -> dict[str, Tensor]:
        """Return the weights as "model.NAME", and the optimizer's tensors as "optimizer.NAME.KEY"."""
        tensors: dict[str, Tensor] = {}
        states = {key: value for part in self.parts for key, value in part.optimizer.state.items()}
        for weight in self.weights:
            tensors[f"model.{weight.name}"] = weight.whole(weight.updated.detach())
            for key, value in states.get(weight.updated, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer.{weight.name}.{key}"] = weight.whole(value)
        return tensors

    def allocate(self, names: dict[str, torch.Size]) -> None:
        """Create the tensors that a checkpoint has, for `state` to return. Args: names: with their whole shapes."""
        members = {weight.updated: part.optimizer for part in self.parts for weight in part.weights}
        for weight in self.weights:
            start = f"optimizer.{weight.name}."
            for name, shape in names.items():
                if name.startswith(start):
                    like = weight.updated if shape == weight.parameter.shape else weight.updated.new_zeros(shape)
                    if name.endswith(".step"):
                        like = like.float()
                    members[weight.updated].state[weight.updated][name.removeprefix(start)] = torch.zeros_like(like)


class _Part(NamedTuple):
    """Some of the weights, and the optimizer that updates them."""

    optimizer: torch.optim.Optimizer | KernelAdamW
    weights: list[Weight]


def _by_dtype(weights: list[Weight]) -> Iterator[list[Weight]]:
    """Split weights by the dtype of their gradients."""
    for dtype in dict.fromkeys(weight.parameter.dtype for weight in weights):
        yield [weight for weight in weights if weight.parameter.dtype == dtype]


def _in_parts(weights: list[Weight]) -> Iterator[list[Weight]]:
    """Split weights into parts with copies of at most `_AT_ONCE` elements; a larger weight is a part of its own."""
    part: list[Weight] = []
    size = 0
    for weight in weights:
        elements = weight.updated.numel() if weight.is_copy else 0
        if part and size + elements > _AT_ONCE:
            yield part
            part, size = [], 0
        part.append(weight)
        size += elements
    yield part


def _round(weights: list[Weight]) -> None:
    copies = [weight for weight in weights if weight.is_copy]
    if copies:
        torch._foreach_copy_([w.parameter for w in copies], [w.updated for w in copies])


@torch.no_grad()
def _weight(name: str, parameter: nn.Parameter) -> Weight:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if local.dtype in (torch.bfloat16, torch.float16):
        return Weight(name, parameter, local.detach().float())
    return Weight(name, parameter, local.detach() if isinstance(parameter, DTensor) else parameter)


def _adamw(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)


def _muon(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    if not hasattr(torch.optim, "Muon"):
        raise ConfigError(f"optimizer.name muon needs torch.optim.Muon, which torch {torch.__version__} does not have")
    rate, momentum = config.learning_rate, config.momentum
    return torch.optim.Muon(groups, lr=rate, momentum=momentum, adjust_lr_fn="match_rms_adamw")
