"""Trains on gloo ranks of this machine as `launch/train.py` would, and reads back what they wrote."""

from collections.abc import Sequence
from pathlib import Path

from mpc_dist.runtime.local import run_local_ranks
from mpc_dist.runtime.mesh import Launch
from mpc_dist.training.config import Config, ConfigParser
from mpc_dist.training.job import train
from mpc_dist.training.metrics import read_metrics


def parse(argv: Sequence[str]) -> Config:
    config, _ = ConfigParser(list(argv), prog="test", description="").parse()
    return config


def train_rank(rank: int, config: Config) -> None:
    train(config, Launch(rank, config.num_ranks, rank), is_quiet=True)


def train_locally(argv: Sequence[str], folder: Path) -> Config:
    """Train into a folder, in this process if one rank is enough."""
    config = parse([*argv, "--training.folder", str(folder)])
    if config.num_ranks == 1:
        train_rank(0, config)
    else:
        run_local_ranks(train_rank, config.num_ranks, config)
    return config


def losses(folder: Path, num_ranks: int) -> dict[tuple[int, str, int], float]:
    """Every training loss, by step, boundary and replica; of a step done twice, the later."""
    found: dict[tuple[int, str, int], float] = {}
    for rank in range(num_ranks):
        replica = 0
        for line in read_metrics(folder, rank):
            if line["event"] == "start":
                replica = line["replica"]
            if line["event"] == "step":
                found |= {(line["step"], boundary, replica): loss for boundary, loss in line["losses"].items()}
    return found
