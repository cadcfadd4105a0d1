"""When to use horizon training: what is counted and compared is right, and a tiny variant writes its page."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mpc_dist.bench.schedule import OURS
from mpc_dist.data import Batches, TextData, TrigonometricData
from mpc_dist.models import GPT, ResMLP, build_chain
from mpc_dist.profile.memory import SavedBytes
from mpc_dist.runtime.in_process import InProcessPipeline
from mpc_dist.schedule import Costs, build_schedule, lay_out, simulate, split_evenly
from mpc_dist.study.cell import Record, Store
from mpc_dist.study.experiment import Experiment, write_page
from mpc_dist.study.outcome import Choice, Learnt, Outcome, Step, adaptive_outcome, find_wins, fixed_outcome
from mpc_dist.study.price_cell import CalibrationCell, PriceCell, add_overhead, calibrated_overhead, torch_ratio
from mpc_dist.study.runner import collect
from mpc_dist.study.stage_cells import COSINE, AdaptiveCell, StagedWindows, TunedCell, pick_rate
from mpc_dist.study.standing import is_sooner, stand
from mpc_dist.study.training_cell import TrainingCell
from mpc_dist.study.when_to_use import METHODS, SCHEDULES, Problem, build_cells, build_variant, conclude
from mpc_dist.training.sections import OptimizerConfig
from mpc_dist.windows import sliding

TEXT = TextData(max_bytes=20_000, context=8)
TINY_GPT = Problem(
    "gpt",
    GPT(num_blocks=8, width=8, num_heads=2),
    TEXT,
    OptimizerConfig("adamw"),
    rates=(3e-3, 1e-2),
    batch_size=4,
    steps=6,
    tuning_steps=2,
    seeds=(0,),
    num_evaluations=3,
    adapt_every=2,
    microbatches=(1, 4),
)
TINY_MLP = Problem(
    "mlp",
    ResMLP(num_blocks=9, width=6),
    TrigonometricData(num_train=64, num_test=20),
    OptimizerConfig("sgd"),
    rates=(0.05,),
    batch_size=8,
    steps=6,
    tuning_steps=2,
    seeds=(0, 1),
    num_evaluations=3,
    adapt_every=2,
    microbatches=(1, 4),
)
CALIBRATION = CalibrationCell(
    2, (1,), (("sliding:1", False), ("backprop", True)), ("torch-ZBV",), seconds=0.002, repeats=1, repeat_seconds=0.02
)


def test_windows_count_stages_of_uneven_sizes():
    windows = StagedWindows("sliding", 2, num_stages=4).build(9)
    sizes = split_evenly(9, 4)
    assert sizes == (3, 2, 2, 2)
    assert [aims[0][0] for aims in windows.targets] == [5, 5, 5, 7, 7, 9, 9, 9, 9]


def test_the_bytes_are_those_that_the_executor_holds():
    windows = StagedWindows("tumbling", 2)
    cell = PriceCell(TINY_GPT.model, TEXT, windows, OptimizerConfig("sgd"), 4, (1,), split=False)
    predicted = cell.run()["prices"]["1"]["live_bytes"]
    data = TEXT.load()
    chain = build_chain(TINY_GPT.model, data.task)
    batch = next(Batches(data.train, batch_size=4, seed=0))
    layout = lay_out(windows.build(8), [1] * 8)
    pipeline = InProcessPipeline(
        chain, layout, build_schedule(layout, 1), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0)
    )
    counts = [SavedBytes([*chain.parameters(), *chain.buffers(), *batch]) for _ in range(8)]
    pipeline.step(*batch, contexts=counts)
    assert max(count.peak for count in counts) == predicted


def test_checkpointing_holds_less_and_takes_a_forward_more():
    plain = TINY_GPT.pricing(StagedWindows("backprop"), split=False).run()["prices"]["1"]
    again = TINY_GPT.pricing(StagedWindows("backprop"), split=False, checkpoint=True).run()["prices"]["1"]
    # 8 stages one after another, each with a forward of 0.08 s more on average.
    assert again["seconds"][0] - plain["seconds"][0] == pytest.approx(8 * 0.08, rel=1e-4)
    assert again["live_bytes"] < plain["live_bytes"]


@pytest.mark.parametrize("split", [False, True])
def test_overhead_is_paid_by_every_action(split: bool):
    layout = lay_out(sliding(4, 4), [1] * 4)
    costs = Costs.uniform([1.0] * 4)
    schedule = build_schedule(layout, 1, split=split, costs=costs)
    more = simulate(schedule, layout, add_overhead(costs, 0.1, split=split)).step_time
    # Four forwards and four backwards (or their input halves) in a row; split, a weight half at the end.
    assert more - simulate(schedule, layout, costs).step_time == pytest.approx(0.1 * (9 if split else 8))


def test_a_rate_that_diverges_is_not_taken():
    assert pick_rate([(0.1, math.nan), (0.3, 2.0), (1.0, 1.0), (3.0, math.inf)]) == 1.0


def test_what_is_reported_is_not_tuned_on():
    with pytest.raises(ValueError, match="tuning seed 1 is among the seeds"):
        TunedCell(
            TINY_GPT.model,
            TEXT,
            None,
            OptimizerConfig(),
            (0.1,),
            4,
            steps=1,
            tuning_steps=1,
            seeds=(0, 1),
            tuning_seed=1,
        )


def test_growing_windows_of_one_stage_train_as_fixed_ones_until_they_grow():
    settings = (TINY_MLP.model, TINY_MLP.data, StagedWindows("tumbling", 1), OptimizerConfig("sgd", lr=0.05), 8, 6, 0)
    fixed = super(AdaptiveCell, cell := AdaptiveCell(*settings, num_evaluations=3, every=100)).run()
    assert {**fixed, "sizes": [[0, 1, "start"]]} == cell.run()


def test_windows_that_stop_to_help_grow_up_to_back_propagation():
    optimizer = OptimizerConfig("sgd", lr=0.0)  # no gain: they double at every second decision
    settings = (TINY_MLP.model, TINY_MLP.data, StagedWindows("tumbling", 1), optimizer, 8, 16, 0)
    sizes = AdaptiveCell(*settings, num_evaluations=1, every=1).run()["sizes"]
    assert [size for _, size, _ in sizes] == [1, 2, 4, 8]


def curve(*losses: float) -> Learnt:
    return Learnt(0.1, tuple(range(0, 10 * len(losses), 10)), (losses,))


def test_steps_to_a_target_lie_on_the_line_between_evaluations():
    assert curve(4.0, 3.0, 2.0).steps_to(2.5) == 15
    assert curve(4.0, 3.0, 3.5, 2.0).steps_to(3.0) == 10
    assert curve(4.0, math.inf, math.inf).steps_to(3.0) is None
    assert curve(4.0, 3.0, 3.5, 2.0, 1.0).loss_at(0.5) == 3.0


def test_quarters_average_what_was_evaluated_in_them():
    seeds = ((9.0, 4.0, 3.0, 1.0), (9.0, 2.0, 1.0, 2.0))
    assert Learnt(0.1, (0, 25, 50, 100), seeds).quarters == {1: 3.0, 2: 2.0, 4: 1.5}


def test_growing_windows_pay_for_each_size_and_each_decision():
    runs = [{"steps": [0, 10, 20], "test": [4.0, 3.0, 2.0], "sizes": [[0, 1, "start"], [10, 8, "grown"]]}]
    by_size = {1: {1: Step(1.0, 10, 20)}, 8: {1: Step(5.0, 80, 90)}}
    outcome = adaptive_outcome("adaptive", {"rate": 0.1, "runs": runs}, by_size, every=6, target=2.5)
    # 10 steps of 1, 5 of 5, and decisions after 6 and 12 steps.
    assert outcome.times == {1: 10 + 25 + 2 * 5}
    assert outcome.steps[1].live_bytes == 80


def test_the_winner_is_the_fastest_that_fits():
    learnt = curve(2.0, 1.0)
    slow = fixed_outcome("small", learnt, {1: Step(3.0, 10, 0)}, target=1.0, is_backprop=False)
    fast = fixed_outcome("large", learnt, {1: Step(1.0, 30, 0)}, target=1.0, is_backprop=True)
    never = fixed_outcome("never", curve(2.0, 1.5), {1: Step(0.1, 1, 0)}, target=1.0, is_backprop=False)
    wins = find_wins([never, fast, slow], [1])
    assert [(win.from_bytes, win.choice.outcome.system) for win in wins] == [(10, "small"), (30, "large")]
    assert wins[0].rival is None
    assert wins[1].rival is not None
    assert wins[1].rival.outcome == fast


def qualities(*losses: float) -> Outcome:
    """One run per loss, which it has from the first step to the last."""
    learnt = Learnt(0.1, (0, 10), tuple((loss, loss) for loss in losses))
    return fixed_outcome("any", learnt, {1: Step(1.0, 1, 1)}, target=0.0, is_backprop=False)


@pytest.mark.parametrize(
    ("losses", "standing"),
    [
        ((1.9, 1.9, 1.9), "better"),
        ((2.1, 2.1, 2.1), "worse"),
        ((2.0, 2.01, 2.0), "as good"),
        ((1.7, 2.0, 2.3), "not distinguished"),  # the same mean, but nobody knows
        ((2.03, 2.05, 2.01), "not distinguished"),  # perhaps 1.5 % worse, perhaps 4 %
        ((2.1,), "not distinguished"),  # one seed tells nothing
    ],
)
def test_what_noise_hides_is_neither_won_nor_lost(losses: tuple[float, ...], standing: str):
    assert stand(qualities(*losses), qualities(*([2.0, 2.0, 2.0][: len(losses)]))) == standing


def test_sooner_means_in_every_seed():
    steps = {1: Step(1.0, 1, 1)}

    def choose(*ends: float) -> Choice:
        learnt = Learnt(0.1, (0, 10), tuple((2.0, end) for end in ends))
        return Choice(fixed_outcome("any", learnt, steps, target=1.0, is_backprop=False), 1)

    early, late, mixed, lost = choose(0.0, 0.5), choose(0.8, 1.0), choose(0.6, 0.9), choose(0.0, 1.5)
    assert early.seed_times == pytest.approx((5, 10 / 1.5))
    assert is_sooner(early, late)
    assert not is_sooner(late, early)
    assert not is_sooner(mixed, late)
    assert not is_sooner(lost, late), "one of its seeds was never there"
    assert not is_sooner(choose(0.0), choose(0.9)), "one seed tells nothing"


def test_a_cosine_falls_over_the_steps_of_each_run_with_growing_windows_too():
    optimizer = OptimizerConfig("sgd", scheduler=COSINE)
    grown = replace(TINY_MLP.training(None), optimizer=optimizer, adapt_every=100)  # no decision in 6 steps
    fixed = replace(grown, windows=StagedWindows("tumbling", 1))
    (run, _), (same, _) = grown.run()["runs"], fixed.run()["runs"]
    assert [run["train"], run["test"]] == [same["train"], same["test"]]
    decay = replace(optimizer, lr=0.05, scheduler_arguments={"T_max": fixed.steps})
    settings = (fixed.model, fixed.data, fixed.windows, decay, fixed.batch_size, fixed.steps, fixed.seeds[0])
    assert same == TrainingCell(*settings, num_evaluations=3, test_batches=1).run()
    assert same != replace(fixed, optimizer=OptimizerConfig("sgd")).run()["runs"][0]


def test_where_micro_batches_are_free_the_best_number_wins():
    one = fixed_outcome("a", curve(2.0, 1.0), {1: Step(1.0, 80, 0), 8: Step(3.0, 10, 0)}, target=1.0, is_backprop=True)
    assert [(win.choice.num_microbatches, win.choice.time) for win in find_wins([one], [1, 8])] == [(8, 30), (1, 10)]


def test_calibration_takes_the_median_and_torchs_fastest():
    ours = {"system": OURS, "windows": "backprop", "split": True}
    rows = [
        {**ours, "microbatches": 1, "overhead": -0.1, "seconds": 2.0},
        {**ours, "microbatches": 4, "overhead": 0.002, "seconds": 2.0},
        {**ours, "microbatches": 1, "overhead": 0.3, "seconds": 9.0, "split": False},
        {"system": "torch-ZBV", "microbatches": 1, "seconds": 3.0},
        {"system": "torch-InterleavedZeroBubble", "microbatches": 1, "seconds": 4.0},
        {"system": "torch-ZBV", "microbatches": 4, "seconds": 2.0},
    ]
    assert calibrated_overhead({"rows": rows}) == 0.002
    assert calibrated_overhead({"rows": rows[:1]}) == 0.0
    assert calibrated_overhead({"rows": rows[2:3]}) == 0.005  # no more was simulated
    assert [torch_ratio({"rows": rows}, m) for m in (1, 2, 16)] == [1.5, 1.25, 1.0]
    assert torch_ratio({"rows": rows[:3]}, 1) is None


def test_quick_and_full_ask_the_same_questions():
    assert list(build_variant(True)) == list(build_variant(False))


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Record]:
    cells = build_cells([TINY_GPT, TINY_MLP], CALIBRATION)
    store = Store(tmp_path_factory.mktemp("when") / "cells.jsonl")
    for name, cell in cells.items():
        store.add(name, cell, cell.run(), seconds=1)
    return collect(cells, store)


def test_a_tiny_variant_writes_its_page_beside_its_folder(records: dict[str, Record], tmp_path: Path):
    findings = conclude(records)
    experiment = Experiment("when-to-use", "When", lambda _: {}, conclude, page_beside=True)
    page = write_page(experiment, findings, records, tmp_path / "when-to-use", quick=False)
    assert page == tmp_path / "when-to-use.md"
    text = page.read_text()
    assert text.index("Where horizon training loses") < text.index("Where it wins") < text.index("## Not distinguished")
    assert text.index("## Not distinguished") < text.index("## When to use what")
    for picture in findings.pictures:
        assert f"](when-to-use/{picture.name}.png)" in text
        assert (tmp_path / "when-to-use" / f"{picture.name}.png").stat().st_size > 10_000
    for system in (*(method for method in METHODS if method != "back-propagation"), *SCHEDULES, "zero bubble, torch's"):
        assert f"| {system} |" in text
    assert len(findings.verdicts) == 4
