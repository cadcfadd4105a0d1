"""What a rank must keep to go on later: weights, buffers, optimizer state and random numbers, as named tensors.

Names are those of the whole chain, by block, so that any other partition finds its parts. Every replica has buffers of
its own (batch norm's statistics); weights and optimizer state are the same on all and are kept once.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

OPTIMIZER, BUFFERS, RANDOM = "optimizer", "buffers", "random"

Modules = Mapping[str, nn.Module]
"""A rank's parts by their names in the chain: `blocks.3`, `readouts.4`."""


OptimizerStates = Mapping[str, Mapping[str, Tensor]]
"""Of each parameter by name: what an optimizer keeps of it, as if it were not shared with anybody."""


class StatefulOptimizer(Protocol):
    """An optimizer whose state can be had and given by parameter."""

    def full_state(self) -> OptimizerStates:
        """Everything; the replicas of a stage call it together."""

    def load_full_state(self, state: OptimizerStates) -> None:
        """Go on from it, and from the weights as they are now."""


class NamedOptimizer:
    """An ordinary optimizer of torch with the names of its parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._names = {parameter: name for name, parameter in named.items()}

    def full_state(self) -> OptimizerStates:
        """Everything that is a tensor; what an optimizer does not use is None."""
        return {
            name: {key: value for key, value in self._optimizer.state[parameter].items() if value is not None}
            for parameter, name in self._names.items()
            if parameter in self._optimizer.state
        }

    def load_full_state(self, state: OptimizerStates) -> None:
        """Go on from it; parameters that it does not have begin anew."""
        content = self._optimizer.state_dict()
        ordered = [self._names[parameter] for group in self._optimizer.param_groups for parameter in group["params"]]
        content["state"] = {index: dict(state[name]) for index, name in enumerate(ordered) if state.get(name)}
        # The library puts each on its parameter's device, and counts of steps where its kernels want them.
        self._optimizer.load_state_dict(content)


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


def collect(modules: Modules, optimizer: StatefulOptimizer | None, *, stage: int, replica: int) -> dict[str, Tensor]:
    """Copies, in main memory, of all that this rank keeps: training may go on while they are written."""
    parameters = named_parameters(modules)
    tensors: dict[str, Tensor] = {**parameters}
    tensors |= {f"{BUFFERS}.{replica}.{name}": value for name, value in named_buffers(modules).items()}
    if optimizer is not None:
        for name, entries in optimizer.full_state().items():
            tensors |= {f"{OPTIMIZER}.{name}.{key}": value for key, value in entries.items()}
    tensors[f"{RANDOM}.{stage}.{replica}"] = torch.get_rng_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        tensors[f"{RANDOM}.{stage}.{replica}.cuda"] = torch.cuda.get_rng_state()
    return {name: _copy(tensor) for name, tensor in tensors.items()}


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def restore(
    modules: Modules, optimizer: StatefulOptimizer | None, saved: Saved, *, stage: int, replica: int
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
        trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
        optimizer.load_full_state(_read_optimizer(trained, saved))
    _restore_random(saved, stage, replica)
    return missing


def _read_optimizer(names: Iterable[str], saved: Saved) -> dict[str, dict[str, Tensor]]:
    """The saved optimizer state of these parameters; empty of one that has none."""
    states: dict[str, dict[str, Tensor]] = {name: {} for name in names}
    into: dict[str, Tensor] = {}
    for full_name, described in saved.described.items():
        name, _, key = full_name.removeprefix(f"{OPTIMIZER}.").rpartition(".")
        if full_name.startswith(f"{OPTIMIZER}.") and name in states:
            states[name][key] = into[full_name] = torch.empty_like(described, device="cpu")
    saved.read(into)
    return states


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
