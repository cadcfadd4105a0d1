"""Which rank holds a pipeline back, and by how much: its busy time against what its share of the work should take."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from mpc_dist.runtime.mesh import Mesh

NOTICEABLE = 1.5
"""A rank is called slow if its work takes so many times what it should: below it lie heads, embeddings and a busy
machine."""
MOST_STEPS = 200
"""Of how many last steps the median is taken."""


@dataclass(frozen=True)
class Pace:
    """How one rank spent its steps."""

    rank: int
    busy: float
    """Seconds of a step in which it computed or updated; the median of the last steps."""
    share: float
    """What its work should cost, in any unit that all ranks use."""
    waiting_for: dict[int, float]
    """Seconds that it waited for each neighbour, in all."""


@dataclass(frozen=True)
class Straggler:
    """The rank that the others wait for."""

    rank: int
    factor: float
    """How many times as long as it should its work takes, by what the same work takes on the others."""
    seconds: float
    """What it takes longer, per step."""
    waited: float
    """Seconds that neighbours have waited for it, in all."""

    def __str__(self) -> str:
        return (
            f"rank {self.rank} holds the pipeline back: its share of the work takes {self.factor:.2f} times what it "
            f"would elsewhere, {1000 * self.seconds:.3g} ms more in each step; its neighbours waited "
            f"{self.waited:.1f} s for it"
        )


def find_straggler(paces: Sequence[Pace]) -> Straggler | None:
    """The busiest rank, if it is busier than its share of the work explains."""
    known = [pace for pace in paces if pace.share > 0 and pace.busy > 0]
    if len(known) < 2:
        return None
    slowest = max(known, key=lambda pace: pace.busy)
    usual = statistics.median(pace.busy / pace.share for pace in known if pace is not slowest)
    factor = slowest.busy / slowest.share / usual
    if factor < NOTICEABLE:
        return None
    waited = sum(pace.waiting_for.get(slowest.rank, 0.0) for pace in paces)
    return Straggler(slowest.rank, factor, slowest.busy - usual * slowest.share, waited)


def gather_paces(mesh: Mesh, own: Pace) -> list[Pace]:
    """Every rank's; all ranks call it."""
    if mesh.stages is None:
        return [own]
    paces: list[Pace] = [own] * (mesh.num_stages * mesh.num_replicas)
    with mesh.watch.waiting(None, "the pace of all ranks"):
        dist.all_gather_object(paces, own)
    return paces
