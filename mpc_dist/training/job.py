"""One training job, from its configuration to its end: found fit, joined by its ranks, connected, and trained."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

from torch import nn

from mpc_dist.data import Batches, Dataset
from mpc_dist.models import build_parts
from mpc_dist.models.block_model import Parts
from mpc_dist.planner.adapt import GrowingHorizon
from mpc_dist.precision import set_tf32
from mpc_dist.readout import LOSSES
from mpc_dist.runtime.compiled import check_compiler
from mpc_dist.runtime.mesh import Launch, Mesh, build_mesh, check_world, join
from mpc_dist.runtime.pipeline import Pipeline
from mpc_dist.runtime.preemption import Preemption
from mpc_dist.runtime.pulse import blame_silent
from mpc_dist.runtime.score import Score
from mpc_dist.runtime.stage import StageOptions
from mpc_dist.runtime.watch import Watch
from mpc_dist.runtime.zero import ZeroSettings, check_settings
from mpc_dist.schedule import Costs, lay_out
from mpc_dist.training.attempt import note_begun
from mpc_dist.training.config import Config
from mpc_dist.training.journal import open_journal
from mpc_dist.training.loop import Loop, windows_now
from mpc_dist.training.optimizer import build_optimizer
from mpc_dist.training.resume import Resume
from mpc_dist.training.size import check_stage_size
from mpc_dist.training.watcher import EXPLAINED, GRACE, RankError, Watcher

DrawRun = Callable[[Config, Costs | None], Mapping[str, Path]]
"""Draws a run's schedule and plan into its folder: the file of each, by name."""


def train(
    config: Config,
    launch: Launch,
    *,
    costs: Costs | None = None,
    is_quiet: bool = False,
    draw: DrawRun | None = None,
) -> dict[int, Score]:
    """Train as configured, with a progress bar on rank 0 unless quiet.

    `costs` are what the order of actions is built for; without them a forward costs 1 per block. `draw` makes the
    pictures that are tracked. Returns the last evaluation of this rank's readouts, by boundary. What is wrong with the
    configuration is found before the ranks meet.
    """
    check_world(launch, num_stages=config.parallel.stages, num_replicas=config.data_parallel.degree)
    resume = Resume(config, launch.rank)
    zero = config.data_parallel.read_zero()
    if zero is not None:
        check_settings(zero, config.training.clip_norm, config.torch_device.type)
    config.tracking.check_installed()
    if config.training.compile:
        check_compiler(config.torch_device.type)
    data = config.data.load()
    parts = build_parts(config.trained_model, data.task, readout=config.readout, seed=config.seed)
    check_stage_size(config, data.task, launch.rank // config.data_parallel.degree)
    batches = Batches(
        data.train,
        batch_size=config.batch_size * config.data_parallel.degree,
        seed=config.seed,
        source=name_source(config),
    )
    job = _Job(config, launch, resume, zero, data, parts, batches, costs, draw, is_quiet)
    join(launch, config.torch_device.type, config.parallel.timeout)
    with blame_silent(launch):
        return job.run()


def name_source(config: Config) -> str:
    """What errors call the data: the field that says where it is, or its name."""
    for field in ("folder", "path"):
        place = getattr(config.data, field, None)
        if place is not None:
            return f"data.{field} {place}"
    return f"data.name {config.as_dict()['data']['name']}"


@dataclass(frozen=True)
class _Job:
    """What was found fit, on one of its ranks."""

    config: Config
    launch: Launch
    resume: Resume
    zero: ZeroSettings | None
    data: Dataset
    parts: Parts
    batches: Batches
    costs: Costs | None
    draw: DrawRun | None
    is_quiet: bool

    @property
    def timeout(self) -> timedelta:
        """How long the libraries wait; the watcher's limit is the configured timeout itself."""
        return timedelta(seconds=self.config.parallel.timeout) + GRACE

    def run(self) -> dict[int, Score]:
        """Connect this rank to the others, and train."""
        launch, watch = self.launch, Watch(self.launch.rank)
        folder, timeout = Path(self.config.training.folder), self.config.parallel.timeout
        watcher = Watcher(watch, launch.rank, launch.world_size, folder, timeout=timeout)
        try:
            return self._run(watch, watcher)
        finally:
            watcher.close()

    def _run(self, watch: Watch, watcher: Watcher) -> dict[int, Score]:
        config, launch = self.config, self.launch
        mesh = build_mesh(
            launch,
            num_stages=config.parallel.stages,
            num_replicas=config.data_parallel.degree,
            device_type=config.torch_device.type,
            timeout=self.timeout,  # the watcher is first to notice a wait that is too long
            watch=watch,
        )
        mesh = mesh.with_timeout(self.timeout)  # so does the group that all have joined
        set_tf32(mesh.device, is_allowed=config.training.tf32)
        saved = self.resume.choose(mesh)
        is_continued = saved is not None and self.resume.is_own(saved)
        note_begun(config, launch)
        preemption = Preemption(launch, after=0 if saved is None else saved.state.step, grace=config.checkpoints.grace)
        growing = GrowingHorizon(mesh.num_stages) if config.horizon.mode == "adaptive" else None
        if growing is not None and saved is not None and saved.state.progress["horizon"] is not None:
            growing.load_state_dict(saved.state.progress["horizon"])
        try:
            pipeline = self._build_pipeline(mesh, growing)
            journal = open_journal(
                config.tracking,
                rank=launch.rank,
                num_ranks=launch.world_size,
                folder=Path(config.training.folder),
                draw=None if self.draw is None else partial(self.draw, config, self.costs),
                is_resumed=is_continued,
            )
            with preemption, pipeline, journal, watcher:
                loop = Loop(
                    config,
                    launch,
                    mesh,
                    pipeline,
                    self.data,
                    self.batches,
                    growing,
                    journal,
                    preemption,
                    is_quiet=self.is_quiet,
                )
                return loop.run(saved, is_continued=is_continued)
        except EXPLAINED as error:
            if launch.world_size == 1 or isinstance(error, RankError):
                raise
            raise RankError(watcher.explain(error)) from error

    def _build_pipeline(self, mesh: Mesh, growing: GrowingHorizon | None) -> Pipeline:
        config, parts, parallel, training = self.config, self.parts, self.config.parallel, self.config.training
        blocks: list[nn.Module] = []

        def build_block(index: int) -> nn.Module:
            # In training mode: pretrained parts come in evaluation mode.
            blocks.append(parts.block(index).to(config.torch_dtype).train())
            return blocks[-1]

        return Pipeline(
            mesh,
            lay_out(windows_now(config, growing), config.partition),
            build_block=build_block,
            build_readout=lambda s: parts.readout(s).to(config.torch_dtype).train(),
            loss=LOSSES[self.data.task.kind],
            optimizer=partial(build_optimizer, config.optimizer, blocks=blocks),
            num_microbatches=parallel.microbatches,
            split=parallel.split,
            cap=parallel.cap,
            costs=self.costs,
            options=StageOptions(
                clip_norm=training.clip_norm,
                clip_scope=training.clip_scope,
                precision=training.build_precision(),
                on_nonfinite=training.on_nonfinite,
                loss_scale=training.build_loss_scale(),
                checkpoint=training.recompute,
                compile=training.compile,
                seed=config.seed,
                record_times=True,
            ),
            zero=self.zero,
            timeout=self.timeout,
        )
