"""Check everything that needs GPUs, on a machine with two, and write one page with verdicts (`make gpu-check`).

python launch/gpu_check.py
python launch/gpu_check.py --device cpu --quick
"""

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console

from mpc_dist.bench.gpu_check import describe_machine, run_checks, write_page
from mpc_dist.bench.gpu_ranks import Setting
from mpc_dist.bench.gpu_steps import list_checks

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Run the checks; 1 if one did not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs if there are any")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that the checks work")
    parser.add_argument("--only", nargs="+", metavar="CHECK", help="names of checks; default: all")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-check"), help="folder of report.md")
    options = parser.parse_args()
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU here; use cpu or auto")
    checks = list_checks(Setting(device, options.quick, ROOT))
    names = [check.name for check in checks]
    unknown = sorted(set(options.only or ()) - set(names))
    if unknown:
        parser.error(f"--only {unknown[0]}: no such check; use some of {', '.join(names)}")
    chosen = [check for check in checks if options.only is None or check.name in options.only]
    console = Console()

    def report(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    outcomes = run_checks(chosen, report)
    page = write_page(outcomes, describe_machine(device))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "report.md").write_text(page, encoding="utf-8")
    report(page)
    report(f"this page: {options.out / 'report.md'}")
    return int(any(one.finding.verdict == "did not hold" for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
