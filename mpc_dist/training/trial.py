"""Trains the finalists of a plan briefly, from the same start, and ranks them by what they learnt.

The measure is the paper's relative rate of decrease, r = ln(J_h / J_0) / ln(J_T / J_0), of the test loss at the last
boundary. A gradient that is closer to back-propagation's need not learn better: where the two disagree, it is said.
"""

import itertools
import math
from dataclasses import replace
from itertools import islice

import torch

from mpc_dist.data import Batch, Batches, Dataset
from mpc_dist.data.dataset import select_tests
from mpc_dist.gradient import eager_mpc_gradients
from mpc_dist.models import Chain
from mpc_dist.planner.choose import Planned, Report
from mpc_dist.planner.plan import Candidate
from mpc_dist.precision import FULL, Precision
from mpc_dist.readout import count_labels
from mpc_dist.training.config import Config
from mpc_dist.training.optimizer import build_optimizer
from mpc_dist.training.planning import build_whole_chain, place
from mpc_dist.validation import check_whole
from mpc_dist.windows import Windows, backprop

BEST_FINALISTS = 3
SHORT = 2
MOST_TESTED = 1_000
"""Test samples of a trial, which one process scores for every finalist."""
MOST_SAID = 5
SMALL_DIFFERENCE = 0.02
"""Qualities that differ by less are not said to disagree."""


def run_trials(config: Config, planned: Planned, *, num_steps: int, report: Report) -> Planned:
    """The plan with its finalists tried, and ranked by the trial."""
    check_whole("--trial", num_steps, minimum=1)
    data = config.data.load()
    finalists = choose_finalists(planned.plan.candidates)
    maps = list(dict.fromkeys([backprop(config.model.num_blocks), *map(windows_of, finalists)]))
    tests = read_tests(config, data)
    initial = evaluate(build_whole_chain(config, data.task), tests, config.training.build_precision())
    losses: dict[Windows, float] = {}
    for number, windows in enumerate(maps):
        report("trials", number, len(maps))
        losses[windows] = train_briefly(config, data, windows, num_steps, tests)
    report("trials", len(maps), len(maps))
    reference = losses[maps[0]]
    qualities = {windows: relative_rate(loss, initial, reference) for windows, loss in losses.items()}
    tried, untried = [], []
    for one in planned.plan.candidates:
        windows = windows_of(one)
        if windows not in qualities:
            untried.append(one)
            continue
        quality = qualities[windows]
        value = planned.planner.value_of(one, max(0.0, quality))
        tried.append(replace(one, trial_loss=losses[windows], trial_quality=quality, value=value))
    ranked = sorted(tried, key=lambda one: (one.value, one.step_seconds, one.num_gpus))
    notes = (
        f"trial: {num_steps} steps from the same start, test loss {initial:.4f} before and {reference:.4f} after "
        "back-propagation; tried candidates are ranked by it, before all others",
        *find_disagreements(ranked),
    )
    plan = replace(
        planned.plan,
        chosen=ranked[0],
        costs=planned.planner.costs_of(ranked[0]),
        candidates=(*ranked, *untried),
        notes=(*planned.plan.notes, *notes),
    )
    return replace(planned, plan=plan)


def choose_finalists(candidates: tuple[Candidate, ...]) -> list[Candidate]:
    """The best by the objective, each window map once, and the best of each kind that is not among them."""
    distinct: dict[Windows, Candidate] = {}
    for one in candidates:
        distinct.setdefault(windows_of(one), one)
    ranked = list(distinct.values())
    chosen = ranked[:BEST_FINALISTS]
    kinds = {_kind(one) for one in chosen}
    for one in ranked[BEST_FINALISTS:]:
        if _kind(one) not in kinds:
            chosen.append(one)
            kinds.add(_kind(one))
    return chosen


def _kind(candidate: Candidate) -> tuple[str, int | None]:
    """Short windows are kinds of their own: their gradients differ most from back-propagation's."""
    size = candidate.shape.size
    return candidate.shape.windows, size if size is not None and size <= SHORT else None


def windows_of(candidate: Candidate) -> Windows:
    """Over the blocks."""
    return candidate.shape.over_blocks(candidate.partition)


def relative_rate(loss: float, initial: float, reference: float) -> float:
    """r = ln(J_h / J_0) / ln(J_T / J_0); 0 for a loss that diverged."""
    if not math.isfinite(loss):
        return 0.0
    if not 0 < reference < initial:
        raise ValueError(
            f"back-propagation did not learn in the trial (test loss {initial:.4f} before, {reference:.4f} after); "
            "give it more steps"
        )
    return math.log(loss / initial) / math.log(reference / initial)


def train_briefly(config: Config, data: Dataset, windows: Windows, num_steps: int, tests: list[Batch]) -> float:
    """The test loss after so many steps with these windows, from the configuration's seed."""
    chain = build_whole_chain(config, data.task)
    named = dict(chain.named_parameters())
    read = tuple(f"readouts.{s}." for s in windows.readouts)
    trained = {name: p for name, p in named.items() if p.requires_grad and name.startswith(("blocks.", *read))}
    optimizer = build_optimizer(config.optimizer, list(trained.values()), blocks=chain.blocks)
    batches = Batches(data.train, batch_size=config.batch_size, seed=config.seed)
    precision = config.training.build_precision()
    for batch in islice(batches, num_steps):
        with precision.step_scope(config.torch_device):
            gradients = eager_mpc_gradients(chain, *place(batch, config), windows, precision=precision)
        for name, gradient in gradients.items():
            trained[name].grad = gradient
        optimizer.step()
    return evaluate(chain, tests, precision)


def read_tests(config: Config, data: Dataset) -> list[Batch]:
    """The test samples that a configuration scores, or some of them, in batches."""
    count = min(MOST_TESTED, config.training.count_tested(data.test.num_samples, config.batch_size))
    chosen = select_tests(data.test, num_samples=count, seed=config.seed, batch_size=config.batch_size)
    return [place(data.test.read(selection), config) for selection in chosen]


def evaluate(chain: Chain, batches: list[Batch], precision: Precision = FULL) -> float:
    """The mean loss at the last boundary, over all labels that count."""
    chain.eval()
    with torch.no_grad():
        losses, weights = [], []
        for inputs, labels in batches:
            state = inputs
            with precision.scope(state.device):
                for block in chain.blocks:
                    state = block(state)
            weights.append(count_labels(chain.loss, labels))
            losses.append(weights[-1] * float(chain.loss_at(chain.num_blocks, state, labels, precision)))
    chain.train()
    return sum(losses) / sum(weights)


def find_disagreements(tried: list[Candidate]) -> list[str]:
    """Pairs that the angle ranks one way and the trial the other, those that differ most first."""
    distinct = list({windows_of(one): one for one in reversed(tried)}.values())
    said: list[tuple[float, str]] = []
    for one, other in itertools.permutations(distinct, 2):
        assert one.trial_quality is not None
        assert other.trial_quality is not None
        closer = one.quality - other.quality
        learnt = one.trial_quality - other.trial_quality
        if closer > SMALL_DIFFERENCE and learnt < -SMALL_DIFFERENCE:
            words = (
                f"angle and trial disagree: {one.shape} has the closer gradient (r^ {one.quality:.3f} against "
                f"{other.quality:.3f}) but {other.shape} learnt more (r {other.trial_quality:.3f} against "
                f"{one.trial_quality:.3f})"
            )
            said.append((learnt, words))
    return [words for _, words in sorted(said)[:MOST_SAID]]
