"""A device's clock, on events whose device is moved by hand: exact, and nobody waits before the times are read."""

import struct
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from mpc_dist.readout import mean_squared_error
from mpc_dist.runtime import Pipeline, build_pipeline, stage
from mpc_dist.runtime.clock import Clock, DeviceClock, HostClock, clock_of
from mpc_dist.runtime.stage import StageOptions
from mpc_dist.schedule.action import Op
from mpc_dist.windows import backprop
from tests.runtime.reference import KeepGradients
from tests.training.local import train_locally


class Event:
    """A `torch.cuda.Event`."""

    device_time = 0.0
    num_waits = 0

    def record(self) -> None:
        self.at = Event.device_time

    def synchronize(self) -> None:
        Event.num_waits += 1

    def elapsed_time(self, end: "Event") -> float:
        milliseconds: float = struct.unpack("f", struct.pack("f", 1000 * (end.at - self.at)))[0]
        return milliseconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(Event, "device_time", 0.0)
    monkeypatch.setattr(Event, "num_waits", 0)
    monkeypatch.setattr(stage, "clock_of", lambda _: DeviceClock(Event))
    return DeviceClock(Event)


def at(clock: Clock, seconds: float) -> object:
    Event.device_time = seconds
    return clock.now()


def test_moments_are_as_far_apart_as_on_the_device_after_hours_of_training(clock: Clock):
    """float32 counts the milliseconds of 10 hours in steps of 4."""
    beginning = clock.read(at(clock, 1.0), near=at(clock, 1.0))
    for step in range(10):
        begun, start, end = (at(clock, 3600.0 * (step + 1) + offset) for offset in (0.0, 0.25, 0.251))
        found = [clock.read(moment, near=begun) for moment in (begun, start, end)]
        assert found[2] - found[1] == pytest.approx(0.001, abs=1e-6)
        assert found[0] - beginning == pytest.approx(3600.0 * (step + 1) - 1, abs=1e-2)


def test_an_earlier_step_may_be_read_after_a_later_one(clock: Clock):
    early, late = at(clock, 1.0), at(clock, 100.0)
    assert clock.read(late, near=late) - clock.read(early, near=early) == pytest.approx(99.0)


def test_a_host_reads_its_own_clock():
    assert isinstance(clock_of(torch.device("cpu")), HostClock)
    assert HostClock().read(3.5, near=0.0) == 3.5


@pytest.mark.usefixtures("clock")
def test_a_step_is_recorded_without_waiting_and_read_as_the_device_ran_it(monkeypatch: pytest.MonkeyPatch):
    """Every action takes a second of the device's time, and the host none."""
    pipeline = build_pipeline(
        [nn.Linear(3, 3)],
        mean_squared_error,
        horizon=backprop(1),
        optimizer=KeepGradients,
        options=StageOptions(record_times=True),
        num_microbatches=2,
    )
    pipeline.connect(*torch.randn(2, 4, 3))
    for op, run in pipeline.stage.executor._handlers.items():

        def take_a_second(action: object, run: object = run) -> None:
            run(action)  # type: ignore[operator]
            Event.device_time += 1.0

        monkeypatch.setitem(pipeline.stage.executor._handlers, op, take_a_second)
    waits = Event.num_waits
    record = pipeline.step(*torch.randn(2, 4, 3)).record
    assert pipeline.describe()["seconds_since_last_action"] < 60
    assert Event.num_waits == waits
    assert [interval.end - interval.start for interval in record.timeline] == pytest.approx([1.0] * 5)
    assert record.timeline[-1].action.op is Op.UPDATE
    assert record.busy_seconds == pytest.approx(record.seconds) == pytest.approx(5.0)
    assert Event.num_waits > waits


@pytest.mark.usefixtures("clock")
def test_training_reads_times_when_it_writes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    waits: list[int] = []
    step = Pipeline.step

    def count(self: Pipeline, *batch: object, **options: object) -> object:
        waits.append(Event.num_waits)
        return step(self, *batch, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Pipeline, "step", count)
    arguments = "--model.name res_mlp --model.num_blocks 2 --data.name linear --device cpu --training.steps 40"
    train_locally([*arguments.split(), "--training.log_every", "8"], tmp_path)
    # Before the steps whose timelines are written.
    reads = [step for step, (before, after) in enumerate(pairwise(waits[:20]), 1) if after > before]
    assert reads == [1, 8, 16]


def test_the_work_of_a_gpu_is_timed_by_its_events_and_a_hosts_by_its_own_clock(monkeypatch):
    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None: ...

        def synchronize(self) -> None: ...

    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert isinstance(clock_of(torch.device("cuda", 0)).now(), Event)
    assert isinstance(clock_of(torch.device("cpu")).now(), float)
