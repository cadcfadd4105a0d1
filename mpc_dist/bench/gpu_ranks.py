"""What two ranks do for `make gpu-check`: on GPUs with NCCL, or the very same on the CPU with gloo."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, nn

from mpc_dist.gradient import mpc_gradients
from mpc_dist.models import GPT, Chain, build_chain
from mpc_dist.planner.pricing import predict_bytes
from mpc_dist.precision import Precision
from mpc_dist.profile import SavedBytes
from mpc_dist.profile.blocks import measure_blocks
from mpc_dist.runtime.mesh import Launch, build_mesh
from mpc_dist.runtime.pipeline import Pipeline
from mpc_dist.runtime.stage import StageOptions
from mpc_dist.schedule import build_schedule, lay_out, simulate
from mpc_dist.schedule.action import Action
from mpc_dist.task import Task
from mpc_dist.windows import Windows, backprop, cumulative, sliding, tumbling

T, PARTITION, BATCH = 6, (3, 3), 8
TIMEOUT = timedelta(seconds=60)
WINDOWS: dict[str, Windows] = {
    "h = 1": sliding(T, 1),
    "tumbling 2": tumbling(T, 2),  # a window across the ranks
    "sliding 2": sliding(T, 2),
    "cumulative 3": cumulative(T, 3),
    "back-propagation": backprop(T),
}
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Setting:
    """Where, and how much of it."""

    device: str
    is_quick: bool
    root: Path
    """Of the checkout, whose tests are run."""

    @property
    def width(self) -> int:
        """Features of a state."""
        return 16 if self.is_quick else 256

    @property
    def task(self) -> Task:
        """Tokens."""
        return Task("tokens", (16 if self.is_quick else 128,), 64)


def build(setting: Setting, dtype: torch.dtype, *, dropout: float = 0.0) -> tuple[Chain, Tensor, Tensor]:
    """A GPT and a batch, the same on every rank."""
    shape = (2, BATCH, *setting.task.input_shape)
    drawn = torch.randint(0, setting.task.num_outputs, shape, generator=torch.Generator().manual_seed(0))
    inputs, labels = drawn.to(setting.device)
    model = GPT(num_blocks=T, width=setting.width, num_heads=2, dropout=dropout)
    return build_chain(model, setting.task).to(setting.device, dtype), inputs, labels


def sgd(rate: float) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """What makes an optimizer without a state."""
    return lambda parameters: torch.optim.SGD(parameters, lr=rate)


def connect(
    setting: Setting,
    rank: int,
    chain: Chain,
    windows: Windows,
    *,
    rate: float = 1.0,
    split: bool = False,
    num_microbatches: int = 4,
    options: StageOptions | None = None,
) -> Pipeline:
    """A pipeline of the chain's parts on two ranks."""
    return Pipeline(
        build_mesh(Launch(rank, 2, rank), num_stages=2, device_type=setting.device, timeout=TIMEOUT),
        lay_out(windows, PARTITION),
        build_block=lambda t: chain.blocks[t],
        build_readout=lambda s: chain.readouts[str(s)],
        loss=chain.loss,
        optimizer=sgd(rate),
        num_microbatches=num_microbatches,
        split=split,
        options=options,
        timeout=TIMEOUT,
    )


def step_down(pipeline: Pipeline, inputs: Tensor, labels: Tensor) -> tuple[Weights, dict[int, float]]:
    """This rank's gradients, as a step with rate 1 takes them off the weights, and its losses."""
    before = {name: value.detach().clone() for name, value in pipeline.named_parameters().items()}
    losses = pipeline.step(inputs, labels).losses
    pipeline.close()
    return {name: before[name] - value.detach() for name, value in pipeline.named_parameters().items()}, losses


def difference(found: Tensor, expected: Tensor) -> float:
    """Relative, of the whole tensor."""
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-12))


def compare_gradients(rank: int, setting: Setting) -> dict[str, float]:
    """Of each case, the largest difference to the definition."""
    worst = {}
    for (name, windows), split in itertools.product(WINDOWS.items(), (False, True)):
        chain, inputs, labels = build(setting, torch.float64)
        expected: Weights = {}
        for x, y in zip(inputs.chunk(4), labels.chunk(4), strict=True):
            for key, gradient in mpc_gradients(chain, x, y, windows).items():
                expected[key] = expected.get(key, torch.zeros_like(gradient)) + gradient / 4
        found, _ = step_down(connect(setting, rank, chain, windows, split=split), inputs, labels)
        case = f"{name}{', split' if split else ''}"
        worst[case] = max(difference(value, expected[key]) for key, value in found.items())
    return worst


def wait_at_every_action(pipeline: Pipeline) -> None:
    """Let this rank wait for its whole device before each action, as a kernel that is loaded late would."""
    executor, device = pipeline.stage.executor, pipeline.mesh.device

    def after_waiting(handler: Callable[[Action], None]) -> Callable[[Action], None]:
        def handle(action: Action) -> None:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            handler(action)

        return handle

    executor._handlers = {op: after_waiting(handler) for op, handler in executor._handlers.items()}


def do_everything(rank: int, setting: Setting, name: str) -> int:
    """Steps with several numbers of micro-batches, evaluations, angles, changes of windows; how many steps."""
    chain, inputs, labels = build(setting, torch.float32)
    waiting = itertools.cycle(((0,), (1,), (0, 1)))
    num_steps = 0
    for num_microbatches, split in itertools.product((1, 4) if setting.is_quick else (1, 2, 4, 8), (False, True)):
        pipeline = connect(
            setting, rank, chain, WINDOWS[name], rate=1e-3, num_microbatches=num_microbatches, split=split
        )
        pipeline.connect(inputs, labels)
        for windows in (WINDOWS[name], backprop(T), sliding(T, 1), WINDOWS[name]):
            pipeline.change_windows(windows)
            if rank in next(waiting):
                wait_at_every_action(pipeline)
            for _ in range(2):
                pipeline.step(inputs, labels)
                num_steps += 1
            pipeline.evaluate(inputs, labels)
            pipeline.measure_angles([(inputs, labels)], windows=[windows])
        pipeline.close()
    return num_steps


def compare_precision(rank: int, setting: Setting, dtype: torch.dtype) -> dict[str, float]:
    """Gradients to the definition's under the same casts; the loss to plain autocast's."""
    worst = {}
    for name in ("h = 1", "back-propagation"):
        chain, inputs, labels = build(setting, torch.float32)
        precision = Precision(dtype)
        expected = mpc_gradients(chain, inputs, labels, WINDOWS[name], precision=precision, sent_at=PARTITION[:1])
        with torch.autocast(setting.device, dtype=dtype):
            plain = float(chain.loss(chain(inputs).float(), labels).detach())
        options = StageOptions(precision=precision)
        pipeline = connect(setting, rank, chain, WINDOWS[name], num_microbatches=1, options=options)
        found, losses = step_down(pipeline, inputs, labels)
        worst[f"gradients, {name}"] = max(difference(value, expected[key]) for key, value in found.items())
        if T in losses:
            worst[f"loss, {name}"] = abs(losses[T] / plain - 1)
    return worst


def train_some(rank: int, setting: Setting, is_compiled: bool) -> Weights:
    """This rank's weights after steps with dropout."""
    chain, inputs, labels = build(setting, torch.float32, dropout=0.1)
    options = StageOptions(compile=is_compiled)
    pipeline = connect(setting, rank, chain, WINDOWS["sliding 2"], rate=0.1, options=options)
    for _ in range(3):
        pipeline.step(inputs, labels)
    pipeline.close()
    return {name: value.detach().cpu() for name, value in pipeline.named_parameters().items()}


def hold(rank: int, setting: Setting, name: str) -> tuple[float, float]:
    """Bytes: predicted, and held at most in a step: by the allocator, on the CPU by what is counted."""
    chain, inputs, labels = build(setting, torch.float32)
    layout = lay_out(WINDOWS[name], PARTITION)
    schedule = build_schedule(layout, 4)
    found = measure_blocks(chain, inputs[: BATCH // 4], labels[: BATCH // 4], sgd(0.1), repeats=1)
    predicted = predict_bytes(found, layout, schedule, simulate(schedule, layout, found.segment_costs(layout)))[rank]
    before = 0
    if setting.device == "cuda":
        chain.cpu()  # back come only the parts of this rank
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
    pipeline = connect(setting, rank, chain, WINDOWS[name], rate=0.1)
    pipeline.step(inputs, labels)
    if setting.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        pipeline.step(inputs, labels)
        held = torch.cuda.max_memory_allocated() - before
    else:
        with SavedBytes([*pipeline.named_parameters().values(), inputs, labels]) as saved:
            pipeline.step(inputs, labels)
        held = saved.peak + pipeline.fixed_bytes
    pipeline.close()
    return predicted, held
