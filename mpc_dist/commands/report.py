"""`mpc-dist report`: one HTML page of one or more runs."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from mpc_dist.report.page import write_page
from mpc_dist.report.run import read_run

SUMMARY = "Write one HTML page that shows and compares runs."


def run(argv: Sequence[str]) -> None:
    """Read the run folders, write the page and say where it is."""
    parser = argparse.ArgumentParser(prog="mpc-dist report", description=SUMMARY, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="A run folder (training.folder).")
    parser.add_argument(
        "--out", type=Path, help="The page (default: RUN/report.html of one run, else report.html here)."
    )
    options = parser.parse_args(argv)
    runs = [read_run(folder) for folder in dict.fromkeys(options.runs)]
    out = options.out or (runs[0].folder / "report.html" if len(runs) == 1 else Path("report.html"))
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder; name a file in it, e.g. {out / 'report.html'}")
    write_page(runs, out)
    Console().print(f"report: {out}", highlight=False, soft_wrap=True, markup=False)
