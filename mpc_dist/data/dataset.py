"""Data sets by index, and batches of them in a seeded order that can be saved and restored mid-epoch.

The order and every random choice depend only on (seed, epoch, batch, place in the batch): every rank that asks gets the
same batches, and one that reads a part of a batch gets what one that reads all of it gets there.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpc_dist.task import Task
from mpc_dist.validation import check_whole

MAX_SEED = 2**32 - 1
"""A larger seed would spread over two words of the generator's key and could meet another seed's stream."""

# First word of a generator's key, so that streams of one seed for different purposes never coincide (3 and 4 are in
# mpc_dist/data/synthetic.py and pixels.py).
_ORDER, _AUGMENT, _TEST_ORDER, _FINGERPRINT = 1, 2, 5, 6

FINGERPRINTED = 32
"""Samples that are read from files for a fingerprint."""
FINGERPRINT_VERSION = "2"
"""Of what a fingerprint is made of: those of other versions cannot be compared."""
_CHUNK = 4096

Indices = NDArray[np.int64]
Noise = NDArray[np.float64]
"""Random numbers from 0 to 1, a row for each sample."""
Batch = tuple[Tensor, Tensor]
"""Inputs and labels, batch first; real values as float32, classes and tokens as int64."""


@dataclass(frozen=True)
class Selection:
    """Which samples a batch is made of, and the random numbers that each is augmented by."""

    indices: Indices
    noise: Noise

    @property
    def num_samples(self) -> int:
        """How many they are."""
        return len(self.indices)

    def part(self, index: int, count: int) -> "Selection":
        """One of so many equal parts, in order."""
        size = self.num_samples // count
        rows = slice(index * size, (index + 1) * size)
        return Selection(self.indices[rows], self.noise[rows])


class Split(ABC):
    """Samples that can be read by index. Processes that read ahead get a pickled copy."""

    num_random: int = 0
    """How many random numbers the augmentation of a sample takes."""
    is_decoded: bool = False
    """Whether reading a sample's input is work, which had better be done ahead and by other processes."""

    @property
    @abstractmethod
    def num_samples(self) -> int:
        """How many samples there are."""

    @abstractmethod
    def read_inputs(self, indices: Indices, noise: Noise) -> Tensor:
        """The inputs of these samples, augmented by these random numbers."""

    @abstractmethod
    def read_labels(self, indices: Indices) -> Tensor:
        """The labels of these samples."""

    def read_raw(self, few: Indices) -> Iterator[bytes | memoryview]:
        """What tells this data from other data, before any augmentation; of what has to be decoded, only these few."""
        every = few if self.is_decoded else np.arange(self.num_samples)
        for indices in np.array_split(every, -(-len(every) // _CHUNK)):
            none = np.zeros((len(indices), self.num_random))
            yield from map(view_bytes, (self.read_inputs(indices, none).numpy(), self.read_labels(indices).numpy()))

    def read(self, selection: Selection) -> Batch:
        """The whole batch."""
        return self.read_inputs(selection.indices, selection.noise), self.read_labels(selection.indices)

    def fingerprint(self) -> str:
        """What tells this data from other data with as many samples."""
        drawn = np.random.default_rng([_FINGERPRINT]).integers(0, self.num_samples, FINGERPRINTED)
        digest = hashlib.sha256(str(self.num_samples).encode())
        for content in self.read_raw(np.unique(drawn)):
            digest.update(content)
        return f"{FINGERPRINT_VERSION}-{digest.hexdigest()[:32]}"

    @staticmethod
    def of_tensors(inputs: Tensor, labels: Tensor) -> "Split":
        """Samples that are rows of two tensors."""
        return TensorSplit(inputs, labels)


@dataclass(frozen=True)
class TensorSplit(Split):
    """Samples that are rows of two tensors."""

    inputs: Tensor
    labels: Tensor

    @property
    def num_samples(self) -> int:
        """How many rows there are."""
        return len(self.inputs)

    def read_inputs(self, indices: Indices, _: Noise) -> Tensor:
        """These rows of the inputs."""
        return self.inputs[torch.from_numpy(indices)]

    def read_labels(self, indices: Indices) -> Tensor:
        """These rows of the labels."""
        return self.labels[torch.from_numpy(indices)]

    def read_raw(self, _: Indices) -> Iterator[bytes | memoryview]:
        """All of them."""
        for part in (self.inputs, self.labels):
            yield f"{part.dtype} {tuple(part.shape)}".encode()
            yield view_bytes(part.numpy())


def view_bytes(array: NDArray[Any]) -> memoryview:
    """An array's content, without a copy if it is in one piece."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


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

    def __init__(
        self, split: Split, *, batch_size: int, seed: int, shuffle: bool = True, source: str = "the data set"
    ) -> None:
        """`source` is what errors call the data."""
        check_whole("batch size", batch_size, minimum=1, maximum=split.num_samples)
        check_whole("seed", seed, minimum=0, maximum=MAX_SEED)
        self._split = split
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._source = source
        self._epoch = 0
        self._batch = 0
        self._order = self._draw_order()

    def ahead(self) -> "Batches":
        """The same sequence from where it stands; both go on alone."""
        other = Batches(self._split, batch_size=self._batch_size, seed=self._seed, shuffle=self._shuffle)
        other._epoch, other._batch, other._order = self._epoch, self._batch, self._order
        return other

    @property
    def batches_per_epoch(self) -> int:
        """How many full batches an epoch has."""
        return self._split.num_samples // self._batch_size

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._epoch

    def __next__(self) -> Batch:
        return self._split.read(self.select())

    def select(self) -> Selection:
        """What the next batch is made of; the sequence goes on by one."""
        rows = self._order[self._batch * self._batch_size : (self._batch + 1) * self._batch_size]
        rng = np.random.default_rng([_AUGMENT, self._seed, self._epoch, self._batch])
        selection = Selection(rows, rng.random((len(rows), self._split.num_random)))
        self._batch += 1
        if self._batch == self.batches_per_epoch:
            self._epoch, self._batch = self._epoch + 1, 0
            self._order = self._draw_order()
        return selection

    def state_dict(self) -> dict[str, Any]:
        """Where the sequence stands, and what it is a sequence of."""
        place = {"epoch": self._epoch, "batch": self._batch, "batch_size": self._batch_size}
        return {**place, **self._identity(), "fingerprint": self._fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; raises if it belongs to another sequence.

        With another batch size (more or fewer replicas, say) it goes on at the first batch that holds no sample seen.
        """
        for name, own in self._identity().items():
            if state.get(name) != own:
                raise ValueError(
                    f"the saved data state has {name} {state.get(name)} but this run {own}; "
                    "resume with the settings it was saved with"
                )
        # Those of before say nothing of the content, or by another version.
        saved = str(state.get("fingerprint"))
        if saved.startswith(f"{FINGERPRINT_VERSION}-") and saved != self._fingerprint:
            raise ValueError(
                f"the training samples of {self._source} are not those that the checkpoint was trained on, though "
                "equally many; give it the data of before, or start anew with --checkpoints.resume never"
            )
        check_whole("epoch of the saved data state:", state.get("epoch"), minimum=0)
        check_whole("batch size of the saved data state:", state.get("batch_size"), minimum=1)
        most = max(self._split.num_samples // state["batch_size"], 1) - 1
        check_whole("batch of the saved data state:", state.get("batch"), minimum=0, maximum=most)
        self._epoch, self._batch = state["epoch"], -(-state["batch"] * state["batch_size"] // self._batch_size)
        if self._batch >= self.batches_per_epoch:
            self._epoch, self._batch = self._epoch + 1, 0
        self._order = self._draw_order()

    @cached_property
    def _fingerprint(self) -> str:
        return self._split.fingerprint()

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


def select_tests(
    split: Split, *, num_samples: int, seed: int, batch_size: int, replica: int = 0, num_replicas: int = 1
) -> list[Selection]:
    """A replica's share of so many test samples, which the seed alone chooses, in batches; the last may be short."""
    order = np.random.default_rng([_TEST_ORDER, seed]).permutation(split.num_samples)[:num_samples]
    share = order[replica::num_replicas]
    parts = [share[start : start + batch_size] for start in range(0, len(share), batch_size)]
    return [Selection(part, np.zeros((len(part), split.num_random))) for part in parts]
