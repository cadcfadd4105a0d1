"""The `mpc-dist` command: finds the sub-command, and turns what a user got wrong into one line and exit code 2."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console

from mpc_dist import __version__
from mpc_dist.commands import angles, demo, export, plan, report, reproduce, schedule, sweep
from mpc_dist.validation import look_up, one_line

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


@dataclass(frozen=True)
class Command:
    """A sub-command."""

    run: Callable[[Sequence[str]], None]
    summary: str


COMMANDS = {
    "angles": Command(angles.run, angles.SUMMARY),
    "demo": Command(demo.run, demo.SUMMARY),
    "export": Command(export.run, export.SUMMARY),
    "plan": Command(plan.run, plan.SUMMARY),
    "report": Command(report.run, report.SUMMARY),
    "reproduce": Command(reproduce.run, reproduce.SUMMARY),
    "schedule": Command(schedule.run, schedule.SUMMARY),
    "sweep": Command(sweep.run, sweep.SUMMARY),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sub-command; return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        Console().print(_usage(), highlight=False, markup=False)
        return 0 if words else EXIT_BAD_INPUT
    if words[0] == "--version":
        Console().print(f"mpc-dist {__version__}", highlight=False)
        return 0
    try:
        look_up("command", words[0], COMMANDS).run(words[1:])
    except (ValueError, OSError, MemoryError, sweep.SweepError) as error:
        Console(stderr=True).print(f"mpc-dist: error: {one_line(error)}", highlight=False, markup=False, soft_wrap=True)
        return EXIT_FAILED if isinstance(error, sweep.SweepError) else EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def _usage() -> str:
    commands = "\n".join(f"  {name:10} {command.summary}" for name, command in COMMANDS.items())
    return (
        "usage: mpc-dist COMMAND [options]\n\nTrain deep networks with Model-Predictive-Control gradients.\n\n"
        f"{commands}\n\n`mpc-dist COMMAND --help` explains every option; `mpc-dist --version` prints the version."
    )
