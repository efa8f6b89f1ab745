"""The optimizer of a training run, and its learning rate."""

import math

import torch

from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.blocks.training.config import TrainConfig
from deltazoo.mixers.core.initialization import no_weight_decay


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the learning rate of a step; steps count from 0."""
    if step < config.warmup:
        return config.learning_rate * (step + 1) / config.warmup
    fraction = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * fraction)))


def adamw(model: LanguageModel, config: TrainConfig) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices only, without those that a module lists in `no_weight_decay`."""
    excluded = {id(getattr(module, name)) for module in model.modules() for name in no_weight_decay(module)}
    decayed = [x for x in model.parameters() if x.dim() >= 2 and id(x) not in excluded]
    others = [x for x in model.parameters() if x.dim() < 2 or id(x) in excluded]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)
