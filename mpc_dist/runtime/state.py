"""What a rank must keep to go on later: weights, buffers, optimizer state and random numbers, as named tensors.

Names are those of the whole chain, by block, so that any other partition finds its parts. Every replica has buffers of
its own (batch norm's statistics); weights and optimizer state are the same on all and are kept once.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

OPTIMIZER, BUFFERS, RANDOM = "optimizer", "buffers", "random"

Modules = Mapping[str, nn.Module]
"""A rank's parts by their names in the chain: `blocks.3`, `readouts.4`."""


class Saved(Protocol):
    """Tensors kept before, that can be read one by one."""

    @property
    def described(self) -> Mapping[str, Tensor]:
        """Every name there is, with an empty tensor (on device `meta`) of its shape and type."""

    @property
    def num_replicas(self) -> int:
        """How many replicas kept their buffers."""

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Copy the tensors of these names into place."""


def named_parameters(modules: Modules) -> dict[str, nn.Parameter]:
    """The parameters of all parts."""
    return {f"{part}.{name}": p for part, module in modules.items() for name, p in module.named_parameters()}


def named_buffers(modules: Modules) -> dict[str, Tensor]:
    """What else belongs to the parts' state: buffers, unless the module can make them anew."""
    found: dict[str, Tensor] = {}
    for part, module in modules.items():
        kept = module.state_dict(keep_vars=True)
        found |= {f"{part}.{name}": value for name, value in module.named_buffers() if name in kept}
    return found


def collect(
    modules: Modules, optimizer: torch.optim.Optimizer | None, *, stage: int, replica: int
) -> dict[str, Tensor]:
    """Copies, in main memory, of all that this rank keeps: training may go on while they are written."""
    parameters = named_parameters(modules)
    tensors: dict[str, Tensor] = {**parameters}
    tensors |= {f"{BUFFERS}.{replica}.{name}": value for name, value in named_buffers(modules).items()}
    if optimizer is not None:
        for name, parameter in parameters.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                if value is not None:  # SGD without momentum
                    tensors[f"{OPTIMIZER}.{name}.{key}"] = torch.as_tensor(value)
    tensors[f"{RANDOM}.{stage}.{replica}"] = torch.get_rng_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        tensors[f"{RANDOM}.{stage}.{replica}.cuda"] = torch.cuda.get_rng_state()
    return {name: _copy(tensor) for name, tensor in tensors.items()}


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def restore(
    modules: Modules, optimizer: torch.optim.Optimizer | None, saved: Saved, *, stage: int, replica: int
) -> list[str]:
    """Put saved tensors in place; returns the names of weights that were not among them and keep their values.

    Only readouts may be missing: another horizon reads its losses elsewhere.
    """
    parameters = named_parameters(modules)
    missing = [name for name in parameters if name not in saved.described]
    lost = [name for name in missing if not name.startswith("readouts.")]
    if lost:
        raise ValueError(f"the checkpoint lacks {lost[0]} and {len(lost) - 1} more weights: it is of another model")
    weights: dict[str, Tensor] = {name: p.detach() for name, p in parameters.items() if name in saved.described}
    source = replica % saved.num_replicas
    buffers = {f"{BUFFERS}.{source}.{name}": value for name, value in named_buffers(modules).items()}
    weights |= {name: value for name, value in buffers.items() if name in saved.described}
    for name, tensor in weights.items():
        shape = saved.described[name].shape
        if tensor.shape != shape:
            raise ValueError(
                f"the checkpoint has {name} of shape {tuple(shape)}, this model {tuple(tensor.shape)}: it is of "
                "another model"
            )
    saved.read(weights)
    if optimizer is not None:
        _restore_optimizer(parameters, optimizer, saved)
    _restore_random(saved, stage, replica)
    return missing


def _restore_optimizer(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, saved: Saved) -> None:
    names = {parameter: name for name, parameter in parameters.items()}
    content = optimizer.state_dict()
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states: dict[str, dict[str, Tensor]] = {}  # by the parameter's name, then the state's
    for name, described in saved.described.items():
        if name.startswith(f"{OPTIMIZER}."):
            parameter_name, _, key = name.removeprefix(f"{OPTIMIZER}.").rpartition(".")
            states.setdefault(parameter_name, {})[key] = torch.empty_like(described, device="cpu")
    content["state"] = {
        index: states[names[parameter]] for index, parameter in enumerate(ordered) if names[parameter] in states
    }
    own = {names[parameter] for parameter in ordered} & set(states)
    saved.read({f"{OPTIMIZER}.{name}.{key}": value for name in own for key, value in states[name].items()})
    # The library puts each on its parameter's device, and counts of steps where its kernels want them.
    optimizer.load_state_dict(content)


def _restore_random(saved: Saved, stage: int, replica: int) -> None:
    states: dict[str, Tensor] = {}
    for name in (f"{RANDOM}.{stage}.{replica}", f"{RANDOM}.{stage}.{replica}.cuda"):
        if name in saved.described:
            states[name] = torch.empty_like(saved.described[name], device="cpu")
    saved.read(states)
    for name, state in states.items():
        if not name.endswith(".cuda"):
            torch.set_rng_state(state)
        elif torch.cuda.is_available():
            torch.cuda.set_rng_state(state)
