"""Batches read ahead by processes: the same as without, in order, and nothing of them stays."""

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch

from mpc_dist.data import Batches, ImageFolderData, Split
from mpc_dist.data.dataset import Selection, select_tests
from mpc_dist.data.reading import Reader, Use, choose_workers
from tests.conftest import ROOT
from tests.data.test_dataset import noisy, numbered

Image = pytest.importorskip("PIL.Image")
PATIENCE = 30.0
"""Seconds for what should take a few on a busy machine."""


def select(split: Split, count: int) -> Iterator[Selection]:
    batches = Batches(split, batch_size=4, seed=2)
    return (batches.select() for _ in range(count))


def children() -> set[int]:
    """The processes that read for this one."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == os.getpid() and b"mpc_dist.data.reading" in (folder / "cmdline").read_bytes():
                found.add(int(folder.name))
    return found


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_what_processes_read_is_what_the_rank_would_have_read(num_workers: int):
    """Two splits at once, as a rank trains on one and is evaluated on the other in between."""
    expected = [noisy().read(selection) for selection in select(noisy(), 9)]
    tests = select_tests(numbered(), num_samples=10, seed=0, batch_size=3)
    with Reader({"train": noisy(), "test": numbered()}, num_workers=num_workers) as reader:
        training = reader.read("train", select(noisy(), 9), Use())
        parts = list(itertools.islice(training, 4))
        for part, selection in zip(reader.read("test", tests, Use()), tests, strict=True):
            assert part.inputs is not None
            assert part.inputs.tolist() == selection.indices.tolist()
            assert part.num_samples == selection.num_samples
        parts += training
    assert len(parts) == len(expected)
    for part, (inputs, labels) in zip(parts, expected, strict=True):
        assert part.inputs is not None
        assert part.labels is not None
        assert torch.equal(part.inputs, inputs)
        assert torch.equal(part.labels, labels)


class OnlyLabels(type(noisy())):  # type: ignore[misc]
    """Samples whose inputs cannot be read."""

    def read_inputs(self, *_: object) -> torch.Tensor:
        raise AssertionError("inputs were read")


def test_nothing_is_read_that_is_not_used():
    split = OnlyLabels(10)
    with Reader({"train": split}, num_workers=0) as reader:
        labels, nothing = (
            list(reader.read("train", select(noisy(), 2), use))
            for use in (Use(inputs=False), Use(inputs=False, labels=False))
        )
    assert [part.inputs for part in (*labels, *nothing)] == [None] * 4
    assert all(part.labels is not None and len(part.labels) == 4 for part in labels)
    assert [(part.labels, part.num_samples) for part in nothing] == [(None, 4)] * 2


@pytest.fixture
def pictures(tmp_path: Path) -> Split:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(6):
            Image.new("RGB", (4, 4), (number, 0, 0)).save(tmp_path / name / f"{number}.png")
    return ImageFolderData(folder=str(tmp_path), size=4, test_fraction=0.5).load().train


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_broken_picture_is_the_same_error_whoever_reads_it(num_workers: int, pictures: Split, tmp_path: Path):
    for path in tmp_path.rglob("*.png"):
        path.write_text("no picture")
    with (
        Reader({"train": pictures}, num_workers=num_workers) as reader,
        pytest.raises(ValueError, match=r"^picture .*/\d\.png cannot be read: cannot identify .*; mend or remove it$"),
    ):
        next(reader.read("train", select(pictures, 3), Use()))


def test_pictures_are_read_by_processes_and_what_is_in_memory_is_not(pictures: Split):
    assert 1 <= choose_workers(pictures, None) <= 4
    assert choose_workers(pictures, 0) == 0
    assert choose_workers(numbered(), None) == 0
    assert choose_workers(numbered(), 7) == 7


def test_processes_hold_no_port_and_heed_no_signal_of_the_launcher_and_end_with_the_reader(pictures: Split):
    """What a rank has open stays its own: a port that outlives it could not be bound again."""
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as stack:
        server.set_inheritable(True)
        reader = stack.enter_context(Reader({"train": pictures}, num_workers=2))
        workers = children()
        assert len(workers) == 2
        for pid in workers:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                os.kill(pid, number)
        parts = list(reader.read("train", select(pictures, 8), Use()))
        assert len(parts) == 8
        assert children() == workers
        for pid in workers:
            opened = [str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()]
            assert not [name for name in opened if name.startswith(("socket:", "/dev/nvidia"))], opened
    assert not children()


def test_a_process_that_is_killed_is_said_in_a_line(pictures: Split):
    with Reader({"train": pictures}, num_workers=1) as reader:
        (pid,) = children()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(OSError, match=r"ended with exit code -9 .*; use fewer training\.workers, or 0"):
            next(reader.read("train", select(pictures, 3), Use()))


RANK = """
import sys, time
from tests.data.test_reading import noisy, select, Use, Reader, children
reader = Reader({"train": noisy()}, num_workers=2)
next(reader.read("train", select(noisy(), 6), Use()))
print(*children(), flush=True)
time.sleep(60)
"""


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # ended; whoever inherited it has not noticed yet


def test_processes_end_when_the_rank_is_killed():
    with subprocess.Popen([sys.executable, "-c", RANK], cwd=ROOT, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        pids = [int(word) for word in rank.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(is_running, pids))
        rank.kill()
    deadline = time.monotonic() + PATIENCE
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, pids))
