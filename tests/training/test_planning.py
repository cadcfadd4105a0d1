"""From a configuration to a plan to a run, and trials."""

import dataclasses
import json
import math
import os
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from mpc_dist.cli import main
from mpc_dist.commands.plan import parse_bytes
from mpc_dist.data import Batches, TextData
from mpc_dist.models import GPT, Chain
from mpc_dist.planner.plan import Plan
from mpc_dist.planner.request import Request
from mpc_dist.profile import SavedBytes
from mpc_dist.readout import cross_entropy
from mpc_dist.runtime.in_process import InProcessPipeline
from mpc_dist.runtime.mesh import Launch
from mpc_dist.runtime.pipeline import Pipeline
from mpc_dist.runtime.stage import StageOptions
from mpc_dist.schedule import Costs, build_schedule, lay_out
from mpc_dist.training import job
from mpc_dist.training.auto import train_as_planned
from mpc_dist.training.config import Config, ConfigParser
from mpc_dist.training.metrics import read_metrics
from mpc_dist.training.optimizer import build_optimizer
from mpc_dist.training.planning import Probe, apply_plan, build_whole_chain, plan_for
from mpc_dist.training.sections import OptimizerConfig, TrainingConfig
from mpc_dist.training.trial import (
    SMALL_DIFFERENCE,
    choose_finalists,
    evaluate,
    find_disagreements,
    relative_rate,
    run_trials,
    windows_of,
)
from mpc_dist.windows import backprop
from tests.conftest import ROOT
from tests.examples import build_dense_chain

SMALL = "--config configs/gpt_train.yaml --model.num_blocks 4 --model.width 16 --data.context 16 --data.max_bytes 30000"
CONFIG = Config(
    model=GPT(num_blocks=4, width=16, num_heads=2),
    data=TextData(context=16, max_bytes=30_000),
    optimizer=OptimizerConfig(lr=0.01),
    batch_size=8,
)


def quiet(_what: str, _done: int, _total: int) -> None: ...


def plan(*options: str, out: Path, fails: bool = False) -> int:
    argv = ["plan", *SMALL.split(), "--gpu-memory", "4MiB", "--batches", "1", "--out", str(out), *options]
    code = main([*argv, "--profiles", str(out.parent / "profiles")])
    assert (code == 0) != fails
    return code


def run_words(words: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(words, capture_output=True, text=True, timeout=240, cwd=ROOT, env=environment)


def launch(num_ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", str(num_ranks)]
    return run_words([*torchrun, "launch/train.py", *SMALL.split(), *arguments])


def test_a_plan_is_made_and_run_as_it_is(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    out = tmp_path / "plan.yaml"
    plan("--max-gpus", "2", out=out)
    said = capsys.readouterr().out
    assert "Algorithm 1: h* =" in said
    assert out.with_suffix(".png").stat().st_size > 10_000
    made = Plan.read(out)
    folder = ["--training.folder", str(tmp_path / "run"), "--training.steps", "3"]
    done = launch(made.chosen.num_gpus, "--plan", str(out), *folder)
    assert done.returncode == 0, done.stderr
    start = read_metrics(tmp_path / "run", 0)[0]
    assert start["config"]["parallel"]["partition"] == list(made.chosen.partition)
    assert start["config"]["horizon"]["windows"] == made.chosen.shape.windows
    again, _ = ConfigParser([*SMALL.split(), *folder], prog="", description="").parse()
    with pytest.raises(ValueError, match="processes were started; start"):
        train_as_planned(again, Launch(0, made.chosen.num_gpus + 1, 0), out)
    wider = dataclasses.replace(again, model=dataclasses.replace(again.model, width=32))
    with pytest.raises(ValueError, match="the plan is for another model"):
        train_as_planned(wider, Launch(0, made.chosen.num_gpus, 0), out)
    # What was measured is used again.
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "profiles").iterdir()}
    plan("--max-gpus", "2", "--objective", "O2", out=out)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "profiles").iterdir()} == before


def rank_bytes(folder: Path, num_ranks: int) -> list[int]:
    """What each rank counted in its first step."""
    steps = [next(line for line in read_metrics(folder, rank) if line["event"] == "step") for rank in range(num_ranks)]
    return [line["rank_bytes"] for line in steps]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_line_that_a_plan_prints_runs_it_and_the_bytes_are_those_planned(
    precision, tmp_path: Path, capsys, monkeypatch
):
    monkeypatch.chdir(ROOT)
    other = tmp_path / "a second file.yaml"
    other.write_text("optimizer: {name: adamw}\ntraining: {steps: 3, clip_norm: 0.5}\n")
    folder = ["--training.folder", str(tmp_path / "a run")]
    given = [
        "--config",
        str(other),
        "--model.width=32",
        "--training.precision",
        precision,
        *folder,
        "--readout.kind",
        "local",
    ]
    plan("--layout", "2|2", "--gpu-memory", "1GiB", *given, "--latency", "1e-3", out=tmp_path / "plan.yaml")
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("run it: "))
    words = shlex.split(line.removeprefix("run it: "))
    assert words[:4] == ["torchrun", "--standalone", "--nproc-per-node", "2"]
    done = run_words([str(Path(sys.executable).with_name("torchrun")), *words[1:]])
    assert done.returncode == 0, done.stderr
    config = read_metrics(tmp_path / "a run", 0)[0]["config"]
    assert (config["model"]["width"], config["optimizer"]["name"], config["training"]["clip_norm"]) == (
        32,
        "adamw",
        0.5,
    )
    assert config["training"]["precision"] == precision
    # 5 %: what autograd saves of messages and of losses depends on the rank's place in a small way.
    planned = Plan.read(tmp_path / "plan.yaml").chosen.bytes_per_rank
    assert rank_bytes(tmp_path / "a run", 2) == pytest.approx(planned, rel=0.05)


def test_a_plan_is_for_one_precision(tmp_path: Path):
    halved = dataclasses.replace(CONFIG, training=dataclasses.replace(CONFIG.training, precision="bfloat16"))
    request, probe = Request(1e9, layout="2|2"), Probe(num_batches=1, repeats=1, profiles=tmp_path)
    # The same folder of profiles: what was measured in one precision is not used for the other.
    whole, half = (plan_for(config, request, probe) for config in (CONFIG, halved))
    assert half.measurements[1].blocks[0].saved_bytes < 0.9 * whole.measurements[1].blocks[0].saved_bytes
    assert half.cosines != whole.cosines
    with pytest.raises(ValueError, match="the plan is for another precision: it was made for 'float32', the config"):
        apply_plan(halved, whole.plan)


def test_horizon_auto_plans_for_the_ranks_given(tmp_path: Path):
    done = launch(2, "--horizon", "auto", "--training.folder", str(tmp_path), "--training.steps", "3")
    assert done.returncode == 0, done.stderr
    assert Plan.read(tmp_path / "plan.yaml").chosen.num_gpus == 2


def test_an_adaptive_horizon_grows_and_logs_its_evidence(tmp_path: Path):
    options = "--horizon.mode adaptive --horizon.every 2 --training.steps 8 --optimizer.lr 0".split()
    done = launch(2, *options, "--training.folder", str(tmp_path))
    assert done.returncode == 0, done.stderr
    decisions = [line for line in read_metrics(tmp_path, 1) if line["event"] == "horizon"]
    assert [line["step"] for line in decisions] == [2, 4, 6, 8]
    assert [line["size"] for line in decisions] == [1, 2, 2, 2]  # nothing is learnt, so the loss does not fall
    assert "the loss fell by" in decisions[1]["reason"]
    assert decisions[1]["loss"] > 0
    assert decisions[-1]["cosine"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu-memory", "1KiB"], "no number of GPUs helps"),
        (["--gpu-memory", "many"], "'many' is no size; write e.g. 24GiB"),
        (["--gpu-memory", ""], "say how much memory one GPU has"),
        (["--max-gpus", "0"], "number of GPUs: 0 is out of range"),
        (["--objective", "O1", "--eps", "2"], "eps 2.0 is out of range"),
        (["--layout", "2|3"], "layout '2|3' must be stage sizes"),
        (["--angles-file", "nowhere.json"], "there is no angle profile nowhere.json"),
        (["--cost", "math.pi"], "'math.pi' is a float, not a function"),
    ],
)
def test_bad_requests_are_named(options, message, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    plan(*options, out=tmp_path / "plan.yaml", fails=True)
    assert message in " ".join(capsys.readouterr().err.split())


def test_an_angle_file_must_be_one(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    empty = tmp_path / "angles.json"
    for content in ({"grams": []}, {}, {"grams": [[[[1.0]], [[1.0]]]]}):
        empty.write_text(json.dumps(content))
        plan("--angles-file", str(empty), out=tmp_path / "plan.yaml", fails=True)
        assert "is no angle profile of mpc_dist" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("given", [{"repeats": 0}, {"num_batches": 0}, {"processes": 0}, {"fake_tflops": 0.0}])
def test_what_a_probe_cannot_do_is_refused(given):
    with pytest.raises(ValueError, match="out of range"):
        Probe(**given)


def test_sizes_are_read():
    assert parse_bytes("24GiB") == 24 * 2**30
    assert parse_bytes("500 MB") == 5e8
    assert parse_bytes("1e9") == 1e9
    assert parse_bytes("2g") == 2e9


def measured_bytes(config: Config, plan: Plan) -> list[int]:
    """What each rank of the planned pipeline holds at most, counted while it runs in one process."""
    planned = apply_plan(config, plan)
    layout = lay_out(planned.horizon.build(planned.partition), planned.partition)
    M = planned.parallel.microbatches
    schedule = build_schedule(
        layout, M, split=planned.parallel.split, cap=planned.parallel.cap, costs=plan.build_costs()
    )
    data = config.data.load()
    chain = build_whole_chain(config, data.task)
    inputs, labels = next(Batches(data.train, batch_size=config.batch_size, seed=0))
    pipeline = InProcessPipeline(
        chain,
        layout,
        schedule,
        optimizer=partial(build_optimizer, config.optimizer, blocks=chain.blocks),
        options=StageOptions(checkpoint=planned.training.recompute),
    )
    meters = [SavedBytes([*chain.parameters(), *chain.buffers(), inputs, labels]) for _ in pipeline.stages]
    pipeline.step(inputs, labels, contexts=meters)
    sizes = []
    for stage, meter in zip(pipeline.stages, meters, strict=True):
        state = [value for values in stage.optimizer.state.values() for value in values.values()]
        weights = sum(2 * parameter.nbytes for parameter in stage.parameters) + sum(value.nbytes for value in state)
        sizes.append(meter.peak + weights)
    return sizes


def test_every_rank_keeps_within_the_memory_that_was_planned_for(tmp_path: Path):
    probe = Probe(num_batches=1, repeats=1, profiles=tmp_path)
    top = max(plan_for(CONFIG, Request(gpu_memory=1e9), probe).memory.values())
    seen = set()
    realised = set()
    for tenths in (1, 3, 5, 10, 20):
        M0 = top * tenths / 10
        for objective in ("O1", "time"):
            try:
                found = plan_for(CONFIG, Request(M0, max_gpus=4, objective=objective, epsilon=0.5), probe)
            except ValueError as error:
                assert tenths < 5, error  # noqa: PT017
                continue
            plan = found.plan
            assert plan.ladder_gpus == math.ceil(found.selection.choice.memory / M0 - 1e-9)
            if plan.realised is not None:
                assert plan.realised.num_gpus >= plan.ladder_gpus
                costs = found.planner.costs_of(plan.realised)
                assert max(measured_bytes(CONFIG, dataclasses.replace(plan, chosen=plan.realised, costs=costs))) <= M0
                realised.add((plan.ladder_gpus, plan.realised.num_gpus))
            if not plan.chosen.checkpoint:  # what is computed again is not counted by the meter
                assert max(measured_bytes(CONFIG, plan)) <= M0
                seen.add(plan.chosen.num_gpus)
    assert len(seen) > 1
    assert len(realised) > 1


def test_trials_rank_the_finalists_by_what_they_learnt(tmp_path: Path):
    request = Request(gpu_memory=1e9, max_gpus=4)
    planned = plan_for(CONFIG, request, Probe(num_batches=1, repeats=1, profiles=tmp_path))
    finalists = choose_finalists(planned.plan.candidates)
    assert {one.shape.windows for one in finalists} == {"backprop", "sliding", "tumbling", "cumulative"}
    assert len({windows_of(one) for one in finalists}) == len(finalists)
    tried = run_trials(CONFIG, planned, num_steps=30, report=quiet)
    by_windows = {windows_of(one): one for one in tried.plan.candidates if one.trial_quality is not None}
    assert set(by_windows) == {windows_of(one) for one in finalists} | {backprop(4)}
    assert by_windows[backprop(4)].trial_quality == pytest.approx(1)
    assert tried.plan.chosen == tried.plan.candidates[0]
    assert tried.plan.chosen.trial_quality is not None
    assert any(note.startswith("trial: 30 steps") for note in tried.plan.notes)
    assert apply_plan(CONFIG, tried.plan).parallel.stages == tried.plan.chosen.num_gpus


@pytest.mark.usefixtures("float64")
def test_a_trials_loss_is_the_mean_over_all_labels_that_count():
    parts, inputs, _ = build_dense_chain([3, 4, 5])
    chain = Chain(list(parts.blocks), cross_entropy, {2: parts.readouts["2"]})
    labels = torch.tensor([-100, 2, 0, 1])
    with torch.no_grad():
        prediction = chain.readouts["2"](chain.blocks[1](chain.blocks[0](inputs)))
    expected = torch.nn.functional.cross_entropy(prediction, labels)
    batches = [(inputs[:2], labels[:2]), (inputs[2:], labels[2:])]
    assert evaluate(chain, batches) == pytest.approx(float(expected), rel=1e-12)


def test_the_rate_and_what_is_said_of_disagreement(tmp_path: Path):
    assert relative_rate(2.0, 4.0, 1.0) == pytest.approx(0.5)
    assert relative_rate(float("nan"), 4.0, 1.0) == 0
    with pytest.raises(ValueError, match="back-propagation did not learn in the trial"):
        relative_rate(2.0, 4.0, 5.0)
    planned = plan_for(CONFIG, Request(1e9, max_gpus=2), Probe(num_batches=1, repeats=1, profiles=tmp_path))
    one, other = choose_finalists(planned.plan.candidates)[:2]
    close = dataclasses.replace(one, quality=0.9, trial_quality=0.2)
    far = dataclasses.replace(other, quality=0.3, trial_quality=0.8)
    (said,) = find_disagreements([close, far])
    assert "has the closer gradient (r^ 0.900 against 0.300)" in said
    for learnt in (0.9, 0.8, 0.8 - SMALL_DIFFERENCE / 2):  # more, as much, and less by next to nothing
        assert find_disagreements([dataclasses.replace(close, trial_quality=learnt), far]) == []


def test_a_plans_measured_costs_order_the_pipes_actions(tmp_path: Path, monkeypatch):
    """What the ranks run is what was simulated: with other costs the builder would choose another order."""
    config = dataclasses.replace(
        CONFIG, training=TrainingConfig(steps=1, eval_every=1, eval_batches=1, folder=str(tmp_path / "run"))
    )
    probe = Probe(num_batches=1, repeats=1, profiles=tmp_path)
    plan = plan_for(config, Request(1e9, num_gpus=1), probe).plan
    plan.write(tmp_path / "plan.yaml")
    given: list[Costs | None] = []

    class Recorded(Pipeline):
        def __init__(self, *arguments, costs: Costs | None = None, **options) -> None:
            given.append(costs)
            super().__init__(*arguments, costs=costs, **options)

    monkeypatch.setattr(job, "Pipeline", Recorded)
    train_as_planned(config, Launch(), tmp_path / "plan.yaml")
    (costs,) = given
    assert costs is not None
    assert costs == plan.build_costs()


def test_a_change_of_the_optimizer_leaves_the_angles_as_measured(tmp_path: Path):
    """The angle is the gradients' alone; what a block costs with the other optimizer is measured again."""
    request, probe = Request(1e9, layout="2|2"), Probe(num_batches=1, repeats=1, profiles=tmp_path)
    for name in ("sgd", "adamw"):
        plan_for(dataclasses.replace(CONFIG, optimizer=OptimizerConfig(name=name)), request, probe)
    assert len(list(tmp_path.glob("angles-*.json"))) == 1
    assert len(list(tmp_path.glob("blocks-*.json"))) == 2


@pytest.mark.parametrize(("num_blocks", "probed"), [(20, 10), (26, 2)])
def test_a_model_too_large_to_build_is_probed_at_a_depth_that_divides_its_own(num_blocks, probed, tmp_path: Path):
    large = dataclasses.replace(CONFIG, model=GPT(num_blocks=num_blocks, width=96, num_heads=2))
    probe = Probe(num_batches=1, fake_tflops=100, profiles=tmp_path)
    planned = plan_for(large, Request(1e12, layout=str(num_blocks)), probe)
    (note,) = (note for note in planned.plan.notes if "a scaled-down probe" in note)
    assert f"with {probed} blocks (GPT(name='gpt', num_blocks={probed}, width=64, num_heads=4" in note
