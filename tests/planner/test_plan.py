"""The search and the plan: what fits, what wins, why counts differ, and that nothing is lost in a file."""

import dataclasses
from pathlib import Path

import pytest

from mpc_dist.planner.measurements import BlockCosts, Measurements, ReadoutCosts, load_measurements, save_measurements
from mpc_dist.planner.plan import Plan, Shape
from mpc_dist.planner.pricing import Planner
from mpc_dist.planner.request import Request
from mpc_dist.planner.search import make_plan
from mpc_dist.planner.select import Selection, select_horizon
from mpc_dist.windows import Windows, expand, sliding

T = 8


def measured(M: int, *, weights: float = 100.0, forward: float = 1.0) -> Measurements:
    times = (forward / M,) * 3
    block = BlockCosts(*times, 400.0 / M, 40.0 / M, 40.0 / M, weights, optimizer_bytes=2 * weights)
    first = dataclasses.replace(block, input_grad=0.0)
    return Measurements(
        16 // M, (first, *[block] * (T - 1)), (ReadoutCosts(0.0, 4.0, 1.0, 0.0, 2.0),) * T, 0.0, "made up"
    )


def cosine(windows: Windows) -> float:
    """Closer the further the blocks look: 1 for back-propagation."""
    reach = sum(sum(w * s for s, w in aims) / sum(w for _, w in aims) - t for t, aims in enumerate(windows.targets))
    return 1 - 0.5 * (1 - reach / (T * (T + 1) / 2)) ** 2


def select(request: Request) -> Selection:
    one = measured(1)
    memory = {h: one.sweep_bytes(h) + one.weight_bytes(range(T), sliding(T, h).readouts) for h in range(1, T + 1)}
    cosines = {h: cosine(sliding(T, h)) for h in memory}
    seconds = dict.fromkeys(memory, 3.0)
    return select_horizon(
        T, memory, cosines, cost=request.build_cost(), objective=request.build_objective(), step_seconds=seconds
    )


def plan(**settings) -> Plan:
    request = Request(**{"gpu_memory": 2000.0, "max_gpus": 6, "latency": 0.0, **settings})
    planner = Planner({m: measured(m) for m in (1, 2, 4)}, cosine, request)
    return make_plan(planner, select(request), request, fingerprint={"model": {"name": "x"}}, notes=("made up",))


def test_every_candidate_keeps_within_the_memory_and_the_best_is_chosen():
    found = plan()
    assert found.chosen == found.candidates[0]
    for drifts in (False, True):
        values = [one.value for one in found.candidates if one.shape.drifts == drifts]
        assert values == sorted(values)
    for one in found.candidates:
        assert max(one.bytes_per_rank) <= 2000
        assert sum(one.partition) == T
        assert one.num_gpus <= 6
    names = {one.name for one in found.candidates}
    assert {"backprop", "backprop, checkpointed", "backprop, split", "sliding 1 stages, split"} <= names
    assert {"tumbling 2 stages, split", "cumulative 2 stages, split"} <= names


def test_sliding_windows_that_promise_more_by_their_angle_are_passed_over_and_it_is_said():
    found = plan()
    drifting = [one.shape.drifts for one in found.candidates]
    assert drifting == sorted(drifting)
    assert min(one.value for one in found.candidates if one.shape.drifts) < found.chosen.value
    assert any("no trial has shown that sliding" in note for note in found.notes)
    assert not Shape("sliding", 1).drifts


def test_the_ladder_counts_and_the_realised_count_is_never_smaller():
    whole = max(select(Request(gpu_memory=2000.0)).choices, key=lambda choice: choice.memory).memory
    for tenths in (1, 2, 3, 4, 5, 7, 10, 14, 20):
        M0 = whole * tenths / 10
        if M0 < 400:  # a block's own weights and state
            continue
        request = Request(gpu_memory=M0, max_gpus=8, objective="O1", epsilon=0.3, latency=0.0)
        planner = Planner({m: measured(m) for m in (1, 2, 4)}, cosine, request)
        selection = select(request)
        found = make_plan(planner, selection, request, fingerprint={})
        assert found.ladder_gpus == -(-selection.choice.memory // M0)
        if found.realised_gpus is not None:
            assert found.realised_gpus >= found.ladder_gpus
        assert ("fewest" in found.why or "no partition" in found.why) == (found.realised_gpus != found.ladder_gpus)


def test_objectives_choose_differently():
    cheap = plan(objective="O1", epsilon=0.9)
    good = plan(objective="O1", epsilon=0.05)
    assert cheap.chosen.num_gpus <= good.chosen.num_gpus
    assert good.chosen.quality >= 0.95
    assert plan(objective="time", gpu_memory=1e9).chosen.num_gpus == 4
    assert plan(objective="money", gpu_memory=1e9).chosen.num_gpus == 1
    widest = plan(objective="memory", gpu_memory=1e9)
    assert widest.chosen.horizon_blocks == T
    layout = plan(layout="2|2|4", gpu_memory=1e9)
    assert {one.partition for one in layout.candidates} == {(2, 2, 4)}


def test_a_plan_is_read_as_it_was_written(tmp_path: Path):
    found = plan()
    found.write(tmp_path / "plan.yaml")
    again = Plan.read(tmp_path / "plan.yaml")
    assert again == found
    assert again.build_costs().forward == found.build_costs().forward
    again.check_fits({"model": {"name": "x"}, "more": 1})
    with pytest.raises(ValueError, match="the plan is for another model"):
        again.check_fits({"model": {"name": "y"}})
    (tmp_path / "other.yaml").write_text("a: 1\n")
    with pytest.raises(ValueError, match="is no plan of mpc_dist"):
        Plan.read(tmp_path / "other.yaml")
    with pytest.raises(ValueError, match="cannot read the plan"):
        Plan.read(tmp_path / "none.yaml")


def test_measurements_are_kept_with_what_they_depend_on(tmp_path: Path):
    found = {1: measured(1), 4: measured(4)}
    save_measurements(tmp_path / "a.json", found, {"model": "x"})
    assert load_measurements(tmp_path / "a.json", {"model": "x"}) == found
    assert load_measurements(tmp_path / "a.json", {"model": "y"}) is None
    assert load_measurements(tmp_path / "none.json", {}) is None
    (tmp_path / "a.json").write_text('{"key": {"model": "x"}}')
    with pytest.raises(ValueError, match="is no profile of mpc_dist"):
        load_measurements(tmp_path / "a.json", {"model": "x"})


def test_shapes_are_windows():
    assert Shape("sliding", 2, "blocks").over_blocks((3, 3)) == sliding(6, 2)
    assert Shape("sliding", 1).over_blocks((3, 3)) == expand(sliding(2, 1), (3, 3))
    assert str(Shape("tumbling", 2)) == "tumbling 2 stages"


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: plan(gpu_memory=300.0), "block 0's weights, gradients and optimizer state need 400 bytes"),
        (lambda: plan(max_gpus=0), "number of GPUs: 0 is out of range"),
        (lambda: plan(objective="O1", epsilon=1.5), "eps 1.5 is out of range"),
        (lambda: plan(layout="3|3"), "layout '3|3' must be stage sizes"),
        (lambda: plan(cost="math.no_such"), "cannot import 'math.no_such'"),
        (lambda: plan(gpu_memory=500.0, max_gpus=1), "nothing fits 1 GPUs of 500 bytes"),
        (lambda: Planner({}, cosine, Request(1e9)), "the profile is empty"),
        (lambda: dataclasses.replace(measured(1), blocks=()), "the profile has 0 blocks and 8 readouts"),
        (lambda: measured(1, forward=float("nan")), "forward of block 0 in the profile must be a finite number"),
    ],
)
def test_bad_input_is_named(action, message):
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        action()
