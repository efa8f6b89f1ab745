"""The validation of a run, on all of its processes."""

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from deltazoo.blocks.training.config import TrainConfig
from deltazoo.blocks.training.positions import PositionSums
from deltazoo.blocks.training.source import Rows
from deltazoo.blocks.training.step import Stepper


def validate(
    stepper: Stepper, rows: Iterable[Rows], config: TrainConfig, losses: Callable[[Rows, bool], Any]
) -> tuple[float, dict[str, float]]:
    """Return the loss of this and all other processes' rows, in bits per token, and by range of positions.

    One process validates by the graphs of training, with gradients that nobody uses.

    Args: losses: computes those of rows, or with True the loss of each token.
    """
    training, by_token, parts = stepper.module, config.evaluation.positions, config.parallel.context
    module: nn.Module = training.module if isinstance(training, DistributedDataParallel) else training
    positions = PositionSums(config.batch.length, stepper.device)
    sums = torch.zeros(2, dtype=stepper.wide, device=stepper.device)
    stepper.module = module.eval()
    try:
        with nullcontext() if stepper.ranks.size == 1 else torch.no_grad():
            for each in rows:
                found = losses(each, by_token)
                if by_token:  # with context parallelism those of this process's part of the tokens
                    sums[0] += positions.add(found, each, parts == 1) * parts
                else:
                    sums[0] += found.cross_entropy.detach().to(sums.dtype) * each.counted
                sums[1] += each.counted
    finally:
        module.train()
        stepper.module = training
    total, count = stepper.ranks.sum_(sums).tolist()
    return total / max(count, 1.0) / math.log(2), positions.bits(stepper.ranks) if by_token else {}
