"""Random numbers that depend on the seed, the step, the micro-batch and the block, and on nothing else.

So dropout is the same for any partition, schedule and number of ranks.
"""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from mpc_dist.runtime.segment import Scope


@dataclass
class Randomness:
    """Seeds every block's forward; `step` is moved on by whoever runs the steps."""

    seed: int
    replica: int = 0
    """Data-parallel replicas drop different features."""
    step: int = 0

    def scope(self, is_random: dict[int, bool], device: torch.device) -> Scope:
        """The scope of a stage's blocks; those without random parts run as they are."""

        def enter(block: int, microbatch: int):  # type: ignore[no-untyped-def]
            return self._seeded(block, microbatch, device) if is_random.get(block, False) else nullcontext()

        return enter

    @contextmanager
    def _seeded(self, block: int, microbatch: int, device: torch.device) -> Iterator[None]:
        key = f"{self.seed} {self.replica} {self.step} {microbatch} {block}"
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(zlib.crc32(key.encode()))
            yield


def has_dropout(module: nn.Module) -> bool:
    """Whether the module draws random numbers in training: a dropout layer, or a rate above 0 among its attributes."""
    rates = [part.p for part in module.modules() if isinstance(part, nn.modules.dropout._DropoutNd)]
    named = [getattr(part, name, 0) for part in module.modules() for name in ("dropout", "attention_dropout")]
    return any(rate > 0 for rate in (*rates, *(rate for rate in named if isinstance(rate, float))))
