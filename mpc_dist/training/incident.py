"""What every rank was doing when a job got stuck, and which rank the others wait for.

RUN/stall/<start of the job>/asked         the first rank that noticed asks all others
                             rank3.json    each answers with what it does; one that is stopped or dead cannot
                             summary.txt   one rank makes this of the answers
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RankReport:
    """What one rank was doing."""

    rank: int
    phase: str
    waits_for: tuple[int, ...] = ()
    """Ranks, any of which may be missing; empty: it waits for nobody."""
    waits_at: str | None = None
    """What for."""
    seconds: float | None = None
    """How long it has waited or, if it does not wait, how long the present action has taken."""
    is_lost: bool = False
    """Whether the connection to the peer was closed."""
    error: str | None = None
    """What it ended with, if that was no wait."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """Step, action, micro-batch, what is in flight, bytes of buffers; a number that is not finite."""
    stacks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Where each thread was, innermost call last."""

    def describe(self) -> str:
        """One line."""
        step = f"step {self.state['step']}, " if self.state.get("step") is not None else ""
        where = f"{step}{self.phase}"
        if self.error is not None:
            return f"{where}: ended with: {self.error}"
        taken = "" if self.seconds is None else f" for {self.seconds:.1f} s"
        if self.waits_for:
            return f"{where}: {'lost its peer' if self.is_lost else 'waiting'}{taken}, {self.waits_at}"
        action = self.state.get("action")
        return f"{where}: waits for nobody; {'at ' + str(action) if action else 'between actions'}{taken}"


@dataclass(frozen=True)
class Culprit:
    """A rank that others wait for and that itself waits for nobody."""

    rank: int
    reason: str
    num_waiting: int
    """How many others wait for it, directly or through others."""


def find_culprits(reports: Mapping[int, RankReport], num_ranks: int) -> list[Culprit]:
    """The ranks at the end of the chains of waiting, most waited for first.

    A number that is not finite comes first: it is blamed on the rank at which it appeared.
    """
    findings = {rank: found for rank, found in _findings(reports).items() if not found["is_received"]}
    if findings:
        return [
            Culprit(rank, f"a number that is not finite: {describe_finding(found)}", len(reports) - 1)
            for rank, found in findings.items()
        ]
    edges = {rank: _missing_peers(rank, reports, num_ranks) for rank in range(num_ranks)}
    ends = [rank for rank in range(num_ranks) if not edges[rank]]
    found = []
    for end in ends:
        waiting = {rank for rank in range(num_ranks) if rank != end and end in _reachable(rank, edges)}
        if end not in reports:
            found.append(Culprit(end, "wrote nothing: it has died, or is stopped", len(waiting)))
        elif reports[end].error is not None or waiting:
            found.append(Culprit(end, reports[end].describe(), len(waiting)))
    # An error and a silence explain more than a rank that is just slow.
    return sorted(found, key=lambda one: (one.rank in reports and reports[one.rank].error is None, -one.num_waiting))


def _missing_peers(rank: int, reports: Mapping[int, RankReport], num_ranks: int) -> set[int]:
    """Whom a rank waits for: of a collective operation, those members that have not come to it."""
    if rank not in reports or reports[rank].error is not None:
        return set()
    own = reports[rank]

    def is_there(peer: int) -> bool:
        other = reports.get(peer)
        return other is not None and other.error is None and other.waits_at == own.waits_at and rank in other.waits_for

    return {peer for peer in own.waits_for if peer < num_ranks and not is_there(peer)}


def _reachable(rank: int, edges: Mapping[int, set[int]]) -> set[int]:
    found: set[int] = set()
    left = [rank]
    while left:
        new = edges[left.pop()] - found
        found |= new
        left += new
    return found


def _findings(reports: Mapping[int, RankReport]) -> dict[int, Mapping[str, Any]]:
    return {rank: one.state["finding"] for rank, one in reports.items() if one.state.get("finding")}


def describe_finding(finding: Mapping[str, Any]) -> str:
    """What was not finite, and where."""
    block = "" if finding["block"] is None else f" of block {finding['block']}"
    microbatch = "" if finding["microbatch"] is None else f" in micro-batch {finding['microbatch']}"
    return f"{finding['what']}{block}{microbatch}"


def summarise(reports: Mapping[int, RankReport], num_ranks: int, *, asked_by: str) -> str:
    """The readable summary; its first line names the culprit."""
    culprits = find_culprits(reports, num_ranks)
    if culprits:
        first = culprits[0]
        others = f"; {first.num_waiting} of {num_ranks - 1} others wait for it" if first.num_waiting else ""
        headline = f"culprit: rank {first.rank}: {first.reason}{others}"
    else:
        headline = "the ranks wait for each other in a circle: a message was lost, or the schedule is wrong"
    lines = [headline, f"noticed by {asked_by}"]
    lines += [f"also: rank {one.rank}: {one.reason}" for one in culprits[1:]]
    for rank in range(num_ranks):
        lines.append(f"rank {rank}: {reports[rank].describe() if rank in reports else 'no answer'}")
    return "\n".join(lines)


class IncidentFolder:
    """The files of an incident; there is a folder only once there is one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def is_asked(self) -> bool:
        """Whether some rank has noticed."""
        return (self.path / "asked").exists()

    @property
    def is_summarised(self) -> bool:
        """Whether the summary is there."""
        return (self.path / "summary.txt").exists()

    def ask(self, why: str) -> None:
        """Ask every rank for what it does; the first reason stays."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._create("asked", why)

    def asked_by(self) -> str:
        """The first reason."""
        with suppress(OSError):
            return (self.path / "asked").read_text(encoding="utf-8")
        return "?"

    def write(self, report: RankReport) -> None:
        """Leave a rank's answer, whole or not at all; an error replaces a wait."""
        self.path.mkdir(parents=True, exist_ok=True)
        _replace(self._report_path(report.rank), json.dumps(asdict(report), indent=1, default=str))

    def read(self, num_ranks: int) -> dict[int, RankReport]:
        """Every answer that is there."""
        found = {}
        for rank in range(num_ranks):
            with suppress(OSError, ValueError, TypeError):
                content = json.loads(self._report_path(rank).read_text(encoding="utf-8"))
                found[rank] = RankReport(**{**content, "waits_for": tuple(content["waits_for"])})
        return found

    def has(self, rank: int) -> bool:
        """Whether that rank has answered."""
        return self._report_path(rank).exists()

    def claim_summary(self) -> bool:
        """Whether this rank is the one to write the summary: the first to ask for it."""
        return self._create("claimed", "")

    def write_summary(self, text: str) -> None:
        """Leave the summary."""
        _replace(self.path / "summary.txt", text + "\n")

    def read_headline(self, *, patience: float) -> str | None:
        """The summary's first line, if there is one in time."""
        deadline = time.monotonic() + patience
        while True:
            with suppress(OSError):
                return (self.path / "summary.txt").read_text(encoding="utf-8").splitlines()[0]
            if time.monotonic() > deadline:
                return None
            time.sleep(0.05)

    def _report_path(self, rank: int) -> Path:
        return self.path / f"rank{rank}.json"

    def _create(self, name: str, content: str) -> bool:
        try:
            with (self.path / name).open("x", encoding="utf-8") as file:
                file.write(content)
        except FileExistsError:
            return False
        return True


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
