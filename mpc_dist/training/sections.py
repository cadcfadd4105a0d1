"""The sections of a training configuration: each a typed, documented and checked dataclass."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from mpc_dist.precision import Precision
from mpc_dist.runtime.loss_scale import LossScale
from mpc_dist.runtime.zero import ZeroSettings
from mpc_dist.validation import MAX_COUNT, check_path, check_real, check_whole, show, suggest
from mpc_dist.windows import Windows, backprop, cumulative, expand, loco, sliding, tumbling

DROP_ON_RISE = "drop_on_rise"
MOST_TESTED = 10_000
"""Samples of an evaluation, if their number is left open."""
MOST_WORKERS = 1_024
"""Processes that read for a rank: more would only be a slip of the pen."""
MAX_SECONDS = 1e8
"""Three years: more than that, torch and Python cannot wait."""


def plain_windows(size: int) -> Literal["sliding", "tumbling"]:
    """What a bare number stands for: 1 is the local loss, more are tumbling windows.

    They learn better than sliding ones and take less time (docs/paper/windows).
    """
    return "sliding" if size == 1 else "tumbling"


@dataclass(frozen=True)
class HorizonConfig:
    """Which block learns from which loss. The short form `horizon: 2` stands for tumbling windows of 2 stages."""

    windows: Literal["sliding", "cumulative", "tumbling", "loco", "backprop"] = "backprop"
    """sliding: the loss `size` units ahead; cumulative: the mean of all up to there; tumbling: the end of a group of
    `size`; loco: the next two; backprop: the last."""
    size: int | None = None
    """How many units ahead, or units per group; loco and backprop have none."""
    unit: Literal["stages", "blocks"] = "stages"
    """What is counted; with stages, losses are read at stage boundaries only."""
    mode: Literal["fixed", "auto", "adaptive"] = "fixed"
    """fixed: as given; auto: planned at start-up for the ranks given (short form `horizon: auto`); adaptive: tumbling
    windows in stages that grow during training, from 1 stage to all."""
    every: int = 100
    """adaptive: steps between decisions."""

    def __post_init__(self) -> None:
        check_whole("horizon.every", self.every, minimum=1, maximum=MAX_COUNT)
        if self.mode != "fixed":
            return
        if self.windows in ("sliding", "cumulative", "tumbling"):
            check_whole("horizon.size", self.size, minimum=1)

    def build(self, partition: Sequence[int]) -> Windows:
        """The windows over all blocks of a model that is cut into stages of these sizes."""
        count = len(partition) if self.unit == "stages" else sum(partition)
        size = count if self.size is None else self.size
        if self.mode == "adaptive":
            return expand(tumbling(len(partition), 1), partition)
        if size > count:
            raise ValueError(
                f"horizon.size {size} exceeds the {count} {self.unit} of this run; use 1..{count}"
                + (", raise parallel.stages or count in blocks" if self.unit == "stages" else "")
            )
        if self.windows == "sliding":
            windows = sliding(count, size)
        elif self.windows == "cumulative":
            windows = cumulative(count, size)
        elif self.windows == "tumbling":
            windows = tumbling(count, size)
        else:
            windows = loco(count) if self.windows == "loco" else backprop(count)
        return expand(windows, partition) if self.unit == "stages" else windows


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is spread over ranks, and a batch over time."""

    stages: int = 1
    """Pipeline stages; the launcher must start stages x data_parallel.degree processes."""
    partition: tuple[int, ...] | None = None
    """Blocks of each stage, e.g. [4,4,6,2]; null: as even as can be."""
    microbatches: int = 1
    """Parts into which each replica's batch is cut; gradients are averaged over them."""
    split: bool = False
    """Whether backwards are cut into an input half and a weight half, which fills the waiting."""
    cap: int | None = None
    """Most micro-batches in flight on any rank; null: the horizon in stages, or one more if that is faster."""
    timeout: float = 600.0
    """Seconds after which a silent neighbour is given up."""

    def __post_init__(self) -> None:
        check_whole("parallel.stages", self.stages, minimum=1)
        check_whole("parallel.microbatches", self.microbatches, minimum=1)
        check_real("parallel.timeout", self.timeout, minimum=1, maximum=MAX_SECONDS)
        if self.cap is not None:
            check_whole("parallel.cap", self.cap, minimum=1)
        if self.partition is not None and len(self.partition) != self.stages:
            raise ValueError(
                f"parallel.partition has {len(self.partition)} stages but parallel.stages is {show(self.stages)}; "
                "make them agree"
            )


@dataclass(frozen=True)
class DataParallelConfig:
    """Replicas of every stage, each with its part of the batch."""

    degree: int = 1
    """Replicas of every stage."""
    sharding: Literal["none", "deepspeed"] = "none"
    """deepspeed: the replicas of a stage share its optimizer's state through ZeRO, each holding 1 / degree of it."""
    stage: Literal[1, 2] | None = None
    """ZeRO stage. 1: optimizer state; 2: reduced gradients too; null: as in deepspeed_config, or 1."""
    deepspeed_config: str | None = None
    """DeepSpeed's JSON file for what is not decided here, e.g. configs/deepspeed/zero1.json."""
    check_every: int = 100
    """Steps between checks that the replicas of a stage hold the same weights, besides one before each checkpoint; a
    difference stops the run. 0: no checks."""

    def __post_init__(self) -> None:
        check_whole("data_parallel.degree", self.degree, minimum=1)
        check_whole("data_parallel.check_every", self.check_every, minimum=0, maximum=MAX_COUNT)
        if self.sharding == "deepspeed" and self.degree == 1:
            raise ValueError(
                "data_parallel.sharding deepspeed shares a stage's optimizer among its replicas, but "
                "data_parallel.degree is 1; use 2 or more, or sharding none"
            )
        if self.sharding == "none" and (self.stage is not None or self.deepspeed_config is not None):
            raise ValueError(
                "data_parallel.stage and data_parallel.deepspeed_config need data_parallel.sharding deepspeed, got none"
            )

    def is_check_due(self, step: int) -> bool:
        """Whether replicas are compared after this step, whatever else is done then."""
        return self.degree > 1 and self.check_every > 0 and step % self.check_every == 0

    def read_zero(self) -> ZeroSettings | None:
        """What DeepSpeed is told; None without sharding."""
        if self.sharding == "none":
            return None
        if self.deepspeed_config is None:
            return ZeroSettings(self.stage or 1)
        return ZeroSettings.read(Path(self.deepspeed_config), self.stage)


@dataclass(frozen=True)
class OptimizerConfig:
    """How weights are updated; every stage has an optimizer of its own."""

    name: Literal["adamw", "sgd", "muon"] = "adamw"
    """Which optimizer of torch. muon orthogonalises the updates of hidden matrices (the 2-D weights of blocks but
    embeddings); all other weights are adamw's."""
    lr: float = 1e-3
    """Learning rate; about 0.02 suits muon."""
    adamw_lr: float | None = None
    """Learning rate of what muon leaves to adamw; null: a tenth of `lr`. A scheduler moves both."""
    momentum: float | None = None
    """Momentum of sgd (null: 0) and of muon, where it is Nesterov's (null: 0.95)."""
    weight_decay: float = 0.0
    """Weight decay."""
    scheduler: str | None = None
    """A class of torch.optim.lr_scheduler, stepped after every update, e.g. CosineAnnealingLR; or drop_on_rise, the
    paper's rule: the rate is multiplied by 0.9 when an epoch's loss rose."""
    scheduler_arguments: dict[str, Any] = field(default_factory=dict)
    """What that class takes besides the optimizer, e.g. {T_max: 1000}."""

    def __post_init__(self) -> None:
        check_real("optimizer.lr", self.lr, minimum=0)
        if self.adamw_lr is not None:
            check_real("optimizer.adamw_lr", self.adamw_lr, minimum=0)
            if self.name != "muon":
                raise ValueError(f"optimizer.adamw_lr is for optimizer.name muon, got {self.name}; give optimizer.lr")
        if self.momentum is not None:
            check_real("optimizer.momentum", self.momentum, minimum=0, maximum=1)
        check_real("optimizer.weight_decay", self.weight_decay, minimum=0)
        # ReduceLROnPlateau wants a loss at every step, which only the last rank has.
        known = {DROP_ON_RISE, *torch.optim.lr_scheduler.__all__} - {"LRScheduler", "ReduceLROnPlateau"}
        if self.scheduler is not None and self.scheduler not in known:
            raise ValueError(f"unknown optimizer.scheduler {show(self.scheduler)}; {suggest(self.scheduler, known)}")

    @property
    def used_momentum(self) -> float:
        """`momentum`, or what null stands for."""
        if self.momentum is None:
            return 0.95 if self.name == "muon" else 0.0
        return self.momentum


@dataclass(frozen=True)
class TrainingConfig:
    """How long to train, and what is done on the way."""

    steps: int = 1000
    """Optimizer steps."""
    log_every: int = 10
    """Steps between lines of metrics."""
    eval_every: int = 100
    """Steps between evaluations on the test set; there is one at the end anyway."""
    eval_batches: int | Literal["all"] | None = None
    """How much of the test set is scored: so many times batch_size samples; all; or null: all of it up to 10,000
    samples, else 10,000 of them. The seed chooses them, the same ones every time; replicas share them."""
    workers: int | None = None
    """Processes of each rank of the first stage that read batches ahead; 0: none, the rank reads by itself; null: 0 for
    data that is held in memory, up to 4 for pictures that have to be decoded."""
    clip_norm: float | None = None
    """Gradients are scaled down to this norm; null: never."""
    clip_scope: Literal["stage", "global"] = "stage"
    """Whose norm it is. `global` makes every rank wait for all others at each update."""
    precision: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    """What is computed in. bfloat16, float16: forwards where torch deems it safe, and messages between ranks; weights,
    sums of gradients and losses stay float32. float16 also scales the loss."""
    bfloat16_weights: bool = False
    """With precision bfloat16: whether weights, states and the optimizer are bfloat16 too, half the memory; gradients
    are summed in float32 all the same."""
    tf32: bool = True
    """Whether a GPU multiplies float32 matrices in TF32: faster, with 10 bits of the fraction instead of 23."""
    loss_scale: Literal["auto", "dynamic", "off"] = "auto"
    """dynamic: the loss has a factor, the same on every rank, that is halved when a gradient overflows anywhere (the
    step is then left out everywhere) and doubled after `loss_scale_interval` good steps; every rank waits for all
    others at each update. auto: only with float16."""
    loss_scale_start: float = 65536.0
    """The factor at the beginning: a power of two."""
    loss_scale_interval: int = 2000
    """Good steps in a row before the factor is doubled."""
    on_nonfinite: Literal["stop", "skip", "ignore"] = "stop"
    """A loss, activation, adjoint or gradient that is not finite: stop with an error that names rank, block and
    micro-batch; skip the step on every rank, which makes them wait for all others at each update; or do not look."""
    recompute: bool = False
    """Whether each block keeps only its input and runs again in backward: less memory, more time. A block of your own
    must then draw its random numbers from torch's generators only."""
    compile: bool = False
    """Whether each block is compiled by torch.compile: a minute at the start (again where inputs have another shape),
    faster steps afterwards; what is dropped at random is the same. It needs a C++ compiler, on GPUs Triton."""
    folder: str = "runs/train"
    """Where metrics are written."""

    def __post_init__(self) -> None:
        for name in ("steps", "log_every", "eval_every"):
            check_whole(f"training.{name}", getattr(self, name), minimum=1, maximum=MAX_COUNT)
        if self.eval_batches not in ("all", None):
            check_whole("training.eval_batches", self.eval_batches, minimum=1, maximum=MAX_COUNT)
        if self.workers is not None:
            check_whole("training.workers", self.workers, minimum=0, maximum=MOST_WORKERS)
        check_path("training.folder", self.folder)
        if self.clip_norm is not None:
            check_real("training.clip_norm", self.clip_norm, minimum=0)
        check_whole("training.loss_scale_interval", self.loss_scale_interval, minimum=1)
        if self.bfloat16_weights and self.precision != "bfloat16":
            raise ValueError(
                f"training.bfloat16_weights needs training.precision bfloat16, got {self.precision}; make them agree"
            )
        if self.loss_scale == "off" and self.precision == "float16":
            raise ValueError(
                "training.loss_scale off loses the small gradients of training.precision float16; use auto, or bfloat16"
            )
        try:
            self.build_loss_scale()
        except ValueError as error:
            raise ValueError(f"training.loss_scale_start: {error}") from error

    def count_tested(self, num_samples: int, batch_size: int) -> int:
        """How many of so many test samples are scored."""
        if self.eval_batches == "all":
            return num_samples
        return min(num_samples, MOST_TESTED if self.eval_batches is None else self.eval_batches * batch_size)

    def build_precision(self) -> Precision:
        """The types that these fields name."""
        kind: torch.dtype = getattr(torch, self.precision)
        return Precision(weights=kind) if kind.itemsize > 2 or self.bfloat16_weights else Precision(compute=kind)

    def build_loss_scale(self) -> LossScale | None:
        """The scale to begin with; None if the loss is not scaled."""
        is_scaled = self.loss_scale == "dynamic" or self.precision == "float16"
        scale = LossScale(self.loss_scale_start, self.loss_scale_interval)
        return scale if is_scaled else None


@dataclass(frozen=True)
class CheckpointsConfig:
    """What is kept of a run to go on later: in `checkpoints/` of the run folder, written in the background."""

    every: int | None = None
    """Steps between checkpoints, besides one at the end; null: only at the end; 0: none."""
    keep: int = 3
    """How many of the newest are kept."""
    resume: str = "auto"
    """auto: go on from the newest checkpoint in the run folder, if there is one; never: start anew and remove those
    that are there; or the path of another run or of a checkpoint to go on from. Ranks, replicas and horizon may differ.
    A run that began from another and is started again goes on from its own; with a checkpoint of its own, it goes back
    to that and drops later ones."""

    grace: float = 25.0
    """Most seconds from SIGTERM or SIGUSR1 to the end: the step is finished and saved, and every rank exits with code
    75. The launcher must give more (torchrun --shutdown-timeout, 30 by default)."""

    def __post_init__(self) -> None:
        if self.every is not None:
            check_whole("checkpoints.every", self.every, minimum=0, maximum=MAX_COUNT)
        check_real("checkpoints.grace", self.grace, minimum=1)
        check_whole("checkpoints.keep", self.keep, minimum=1, maximum=MAX_COUNT)
        check_path("checkpoints.resume", self.resume)

    def is_due(self, step: int, *, last: int) -> bool:
        """Whether there is one after this step."""
        if self.every == 0:
            return False
        return step == last or (self.every is not None and step % self.every == 0)
