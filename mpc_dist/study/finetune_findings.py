"""What the records of `reproduce finetune` say: summary, verdicts and tables, all made from the records."""

from collections.abc import Callable, Sequence
from statistics import mean

from mpc_dist.report.angles import format_bytes
from mpc_dist.study.experiment import Findings, Picture, Records, Table, Verdict, VerdictWord
from mpc_dist.study.finetune_figures import draw_horizons, draw_tradeoff
from mpc_dist.study.finetune_part import FRACTION, HEAD_ALONE, Part, read_parts

PRETRAINING = "pretraining"
NEAR, CLOSE = 0.95, 0.85
"""Shares of back-propagation's accuracy that count as nearly all of it, and as most of it."""
STRAIGHT, NEARLY_STRAIGHT = 0.99, 0.9
"""R^2 of a line."""
CLEAR = 2.0
"""Standard errors by which back-propagation must beat training the head alone, for its accuracy to mean anything."""
ORDERED, MOSTLY_ORDERED = 0.8, 0.6
"""Share of pairs of horizons of which the larger has the higher accuracy; chance gives a half."""


def conclude(records: Records) -> Findings:
    """Tables, figures and verdicts."""
    parts = read_parts(records)
    verdicts = (_judge_moderate(parts), _judge_memory(parts), _judge_order(parts), _judge_smallest(parts))
    sizes = " ".join(map(_describe_size, parts))
    pictures = (
        Picture("horizons", draw_horizons(parts), f"Test accuracy (dots: seeds) and memory against h. {sizes}"),
        Picture("tradeoff", draw_tradeoff(parts), f"Test accuracy against memory held for backward. {sizes}"),
    )
    tables = (_tabulate_runs(parts), _tabulate_rates(parts), _tabulate_memory(records, parts))
    return Findings(" ".join(map(_summarise, parts)), tables, pictures, verdicts, _note(records, parts))


def _summarise(part: Part) -> str:
    last = part.horizons[-1]
    sentences = []
    between = [h for h in part.horizons[1:-1] if part.at(h) < part.at(1)]
    if between:
        sentences.append(f"h = {', '.join(map(str, between))} learned less than h = 1 ({part.at(1):.1%}).")
    for words in part.variants:
        size = words.removeprefix("tumbling ")
        if size != words and f"h = {size}" in part.variants:
            verb = "more than" if part.accuracy(words) > part.at(int(size)) else "no more than"
            rival = f"sliding h = {size} ({part.at(int(size)):.1%})"
            sentences.append(f"Tumbling windows of {size} ({part.accuracy(words):.1%}) learned {verb} {rival}.")
    best = part.best_moderate
    sentences.append(f"Back-propagation (h = {last}) reached {part.backprop:.1%}, the {_compare_head(part)}.")
    if best is not None:
        sentences.append(
            f"Of the horizons between that hold at most {FRACTION:.0%} of its memory, h = {best} was best: "
            f"{part.at(best):.1%} with {part.share(best):.0%}."
        )
    return f"**{part.title}.** " + " ".join(sentences)


def _compare_head(part: Part) -> str:
    head = part.accuracy(HEAD_ALONE)
    return f"head alone {head:.1%}" + ("" if part.backprop > head else ", so that tuning the rest gained nothing here")


def _level(part: Part) -> int:
    """2: a moderate horizon is near back-propagation; 1: one is close; 0: none, or tuning gains nothing clear."""
    best = part.best_moderate
    reached = part.at(best) / part.backprop if best is not None and part.backprop else 0.0
    gained = part.backprop - part.accuracy(HEAD_ALONE)
    if gained <= CLEAR * part.error:
        return 0  # nothing was tuned that a horizon could have kept
    return _grade(reached, NEAR, CLOSE)


def _combine(levels: Sequence[int]) -> VerdictWord:
    """Confirmed if it is so for every model; with limits if at least partly for one."""
    if min(levels) == 2:
        return "confirmed"
    return "confirmed with limits" if max(levels) > 0 else "not confirmed"


def _grade(value: float, full: float, partly: float) -> int:
    return 2 if value >= full else int(value >= partly)


def _judge_moderate(parts: Sequence[Part]) -> Verdict:
    def describe(part: Part) -> str:
        best = part.best_moderate
        if best is None:
            return f"no horizon between 1 and {part.horizons[-1]} holds at most {FRACTION:.0%} of the memory"
        reached = f"{part.at(best) / part.backprop:.0%} of it" if part.backprop else "nothing to compare with"
        return (
            f"back-propagation {part.backprop:.1%}, h = {best} {part.at(best):.1%} ({reached}) with "
            f"{part.share(best):.0%} of the memory, {_compare_head(part)}"
        )

    return Verdict(
        "Fine-tuning, in full and by LoRA, with a moderate horizon reaches nearly the accuracy of back-propagation at "
        f"a fraction of its memory (fig. 3, 4). Asked: {NEAR:.0%} of it with at most {FRACTION:.0%} of the memory; "
        f"partly: {CLOSE:.0%}",
        _combine([_level(part) for part in parts]),
        _join(parts, describe),
    )


def _judge_memory(parts: Sequence[Part]) -> Verdict:
    def describe(part: Part) -> str:
        line = part.line
        return (
            f"M(h) = {format_bytes(line.slope)} h + {format_bytes(line.intercept)}, R² = {line.r_squared:.4f}; "
            f"h = 1 holds {part.share(1):.0%} of back-propagation's"
        )

    return Verdict(
        f"Memory is affine in h when tuning too (fig. 3, 4). Asked: R² of {STRAIGHT}; partly: {NEARLY_STRAIGHT}",
        _combine([_grade(part.line.r_squared, STRAIGHT, NEARLY_STRAIGHT) for part in parts]),
        _join(parts, describe),
    )


def _judge_order(parts: Sequence[Part]) -> Verdict:
    def describe(part: Part) -> str:
        curve = ", ".join(f"h = {h} {part.at(h):.1%}" for h in part.horizons)
        return f"{part.order:.0%} of pairs are in order ({curve})"

    return Verdict(
        "A larger horizon tunes to a higher accuracy (fig. 3, 4). Asked: it does in "
        f"{ORDERED:.0%} of all pairs of horizons; partly: {MOSTLY_ORDERED:.0%}",
        _combine([_grade(part.order, ORDERED, MOSTLY_ORDERED) for part in parts]),
        _join(parts, describe),
    )


def _judge_smallest(parts: Sequence[Part]) -> Verdict:
    def grade(part: Part) -> int:
        return 2 * int(part.at(1) < NEAR * part.backprop)

    return Verdict(
        f"The local loss, h = 1, saves most memory but is less accurate than back-propagation (fig. 3, 4). Asked: less "
        f"than {NEAR:.0%} of its accuracy",
        _combine([grade(part) for part in parts]),
        _join(parts, lambda part: f"h = 1 {part.at(1):.1%}, back-propagation {part.backprop:.1%}"),
    )


def _join(parts: Sequence[Part], describe: Callable[[Part], str]) -> str:
    return "; ".join(f"{part.title}: {describe(part)}" for part in parts)


def _describe_size(part: Part) -> str:
    cell = part.runs[0].cell
    seeds = len({run.seed for run in part.runs})
    return (
        f"{part.title}: {cell['steps']} steps of {cell['batch_size']} images, h in units of {part.unit} of "
        f"{part.memory['num_blocks']} blocks, {seeds} seed{'s' if seeds > 1 else ''}, tested on {part.num_tested} "
        f"images (one standard error of a seed's accuracy: {part.error:.1%})."
    )


def _note(records: Records, parts: Sequence[Part]) -> tuple[str, ...]:
    start, cell = records[PRETRAINING].result, records[PRETRAINING].cell
    sizes = cell["overrides"]
    return (
        *map(_describe_size, parts),
        f"The ViT was pretrained here, by back-propagation on the CIFAR-10 subset alone: {cell['steps']} steps of "
        f"{cell['batch_size']} images, {sizes['num_hidden_layers']} layers of width {sizes['hidden_size']}, patches of "
        f"{sizes['patch_size']} pixels; test accuracy {start['accuracy'][-1]:.1%} there; weights "
        f"sha256 {start['sha256'][:12]}. The paper tunes far larger models, pretrained on far more data.",
        "Heads are drawn anew, from the run's seed, which also orders the data; interior readouts are local heads "
        "unless it says shared. With LoRA, adapters and linear maps of heads train; frozen weights have no gradients.",
        "Batch norm: statistics are updated once per step, in the one forward pass that every horizon makes; relays "
        "and backwards run no forward again. Tests use the running statistics.",
        "Learning rate: all windows were trained with every rate in the table, on every seed; for each, the rate with "
        "the highest mean accuracy counts. It is chosen on the test images, which flatters all windows alike.",
        "Memory is the peak held for backward by the eager sweep, counted tensor by tensor. Weights, gradients and "
        "optimizer state come on top: the same for every h, but for the interior heads, which add theirs.",
    )


def _tabulate_runs(parts: Sequence[Part]) -> Table:
    rows = []
    for part in parts:
        for words in part.variants:
            runs = part.find(words)
            values = [run.accuracy for run in runs]
            held = part.held_by(words) if words != HEAD_ALONE else None
            rows.append(
                (
                    part.title,
                    words + (" (back-propagation)" if words == f"h = {part.horizons[-1]}" else ""),
                    f"{mean(values):.1%} ({min(values):.1%} to {max(values):.1%})",
                    f"{mean(run.loss for run in runs):.3f}",
                    "" if held is None else format_bytes(held),
                    "" if held is None else f"{held / part.held[part.horizons[-1]]:.0%}",
                )
            )
    columns = ("model", "windows", "test accuracy, mean (range over seeds)", "test loss", "held", "of back-propagation")
    return Table("Accuracy and memory", columns, tuple(rows))


def _tabulate_rates(parts: Sequence[Part]) -> Table:
    rows = []
    for part in parts:
        for words in part.variants:
            rates = sorted({run.rate for run in part.runs if run.words == words})
            found = {rate: mean(run.accuracy for run in part.find(words, rate)) for rate in rates}
            tried = ", ".join(f"{rate:g}: {value:.1%}" for rate, value in found.items())
            rows.append((part.title, words, tried, f"{part.best_rate(words):g}"))
    return Table("Learning rates", ("model", "windows", "rate: mean test accuracy", "counts"), tuple(rows))


def _tabulate_memory(records: Records, parts: Sequence[Part]) -> Table:
    measured = {part.title: part.memory for part in parts}
    whole = records.get("memory: vit, all weights")
    if whole is not None:
        measured[f"ViT of {whole.result['num_blocks']} layers, all weights"] = whole.result
    rows = []
    for title, memory in measured.items():
        sliding = [held for words, held in memory["held"].items() if words.startswith("sliding")]
        sizes = (memory["weights"], memory["gradients"], min(sliding), max(sliding))
        rows.append((title, *map(format_bytes, sizes)))
    columns = ("tuned", "weights", "gradients", "held, h = 1", "held, back-propagation")
    return Table("What tuning holds", columns, tuple(rows))
