"""Judges the paper's claims about horizons from the losses of every horizon."""

import math
from collections.abc import Sequence

from mpc_dist.study.experiment import Verdict, VerdictWord
from mpc_dist.study.horizon_curves import Curves, share_of_falling_pairs

MONOTONE, MOSTLY = 0.9, 0.7
"""Shares of pairs of horizons in the claimed order, from which a loss counts as falling, or mostly falling."""
MARKED = 1.1
"""A loss this many times another is markedly worse."""
NEAR = 0.8
"""A relative rate from which a horizon suffices, and a share of the whole gain from which the rest is small."""


def judge(curves: Sequence[Curves]) -> tuple[Verdict, ...]:
    """All claims, over the tasks that the records hold."""
    learned = [one for one in curves if not one.is_short]
    with_rate = [one for one in learned if one.initial]
    return (
        _judge_monotone(learned),
        _judge_interior(learned),
        _judge_returns(learned),
        _judge_forward_forward(learned),
        _judge_early(with_rate),
        _judge_test(learned),
    )


def summarise(curves: Sequence[Curves]) -> str:
    """What stands out, chosen by the numbers."""
    sentences = []
    learned = [one for one in curves if not one.is_short]
    lost = [one.title for one in curves if one.is_short and not any(map(math.isfinite, one.finals("train")))]
    for one in learned:
        first, last = one.horizons[0], one.horizons[-1]
        between = {h: one.final("test", h) for h in one.horizons[1:-1]}
        if not between:
            continue
        worse = sum(not value < one.final("test", first) for value in between.values())
        sentences.append(
            f"{one.title}: test loss {_show(one.final('test', first))} at h = 1, {_show(one.final('test', last))} at "
            f"h = T = {last}, median {_show(sorted(between.values())[len(between) // 2])} between; {worse} of "
            f"{len(between)} horizons between are no better than h = 1."
        )
    if lost:
        sentences.append(f"Without a factor on residual branches every horizon diverges: {'; '.join(lost)}.")
    return " ".join(sentences)


def _judge_monotone(tasks: Sequence[Curves]) -> Verdict:
    shares = {one.title: share_of_falling_pairs(one.finals("train")) for one in tasks}
    return Verdict(
        "The larger the horizon, the lower the final loss (experiments on the horizon)",
        grade([share >= MONOTONE for share in shares.values()], [share >= MOSTLY for share in shares.values()]),
        "pairs of horizons in that order: " + _list({name: f"{share:.0%}" for name, share in shares.items()}),
    )


def _judge_interior(tasks: Sequence[Curves]) -> Verdict:
    shares = {}
    for one in tasks:
        between = one.finals("train")[1:-1]
        shares[one.title] = (sum(value < one.finals("train")[0] for value in between), len(between))
    return Verdict(
        "Horizons between 1 and T lie between forward-forward and back-propagation in loss",
        grade(
            [good == count for good, count in shares.values()], [good >= count / 2 for good, count in shares.values()]
        ),
        "of 1 < h < T, better than h = 1: " + _list({name: f"{good} of {n}" for name, (good, n) in shares.items()}),
    )


def _judge_returns(tasks: Sequence[Curves]) -> Verdict:
    """The share of the gain in log loss from h = 1 to h = T that the largest horizon below T has got."""
    shares = {}
    for one in tasks:
        first, before, last = (one.final("train", one.horizons[i]) for i in (0, -2, -1))
        gain = _log_ratio(first, last)
        got = _log_ratio(first, before) / gain if gain > 0 else math.nan
        shares[f"{one.title} (h = {one.horizons[-2]})"] = got
    return Verdict(
        "Returns diminish: near T a larger horizon gains little more",
        grade([share >= NEAR for share in shares.values()], [share >= NEAR / 2 for share in shares.values()]),
        "share of the gain in log loss that the last horizon below T has: "
        + _list({name: f"{share:.0%}" if math.isfinite(share) else "diverged" for name, share in shares.items()}),
    )


def _judge_forward_forward(tasks: Sequence[Curves]) -> Verdict:
    ratios = {}
    for one in tasks:
        values = one.finals("train")
        ratios[one.title] = (values[0] / sorted(values[1:-1])[len(values[1:-1]) // 2], values[0] / values[-1])
    return Verdict(
        "Forward-forward (h = 1) is markedly worse than larger horizons",
        grade(
            [other > MARKED and full > MARKED for other, full in ratios.values()],
            [full > MARKED for _, full in ratios.values()],
        ),
        "its training loss over the median of 1 < h < T, and over back-propagation's: "
        + _list({name: f"{other:.3g} and {full:.3g}" for name, (other, full) in ratios.items()}),
    )


def _judge_early(tasks: Sequence[Curves]) -> Verdict:
    rates = {}
    for one in tasks:
        horizon = max(1, round(one.num_blocks / 3))
        rates[f"{one.title} (h = {horizon})"] = (one.rate(horizon, 0), one.rate(horizon, -1))
    return Verdict(
        "A small horizon suffices early in training and not late (the angle grows)",
        grade(
            [early >= NEAR and late < early for early, late in rates.values()],
            [late < early for early, late in rates.values()],
        ),
        "relative rate r(h) after the first epoch and at the end: "
        + _list({name: f"{early:.2f} and {late:.2f}" for name, (early, late) in rates.items()}),
    )


def _judge_test(tasks: Sequence[Curves]) -> Verdict:
    """The order of the test losses, over horizons sorted by training loss."""
    shares = {}
    for one in tasks:
        order = sorted(one.horizons, key=lambda h, task=one: -task.final("train", h))  # type: ignore[misc]
        finite = [h for h in order if math.isfinite(one.final("train", h))]
        shares[one.title] = share_of_falling_pairs([one.final("test", h) for h in finite])
    return Verdict(
        "What holds of the training loss holds of the test loss (ours: the paper shows training loss)",
        grade([share >= MONOTONE for share in shares.values()], [share >= MOSTLY for share in shares.values()]),
        "pairs of horizons that both losses order alike: "
        + _list({name: f"{share:.0%}" for name, share in shares.items()}),
    )


def grade(fully: Sequence[bool], partly: Sequence[bool]) -> VerdictWord:
    """Confirmed if it holds fully everywhere; with limits if partly everywhere, or fully on half of the tasks."""
    if fully and all(fully):
        return "confirmed"
    return "confirmed with limits" if partly and (all(partly) or sum(fully) * 2 >= len(fully)) else "not confirmed"


def _log_ratio(first: float, second: float) -> float:
    return math.log(first / second) if math.isfinite(first) and math.isfinite(second) else -math.inf


def _show(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "infinite (diverged)"


def _list(values: dict[str, str]) -> str:
    return "; ".join(f"{name} {words}" for name, words in values.items())
