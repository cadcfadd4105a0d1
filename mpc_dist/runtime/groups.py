"""Parameters that join an optimizer at work: each gets into the group that it would have had from the start."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

_REMEDY = "let the optimizer make its groups even where they are empty, or give them one group"


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
    given = {id(parameter) for parameter in parameters}
    others = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in given]
    # With all parameters there are, so that it shows every group as it was before any schedule.
    fresh = build([*parameters, *others]).param_groups
    places = [{group_of[id(p)] for p in group["params"] if id(p) in group_of} for group in fresh]
    known = [(place, group) for group, own in zip(fresh, places, strict=True) for place in own]
    empty = {place for place, group in enumerate(optimizer.param_groups) if not group["params"]}
    for index, (group, own) in enumerate(zip(fresh, places, strict=True)):
        new = [parameter for parameter in group["params"] if id(parameter) not in group_of]
        if not new:
            continue
        # A group is known by the parameters that it has already, or by its place if it was made without any, or by its
        # settings.
        found = own or {index} & empty or {place for place, other in known if _settings(other) == _settings(group)}
        if len(found) > 1:
            raise ValueError(
                f"{len(new)} parameters that join at a change of windows belong to a group that the optimizer does not "
                f"have: {len(found)} of its groups are like it; {_REMEDY}"
            )
        if found:
            optimizer.param_groups[found.pop()]["params"].extend(new)
        else:
            _add_group(optimizer, {**_settings(group), "params": new}, known)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _add_group(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], known: Sequence[tuple[int, Mapping[str, Any]]]
) -> None:
    """Add a group; its learning rate has moved as that of the known groups, which are given as they were at first."""
    if any("initial_lr" in other for other in optimizer.param_groups):
        raise ValueError(
            f"{len(group['params'])} parameters that join at a change of windows belong to a group that the optimizer "
            f"does not have, and a schedule that was made for its {len(optimizer.param_groups)} groups would not move "
            f"the rate of another; {_REMEDY}"
        )
    factors = [optimizer.param_groups[place]["lr"] / first["lr"] for place, first in known if first.get("lr")]
    if factors and group.get("lr"):
        if not all(math.isclose(factor, factors[0], rel_tol=1e-6) for factor in factors):
            raise ValueError(
                f"{len(group['params'])} parameters that join at a change of windows belong to a group that the "
                "optimizer does not have, and the rates of those that it has have moved by different factors; "
                f"{_REMEDY}"
            )
        group["lr"] = group["lr"] * factors[0]
    optimizer.add_param_group(group)
