"""A job that its launcher starts again goes on, whatever it was told to begin from.

`checkpoints.resume: never` and a path say where a job begins. Obeyed at a restart too, they would throw away what the
job has done since. A file in the run folder tells that it has begun: an attempt may die before.
"""

from dataclasses import replace
from pathlib import Path

from mpc_dist.runtime.mesh import Launch
from mpc_dist.training.config import Config
from mpc_dist.training.resume import AUTO

JOB_FILE = "job.txt"


def go_on_if_begun(config: Config, launch: Launch) -> Config:
    """The configuration, going on from the run's own checkpoints if an earlier attempt of this job has begun."""
    path = Path(config.training.folder) / JOB_FILE
    if launch.job is None or config.checkpoints.resume == AUTO:
        return config
    if not launch.attempt:
        if launch.rank == 0:
            path.unlink(missing_ok=True)  # of a job before, which may have had the same name
        return config
    has_begun = path.is_file() and path.read_text(encoding="utf-8") == launch.job
    return replace(config, checkpoints=replace(config.checkpoints, resume=AUTO)) if has_begun else config


def note_begun(config: Config, launch: Launch) -> None:
    """Remember, on rank 0, that this job has chosen where it begins."""
    if launch.rank == 0 and launch.job is not None and config.checkpoints.resume != AUTO:
        folder = Path(config.training.folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / JOB_FILE).write_text(launch.job, encoding="utf-8")
