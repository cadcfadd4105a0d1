"""Parameters that join an optimizer at work: each gets into the group that it would have had from the start."""

from collections.abc import Callable, Sequence

import torch
from torch import nn


def add_parameters(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    build: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
) -> None:
    """Let those of the parameters that are new join; `build` made the optimizer, and shows where they belong.

    The optimizer stays the same object, with its state and its present learning rates: schedules hold on to it.
    """
    group_of = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    if all(id(parameter) in group_of for parameter in parameters):
        return
    fresh = build(list(parameters))
    for index, group in enumerate(fresh.param_groups):
        new = [parameter for parameter in group["params"] if id(parameter) not in group_of]
        if not new:
            continue
        # A group is known by the parameters that it has already; one that has none is at the same place.
        own = [group_of[id(p)] for p in group["params"] if id(p) in group_of]
        place = own[0] if own else index
        if place >= len(optimizer.param_groups):
            raise ValueError(
                f"{len(new)} parameters that join at a change of windows belong to a group that the optimizer does not "
                "have; let the optimizer make its groups even where they are empty, or give them one group"
            )
        optimizer.param_groups[place]["params"].extend(new)
