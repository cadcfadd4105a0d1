"""Random numbers that depend on the seed, the replica, the step, the micro-batch and the block, and on nothing else.

So whatever a block draws from torch's generators, by whichever layer or function, is the same for any partition,
schedule and number of ranks.
"""

import zlib
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch


@dataclass
class Randomness:
    """Seeds torch's generator before every forward; `step` is moved on by whoever runs the steps."""

    seed: int
    replica: int = 0
    """Data-parallel replicas drop different features."""
    step: int = 0
    generators: tuple[torch.Generator, ...] = (torch.default_generator,)
    """Those that a forward may draw from: see `list_generators`."""

    def begin(self, block: int, microbatch: int) -> None:
        """What is drawn from here on belongs to this block's forward; a readout has its boundary, negated.

        Every block is seeded, whether or not it looks random: that takes a microsecond, and looking would miss what
        functions draw. What the generator held is put back after the step, not after each block.
        """
        key = zlib.crc32(f"{self.seed} {self.replica} {self.step} {microbatch} {block}".encode())
        for generator in self.generators:
            generator.manual_seed(key)


def list_generators(device: torch.device) -> tuple[torch.Generator, ...]:
    """The generators that functions of torch draw from on this device, and on the CPU."""
    if device.type != "cuda":
        return (torch.default_generator,)
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.default_generator, torch.cuda.default_generators[index]


def undisturbed(device: torch.device) -> AbstractContextManager[None]:
    """A context after which the generators that others draw from are as before."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
