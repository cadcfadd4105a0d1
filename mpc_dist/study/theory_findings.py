"""What the records of `theory` say: verdicts, tables and figures."""

from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mpc_dist.study.deep_linear import RELATIONS, Relation
from mpc_dist.study.experiment import Experiment, Findings, Picture, Records, Table, Verdict, VerdictWord
from mpc_dist.study.theory import (
    FURTHEST,
    NEAREST,
    NORM,
    SHARES,
    WIDTH,
    Choice,
    Rates,
    build_cells,
    counted_order,
    gather_choices,
    gather_orders,
    gather_rates,
)

CUBIC_TOLERANCE = 0.3
"""A fitted order within this of what a cubic law shows at the same depth counts as cubic."""
LAWS = {"cubic": 2, "quadratic": 1}
"""The power of d in `counted_order`."""
CLOSE, ROUGH = 0.05, 0.15
"""Mean distance of r(h) from cos^2 that counts as agreement, and as rough agreement; so for h* as a share of T."""
Orders = Mapping[tuple[Relation, int], Sequence[float]]


def conclude(records: Records) -> Findings:
    """Orders, rates and horizons against the theory."""
    orders, rates, choices = gather_orders(records), gather_rates(records), gather_choices(records)
    cubic, rate, closed, printed = (
        _judge_cubic(orders),
        _judge_rates(rates),
        _judge_closed(choices),
        _judge_printed(choices),
    )
    summary = (
        f"Cubic order: {cubic.verdict} ({cubic.evidence}). r(h) = cos²: {rate.verdict}. "
        f"Closed form of h*: {closed.verdict}; as printed, without T under the root: {printed.verdict}."
    )
    return Findings(
        summary,
        tables=(_order_table(orders), _rate_table(rates), _choice_table(choices)),
        pictures=(
            Picture("order", draw_orders(orders), _order_caption(orders)),
            Picture("rate", draw_rates(rates), _rate_caption(rates)),
            Picture("closed_form", draw_choices(choices), _choice_caption()),
        ),
        verdicts=(cubic, rate, closed, printed),
        notes=_notes(records),
    )


def _judge_cubic(orders: Orders) -> Verdict:
    deepest = max(depth for _, depth in orders)
    means = {relation: fmean(orders[relation, deepest]) for relation in RELATIONS}
    expected = counted_order(deepest, power=2)
    cubic = [relation for relation, order in means.items() if abs(order - expected) <= CUBIC_TOLERANCE]
    word: VerdictWord = (
        "confirmed" if len(cubic) == len(means) else "confirmed with limits" if cubic else "not confirmed"
    )
    return Verdict(
        "1 - cos²(theta_h) = O((1 - h/T)³) for deep linear nets W = I + W~/T (section 3)",
        word,
        f"order at T = {deepest}, by the layers' W~: "
        + ", ".join(f"{relation} {order:.2f}" for relation, order in means.items())
        + f"; at this depth a cubic law shows {expected:.2f}, a quadratic one {counted_order(deepest, power=1):.2f}",
    )


def _judge_rates(rates: Sequence[Rates]) -> Verdict:
    early = {one.title: one.mean_gap(late=False) for one in rates}
    late = {one.title: one.mean_gap(late=True) for one in rates}
    lost = {one.title: one.num_lost for one in rates}
    values = [*early.values(), *late.values()]
    is_close = max(values) <= CLOSE and not any(lost.values())
    word: VerdictWord = (
        "confirmed" if is_close else "confirmed with limits" if min(values) <= ROUGH else "not confirmed"
    )
    numbers = "; ".join(
        f"{title} {early[title]:.2f} early, {late[title]:.2f} late"
        + (f" (runs with 1 < h < T that blew up: {lost[title]})" if lost[title] else "")
        for title in early
    )
    return Verdict(
        "The relative rate of loss decrease r(h) = ln(J_h/J_0)/ln(J_T/J_0) is about cos²(theta_h) (section 3)",
        word,
        f"mean |r - cos²| over horizons below T: {numbers}",
    )


def _judge_closed(choices: Sequence[Choice]) -> Verdict:
    errors = {one.curve: _error([same for same in choices if same.curve == one.curve]) for one in choices}
    # Of several that are equal as written, the first: processors differ in how they round the last bits.
    written = {curve: round(error, 3) for curve, error in errors.items()}
    best, worst = min(written, key=written.__getitem__), max(written, key=written.__getitem__)
    word: VerdictWord = (
        "confirmed" if errors[worst] <= CLOSE else "confirmed with limits" if errors[best] <= CLOSE else "not confirmed"
    )
    close = sum(error <= CLOSE for error in errors.values())
    return Verdict(
        "O2 has the closed-form minimiser h* = T(1 - sqrt(a lambda T/(3k))) (section 4, with the T that it leaves out)",
        word,
        f"mean |h* - best|/T at most {CLOSE} on {close} of {len(errors)} measured curves: from {errors[best]:.3f} "
        f"({best}) to {errors[worst]:.3f} ({worst}); mean regret {fmean(one.regret for one in choices):.1%} of the "
        "objective's range",
    )


def _judge_printed(choices: Sequence[Choice]) -> Verdict:
    closed, printed = _error(choices), fmean(one.error(one.printed) for one in choices)
    word: VerdictWord = "confirmed" if printed <= CLOSE and printed <= closed else "not confirmed"
    return Verdict(
        "The same as printed: h* = T(1 - sqrt(a lambda/(3k))) (section 4)",
        word,
        f"mean |h* - best|/T {printed:.3f}, with T under the root {closed:.3f}",
    )


def _error(choices: Sequence[Choice]) -> float:
    return fmean(one.error(one.closed) for one in choices)


def _order_table(orders: Orders) -> Table:
    depths = sorted({depth for _, depth in orders})
    rows = [(relation, *(_spread(orders[relation, depth]) for depth in depths)) for relation in RELATIONS]
    for law, power in LAWS.items():
        rows.append((f"{law} law at this depth", *(f"{counted_order(depth, power=power):.2f}" for depth in depths)))
    return Table(
        "Order of 1 - cos² in 1 - h/T, mean over seeds (least to most)",
        ("W~(t) of the layers", *(f"T = {depth}" for depth in depths)),
        tuple(rows),
    )


def _spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _rate_table(rates: Sequence[Rates]) -> Table:
    rows = []
    for one in rates:
        for place, h in enumerate(one.horizons):
            numbers = (
                one.expected(late=False)[:, place],
                one.early[:, place],
                one.expected(late=True)[:, place],
                one.late[:, place],
            )
            rows.append((one.title, str(h), *(_mean_text(values) for values in numbers)))
    columns = ("task", "h", "cos² at the start", "r early", "cos² along the way", "r late")
    return Table("r(h) against cos²(theta_h), means over seeds", columns, tuple(rows))


def _mean_text(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> str:
    kept = values[np.isfinite(values)]
    if not len(kept):
        return "blew up"
    lost = len(values) - len(kept)
    return f"{float(kept.mean()):.3f}" + (f" ({lost} of {len(values)} blew up)" if lost else "")


def _choice_table(choices: Sequence[Choice]) -> Table:
    rows = tuple(
        (
            one.curve,
            str(one.num_blocks),
            f"{one.factor:.3g}",
            f"{one.weight:.3g}",
            str(one.best),
            f"{one.closed:.1f}",
            f"{one.printed:.1f}",
            f"{one.regret:.1%}",
        )
        for one in choices
    )
    columns = ("curve", "T", "k", "lambda", "best h", "closed form", "as printed", "regret of the closed form")
    return Table("h* by brute force and in closed form", columns, rows)


def draw_orders(orders: Orders) -> Figure:
    """The order against depth."""
    figure = Figure(figsize=(7.5, 4), layout="constrained")
    axes = figure.subplots()
    depths = sorted({depth for _, depth in orders})
    for relation in RELATIONS:
        values = np.array([orders[relation, depth] for depth in depths])
        (line,) = axes.plot(depths, values.mean(axis=1), "o-", label=f"W~: {relation}")
        axes.fill_between(depths, values.min(axis=1), values.max(axis=1), alpha=0.15, color=line.get_color())
    for law, power in LAWS.items():
        shown = [counted_order(depth, power=power) for depth in depths]
        axes.plot(depths, shown, ls=":" if power == 1 else "--", color="gray", label=f"{law} law at this depth")
    axes.set_xscale("log", base=2)
    axes.set_xticks(depths, labels=[str(depth) for depth in depths])
    axes.set_ylim(0, 3.6)
    axes.set_xlabel("depth T (layers)")
    axes.set_ylabel("order of 1 - cos² in 1 - h/T")
    _finish(axes, legend=False)
    axes.legend(fontsize=8, loc="lower right")
    return figure


def draw_rates(rates: Sequence[Rates]) -> Figure:
    """A panel per task: r and cos^2 against the horizon."""
    figure = Figure(figsize=(3.9 * len(rates), 4), layout="constrained")
    lowest = min([-0.3, *(float(np.nanmin(np.concatenate([one.early, one.late]))) for one in rates)])
    for place, one in enumerate(rates, start=1):
        axes = figure.add_subplot(1, len(rates), place)
        shares = np.array(one.horizons) / one.horizons[-1]
        for late, measured, colour, when in (
            (False, one.early, "tab:blue", "early"),
            (True, one.late, "tab:red", "late"),
        ):
            axes.plot(shares, np.nanmedian(measured, axis=0), "o-", ms=4, color=colour, label=f"r(h), {when}, median")
            blown = shares[np.isnan(measured).any(axis=0)]
            axes.plot(blown, np.full(len(blown), 1.18), "x", color=colour, label=f"a seed blew up, {when}")
            axes.plot(shares, one.expected(late=late).mean(axis=0), "--", color=colour, label=f"cos², {when}")
            for run in measured:
                axes.plot(shares, run, lw=0.5, alpha=0.4, color=colour)
        axes.axhline(0, color="black", lw=0.6)
        axes.set_ylim(max(-2.0, lowest - 0.1), 1.25)
        axes.set_title(one.title, fontsize=10)
        axes.set_xlabel("h / T")
        axes.set_ylabel("share of back-propagation's progress")
        _finish(axes)
    return figure


def draw_choices(choices: Sequence[Choice]) -> Figure:
    """The closed form against brute force."""
    figure = Figure(figsize=(9, 4.4), layout="constrained")
    for place, title in enumerate(("with T under the root", "as printed"), start=1):
        axes = figure.add_subplot(1, 2, place)
        for name in dict.fromkeys(one.curve for one in choices):
            chosen = [one for one in choices if one.curve == name]
            found = [(one.closed if place == 1 else one.printed) / one.num_blocks for one in chosen]
            axes.plot([one.best / one.num_blocks for one in chosen], found, "o", ms=5, alpha=0.7, label=name)
        axes.plot([0, 1], [0, 1], color="gray", lw=0.8, ls=":")
        axes.set_xlabel("best h / T, by brute force")
        axes.set_ylabel("h* / T, closed form")
        axes.set_title(title, fontsize=10)
        _finish(axes, legend=False)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    return figure


def _finish(axes: Axes, *, legend: bool = True) -> None:
    if legend:
        axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _order_caption(orders: Orders) -> str:
    seeds = max(map(len, orders.values()))
    return (
        f"Order of 1 - cos²(theta_h) in 1 - h/T of deep linear nets at initialisation, width {WIDTH}, |W~| = {NORM}, "
        f"fitted over h/T in [{FURTHEST}, {NEAREST}]; {seeds} seeds, band from least to most."
    )


def _rate_caption(rates: Sequence[Rates]) -> str:
    seeds = len(rates[0].early)
    return (
        "Share of back-propagation's log loss decrease that sliding windows of horizon h reach with the same steps, "
        f"and cos²(theta_h) along back-propagation's way; thin lines: each of {seeds} seeds."
        " Early: a tenth of the steps."
    )


def _choice_caption() -> str:
    shares = ", ".join(f"{share:g}" for share in SHARES)
    return (
        "h* of O2 = -cos² + lambda C, C = memory / back-propagation's; a point per measured curve and lambda = "
        f"{shares} of 3k/(aT)."
    )


def _notes(records: Records) -> tuple[str, ...]:
    trained = [record for record in records.values() if record.cell["kind"] == "TrainingCell"]
    steps = max(record.cell["steps"] for record in trained)
    return (
        f"The tasks train for {steps} steps with the paper's rates (0.03 linear, 0.01 MLP), batch 100 and 15 layers of "
        "width 10, residual layers' Glorot weights over T; J is the test loss at the last boundary (1,000 samples).",
        "Deep linear nets at initialisation: float64, inputs an orthonormal basis, Gaussian target. 'smooth' turns "
        "from one matrix to another by a quarter over the depth; 'independent' draws every layer anew.",
        "k is fitted to the measured cos² by least squares, a to the measured memory; C = h/T for deep linear nets.",
    )


EXPERIMENT = Experiment(
    "theory", "The theory: cubic order, rate against angle, the closed form of h*", build_cells, conclude
)
