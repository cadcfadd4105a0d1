"""The first lines of the page on when to use horizon training: where it loses, where it wins, what is not known."""

from collections.abc import Callable, Iterable, Sequence

from mpc_dist.report.angles import format_bytes
from mpc_dist.study.outcome import Choice, Outcome, Panel, Win, find_wins
from mpc_dist.study.standing import MARGIN, Standing, is_sooner, stand

NOTHING = "Nothing, in these runs."


def summarise(panels: Sequence[Panel]) -> str:
    """Losses first, then gains, then what the seeds do not decide."""
    return "\n\n".join(
        [
            *("## Where horizon training loses", _list(panels, _losses)),
            *("## Where it wins", _list(panels, _gains)),
            *("## Not distinguished: the seeds overlap", _list(panels, _undecided)),
        ]
    )


def _list(panels: Sequence[Panel], describe: Callable[[Panel], Iterable[str]]) -> str:
    return "\n".join([f"- **{panel.problem}**: {text}" for panel in panels for text in describe(panel)] or [NOTHING])


def _losses(panel: Panel) -> Iterable[str]:
    if worse := _with_standing(panel, "worse"):
        yield f"after the same steps, worse than back-propagation ({_show(panel.backprop)}): {_show_all(worse)}."
    if len(worse) == len(panel.windows):
        yield f"no window ends as well as back-propagation; the nearest is {panel.best_window.system}."
    if fading := [text for one in panel.windows if (text := _fade(one, panel.backprop))]:
        yield (
            "back-propagation gains on these as training goes on (their loss above its own in the first and the last "
            f"quarter of the steps), so expect less of them in longer training: {', '.join(fading)}."
        )
    if missed := [one.system for one in panel.windows if one.steps_to_target is None]:
        steps = panel.cell["steps"]
        yield f"not down to the target loss of {panel.target:.3f} in {steps} steps: {', '.join(missed)}."
    if lost := [_compare(first, second) for first, second in _races(panel, decided=True) if first.outcome.is_backprop]:
        yield f"with memory to spare, back-propagation is the first at the target, in every seed: {'; '.join(lost)}."


def _gains(panel: Panel) -> Iterable[str]:
    if better := _with_standing(panel, "better"):
        yield f"after the same steps, better than back-propagation ({_show(panel.backprop)}): {_show_all(better)}."
    if equal := _with_standing(panel, "as good"):
        limit = f"at most {MARGIN:.0%} above back-propagation's loss ({_show(panel.backprop)})"
        yield f"after the same steps, {limit}, with two standard errors: {_show_all(equal)}."
    if won := [
        _compare(first, second) for first, second in _races(panel, decided=True) if not first.outcome.is_backprop
    ]:
        yield f"first at the target with memory to spare, in every seed: {'; '.join(won)}."
    alone = []
    for m in panel.microbatches:
        needed = [one.steps[m].live_bytes for one in panel.outcomes if one.is_backprop and m in one.times]
        wins = [win for win in find_wins(panel.outcomes, [m]) if win.rival is None]
        if wins and needed:
            alone.append(f"M = {m}: {wins[0].choice.outcome.system} from {format_bytes(wins[0].from_bytes)}")
            alone[-1] += f" (back-propagation from {format_bytes(min(needed))})"
    if alone:
        yield f"at the target in memory in which no back-propagation fits: {'; '.join(alone)}."


def _undecided(panel: Panel) -> Iterable[str]:
    if unclear := _with_standing(panel, "not distinguished"):
        yield f"neither better, worse nor within {MARGIN:.0%} of back-propagation: {_show_all(unclear)}."
    if close := [_compare(first, second) for first, second in _races(panel, decided=False)]:
        yield f"first at the target in the seeds' mean only, with memory to spare: {'; '.join(close)}."


def _with_standing(panel: Panel, standing: Standing) -> list[Outcome]:
    """The windows that stand so beside back-propagation, best first."""
    found = [one for one in panel.windows if stand(one, panel.backprop) == standing]
    return sorted(found, key=lambda one: one.learnt.loss)


def _show(one: Outcome) -> str:
    return f"{one.learnt.loss:.3f} ± {one.learnt.spread:.3f}"


def _show_all(outcomes: Iterable[Outcome]) -> str:
    return ", ".join(f"{one.system} {_show(one)}" for one in outcomes)


def _fade(one: Outcome, backprop: Outcome) -> str | None:
    """How a window's gap to back-propagation grew over training; None if it did not."""
    own, usual = one.learnt.quarters, backprop.learnt.quarters
    early, late = (own[quarter] - usual[quarter] for quarter in (min(usual), max(usual)))
    return f"{one.system} {early:+.3f} and {late:+.3f}" if late > early else None


def _races(panel: Panel, *, decided: bool) -> Iterable[tuple[Choice, Choice | None]]:
    """The first at the target with each number of micro-batches, and the first of the other kind, if one gets there.

    Decided: so in every seed.
    """
    for m in panel.microbatches:
        win = unlimited(panel, m)
        if win is None:
            continue
        kind = win.choice.outcome.is_backprop
        others = [Choice(one, m) for one in panel.outcomes if one.is_backprop != kind and m in one.times]
        second = min(others, key=lambda one: one.time, default=None)
        if decided == (second is None or is_sooner(win.choice, second)):
            yield win.choice, second


def _compare(first: Choice, second: Choice | None) -> str:
    text = f"M = {first.num_microbatches}: {first.outcome.system}"
    return text if second is None else f"{text}, {second.time / first.time:.2f} x as fast as {second.outcome.system}"


def unlimited(panel: Panel, num_microbatches: int) -> Win | None:
    """The first at the target with so many micro-batches, if memory is no limit."""
    wins = find_wins(panel.outcomes, [num_microbatches])
    return wins[-1] if wins else None
