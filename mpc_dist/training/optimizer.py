"""Builds a stage's optimizer and its learning-rate schedule from the configuration."""

from collections.abc import Callable

import torch
from torch import nn

from mpc_dist.training.sections import DROP_ON_RISE, OptimizerConfig


def build_optimizer(config: OptimizerConfig, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of these parameters."""
    if config.name == "sgd":
        return torch.optim.SGD(parameters, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)
    return torch.optim.AdamW(parameters, lr=config.lr, weight_decay=config.weight_decay)


def build_scheduler(config: OptimizerConfig, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """What to call after every update."""
    if config.scheduler in (None, DROP_ON_RISE):
        return lambda: None
    kind = getattr(torch.optim.lr_scheduler, str(config.scheduler))
    try:
        scheduler = kind(optimizer, **config.scheduler_arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"optimizer.scheduler_arguments do not fit {config.scheduler}: {error}") from error
    step: Callable[[], None] = scheduler.step
    return step


class DropOnRise:
    """The paper's rule: multiply the rate by 0.9 when an epoch's loss rose."""

    FACTOR = 0.9

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._last: float | None = None

    def end_epoch(self, loss: float) -> None:
        """Compare with the epoch before."""
        if self._last is not None and loss > self._last:
            for group in self._optimizer.param_groups:
                group["lr"] *= self.FACTOR
        self._last = loss
