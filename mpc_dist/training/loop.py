"""The training loop: the same on every rank, each with its stage."""

import statistics
import time
from collections import deque
from contextlib import nullcontext
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mpc_dist.data import Batches, Dataset
from mpc_dist.data.reading import Part, Reader, Use, choose_workers
from mpc_dist.document import write_whole
from mpc_dist.planner.adapt import GrowingHorizon
from mpc_dist.profile import SavedBytes
from mpc_dist.runtime.executor import StepRecord
from mpc_dist.runtime.guard import NonFiniteError, check_state
from mpc_dist.runtime.mesh import Launch, Mesh
from mpc_dist.runtime.pipeline import Pipeline, StepResult
from mpc_dist.runtime.preemption import Preempted, Preemption
from mpc_dist.runtime.replicas import ReplicaError
from mpc_dist.runtime.score import Score
from mpc_dist.runtime.watch import Wait
from mpc_dist.training.checkpoint import CheckpointSaver, SavedCheckpoint, name_save
from mpc_dist.training.checkpoint_folder import folder_of
from mpc_dist.training.config import Config
from mpc_dist.training.evaluation import TEST, Evaluation, plain_scores
from mpc_dist.training.feed import TRAIN, Feed
from mpc_dist.training.journal import Journal
from mpc_dist.training.loss_memory import LossMemory
from mpc_dist.training.metrics import MetricsFile, forget_other_ranks, read_metrics
from mpc_dist.training.optimizer import LearningRate
from mpc_dist.training.resume import weights_fingerprint
from mpc_dist.training.sections import DROP_ON_RISE
from mpc_dist.training.straggler import MOST_STEPS, Pace, find_straggler, gather_paces
from mpc_dist.training.watcher import RankError as RankError
from mpc_dist.windows import Windows, expand, tumbling

NUM_TIMELINES = 20
"""Of how many last steps the metrics hold when each action ran."""
SHOWN_BYTES = 1 << 16
"""Of the end of another rank's metrics: among them is its last loss, unless it wrote a very long timeline since."""


def windows_now(config: Config, growing: GrowingHorizon | None) -> Windows:
    """The windows to train with: those configured, or those that the horizon has grown to."""
    if growing is None:
        return config.horizon.build(config.partition)
    return expand(tumbling(len(config.partition), growing.size), config.partition)


class Loop:
    """One rank's training, from its first step to its last."""

    def __init__(
        self,
        config: Config,
        launch: Launch,
        mesh: Mesh,
        pipeline: Pipeline,
        data: Dataset,
        batches: Batches,
        growing: GrowingHorizon | None,
        journal: Journal,
        preemption: Preemption,
        *,
        is_quiet: bool,
    ) -> None:
        self._config = config
        self._shows_progress = launch.rank == 0 and not is_quiet
        self._mesh = mesh
        self._pipeline = pipeline
        self._data = data
        self._batches = batches
        self._evaluation = Evaluation(config, data.test, mesh, pipeline)
        self._folder = Path(config.training.folder)
        self._growing = growing
        self._losses = LossMemory(
            mesh,
            by_epoch=config.optimizer.scheduler == DROP_ON_RISE,
            by_decision=growing is not None,
        )
        self._saver = CheckpointSaver(
            folder_of(self._folder),
            keep=config.checkpoints.keep,
            fingerprint=weights_fingerprint(config),
            rank=launch.rank,
            num_replicas=mesh.num_replicas,
            group=mesh.background,
            watch=mesh.watch,
        )
        self._save_failure: str | None = None
        self._busy: deque[float] = deque(maxlen=MOST_STEPS)
        self._unread: deque[StepRecord] = deque(maxlen=MOST_STEPS)
        """Of steps whose times nobody has read: reading them off a device waits for it."""
        self._rank = launch.rank
        self._listener = journal.put
        self._preemption = preemption

    def run(self, saved: SavedCheckpoint | None, *, is_continued: bool) -> dict[int, Score]:
        """Train to the end, evaluating and saving on the way.

        `saved` is where to go on from; `is_continued` tells that it is of this very run, whose metrics then go on too.
        """
        workers = choose_workers(self._data.train, self._config.training.workers)
        with Reader(
            {TRAIN: self._data.train, TEST: self._data.test},
            num_workers=workers if self._pipeline.needs_inputs else 0,
        ) as self._reader:
            return self._run(saved, is_continued=is_continued)

    def _run(self, saved: SavedCheckpoint | None, *, is_continued: bool) -> dict[int, Score]:
        training = self._config.training
        first = 1 if saved is None else saved.state.step + 1
        missing = self._prepare(saved)
        self._metrics = MetricsFile(self._folder, self._rank, self._listener, is_continued=is_continued)
        if self._rank == 0 and not is_continued:
            forget_other_ranks(self._folder, self._config.num_ranks)
        self._write_start()
        if saved is not None:
            self._metrics.write(event="resume", step=first - 1, checkpoint=str(saved.path), new_weights=missing)
        started = time.perf_counter()
        scores: dict[int, Score] = {}
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        shown = Progress(*columns) if self._shows_progress else nullcontext()
        with shown as progress:
            bar = None if progress is None else progress.add_task("training", total=training.steps, completed=first - 1)
            for step in range(first, training.steps + 1):
                if not self._preemption.begin(step):
                    self._stop(step - 1, is_saved=step == first)
                self._train_step(step, is_first=step == first)
                if self._growing is not None and step % self._config.horizon.every == 0:
                    self._adapt(step, self._growing)
                if self._config.data_parallel.is_check_due(step):
                    self._check_replicas(step)
                if step % training.eval_every == 0 or step == training.steps:
                    scores = self._evaluate(step)
                if self._config.checkpoints.is_due(step, last=training.steps):
                    self._save(step)
                if progress is not None and bar is not None:
                    is_logged = step % training.log_every == 0
                    progress.update(bar, advance=1, description=self._describe() if is_logged else None)
        last = max(first - 1, training.steps)
        if first > training.steps:
            self._say(f"nothing left to train: {self._folder} is already after step {last}; raise training.steps")
            scores = self._evaluate(last)
        self._saver.wait()
        self._report_saves()
        self._read_times()
        pace = Pace(
            self._rank,
            statistics.median(self._busy) if self._busy else 0.0,
            self._pipeline.share_of_work,
            self._pipeline.waiting_for,
        )
        straggler = find_straggler(gather_paces(self._mesh, pace))
        if straggler is not None:
            self._say(str(straggler))
        self._metrics.write(
            event="end",
            step=last,
            seconds=time.perf_counter() - started,
            seconds_waiting=self._pipeline.seconds_waiting,
            seconds_waiting_for=self._pipeline.waiting_for,
            busy_seconds=pace.busy,
            straggler=None if straggler is None else {**vars(straggler), "text": str(straggler)},
            skipped_steps=self._pipeline.guard.num_skipped,
            scores=plain_scores(scores),
        )
        if self._save_failure is not None:
            raise OSError(f"training has ended, but its last checkpoint could not be saved: {self._save_failure}")
        return scores

    def _prepare(self, saved: SavedCheckpoint | None) -> list[str]:
        """Connect the ranks and, if there is a checkpoint, put everything back; the weights that it did not have."""
        if saved is not None:
            self._batches.load_state_dict(saved.state.progress["data"])
        # Windows that grow are measured by all ranks, and which of them read a loss changes.
        use = Use(self._pipeline.needs_inputs, labels=self._pipeline.needs_labels or self._growing is not None)
        self._feed = Feed(self._batches, self._reader, self._mesh, use, self._config.torch_dtype)
        first = self._feed.peek()
        self._pipeline.connect(first.inputs, first.labels)
        self._rate = LearningRate(self._config.optimizer, self._pipeline.stage.optimizer)
        if saved is None:
            return []
        step, progress = saved.state.step, saved.state.progress
        missing = self._pipeline.restore_state(saved, step=step)
        self._rate.load_state_dict(progress["rate"], num_steps=step)
        self._losses.restore(saved)
        self._pipeline.guard.load_state_dict(progress.get("numbers", {}))
        return missing

    def _check_replicas(self, step: int) -> None:
        start = time.perf_counter()
        try:
            self._pipeline.check_replicas()
        except ReplicaError as error:
            self._saver.wait()  # the last good checkpoint may still be on its way to the disk
            raise ReplicaError(f"step {step}: {error}") from error
        self._metrics.write(event="replicas", step=step, agree=True, seconds=time.perf_counter() - start)

    def _save(self, step: int) -> None:
        data_parallel = self._config.data_parallel
        if data_parallel.check_every and data_parallel.degree > 1 and not data_parallel.is_check_due(step):
            self._check_replicas(step)
        start = time.perf_counter()
        tensors = {**self._pipeline.collect_state(), **self._losses.collect()}
        if self._config.training.on_nonfinite != "ignore":
            check_state(tensors, step=step)
        progress = {
            "data": self._batches.state_dict(),
            "rate": self._rate.state_dict(),
            "horizon": None if self._growing is None else self._growing.state_dict(),
            "numbers": self._pipeline.guard.state_dict(),
        }
        self._saver.save(step, tensors, progress)
        self._metrics.write(event="checkpoint", step=step, stall_seconds=time.perf_counter() - start)
        self._report_saves()

    def _stop(self, step: int, *, is_saved: bool) -> NoReturn:
        """Save, unless this was just done, and end as one that was asked to."""
        checkpoints = self._config.checkpoints
        if not is_saved and checkpoints.every != 0 and not checkpoints.is_due(step, last=self._config.training.steps):
            self._save(step)
        self._saver.wait()
        self._report_saves()
        self._pipeline.close()  # without checkpoints, a neighbour may still be on its way to this step
        if self._save_failure is not None:
            raise OSError(f"stopped by a signal after step {step}, but it could not be saved: {self._save_failure}")
        self._metrics.write(event="preempted", step=step)
        self._preemption.leave()
        raise Preempted(step, is_saved=checkpoints.every != 0 and step > 0)

    def _report_saves(self) -> None:
        """Write down how saves went that have ended."""
        for outcome in self._saver.take_outcomes():
            self._metrics.write(event="saved", **vars(outcome))
            if outcome.is_peer_lost:
                # Its group does not work any more: there would never be another checkpoint.
                what = name_save(outcome.step)
                others = tuple(rank for rank in range(dist.get_world_size()) if rank != self._rank)
                wait = Wait(others, what, since=time.perf_counter() - outcome.seconds)
                raise self._mesh.watch.give_up(wait, RuntimeError(outcome.failure), f"saving {what}")
            self._save_failure = outcome.failure
            if outcome.failure is not None:
                self._say(f"the checkpoint after step {outcome.step} could not be saved: {outcome.failure}")

    def _say(self, message: str) -> None:
        """One line on the error stream, of rank 0."""
        if self._rank == 0:
            Console(stderr=True).print(message, highlight=False, markup=False, soft_wrap=True)

    def _write_start(self) -> None:
        mesh, config = self._mesh, self._config
        tested, test_size = self._evaluation.num_samples, self._data.test.num_samples
        if tested < test_size:
            self._say(f"every evaluation scores {tested} of the {test_size} test samples (training.eval_batches)")
        if mesh.stage == mesh.replica == 0:
            write_whole(self._folder / "config.yaml", config.as_yaml())
        self._metrics.write(
            event="start",
            config=config.as_dict(),
            stage=mesh.stage,
            replica=mesh.replica,
            num_stages=mesh.num_stages,
            num_replicas=mesh.num_replicas,
            device=str(mesh.device),
            partition=config.partition,
            windows=windows_now(config, self._growing).targets,
            test_samples={"scored": tested, "of": test_size},
        )

    def _train_step(self, step: int, *, is_first: bool) -> None:
        epoch = self._batches.epoch
        start = time.perf_counter()
        part = self._last_part = next(self._feed)
        waited = time.perf_counter() - start
        extra: dict[str, int] = {}
        if is_first:
            # What a schedule holds does not change from step to step: it is counted once.
            given = [value for value in (part.inputs, part.labels) if value is not None]
            with SavedBytes([*self._pipeline.named_parameters().values(), *given]) as saved:
                result = self._run_step(step, part)
            extra |= {"live_bytes": saved.peak, "rank_bytes": saved.peak + self._pipeline.fixed_bytes}
        else:
            result = self._run_step(step, part)
        seconds = time.perf_counter() - start
        self._rate.step()
        record = result.record
        if not is_first:
            self._unread.append(record)
        if record.is_skipped:
            found = None if record.finding is None else vars(record.finding)
            self._metrics.write(event="skipped", step=step, finding=found, **self._pipeline.guard.state_dict())
        elif self._losses.is_asked:
            last = self._config.model.num_blocks
            if last in result.means:
                self._losses.add(result.means[last])
        if self._batches.epoch != epoch:
            self._end_epoch()
        if is_first or step % self._config.training.log_every == 0:
            losses, num_labels = average_over_replicas(self._mesh, result)
            self._read_times()
            self._metrics.write(
                event="step",
                step=step,
                losses=losses,
                num_labels=num_labels,
                step_seconds=max(seconds, record.seconds),
                seconds_waiting_for_data=waited,
                samples_per_second=self._config.batch_size * self._mesh.num_replicas / max(seconds, record.seconds),
                bubble=measure_bubble(record),
                busy_seconds=record.busy_seconds,
                skipped_steps=self._pipeline.guard.num_skipped,
                in_flight=result.record.most_in_flight,
                seconds_waiting_for_head=self._pipeline.seconds_waiting_for_head,
                **extra,
            )
        if step > self._config.training.steps - NUM_TIMELINES:
            actions = [(str(interval.action), interval.start, interval.end) for interval in result.record.timeline]
            reductions = [(reduction.start, reduction.end, reduction.size) for reduction in result.record.reductions]
            self._metrics.write(event="timeline", step=step, actions=actions, reductions=reductions)

    def _read_times(self) -> None:
        self._busy.extend(record.busy_seconds for record in self._unread)
        self._unread.clear()

    def _run_step(self, step: int, part: Part) -> StepResult:
        def load_next() -> None:
            coming = self._feed.peek()
            self._pipeline.load(coming.inputs, coming.labels)

        is_worth_it = has_own_queue(self._mesh.device) and step < self._config.training.steps
        try:
            return self._pipeline.step(part.inputs, part.labels, meanwhile=load_next if is_worth_it else None)
        except NonFiniteError:
            self._saver.wait()  # the last good checkpoint may still be on its way to the disk
            raise

    def _adapt(self, step: int, growing: GrowingHorizon) -> None:
        """Measure the angle of the present windows on the last batch, decide, and change the windows if so decided."""
        windows = windows_now(self._config, growing)
        profile = self._pipeline.measure_angles([(self._last_part.inputs, self._last_part.labels)], [windows])
        loss = self._losses.take_recent()
        before = growing.size
        cosine = torch.tensor(profile.cosine(windows), dtype=torch.float64, device=self._mesh.device)
        if self._mesh.replicas is not None:
            with self._mesh.watch.waiting(self._mesh.replicas, "the replicas' angle"):
                dist.all_reduce(cosine, group=self._mesh.replicas)
            cosine /= self._mesh.num_replicas
        # The evidence is the same on every rank, and so is the decision.
        decision = growing.decide(float(cosine), loss)
        if decision.size != before:
            self._pipeline.change_windows(windows_now(self._config, growing))
        self._metrics.write(event="horizon", step=step, before=before, **vars(decision))

    def _end_epoch(self) -> None:
        if self._rate.drop is not None:
            # The rule needs the last rank's loss everywhere: the one time in an epoch at which ranks wait.
            self._rate.drop.end_epoch(self._losses.take_epoch())

    def _evaluate(self, step: int) -> dict[int, Score]:
        scores = self._evaluation.run(self._reader)
        self._metrics.write(event="evaluation", step=step, scores=plain_scores(scores))
        return scores

    def _describe(self) -> str:
        """The last loss at the last boundary, which another rank may have written down."""
        last = (self._mesh.num_stages - 1) * self._mesh.num_replicas
        found = read_metrics(self._folder, last, last_bytes=SHOWN_BYTES)
        lines = [line for line in found if line["event"] == "step"]
        losses = list(lines[-1]["losses"].values()) if lines else []
        return f"training, loss {losses[-1]:.4f}" if losses else "training"


def has_own_queue(device: torch.device) -> bool:
    """Whether it goes on by itself while this thread reads data; on the CPU it is this thread that computes."""
    return device.type != "cpu"


def average_over_replicas(mesh: Mesh, result: StepResult) -> tuple[dict[int, float], float]:
    """A step's losses by boundary, over the labels of all replicas that count, and how many they are.

    The replicas of a stage call it together.
    """
    if mesh.replicas is None or not result.losses:
        return result.losses, result.count
    totals = [result.count, *(loss * result.count for loss in result.losses.values())]
    sums = torch.tensor(totals, dtype=torch.float64, device=mesh.device)
    with mesh.watch.waiting(mesh.replicas, "the replicas' losses"):
        dist.all_reduce(sums, group=mesh.replicas)
    count, *whole = sums.tolist()
    means = [total / count if count else 0.0 for total in whole]
    return dict(zip(result.losses, means, strict=True)), count


def measure_bubble(record: StepRecord) -> float:
    """The share of a step in which its rank neither computed nor updated."""
    return max(0.0, 1 - record.busy_seconds / record.seconds) if record.seconds else 0.0
