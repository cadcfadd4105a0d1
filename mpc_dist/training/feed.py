"""What one rank trains on: its replica's part of every batch, of that what the rank uses, read ahead."""

from collections import deque
from collections.abc import Iterator
from itertools import count

import torch

from mpc_dist.data import Batches
from mpc_dist.data.reading import Part, Reader, Use
from mpc_dist.runtime.mesh import Mesh

TRAIN = "train"
"""What the reader calls the training set."""


class Feed(Iterator[Part]):
    """The parts of a sequence of batches, from where it stands; the sequence goes on as they are taken, not as read.

    So its state, saved between two steps, is that of the training, however much has been read ahead.
    """

    def __init__(self, batches: Batches, reader: Reader, mesh: Mesh, use: Use, dtype: torch.dtype) -> None:
        ahead = batches.ahead()
        selections = (ahead.select().part(mesh.replica, mesh.num_replicas) for _ in count())
        self._batches = batches
        self._parts = (part.to(dtype) for part in reader.read(TRAIN, selections, use))
        self._peeked: deque[Part] = deque(maxlen=1)

    def peek(self) -> Part:
        """The next part, read if it has not been, which stays the next."""
        if not self._peeked:
            self._peeked.append(next(self._parts))
        return self._peeked[0]

    def __next__(self) -> Part:
        part = self.peek()
        self._peeked.clear()
        self._batches.select()
        return part
