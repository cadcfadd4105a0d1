"""When work ran: by the host's clock, or on a device by events in its queue, of which nobody waits until they are read.

A host is done with an action when it has enqueued it: its times say nothing about a device.
"""

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

Moment = Any
"""What a clock gives: the host's a number of seconds, a device's an event."""


class Clock(Protocol):
    """One rank's."""

    def now(self) -> Moment:
        """This point of the work."""

    def read(self, moment: Moment, *, near: Moment) -> float:
        """Seconds, by the host's clock; exact to a microsecond relative to `near`, which was a few steps away at most.

        A device's are waited for.
        """


class HostClock:
    """For a device whose work is done when its call returns."""

    def now(self) -> float:
        """Seconds."""
        return time.perf_counter()

    def read(self, moment: float, *, near: float) -> float:  # noqa: ARG002
        """The same."""
        return moment


class Event(Protocol):
    """What is used of a `torch.cuda.Event`."""

    def record(self) -> None:
        """Put it into the queue."""

    def synchronize(self) -> None:
        """Wait until the device has come to it."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this one to another, in float32."""


def make_cuda_event() -> Event:
    """One that knows its time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class DeviceClock:
    """By a device's events."""

    def __init__(self, make_event: Callable[[], Event] = make_cuda_event) -> None:
        self._make_event = make_event
        self._base = self.now()
        self._base.synchronize()
        self._seconds = time.perf_counter()
        """When the device came to the base, by the host's clock."""

    def now(self) -> Event:
        """An event behind all that was enqueued before."""
        event = self._make_event()
        event.record()
        return event

    def read(self, moment: Event, *, near: Event) -> float:
        """Wait for the event, and tell when it was."""
        moment.synchronize()
        if near is not self._base:
            # float32 knows milliseconds of an hour, microseconds of a few steps: the base goes along with what is read.
            near.synchronize()
            self._seconds += self._base.elapsed_time(near) / 1000
            self._base = near
        return self._seconds + self._base.elapsed_time(moment) / 1000


def clock_of(device: torch.device) -> Clock:
    """That of a device's work."""
    return DeviceClock() if device.type == "cuda" else HostClock()
