"""The process in which a run is reported to W&B, fed by rank 0 through its standard input: a message per line, as JSON.

It has an interpreter of its own, so that no training step waits for it, and a lower priority. It ends when its input
does: with the run marked as failed, if rank 0 did not say that it succeeded.
"""

import json
import os
import sys
import threading
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mpc_dist.training.collector import Collector
from mpc_dist.training.tracking import TrackingConfig
from mpc_dist.training.wandb_tracker import WandbTracker

NICENESS = 10
PERIOD = 0.5
"""Seconds in which messages gather: figures of one step, from several ranks, are then one row."""


def main(messages: Iterable[str] = sys.stdin) -> None:
    """Report until the messages end."""
    os.nice(NICENESS)
    arrived: deque[list[Any]] = deque()
    has_ended = threading.Event()

    def read() -> None:
        arrived.extend(json.loads(message) for message in messages)
        has_ended.set()

    threading.Thread(target=read, daemon=True).start()
    while not arrived and not has_ended.wait(PERIOD):
        pass
    if not arrived:
        return
    kind, folder, tracking, is_resumed = arrived.popleft()
    assert kind == "begin"
    config = TrackingConfig(**{**tracking, "tags": tuple(tracking["tags"])})
    collector = Collector(WandbTracker(config, is_resumed=is_resumed), Path(folder))
    succeeded = False
    is_last_round = False
    while not is_last_round:
        is_last_round = has_ended.wait(PERIOD)
        found = [arrived.popleft() for _ in range(len(arrived))]
        collector.report((rank, line) for kind, *values in found if kind == "line" for rank, line in [values])
        for kind, *values in found:
            if kind == "figure":
                collector.show(values[0], Path(values[1]))
            elif kind == "end":
                (succeeded,) = values
    collector.finish(succeeded=succeeded)


if __name__ == "__main__":
    main()
