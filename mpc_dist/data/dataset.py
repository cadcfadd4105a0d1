"""Data sets held in memory, and batches of them in a seeded order that can be saved and restored mid-epoch.

The order and every random choice depend only on (seed, epoch, batch): every rank that asks gets the same batches.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpc_dist.task import Task
from mpc_dist.validation import check_whole

MAX_SEED = 2**32 - 1
"""A larger seed would spread over two words of the generator's key and could meet another seed's stream."""

# First word of a generator's key, so that streams of one seed for different purposes never coincide.
_ORDER, _AUGMENT = 1, 2

Indices = NDArray[np.int64]
Batch = tuple[Tensor, Tensor]
"""Inputs and labels, batch first; real values as float32, classes and tokens as int64."""


@dataclass(frozen=True)
class Split:
    """Samples that can be gathered by index."""

    num_samples: int
    """How many samples there are."""
    gather: Callable[[Indices, np.random.Generator], Batch]
    """The samples of these indices as a batch; the generator serves random augmentation, if the data has any."""

    @classmethod
    def of_tensors(cls, inputs: Tensor, labels: Tensor) -> "Split":
        """Samples that are rows of two tensors."""

        def gather(indices: Indices, _: np.random.Generator) -> Batch:
            rows = torch.from_numpy(indices)
            return inputs[rows], labels[rows]

        return cls(len(inputs), gather)


@dataclass(frozen=True)
class Dataset:
    """A task with its samples."""

    task: Task
    train: Split
    test: Split


class Batches(Iterator[Batch]):
    """An endless sequence of batches; each epoch is one pass in an order of its own.

    A last batch that would be short is left out, so that every step has the same shapes.
    """

    def __init__(self, split: Split, *, batch_size: int, seed: int, shuffle: bool = True) -> None:
        check_whole("batch size", batch_size, minimum=1, maximum=split.num_samples)
        check_whole("seed", seed, minimum=0, maximum=MAX_SEED)
        self._split = split
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._batch = 0
        self._order = self._draw_order()

    @classmethod
    def like(cls, other: "Batches") -> "Batches":
        """The same sequence from its beginning."""
        return cls(other._split, batch_size=other._batch_size, seed=other._seed, shuffle=other._shuffle)

    @property
    def batches_per_epoch(self) -> int:
        """How many full batches an epoch has."""
        return self._split.num_samples // self._batch_size

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._epoch

    def __next__(self) -> Batch:
        rows = self._order[self._batch * self._batch_size : (self._batch + 1) * self._batch_size]
        batch = self._split.gather(rows, np.random.default_rng([_AUGMENT, self._seed, self._epoch, self._batch]))
        self._batch += 1
        if self._batch == self.batches_per_epoch:
            self._epoch, self._batch = self._epoch + 1, 0
            self._order = self._draw_order()
        return batch

    def state_dict(self) -> dict[str, int]:
        """Where the sequence stands, and what it is a sequence of."""
        return {"epoch": self._epoch, "batch": self._batch, "batch_size": self._batch_size, **self._identity()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a saved state; raises if it belongs to another sequence.

        With another batch size (more or fewer replicas, say) it goes on at the first batch that holds no sample seen.
        """
        for name, own in self._identity().items():
            if state.get(name) != own:
                raise ValueError(
                    f"the saved data state has {name} {state.get(name)} but this run {own}; "
                    "resume with the settings it was saved with"
                )
        check_whole("epoch of the saved data state:", state.get("epoch"), minimum=0)
        check_whole("batch size of the saved data state:", state.get("batch_size"), minimum=1)
        most = max(self._split.num_samples // state["batch_size"], 1) - 1
        check_whole("batch of the saved data state:", state.get("batch"), minimum=0, maximum=most)
        self._epoch, self._batch = state["epoch"], -(-state["batch"] * state["batch_size"] // self._batch_size)
        if self._batch >= self.batches_per_epoch:
            self._epoch, self._batch = self._epoch + 1, 0
        self._order = self._draw_order()

    def _identity(self) -> dict[str, int]:
        return {
            "seed": self._seed,
            "num_samples": self._split.num_samples,
            "shuffle": int(self._shuffle),
        }

    def _draw_order(self) -> Indices:
        if not self._shuffle:
            return np.arange(self._split.num_samples)
        return np.random.default_rng([_ORDER, self._seed, self._epoch]).permutation(self._split.num_samples)
