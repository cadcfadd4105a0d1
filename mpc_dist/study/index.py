"""The page over all experiments of a results folder: every claim with its verdict, surprises first."""

from collections.abc import Mapping
from pathlib import Path
from typing import get_args

from mpc_dist.study.experiment import Experiment, Findings, Table, VerdictWord, page_path

SURPRISES_FIRST: tuple[str, ...] = tuple(reversed(get_args(VerdictWord)))


def write_index(findings: Mapping[str, Findings], experiments: Mapping[str, Experiment], folder: Path) -> Path:
    """Write README.md over these experiments' pages, which are in folders of their names."""
    path = folder / "README.md"
    path.write_text(render_index(findings, experiments), encoding="utf-8")
    return path


def render_index(findings: Mapping[str, Findings], experiments: Mapping[str, Experiment]) -> str:
    """The page's text."""
    claims = [(name, verdict) for name, found in findings.items() for verdict in found.verdicts]
    claims.sort(key=lambda claim: SURPRISES_FIRST.index(claim[1].verdict))
    counts = {word: sum(verdict.verdict == word for _, verdict in claims) for word in SURPRISES_FIRST}
    links = {name: f"[{name}]({page_path(experiments[name], Path(name))})" for name in findings}
    rows = tuple((links[name], one.claim, f"**{one.verdict}**", one.evidence) for name, one in claims)
    pages = tuple((links[name], experiments[name].title) for name in findings)
    return (
        "\n\n".join(
            [
                "# Results",
                "Each page was written by `mpc-dist reproduce NAME` from the runs in its `cells.jsonl`; "
                "`mpc-dist reproduce NAME --out FOLDER --page-only` writes it again. Claims: "
                + ", ".join(f"{count} {word}" for word, count in counts.items())
                + ".",
                Table("Experiments", ("page", "what"), pages).as_markdown(),
                Table(
                    "Every claim, surprises first", ("experiment", "claim", "verdict", "evidence"), rows
                ).as_markdown(),
            ]
        )
        + "\n"
    )
