"""What a rank's device waits for, and what ranks wait for before they are connected, is told like any other wait."""

import threading
from pathlib import Path

from mpc_dist.runtime import mesh as meshes
from mpc_dist.runtime.local import run_local_ranks
from mpc_dist.runtime.mesh import Launch, Mesh
from mpc_dist.runtime.watch import DeviceWaits, Wait, Watch
from mpc_dist.schedule.action import parse_action
from mpc_dist.training import watcher
from mpc_dist.training.job import train
from mpc_dist.training.watcher import Watcher
from mpc_dist.windows import sliding
from tests.nccl.test_no_hang import build
from tests.training.faulty import SMALL
from tests.training.local import parse


class Mark:
    """A `torch.cuda.Event` whose device is moved by hand."""

    def __init__(self) -> None:
        self.is_reached = False
        self.num_asked = 0

    def query(self) -> bool:
        """Whether the device was moved past it."""
        self.num_asked += 1
        return self.is_reached


def give(count: int) -> tuple[DeviceWaits, list[Wait], list[Mark]]:
    marks = [Mark() for _ in range(count)]
    waits = [Wait((number,), f"wait {number}") for number in range(count)]
    coming = iter(marks)
    device = DeviceWaits(lambda: next(coming, None) or Mark())
    for wait in waits:
        device.add(wait)
    return device, waits, marks


def test_the_wait_that_a_device_is_at_is_the_first_that_is_not_done():
    device, waits, marks = give(3)
    device.look()
    first = device.present
    assert (first.peers, first.what) == (waits[0].peers, waits[0].what)
    assert first.since > waits[0].since  # it may have been given long before
    device.look()
    assert device.present is first
    marks[0].is_reached = marks[1].is_reached = True
    device.look()
    assert device.present.what == "wait 2"
    marks[2].is_reached = True
    device.look()
    assert device.present is None


def test_waits_that_are_done_are_forgotten_and_asked_once():
    device, _, marks = give(3)
    marks[0].is_reached = marks[1].is_reached = True
    for _ in range(4):
        device.look()
    assert [mark.num_asked for mark in marks] == [3, 1, 4]  # the first also by each wait that was given
    device.add(Wait((3,), "another"))
    assert len(device._given) == 2


def test_a_wait_of_this_thread_comes_first():
    watch = Watch(0, device=give(1)[0])
    watch.device.look()
    with watch.waiting(None, "the others", peers=[1, 2]):
        assert watch.present.what == "the others"
    assert watch.present.what == "wait 0"
    assert [given.wait.what for given in watch.device._given] == ["wait 0", "the others"]


def step_with_marks(rank: int) -> list[str]:
    """What the device would be waiting for after a step, in order."""
    pipeline, inputs, labels = build(rank, (3, 3), sliding(6, 4), num_microbatches=2, replicas=2)
    watch = pipeline.mesh.watch
    pipeline.connect(inputs, labels)
    watch.device = DeviceWaits(Mark)
    pipeline.step(inputs, labels)
    pipeline.close()
    return [given.wait.what for given in watch.device._given]


def test_every_wait_of_a_step_is_left_behind():
    by_rank = run_local_ranks(step_with_marks, 4)
    for rank, found in enumerate(by_rank):
        receives = [what.split(" at ")[1] for what in found if what.startswith("receiving from")]
        assert {parse_action(text).op.value for text in receives} == ({"RD"} if rank < 2 else {"RA"})
        assert "the average of the replicas' gradients" in found
    assert "the replicas' number of labels" in by_rank[3]


def get_stuck(rank: int, folder: Path) -> None:
    """Rank 0's device waits for rank 1 and rank 0 for its device; rank 1 computes."""
    watcher.LAST_RESORT = 1.0
    watch = Watch(rank)
    if rank == 0:
        watch.device = DeviceWaits(Mark)
        watch.end(Wait((1,), "receiving from rank 1 at RD2.0@3"))
    with Watcher(watch, rank, 2, folder, timeout=1.0):
        threading.Event().wait(6)


def test_a_device_that_is_stuck_is_told_with_what_it_waits_for(tmp_path: Path):
    assert run_local_ranks(get_stuck, 2, tmp_path, may_fail=True)[0] is None  # ended by force
    said = next(tmp_path.glob("stall/*/summary.txt")).read_text()
    assert said.startswith("culprit: rank 1: start-up: waits for nobody; between actions; 1 of 1 others wait for it")
    assert "rank 0: start-up: waiting for 1." in said
    assert "receiving from rank 1 at RD2.0@3" in said


def stay_away(rank: int, folder: str) -> None:
    connect = meshes._connect_neighbours
    watcher.LAST_RESORT = 1.0

    def connect_late(mesh: Mesh) -> None:
        if rank == 1:
            with mesh.watch.during("start-up, in a library"):
                threading.Event().wait(8)
        connect(mesh)

    meshes._connect_neighbours = connect_late
    config = parse([*SMALL, *f"--parallel.stages 3 --training.folder {folder} --parallel.timeout 2".split()])
    train(config, Launch(rank, 3, rank), is_quiet=True)


def test_a_rank_that_is_stuck_while_neighbours_connect_is_named(tmp_path: Path):
    run_local_ranks(stay_away, 3, str(tmp_path), may_fail=True)
    said = next(tmp_path.glob("stall/*/summary.txt")).read_text()
    assert said.startswith("culprit: rank 1: start-up, in a library: waits for nobody")
