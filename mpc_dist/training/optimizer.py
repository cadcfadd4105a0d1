"""Builds a stage's optimizer and its learning-rate schedule from the configuration."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mpc_dist.training.sections import DROP_ON_RISE, OptimizerConfig


def build_optimizer(
    config: OptimizerConfig, parameters: Sequence[nn.Parameter], *, blocks: Iterable[nn.Module]
) -> torch.optim.Optimizer:
    """The optimizer of these parameters, some of which are of these blocks."""
    fused = are_on_gpu(parameters) or None  # None: torch decides, as ever
    momentum, decay = config.used_momentum, config.weight_decay
    if config.name == "sgd":
        return torch.optim.SGD(parameters, lr=config.lr, momentum=momentum, weight_decay=decay, fused=fused)
    if config.name == "adamw":
        return torch.optim.AdamW(parameters, lr=config.lr, weight_decay=decay, fused=fused)
    hidden = {parameter for block in blocks for parameter in hidden_matrices(block)}
    # Both are made even of nothing: parameters may join at a change of windows.
    matrices = [{"params": [parameter for parameter in parameters if parameter in hidden]}]
    others = [{"params": [parameter for parameter in parameters if parameter not in hidden]}]
    rate = config.lr / 10 if config.adamw_lr is None else config.adamw_lr
    return Joined(
        torch.optim.Muon(matrices, lr=config.lr, momentum=momentum, weight_decay=decay),
        torch.optim.AdamW(others, lr=rate, weight_decay=decay, fused=fused),
    )


def are_on_gpu(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether all of them are, so that one kernel can update them all."""
    return all(parameter.device.type == "cuda" for parameter in parameters)


def hidden_matrices(block: nn.Module) -> Iterator[nn.Parameter]:
    """What Muon is for: weights that map a state to a state. The rows of an embedding are vectors of their own."""
    for module in block.modules():
        if not isinstance(module, nn.Embedding):
            yield from (parameter for parameter in module.parameters(recurse=False) if parameter.ndim == 2)


class Joined(torch.optim.Optimizer):
    """Optimizers of one group each as one, so that whatever reads or changes groups and state sees all of them."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._parts = parts

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Let each part update its group."""
        for part, group in zip(self._parts, self.param_groups, strict=True):
            # They are other objects once a state has been loaded.
            part.param_groups, part.state = [group], self.state
            part.step()


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

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimizer = optimizer
        self._last: float | None = None
        self._num_drops = 0

    def end_epoch(self, loss: float) -> None:
        """Compare with the epoch before."""
        if self._last is not None and loss > self._last:
            self._drop()
        self._last = loss

    def state_dict(self) -> dict[str, float | int | None]:
        """What it remembers."""
        return {"last": self._last, "num_drops": self._num_drops}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, with a rate that has not been dropped yet."""
        self._last = state["last"]
        for _ in range(state["num_drops"]):
            self._drop()

    def _drop(self) -> None:
        self._num_drops += 1
        for group in self._optimizer.param_groups if self._optimizer is not None else ():
            group["lr"] *= self.FACTOR


class LearningRate:
    """Changes a stage's learning rate as configured; a stage without weights has no optimizer but keeps the count."""

    def __init__(self, config: OptimizerConfig, optimizer: torch.optim.Optimizer | None) -> None:
        self._step = build_scheduler(config, optimizer) if optimizer is not None else lambda: None
        self.drop = DropOnRise(optimizer) if config.scheduler == DROP_ON_RISE else None

    def step(self) -> None:
        """A step has been done."""
        self._step()

    def state_dict(self) -> dict[str, Any]:
        """What cannot be told from the number of steps."""
        return {} if self.drop is None else self.drop.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, num_steps: int) -> None:
        """Go on after so many steps: torch's schedules depend on nothing else, and are run through again."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step\\(\\)` before")
            for _ in range(num_steps):
                self._step()
        if self.drop is not None and state:
            self.drop.load_state_dict(state)
