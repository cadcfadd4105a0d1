"""A device that is not this host, in Python: its tensors' values are on the CPU, but nobody gets at them unnoticed.

Every operation passes through torch's dispatch, so that each wait of the host for the device is seen: a value that is
read, a copy to the host, and a copy from memory of the host that may be swapped out.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from torch.utils.weak import WeakTensorKeyDictionary

READS = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::equal", "aten::masked_select")
DEVICE_TYPE = "elsewhere"


class Elsewhere(Tensor):
    """A tensor of the device."""

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor) -> "Elsewhere":
        found = Tensor._make_wrapper_subclass(
            cls,
            here.shape,
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=torch.device(DEVICE_TYPE, 0),
        )
        found.here = here
        return found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What happens on the device by itself."""
        return _run(func, args, dict(kwargs or {}), is_to=True)

    def tolist(self) -> Any:
        """As on a GPU: by a copy to the host."""
        return self.to("cpu").tolist()


class Device(TorchDispatchMode):
    """Runs what is asked of the device, and notes for what the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self._pinned = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func._schema.name
        if name in ("aten::is_pinned", "aten::_pin_memory"):
            return self._pin(name, args[0])
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_from = any(isinstance(tensor, Elsewhere) for tensor in given)
        wanted = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
        is_to = is_from if wanted is None else wanted == DEVICE_TYPE
        if name == "aten::copy_":
            is_to, is_from = (isinstance(tensor, Elsewhere) for tensor in args[:2])
        self._note(name, given, is_from=is_from, is_to=is_to, is_patient=not kwargs.get("non_blocking", False))
        if is_to and wanted is not None:
            kwargs["device"] = torch.device("cpu")
        return _run(func, args, kwargs, is_to=is_to)

    def _pin(self, name: str, tensor: Tensor) -> Any:
        if name == "aten::is_pinned":
            return tensor in self._pinned
        copy = tensor.clone()
        self._pinned[copy] = True
        return copy

    def _note(self, name: str, given: list[Tensor], *, is_from: bool, is_to: bool, is_patient: bool) -> None:
        if name in READS and is_from:
            self.waits.append(name)
        elif is_from and not is_to and given:
            self.waits.append(f"{name} to the host")
        elif is_to and not is_from and given and (is_patient or not all(one in self._pinned for one in given)):
            self.waits.append(f"{name} of pages that may be swapped out")


def _run(func: Any, args: Any, kwargs: dict[str, Any], *, is_to: bool) -> Any:
    found = func(*tree_map(_bring, args), **tree_map(_bring, kwargs))
    if func._schema.name.endswith("_") and isinstance(args[0], Elsewhere):
        return args[0]
    if not is_to:
        return found
    away = tree_map(lambda one: Elsewhere(one) if isinstance(one, Tensor) else one, found)
    # Memory counts its users: a pool of buffers asks.
    return return_and_correct_aliasing(func, args, kwargs, away) if func is torch.ops.aten.detach.default else away


def _bring(value: Any) -> Any:
    return value.here if isinstance(value, Elsewhere) else value


@contextmanager
def elsewhere() -> Iterator[Device]:
    """The device; for the rest of this process torch knows its type."""
    if torch._C._get_privateuse1_backend_name() != DEVICE_TYPE:
        _setup_privateuseone_for_python_backend(DEVICE_TYPE)
    make = torch.tensor

    def make_anywhere(*given: Any, device: Any = None, **options: Any) -> Tensor:
        return make(*given, **options).to(device)  # as the library does, but where the dispatch sees it

    torch.tensor = make_anywhere
    try:
        # In this thread: the engine would give the device one of its own, in which Python is not safe.
        with torch.autograd.set_multithreading_enabled(False), Device() as device:
            yield device
    finally:
        torch.tensor = make
