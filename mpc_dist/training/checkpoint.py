"""Saves and reads checkpoints, as safetensors: reading one executes nothing.

Saving is done by a thread with a process group of its own: a rank only copies its tensors, and ranks that are at
different steps never wait for each other. Each rank writes one file; rank 0 notes which tensor is in which, so that
whoever goes on opens only the files that hold what it needs.
"""

import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpc_dist.runtime.tree import gather_objects
from mpc_dist.runtime.watch import Watch
from mpc_dist.training.checkpoint_folder import (
    CheckpointState,
    Digest,
    commit,
    find_damage,
    folder_of,
    list_checkpoints,
    partial_of,
    read_state,
)
from mpc_dist.training.tensor_files import (
    UNREADABLE,
    Entry,
    TensorFiles,
    describe_problem,
    read_index,
    write_tensors,
)


@dataclass(frozen=True)
class SaveOutcome:
    """How a save went on this rank."""

    step: int
    seconds: float
    """From the copy of the tensors to the file on disk."""
    size: int
    """Bytes that this rank wrote."""
    failure: str | None
    """Why there is no checkpoint; the ones before it are intact."""
    is_peer_lost: bool = False
    """Whether another rank did not take part in time, or is gone."""


def name_save(step: int) -> str:
    """What ranks that wait for each other in a save say that they wait for."""
    return f"the checkpoint after step {step}"


class CheckpointSaver:
    """Writes one rank's part of every checkpoint, in the background."""

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        fingerprint: dict[str, Any],
        rank: int = 0,
        num_replicas: int = 1,
        group: dist.ProcessGroup | None = None,
        watch: Watch | None = None,
    ) -> None:
        """`group` joins all ranks for nothing but this; None in a single process."""
        self._folder = folder
        self._keep = keep
        self._fingerprint = fingerprint
        self._rank = rank
        self._num_replicas = num_replicas
        self._group = group
        self._watch = watch or Watch(rank)
        self._step = 0
        self._thread: threading.Thread | None = None
        self._outcomes: list[SaveOutcome] = []

    def save(self, step: int, tensors: Mapping[str, Tensor], progress: dict[str, Any]) -> None:
        """Write these tensors, which nobody else changes, as the checkpoint after `step`.

        Every rank calls it for the same steps. It returns at once, unless the save before it is still under way.
        """
        self.wait()
        self._step = step
        self._thread = threading.Thread(
            target=self._write, args=(step, dict(tensors), progress), name=f"checkpoint {step}", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait for the save under way; if ranks are gone, at most the group's timeout."""
        if self._thread is None:
            return
        with nullcontext() if self._group is None else self._watch.waiting(self._group, name_save(self._step)):
            self._thread.join()
        self._thread = None

    def take_outcomes(self) -> list[SaveOutcome]:
        """The saves that have ended since this was last asked."""
        found, self._outcomes = self._outcomes, []
        return found

    def _write(self, step: int, tensors: dict[str, Tensor], progress: dict[str, Any]) -> None:
        start, size, failure, is_peer_lost = time.perf_counter(), 0, None, False
        try:
            size = self._write_together(step, tensors, progress)
        except Exception as error:
            failure = str(error) if isinstance(error, _SaveError) else describe_problem(error)
            # What goes wrong while a rank writes is told to all; the group raises this one.
            is_peer_lost = self._group is not None and isinstance(error, RuntimeError)
            if self._rank == 0:
                # On a full disk the next save needs the room.
                shutil.rmtree(partial_of(self._folder, step), ignore_errors=True)
        self._outcomes.append(SaveOutcome(step, time.perf_counter() - start, size, failure, is_peer_lost))

    def _write_together(self, step: int, tensors: dict[str, Tensor], progress: dict[str, Any]) -> int:
        partial = partial_of(self._folder, step)
        own = self._write_own(partial, tensors)
        # From here on every rank takes part in both messages, whatever went wrong on it.
        parts = [own] if self._group is None else gather_objects(own, self._group)
        outcome: list[str | None] = [None if parts is None else self._try_commit(partial, step, progress, parts)]
        if self._group is not None:
            dist.broadcast_object_list(outcome, src=0, group=self._group)
        if outcome[0] is not None:
            raise _SaveError(outcome[0])
        return 0 if isinstance(own, str) else own.digest.size

    def _write_own(self, partial: Path, tensors: dict[str, Tensor]) -> "_Part | str":
        """What this rank wrote, or why it could not."""
        # Named and numbered as torch's library did, which wrote them once.
        path = partial / f"shard-{self._rank + 1:05d}-model-00001-of-00001.safetensors"
        try:
            return _Part(path.name, write_tensors(path, tensors), Digest.of(path))
        except Exception as error:  # the others wait to hear of it
            return f"rank {self._rank}: {describe_problem(error)}"

    def _try_commit(
        self, partial: Path, step: int, progress: dict[str, Any], parts: Sequence["_Part | str"]
    ) -> str | None:
        try:
            return self._commit(partial, step, progress, parts)
        except (OSError, ValueError) as error:
            return describe_problem(error)

    def _commit(self, partial: Path, step: int, progress: dict[str, Any], parts: Sequence["_Part | str"]) -> str | None:
        files: dict[str, Digest] = {}
        for part in parts:
            if isinstance(part, str):
                return part
            if not (partial / part.name).is_file():
                raise OSError(
                    f"{part.name} was written but is not seen here; training.folder must be one that all hosts see"
                )
            files[part.name] = part.digest
        for left in partial.glob("*.safetensors"):  # by an attempt with more ranks, at the same step
            if left.name not in files:
                left.unlink()
        index = {part.name: part.entries for part in parts if isinstance(part, _Part)}
        state = CheckpointState(step, self._num_replicas, self._fingerprint, progress, files, index)
        commit(partial, state, keep=self._keep)
        return None


class _SaveError(Exception):
    """A save that failed on some rank, as all have been told."""


@dataclass(frozen=True)
class _Part:
    """One rank's file of a checkpoint."""

    name: str
    entries: dict[str, Entry]
    digest: Digest


class SavedCheckpoint:
    """A checkpoint on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = read_state(path)

    @property
    def num_replicas(self) -> int:
        """How many replicas kept their buffers."""
        return self.state.num_replicas

    @cached_property
    def _files(self) -> TensorFiles:
        with self._explained():
            index = self.state.index
            if index is None:  # it is one of before: its files are asked
                index = read_index(self.path, self.state.files)
            return TensorFiles(self.path, index, {name: digest.size for name, digest in self.state.files.items()})

    @property
    def described(self) -> Mapping[str, Tensor]:
        """Every name there is, with an empty tensor of its shape and type."""
        return self._files.described

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Copy the tensors of these names into place; only the files that hold them are opened."""
        files = self._files
        with self._explained():
            files.read(into)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except UNREADABLE as error:
            raise OSError(f"checkpoint {self.path} cannot be read: {describe_problem(error)}") from error

    def read_all(self, names: list[str]) -> dict[str, Tensor]:
        """The tensors of these names."""
        tensors = {name: torch.empty_like(self.described[name], device="cpu") for name in names}
        self.read(tensors)
        return tensors


def find_run_checkpoints(place: Path) -> list[Path]:
    """The checkpoints meant by a run folder, oldest first, or by the path of a single one."""
    if (place / "state.json").is_file():
        return [place]
    return list_checkpoints(folder_of(place))


def newest_undamaged(
    candidates: list[Path], *, rank: int = 0, group: dist.ProcessGroup | None = None
) -> tuple[SavedCheckpoint | None, list[str]]:
    """The newest checkpoint whose files are all as they were written, and what is wrong with newer ones.

    All ranks of the group call it; they share the checking and agree on the answer.
    """
    num_ranks = 1 if group is None else dist.get_world_size(group)
    names: list[list[Path]] = [candidates]
    if group is not None:
        dist.broadcast_object_list(names, src=0, group=group)  # a shared file system may show another rank less
    damages: list[str] = []
    for path in reversed(names[0]):
        found: list[str | None] = [find_damage(path, part=rank, num_parts=num_ranks)]
        if group is not None:
            mine, found = found[0], [None] * num_ranks
            dist.all_gather_object(found, mine, group=group)
        damage = next((text for text in found if text is not None), None)
        if damage is None:
            return SavedCheckpoint(path), damages
        damages.append(damage)
    return None, damages
