"""What each method reached, and the verdicts on claims about windows that follow from it."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpc_dist.study.cell import Record
from mpc_dist.study.experiment import Verdict, VerdictWord
from mpc_dist.study.window_settings import DECAY, DEEP, MAIN

SMALLEST = 0.01
"""Losses that differ by less than this share are taken as equal, whatever the seeds say."""
PAPER_SHARE = 0.9
"""Share of settings in which a claim must hold to be confirmed."""


@dataclass(frozen=True)
class Outcome:
    """What one method reached in one setting."""

    rate: float
    losses: tuple[float, ...]
    """Last test loss of each seed; infinite where training broke down."""

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.fmean(self.losses)

    @property
    def spread(self) -> float:
        """Standard deviation over the seeds."""
        return statistics.stdev(self.losses) if len(self.losses) > 1 and math.isfinite(self.mean) else 0.0

    def is_better_than(self, other: "Outcome") -> bool:
        """By more than two standard errors of the difference and one percent."""
        error = math.hypot(self.spread / len(self.losses) ** 0.5, other.spread / len(other.losses) ** 0.5)
        return other.mean - self.mean > max(2 * error, SMALLEST * abs(self.mean))

    def __str__(self) -> str:
        return f"{self.mean:.3g} ± {self.spread:.2g}" if math.isfinite(self.mean) else "broke down"


Outcomes = Mapping[str, Mapping[str, Outcome]]
"""By setting and windows."""


def read_outcome(record: Record) -> Outcome:
    """Of a tuned cell."""
    steps = record.cell["training"]["steps"]
    losses = [
        run["test"][-1] if run["steps"][-1] == steps and math.isfinite(run["test"][-1]) else math.inf
        for run in record.result["runs"]
    ]
    return Outcome(record.result["rate"], tuple(losses))


def judge_trial(outcomes: Outcomes) -> Verdict:
    """The trial that began this: GPT with AdamW."""
    rows, holds = [], []
    for setting in (MAIN, DEEP):
        of = outcomes[setting]
        for windows in [w for w in ("sliding 2", "sliding 4") if w in of]:
            holds.append(all(of[other].is_better_than(of[windows]) for other in ("sliding 1", "tumbling 2")))
            rows.append(f"{setting}: {windows} {of[windows]}, h = 1 {of['sliding 1']}, tumbling 2 {of['tumbling 2']}")
    word = _word(sum(holds), len(holds))
    return Verdict(
        "Sliding windows with 1 < h < T train worse than h = 1 and than tumbling windows (GPT, AdamW)",
        word,
        "; ".join(rows),
    )


def judge_paper(outcomes: Outcomes) -> Verdict:
    """Whether looking further ahead trains better, among the paper's windows."""
    pairs = [("sliding 1", "sliding 2"), ("sliding 2", "sliding 4")]
    kept, broken, level = [], [], 0
    for setting, of in outcomes.items():
        for near, far in pairs:
            if near in of and far in of:
                if of[far].is_better_than(of[near]):
                    kept.append((setting, near, far))
                elif of[near].is_better_than(of[far]):
                    broken.append((setting, near, far))
                else:
                    level += 1
    total = len(kept) + len(broken) + level

    def say(found: Sequence[tuple[str, str, str]]) -> str:
        return (
            "; ".join(f"{s}: {a} {outcomes[s][a].mean:.3g}, {b} {outcomes[s][b].mean:.3g}" for s, a, b in found)
            or "none"
        )

    evidence = (
        f"further is better in {len(kept)} of {total} comparisons, worse in {len(broken)}. "
        f"Better: {say(kept)}. Worse: {say(broken)}"
    )
    return Verdict(
        "A larger horizon trains better (section 4: performance lies between forward-forward and back-propagation)",
        _word(len(kept), total),
        evidence,
    )


def judge_angle(main: Mapping[str, Record], of: Mapping[str, Outcome]) -> Verdict:
    """Whether the angle predicts learning."""
    cosines = next(iter(main.values())).result["runs"][0]["cosines"]["0"]
    horizons = (1, 2, 4)
    loss = [of[f"sliding {h}"] for h in horizons]
    is_closer = cosines[0] < cosines[1] < cosines[3]
    is_better = [loss[i + 1].is_better_than(loss[i]) for i in range(2)]
    evidence = ", ".join(
        f"h = {h}: cos {cosines[h - 1]:.2f} at the start, loss {o}" for h, o in zip(horizons, loss, strict=True)
    )
    return Verdict(
        "A gradient closer to back-propagation's learns better (GPT, 8 blocks, AdamW)",
        _word(sum(is_better) if is_closer else 0, 2),
        evidence,
    )


def judge_cause(modes: Mapping[str, Mapping[str, Record]]) -> Verdict:
    """Where the linear model has undamped modes."""
    right, total, shown = 0, 0, []
    for depth, of in modes.items():
        for windows, record in of.items():
            kind = record.cell["windows"]
            units = int(depth) / kind["unit"]
            is_two_way = kind["kind"] == "sliding" and 1 < kind["size"] < units - 1
            right += (record.result["chain"] > 0) == is_two_way
            total += 1
            if is_two_way:
                shown.append(f"{windows} of {depth}: chain of {record.result['chain']}")
    return Verdict(
        "A linear model of the chain has undamped modes for sliding windows with 1 < h < T - 1 and for no others",
        _word(right, total),
        f"right for {right} of {total} window maps, in exact arithmetic; {', '.join(shown)}",
    )


def judge_prediction(predicted: Mapping[str, float], measured: Mapping[str, float]) -> Verdict:
    """Whether the linear model ranks windows as training does."""
    shared = sorted(predicted.keys() & measured.keys())
    value = rank_correlation([predicted[w] for w in shared], [measured[w] for w in shared])
    word: VerdictWord = "confirmed" if value >= 0.8 else "confirmed with limits" if value >= 0.5 else "not confirmed"
    return Verdict(
        "The linear model ranks the windows as training does (GPT, 8 blocks, AdamW)",
        word,
        f"rank correlation of predicted error and test loss {value:.2f} over {len(shared)} window maps",
    )


def judge_near(of: Mapping[str, Outcome]) -> Verdict:
    """The first intervention."""
    names = [name for name in of if name.endswith("near")]
    base, local = of["sliding 2"], of["sliding 1"]
    gap = _gap(of)
    closed = {name: (base.mean - of[name].mean) / gap if gap > 0 else 0.0 for name in names}
    best = max(closed, key=lambda name: closed[name])
    is_monotone = all(closed[a] <= closed[b] for a, b in itertools.pairwise(names))
    word: VerdictWord = "not confirmed"
    if closed[best] >= 0.8:
        word = "confirmed" if is_monotone else "confirmed with limits"
    elif closed[best] >= 0.4:
        word = "confirmed with limits"
    evidence = ", ".join(f"{name}: {of[name]}, {share:.0%} of the gap closed" for name, share in closed.items())
    return Verdict(
        "Adding the near loss mends sliding windows (intervention 1)",
        word,
        f"sliding 2 {base}, h = 1 {local}; {evidence}",
    )


def judge_damping(outcomes: Outcomes) -> Verdict:
    """The second intervention."""
    (decayed,) = (of for setting, of in outcomes.items() if DECAY in setting)
    plain = outcomes[MAIN]
    gap, left = _gap(plain), decayed["sliding 2"].mean - decayed["sliding 1"].mean
    word: VerdictWord = "not confirmed"
    # A decay that spoils all windows alike mends none.
    is_better = decayed["sliding 2"].mean < plain["sliding 2"].mean
    if gap > 0 and left < 0.5 * gap and is_better:
        word = "confirmed"
    elif gap > 0 and left < 0.8 * gap:
        word = "confirmed with limits"
    return Verdict(
        "Damping all weights (weight decay 1) mends sliding windows (intervention 2)",
        word,
        f"sliding 2 minus h = 1: {gap:.3g} without, {left:.3g} with decay "
        f"(sliding 2 {decayed['sliding 2']}, h = 1 {decayed['sliding 1']}; without decay sliding 2 "
        f"{plain['sliding 2']}" + ("" if is_better else ": the decay spoils both") + ")",
    )


def judge_units(outcomes: Outcomes) -> Verdict:
    """The third intervention."""
    rows, holds = [], []
    for setting in (MAIN, DEEP):
        of = outcomes[setting]
        fine, coarse, local = of["sliding 2"], of["sliding 2 (units of 2)"], of["tumbling 2"]
        gap = _gap(of)
        holds.append(gap > 0 and coarse.mean - local.mean < 0.5 * gap)
        rows.append(
            f"{setting}: sliding 2 by block {fine}, by two {coarse}; h = 1 by block {of['sliding 1']}, by two {local}"
        )
    return Verdict(
        "Larger units, and so fewer of them, mend sliding windows (intervention 3)",
        _word(sum(holds), len(holds)),
        "; ".join(rows),
    )


def _gap(of: Mapping[str, Outcome]) -> float:
    """How much worse sliding 2 is than h = 1; 0 if the seeds cannot tell, and then there is nothing to mend."""
    far, local = of["sliding 2"], of["sliding 1"]
    return far.mean - local.mean if local.is_better_than(far) else 0.0


def _word(count: int, total: int) -> VerdictWord:
    if total and count >= PAPER_SHARE * total:
        return "confirmed"
    return "confirmed with limits" if total and count >= 0.25 * total else "not confirmed"


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Spearman's; equal values have no order, so the earlier one counts as smaller."""

    def ranks(values: Sequence[float]) -> list[int]:
        order = sorted(range(len(values)), key=lambda i: values[i])
        return [order.index(i) for i in range(len(values))]

    return statistics.correlation(ranks(left), ranks(right))
