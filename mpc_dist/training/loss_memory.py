"""The losses at the last boundary that rules of training look back on: of this epoch, and since the last decision.

Only the last stage knows them; the others learn the mean over all labels that counted when a rule asks for it.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from mpc_dist.runtime.mesh import Mesh
from mpc_dist.runtime.microbatch import Means
from mpc_dist.runtime.state import Saved


class LossMemory:
    """One rank's share of it; empty but on the last stage."""

    def __init__(self, mesh: Mesh, *, by_epoch: bool, by_decision: bool) -> None:
        """Which of the two rules ask for."""
        self._mesh = mesh
        self._by_epoch = by_epoch
        self._by_decision = by_decision
        self._epoch: list[Means] = []  # of a step each, unread
        self._recent: list[Means] = []

    @property
    def is_asked(self) -> bool:
        """Whether any rule asks."""
        return self._by_epoch or self._by_decision

    def add(self, means: Means) -> None:
        """Remember the losses of a step; they are read when a rule looks back."""
        if self._by_epoch:
            self._epoch.append(means)
        if self._by_decision:
            self._recent.append(means)

    def take_epoch(self) -> float:
        """The epoch's mean, the same on every rank; then forget it. All of them must call it."""
        losses, self._epoch = self._epoch, []
        return self._mean(losses)

    def take_recent(self) -> float:
        """The mean since it was last taken, likewise."""
        losses, self._recent = self._recent, []
        return self._mean(losses)

    def collect(self) -> dict[str, Tensor]:
        """As tensors to save."""
        memories = {"epoch": self._epoch, "recent": self._recent}
        names = {self._name(kind, self._mesh.replica): losses for kind, losses in memories.items() if losses}
        return {name: torch.tensor(_read(losses), dtype=torch.float64) for name, losses in names.items()}

    def restore(self, saved: Saved) -> None:
        """Go on from saved tensors; with other replicas than saved, from one of theirs."""
        if self._mesh.stage != self._mesh.num_stages - 1:
            return
        for kind, losses in (("epoch", self._epoch), ("recent", self._recent)):
            name = self._name(kind, self._mesh.replica % saved.num_replicas)
            if name in saved.described:
                found = torch.empty_like(saved.described[name], device="cpu")
                saved.read({name: found})
                # Kept without counts before there were any: all steps were alike.
                rows = found if found.ndim == 2 else torch.stack([found, torch.ones_like(found)], 1)
                losses[:] = [Means(row[:1], (row[1].item(),)) for row in rows]

    def _name(self, kind: str, replica: int) -> str:
        return f"losses.{kind}.{replica}"

    def _mean(self, losses: list[Means]) -> float:
        mesh, steps = self._mesh, _read(losses)
        total, count = sum(loss * number for loss, number in steps), sum(number for _, number in steps)
        sums = torch.tensor([total, count], dtype=torch.float64, device=mesh.device)
        if mesh.stages is not None:
            with mesh.watch.waiting(mesh.stages, "the last stage's loss"):
                dist.broadcast(sums, src=mesh.ranks_of_stages[-1], group=mesh.stages)
        if mesh.replicas is not None:
            # Replicas that decided differently would no longer be replicas.
            with mesh.watch.waiting(mesh.replicas, "the replicas' loss"):
                dist.all_reduce(sums, group=mesh.replicas)
        total, count = sums.tolist()
        return total / count if count else 0.0


def _read(losses: list[Means]) -> list[tuple[float, float]]:
    return [(means.average(), means.count) for means in losses]
