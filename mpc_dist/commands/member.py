"""One run of a sweep, as torchrun starts it on every rank.

torchrun --standalone --nproc-per-node 2 -m mpc_dist.commands.member --config runs/sweep/h1-seed0/member.yaml
"""

import sys

from mpc_dist.report.pictures import draw_run
from mpc_dist.runtime.mesh import Launch
from mpc_dist.training.auto import train_as_planned
from mpc_dist.training.config import ConfigParser


def main() -> None:
    """Train as configured; a failure is this process's, and its traceback goes to the member's log."""
    parser = ConfigParser(sys.argv[1:], prog="member", description="Train one member of a sweep.")
    config, _ = parser.parse()
    train_as_planned(config, Launch.from_environment(), draw=draw_run)


if __name__ == "__main__":
    main()
