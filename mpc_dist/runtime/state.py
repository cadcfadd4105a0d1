"""What a rank must keep to go on later: weights, buffers, optimizer state and random numbers, as named tensors.

Names are those of the whole chain, by block, so that any other partition finds its parts. Every replica has buffers of
its own (batch norm's statistics); weights and optimizer state are the same on all and are kept once, some of them by
each replica. Of an optimizer that replicas share, each keeps its part.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

OPTIMIZER, BUFFERS, RANDOM = "optimizer", "buffers", "random"
MOST_KEEPERS = 8
"""Replicas of a stage among which its weights are divided: whoever goes on opens the files of all of them."""
_FRAGMENT = re.compile(r"(optimizer\..+)@(\d{1,18}):((?:\d{1,18}(?:x\d{1,18}){0,63})?)")

Modules = Mapping[str, nn.Module]
"""A rank's parts by their names in the chain: `blocks.3`, `readouts.4`."""


OptimizerStates = Mapping[str, Mapping[str, Tensor]]
"""Of each parameter by name: what an optimizer keeps of it, as if it were not shared with anybody."""


class Fragment(NamedTuple):
    """This rank's part of a tensor that the replicas of its stage share."""

    tensor: Tensor
    """Flat."""
    first: int
    """Its place in the whole tensor, flat."""
    shape: tuple[int, ...]
    """Of the whole tensor."""

    def name(self, whole: str) -> str:
        """Under which it is kept, given the name of the whole tensor."""
        return f"{whole}@{self.first}:{'x'.join(map(str, self.shape))}"


def read_fragment_name(name: str) -> tuple[str, int, tuple[int, ...]] | None:
    """The whole tensor's name, the first element and the shape; None if it is no fragment's name."""
    match = _FRAGMENT.fullmatch(name)
    if match is None:
        return None
    return match[1], int(match[2]), tuple(int(size) for size in match[3].split("x") if size)


class StatefulOptimizer(Protocol):
    """An optimizer whose state can be had and given by parameter."""

    def own_state(self) -> Mapping[str, Mapping[str, Tensor | Fragment]]:
        """Of each parameter by name: what this replica holds of its state. A tensor is the same on all of them."""

    def load_full_state(self, state: OptimizerStates) -> None:
        """Go on from it, and from the weights as they are now."""


class NamedOptimizer:
    """An ordinary optimizer of torch with the names of its parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._names = {parameter: name for name, parameter in named.items()}

    def own_state(self) -> OptimizerStates:
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


def collect(
    modules: Modules, optimizer: StatefulOptimizer | None, *, stage: int, replica: int, num_replicas: int
) -> dict[str, Tensor]:
    """Copies, in main memory, of all that this rank keeps: training may go on while they are written."""
    common: dict[str, Tensor] = {**named_parameters(modules)}
    tensors = {f"{BUFFERS}.{replica}.{name}": value for name, value in named_buffers(modules).items()}
    for name, entries in {} if optimizer is None else optimizer.own_state().items():
        for key, value in entries.items():
            whole = f"{OPTIMIZER}.{name}.{key}"
            if isinstance(value, Fragment):
                tensors[value.name(whole)] = value.tensor
            else:
                common[whole] = value
    tensors |= {name: common[name] for name in divide(common, min(num_replicas, MOST_KEEPERS)).get(replica, ())}
    tensors[f"{RANDOM}.{stage}.{replica}"] = torch.get_rng_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        tensors[f"{RANDOM}.{stage}.{replica}.cuda"] = torch.cuda.get_rng_state()
    return {name: _copy(tensor) for name, tensor in tensors.items()}


def divide(tensors: Mapping[str, Tensor], num_keepers: int) -> dict[int, list[str]]:
    """The names of about equally many bytes for each keeper; the same on every replica."""
    shares: dict[int, list[str]] = {keeper: [] for keeper in range(num_keepers)}
    sizes = dict.fromkeys(shares, 0)
    for name in sorted(tensors, key=lambda name: (-tensors[name].nbytes, name)):
        least = min(shares, key=lambda keeper: (sizes[keeper], keeper))
        shares[least].append(name)
        sizes[least] += tensors[name].nbytes
    return shares


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
