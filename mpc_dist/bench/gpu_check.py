"""The first hour on GPUs: checks that each come to a verdict of their own, and the page that they make.

A check bounds its time by itself, runs what it runs in other processes, and says what it saw; whatever it raises is its
own verdict and hides no other's.
"""

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

Verdict = Literal["held", "did not hold", "not run"]


@dataclass(frozen=True)
class Finding:
    """What a check came to."""

    verdict: Verdict
    reason: str
    """One line: what held, or what did not, or why it was not run."""
    figures: Sequence[str] = ()
    """Lines for whoever wants to know more."""


@dataclass(frozen=True)
class Check:
    """One claim and how it is looked at."""

    name: str
    claim: str
    run: Callable[[], Finding]


@dataclass(frozen=True)
class Outcome:
    """A check that is over."""

    check: Check
    finding: Finding
    seconds: float


@dataclass
class Largest:
    """The largest difference seen so far, and where; all must stay within a limit."""

    limit: float
    figures: list[str] = field(default_factory=list)
    _worst: float = 0.0
    _where: str = ""

    def add(self, where: str, difference: float) -> None:
        """See one more; what is not a number is beyond every limit."""
        difference = difference if difference == difference else float("inf")
        self.figures.append(f"{where}: {difference:.2g}")
        if difference >= self._worst:
            self._worst, self._where = difference, where

    def conclude(self, what: str) -> Finding:
        """Whether all were within the limit."""
        is_within = self._worst <= self.limit
        reason = f"{what}: largest relative difference {self._worst:.2g} ({self._where}), limit {self.limit:.2g}"
        return Finding("held" if is_within else "did not hold", reason, self.figures)


def run_checks(checks: Sequence[Check], report: Callable[[str], None]) -> list[Outcome]:
    """Run them one after another, whatever becomes of each."""
    outcomes = []
    for check in checks:
        report(f"{check.name} ...")
        start = time.perf_counter()
        try:
            finding = check.run()
        except Exception as error:
            lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            finding = Finding("did not hold", lines[-1].strip(), lines)
        outcomes.append(Outcome(check, finding, time.perf_counter() - start))
        report(f"{check.name}: {finding.verdict} ({outcomes[-1].seconds:.0f} s): {finding.reason}")
    return outcomes


def describe_machine(device_type: str) -> list[str]:
    """What the page says of where it was made."""
    lines = [f"torch {torch.__version__}, Python {platform.python_version()}, {platform.platform()}"]
    if device_type != "cuda":
        return [*lines, "CPU, gloo: no GPU was looked at"]
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    nccl = ".".join(map(str, version))
    lines.append(f"CUDA {torch.version.cuda}, NCCL {nccl}")
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        lines.append(f"cuda:{index}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    return lines


def write_page(outcomes: Sequence[Outcome], machine: Sequence[str]) -> str:
    """Markdown: the machine, a table of verdicts, then each check's figures."""
    parts = ["# GPU check", "", *(f"- {line}" for line in machine), ""]
    parts += ["| check | claim | verdict | evidence | seconds |", "|---|---|---|---|---|"]
    for one in outcomes:
        reason = one.finding.reason.replace("|", "\\|")
        cells = (one.check.name, one.check.claim, f"**{one.finding.verdict}**", reason, f"{one.seconds:.0f}")
        parts.append(f"| {' | '.join(cells)} |")
    for one in outcomes:
        if one.finding.figures:
            parts += ["", f"## {one.check.name}", "", "```", *one.finding.figures, "```"]
    return "\n".join(parts) + "\n"
