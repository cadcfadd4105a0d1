"""The losses at the last boundary that rules of training look back on: of this epoch, and since the last decision.

Only the last stage knows them; the others learn the mean when a rule asks for it.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from mpc_dist.runtime.mesh import Mesh
from mpc_dist.runtime.state import Saved


class LossMemory:
    """One rank's share of it; empty but on the last stage."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._epoch: list[float] = []
        self._recent: list[float] = []

    def add(self, losses: list[float]) -> None:
        """Remember the losses of a step."""
        self._epoch += losses
        self._recent += losses

    def take_epoch(self) -> float:
        """The epoch's mean, the same on every rank of a replica; then forget it. All of them must call it."""
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
        return {name: torch.tensor(losses, dtype=torch.float64) for name, losses in names.items()}

    def restore(self, saved: Saved) -> None:
        """Go on from saved tensors; with other replicas than saved, from one of theirs."""
        if self._mesh.stage != self._mesh.num_stages - 1:
            return
        for kind, losses in (("epoch", self._epoch), ("recent", self._recent)):
            name = self._name(kind, self._mesh.replica % saved.num_replicas)
            if name in saved.described:
                found = torch.empty_like(saved.described[name], device="cpu")
                saved.read({name: found})
                losses[:] = found.tolist()

    def _name(self, kind: str, replica: int) -> str:
        return f"losses.{kind}.{replica}"

    def _mean(self, losses: list[float]) -> float:
        mean = torch.tensor(sum(losses) / max(len(losses), 1), device=self._mesh.device)
        if self._mesh.stages is not None:
            dist.broadcast(mean, src=self._mesh.ranks_of_stages[-1], group=self._mesh.stages)
        return float(mean)
