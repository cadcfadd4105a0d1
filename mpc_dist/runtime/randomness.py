"""Random numbers that depend on the seed, the replica, the step, the micro-batch and the block, and on nothing else.

So whatever a block draws from torch's generators, by whichever layer or function, is the same for any partition,
schedule and number of ranks.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from zlib import crc32

import torch

_NOTHING = nullcontext()


@dataclass
class Randomness:
    """Seeds torch's generator before every forward; `step` is moved on by whoever runs the steps."""

    seed: int
    replica: int = 0
    """Data-parallel replicas drop different features."""
    step: int = 0
    generators: tuple[torch.Generator, ...] = (torch.default_generator,)
    """Those that a forward may draw from: see `list_generators`."""

    _begun_step: int = field(default=-1, repr=False)
    _begun_microbatch: int = field(default=-1, repr=False)
    _hashed: int = field(default=0, repr=False)
    """Of all that the blocks of a micro-batch have in common."""
    _names: dict[int, bytes] = field(default_factory=dict, repr=False)
    """What a block adds to that: made once, as seeding is on the way of every forward."""

    def begin(self, block: int, microbatch: int) -> AbstractContextManager[object]:
        """What is drawn from here on belongs to this block's forward; a readout has its boundary, negated.

        Every block is seeded, whether or not it looks random: that takes two microseconds, and looking would miss what
        functions draw. What the generator held is put back after the step, not after each block: the context that is
        returned does nothing.
        """
        if microbatch != self._begun_microbatch or self.step != self._begun_step:
            self._begun_step, self._begun_microbatch = self.step, microbatch
            self._hashed = crc32(f"{self.seed} {self.replica} {self.step} {microbatch} ".encode())
        name = self._names.get(block)
        if name is None:
            name = self._names[block] = b"%d" % block
        seed = crc32(name, self._hashed)
        for generator in self.generators:
            generator.manual_seed(seed)
        return _NOTHING


def list_generators(device: torch.device) -> tuple[torch.Generator, ...]:
    """The generators that functions of torch draw from on this device, and on the CPU."""
    if device.type != "cuda":
        return (torch.default_generator,)
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.default_generator, torch.cuda.default_generators[index]


def undisturbed(device: torch.device) -> AbstractContextManager[None]:
    """A context after which the generators that others draw from are as before."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
