"""`bench.py adaptive`: loss against simulated time, of the adaptive horizon beside each fixed one.

One process computes the exact gradients; a step takes the time that the simulator gives it with one block per stage.
"""

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure

from mpc_dist.bench.rows import Row
from mpc_dist.data import Batches, Dataset
from mpc_dist.gradient import eager_mpc_gradients
from mpc_dist.planner.adapt import GrowingHorizon
from mpc_dist.profile import measure_angles
from mpc_dist.schedule import Costs, build_schedule, lay_out, simulate
from mpc_dist.training.config import Config
from mpc_dist.training.optimizer import build_optimizer
from mpc_dist.training.planning import build_whole_chain, place
from mpc_dist.training.trial import evaluate, read_tests
from mpc_dist.windows import tumbling

NUM_EVALUATIONS = 24
ADAPTIVE = "adaptive"


@dataclass(frozen=True)
class AdaptiveSetting:
    """What is compared."""

    config: Config
    microbatches: int
    budget_steps: int
    """The time of so many steps of back-propagation is given to each."""
    every: int
    """Steps between the adaptive rule's decisions."""


@dataclass(frozen=True)
class Curve:
    """What one choice did."""

    times: tuple[float, ...]
    """In units of a stage's forward of a whole batch's micro-batch."""
    losses: tuple[float, ...]
    """Test losses at the last boundary."""
    changes: tuple[tuple[float, int, str], ...] = ()
    """(time, size from then on, reason)."""


def bench_adaptive(
    setting: AdaptiveSetting, on_progress: Callable[[], None] = lambda: None
) -> tuple[list[Row], dict[str, Curve]]:
    """A row and a curve per choice."""
    num_stages = setting.config.model.num_blocks
    sizes = GrowingHorizon(num_stages).sizes
    step_times = {size: _step_time(num_stages, size, setting.microbatches) for size in sizes}
    budget = setting.budget_steps * step_times[num_stages]
    data = setting.config.data.load()
    curves = {}
    for name, size in [*((_name(size, num_stages), size) for size in sizes), (ADAPTIVE, None)]:
        curves[name] = _train(setting, data, step_times, budget, size)
        on_progress()
    rows = [
        Row.of_times(
            [curve.times[-1]],
            system="mpc_dist",
            windows=name,
            split=True,
            stages=num_stages,
            microbatches=setting.microbatches,
            extra={"loss": curve.losses[-1], "loss at half the time": curve.losses[len(curve.losses) // 2]},
        )
        for name, curve in curves.items()
    ]
    return rows, curves


def _name(size: int, num_stages: int) -> str:
    return "backprop" if size == num_stages else f"tumbling:{size}"


def _step_time(num_stages: int, size: int, microbatches: int) -> float:
    layout = lay_out(tumbling(num_stages, size), [1] * num_stages)
    schedule = build_schedule(layout, microbatches, split=True)
    return simulate(schedule, layout, Costs.uniform([1.0] * num_stages)).step_time


def _train(
    setting: AdaptiveSetting, data: Dataset, step_times: dict[int, float], budget: float, fixed: int | None
) -> Curve:
    config = setting.config
    num_stages = config.model.num_blocks
    chain = build_whole_chain(config, data.task)
    named = {name: parameter for name, parameter in chain.named_parameters() if parameter.requires_grad}
    optimizer = build_optimizer(config.optimizer, list(named.values()), blocks=chain.blocks)
    batches = Batches(data.train, batch_size=config.batch_size, seed=config.seed)
    tests = read_tests(config, data)
    rule = GrowingHorizon(num_stages)
    time, step, recent = 0.0, 0, []
    times, losses, changes = [0.0], [evaluate(chain, tests)], []
    while time < budget:
        size = rule.size if fixed is None else fixed
        windows = tumbling(num_stages, size)
        inputs, labels = place(next(batches), config)
        optimizer.zero_grad(set_to_none=True)
        for name, gradient in eager_mpc_gradients(chain, inputs, labels, windows).items():
            named[name].grad = gradient
        optimizer.step()
        time, step = time + step_times[size], step + 1
        if fixed is None:
            recent.append(evaluate(chain, [(inputs, labels)]))
            if step % setting.every == 0:
                # The probe takes a forward and a full backward of every stage, without overlap between batches.
                time += step_times[num_stages]
                cosine = measure_angles(chain, [(inputs, labels)], windows=[windows]).cosine(windows)
                decision = rule.decide(cosine, sum(recent) / len(recent))
                recent = []
                if decision.size != size:
                    changes.append((time, decision.size, decision.reason))
        if time >= len(times) * budget / NUM_EVALUATIONS:
            times.append(time)
            losses.append(evaluate(chain, tests))
    return Curve(tuple(times), tuple(losses), tuple(changes))


def draw_curves(curves: dict[str, Curve]) -> Figure:
    """Loss against simulated time."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        is_adaptive = name == ADAPTIVE
        axes.plot(
            curve.times,
            curve.losses,
            label=name,
            color="black" if is_adaptive else None,
            lw=2.2 if is_adaptive else 1.3,
        )
        for time, size, _ in curve.changes:
            axes.axvline(time, color="black", lw=0.7, ls=":")
            axes.annotate(f" {size} stages", (time, max(curve.losses)), fontsize=8, va="top", rotation=90)
    axes.set_xlabel("simulated time on 8 stages (forwards of a stage and micro-batch)")
    axes.set_ylabel("test loss at the last boundary")
    axes.legend()
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
