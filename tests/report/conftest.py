"""Real run folders, trained once for all tests of the report."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from mpc_dist.planner.request import Request
from mpc_dist.runtime.local import run_local_ranks
from mpc_dist.runtime.mesh import Launch
from mpc_dist.training.auto import train_as_planned
from mpc_dist.training.config import Config, ConfigParser
from mpc_dist.training.planning import Probe, plan_for
from tests.conftest import ROOT

GPT = (
    f"--config {ROOT}/configs/gpt_train.yaml --model.num_blocks 4 --model.width 16 --data.context 16 "
    "--data.max_bytes 30000 --training.steps 24 --training.log_every 1 --training.eval_every 10 "
    "--training.eval_batches 1"
)
RUNS = {
    "horizon1": GPT,
    "backprop": f"{GPT} --horizon.windows backprop --parallel.split true",
    "adaptive": f"{GPT} --horizon.mode adaptive --horizon.every 4",
    "planned": GPT,
    "regression": f"--config {ROOT}/configs/res_mlp.yaml --model.num_blocks 6 --data.num_train 400 "
    "--training.log_every 1 --training.steps 4 --parallel.stages 2 --data_parallel.degree 2 --horizon 1",
}


def read_config(arguments: str, folder: Path) -> Config:
    config, _ = ConfigParser([*arguments.split(), "--training.folder", str(folder)], prog="", description="").parse()
    return config


def train_rank(rank: int, configs: list[Config], plans: dict[str, Path]) -> None:
    for config in configs:
        folder = Path(config.training.folder)
        if not dist.is_initialized():  # training leaves the group
            store = f"file://{folder}.store"
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=config.num_ranks)
        train_as_planned(config, Launch(rank, config.num_ranks, rank), plans.get(folder.name))


@pytest.fixture(scope="session")
def run_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each kind of run; read them only."""
    top = tmp_path_factory.mktemp("runs")
    configs = {name: read_config(arguments, top / name) for name, arguments in RUNS.items()}
    plan = top / "plan" / "plan.yaml"
    probe = Probe(profiles=top / "profiles", repeats=1, num_batches=1)
    plan_for(configs["planned"], Request(gpu_memory=2.0**25, num_gpus=2), probe).plan.write(plan)
    # Processes that have run once are warm: those that need as many ranks share them.
    for num_ranks in (2, 4):
        alike = [config for config in configs.values() if config.num_ranks == num_ranks]
        run_local_ranks(train_rank, num_ranks, alike, {"planned": plan}, timeout=120.0)
    return {name: top / name for name in RUNS}


@pytest.fixture
def copy_of(run_folders: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a run that may be damaged."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(run_folders[name], tmp_path / name))

    return copy
