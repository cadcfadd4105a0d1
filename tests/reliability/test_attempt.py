"""Where a job begins is asked once; when its launcher starts it again, it goes on."""

from dataclasses import replace
from pathlib import Path

import pytest

from mpc_dist.runtime.mesh import Launch
from mpc_dist.training.attempt import go_on_if_begun, note_begun
from mpc_dist.training.auto import train_as_planned
from mpc_dist.training.checkpoint_folder import folder_of, list_checkpoints, step_of
from mpc_dist.training.config import Config
from mpc_dist.training.metrics import read_metrics
from tests.training.local import parse

SMALL = (
    "--model.num_blocks 2 --model.width 16 --model.num_heads 2 --data.context 16 --data.max_bytes 20000 --batch_size 4 "
    "--training.steps 2 --training.eval_batches 1 --device cpu"
).split()
NEVER = ("--checkpoints.resume", "never")


def config_of(folder: Path, *more: str) -> Config:
    return parse([*SMALL, "--training.folder", str(folder), *more])


def test_a_restart_does_not_throw_away_what_the_job_has_done(tmp_path: Path):
    first = Launch(job="job")
    train_as_planned(config_of(tmp_path, *NEVER), first)
    train_as_planned(config_of(tmp_path, *NEVER, "--training.steps", "4"), replace(first, attempt=1))
    lines = read_metrics(tmp_path, 0)
    assert [line["step"] for line in lines if line["event"] == "resume"] == [2]
    assert [step_of(path) for path in list_checkpoints(folder_of(tmp_path))] == [2, 4]
    train_as_planned(config_of(tmp_path, *NEVER), first)  # asked again, by hand
    assert [step_of(path) for path in list_checkpoints(folder_of(tmp_path))] == [2]


@pytest.mark.parametrize("job", ["other", None])
def test_an_attempt_that_died_before_it_began_is_not_gone_on_with(job, tmp_path: Path):
    config = config_of(tmp_path, *NEVER)
    note_begun(config, Launch(job="before"))
    assert go_on_if_begun(config, Launch(job=job, attempt=1)).checkpoints.resume == "never"
    assert go_on_if_begun(config, Launch(job="before", attempt=1)).checkpoints.resume == "auto"
    go_on_if_begun(config, Launch(job="before"))  # a new job of the same name
    assert go_on_if_begun(config, Launch(job="before", attempt=1)).checkpoints.resume == "never"


def test_what_the_launcher_says_of_attempts():
    said = {"TORCHELASTIC_RUN_ID": "7", "TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "3"}
    launch = Launch.from_environment({**said, "SLURM_RESTART_COUNT": "2"})
    assert (launch.job, launch.attempt, launch.restarts_left) == ("7", 3, 2)
    with pytest.raises(ValueError, match="SLURM_RESTART_COUNT must be whole numbers"):
        Launch.from_environment({"SLURM_RESTART_COUNT": "often"})
