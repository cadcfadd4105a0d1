"""Checkpoints: what is saved by one layout is gone on with by any, and a damaged one is never used."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mpc_dist.cli import main
from mpc_dist.data.dataset import select_tests
from mpc_dist.models import build_chain
from mpc_dist.report.page import build_page
from mpc_dist.report.run import read_run
from mpc_dist.runtime.local import LocalRankError, run_local_ranks
from mpc_dist.runtime.mesh import Launch
from mpc_dist.runtime.pipeline import Pipeline
from mpc_dist.training.checkpoint import SavedCheckpoint, newest_undamaged
from mpc_dist.training.checkpoint_folder import find_damage, folder_of, list_checkpoints, step_of
from mpc_dist.training.config import Config
from mpc_dist.training.job import train
from mpc_dist.training.metrics import read_metrics
from tests.conftest import ROOT
from tests.training.local import losses, parse, train_locally

GPT = (
    "--model.name gpt --model.num_blocks 4 --model.width 16 --model.num_heads 2 --model.dropout 0.1 --data.name text "
    "--data.context 16 --data.max_bytes 40000 --batch_size 8 --parallel.microbatches 2 --training.log_every 1 "
    "--training.eval_batches 1 --training.precision float64 --device cpu"
).split()
RESNET = (
    "--model.name resnet_cifar --model.blocks_per_group 1 --model.channels 4 --data.name digits --batch_size 8 "
    "--parallel.microbatches 2 --optimizer.name sgd --optimizer.momentum 0.9 --training.log_every 1 "
    "--training.eval_batches 1 --device cpu"
).split()


def words(text: str) -> list[str]:
    return text.split()


LAYOUTS = {
    "horizon 1 on 2 stages, cosine rate": [
        *GPT,
        *words("--parallel.stages 2 --horizon 1 --optimizer.scheduler CosineAnnealingLR"),
        "--optimizer.scheduler_arguments",
        "{T_max: 20}",
    ],
    "2 stages x 2 replicas, shared readouts, split": [
        *GPT,
        *words("--parallel.stages 2 --data_parallel.degree 2 --horizon 1 --readout.kind shared --parallel.split true"),
    ],
    "2 stages x 2 replicas, optimizer shared by ZeRO": [
        *GPT,
        *words("--parallel.stages 2 --data_parallel.degree 2 --data_parallel.sharding deepspeed"),
        *words("--data_parallel.stage 2 --horizon 1 --training.precision float32"),
    ],
    "batch norm in one process, rate of the paper": [
        *RESNET,
        *words("--optimizer.scheduler drop_on_rise --data.num_test 1777 --optimizer.lr 0.5"),
    ],
    "batch norm on 2 replicas": [*RESNET, *words("--data_parallel.degree 2")],
}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.slow if "ZeRO" in name else ()) for name in LAYOUTS]
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(layout: str, tmp_path: Path):
    arguments = LAYOUTS[layout]
    config = train_locally([*arguments, *words("--training.steps 7")], tmp_path / "whole")
    for steps in ("3", "7"):
        train_locally([*arguments, "--training.steps", steps, "--checkpoints.every", "2"], tmp_path / "parts")
    whole, parts = (losses(tmp_path / name, config.num_ranks) for name in ("whole", "parts"))
    assert whole == parts
    assert {step for step, _, _ in whole} == set(range(1, 8))
    ends = [SavedCheckpoint(list_checkpoints(folder_of(tmp_path / name))[-1]) for name in ("whole", "parts")]
    assert ends[0].described.keys() == ends[1].described.keys()
    tensors = [end.read_all(list(end.described)) for end in ends]
    for name, tensor in tensors[0].items():
        assert torch.equal(tensor, tensors[1][name]), name
    assert ends[0].state.progress == ends[1].state.progress


@pytest.fixture(scope="module")
def four_stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps on 4 stages with windows in blocks, then three more."""
    folder = tmp_path_factory.mktemp("four")
    for steps in ("3", "6"):
        train_locally([*FOUR, "--training.steps", steps, "--parallel.stages", "4"], folder)
        if steps == "3":
            shutil.copytree(folder, folder / "begun")
    return folder


FOUR = [*GPT, *words("--horizon.windows sliding --horizon.size 2 --horizon.unit blocks --model.dropout 0")]


@pytest.mark.parametrize(("stages", "replicas", "batch"), [(2, 2, 4), (1, 1, 8), (3, 1, 8)])
def test_another_layout_goes_on_alike(stages, replicas, batch, four_stages: Path, tmp_path: Path):
    arguments = [*FOUR, *words(f"--training.steps 6 --parallel.stages {stages} --data_parallel.degree {replicas}")]
    resume = ["--checkpoints.resume", str(four_stages / "begun"), "--batch_size", str(batch)]
    config = train_locally([*arguments, *resume], tmp_path)
    found, expected = losses(tmp_path, config.num_ranks), losses(four_stages, 4)
    assert {step for step, _, _ in found} == {4, 5, 6}
    for step, boundary, _ in found:
        mean = sum(found[step, boundary, replica] for replica in range(replicas)) / replicas
        # The same sums in another order: float64 rounding, amplified by three updates.
        assert mean == pytest.approx(expected[step, boundary, 0], rel=1e-9)
    saved, again = (SavedCheckpoint(list_checkpoints(folder_of(folder))[-1]) for folder in (four_stages, tmp_path))
    weights = [name for name in saved.described if not name.startswith("random.")]
    assert set(weights) == {name for name in again.described if not name.startswith("random.")}
    ours, theirs = saved.read_all(weights), again.read_all(weights)
    for name in weights:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-7, atol=1e-9, msg=name)


def test_a_shared_optimizer_goes_on_unshared(tmp_path: Path):
    """The state of ZeRO's parts is saved whole: a run without sharding goes on from it, and the other way round."""
    arguments = [*GPT, *words("--horizon 1 --training.precision float32 --model.dropout 0 --data_parallel.degree 2")]
    shared = words("--data_parallel.sharding deepspeed --data_parallel.stage 1")
    train_locally([*arguments, *words("--training.steps 6")], tmp_path / "plain")
    for number, sharding in enumerate([shared, [], shared]):
        train_locally([*arguments, *sharding, "--training.steps", str(2 * (number + 1))], tmp_path / "mixed")
    plain, mixed = losses(tmp_path / "plain", 2), losses(tmp_path / "mixed", 2)
    assert plain.keys() == mixed.keys()
    for key, loss in plain.items():
        assert mixed[key] == pytest.approx(loss, rel=1e-5), key  # float32, summed in another order


def test_export_is_the_trained_model(four_stages: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["export", str(four_stages), "--to", str(tmp_path / "out")]) == 0
    assert "after step 6" in capsys.readouterr().out
    config = parse(["--config", str(tmp_path / "out" / "config.yaml")])
    data = config.data.load()
    chain = build_chain(config.model, data.task, boundaries=[2, 3, 4]).to(torch.float64)
    chain.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    saved = SavedCheckpoint(list_checkpoints(folder_of(four_stages))[-1])
    for name, parameter in chain.named_parameters():
        assert torch.equal(saved.read_all([name])[name], parameter), name
    (tested,) = select_tests(data.test, num_samples=8, seed=config.seed, batch_size=8)
    inputs, labels = data.test.read(tested)
    evaluation = [line for line in read_metrics(four_stages, 3) if line["event"] == "evaluation"][-1]
    with torch.no_grad():
        loss = float(chain.loss(chain(inputs), labels))
    assert loss == pytest.approx(evaluation["scores"]["4"]["loss"], rel=1e-12)


def test_an_adaptive_horizon_goes_on_across_its_changes(tmp_path: Path):
    """Windows grow at some of the decisions; wherever the run is cut, before or after, it goes on alike."""
    arguments = [*GPT, *words("--parallel.stages 2 --horizon.mode adaptive --horizon.every 2 --optimizer.lr 0")]
    train_locally([*arguments, *words("--training.steps 8")], tmp_path / "whole")
    for steps in ("3", "5", "8"):
        train_locally([*arguments, "--training.steps", steps], tmp_path / "parts")
    decisions = {
        name: [{**line, "time": 0} for line in read_metrics(tmp_path / name, 1) if line["event"] == "horizon"]
        for name in ("whole", "parts")
    }
    # Without a learning rate the loss does not fall: grown at the second decision.
    assert [line["size"] for line in decisions["whole"]] == [1, 2, 2, 2]
    assert decisions["parts"] == decisions["whole"]
    assert losses(tmp_path / "whole", 2) == losses(tmp_path / "parts", 2)


@pytest.mark.parametrize("stages", [("2", "1"), ("1", "2")], ids="->".join)
def test_the_report_follows_a_run_over_its_layouts(stages, tmp_path: Path):
    for number, before in zip(("3", "6"), stages, strict=True):
        train_locally([*FOUR, "--training.steps", number, "--parallel.stages", before], tmp_path)
    run = read_run(tmp_path)
    assert (run.num_stages, run.status, run.last_step) == (int(stages[1]), "finished", 6)
    assert [point.step for point in run.train_losses] == [1, 2, 3, 4, 5, 6]
    assert [point.step for point in run.test_losses] == [3, 6]
    assert run.last_evaluation is not None
    assert 4 in run.last_evaluation.exits
    assert "resumed from step 3" in build_page([run])


def test_a_new_run_forgets_the_ranks_of_a_larger_one(tmp_path: Path):
    train_locally([*FOUR, *words("--training.steps 2 --parallel.stages 2")], tmp_path)
    train_locally([*FOUR, *words("--training.steps 2 --checkpoints.resume never")], tmp_path)
    assert [path.name for path in tmp_path.glob("metrics-*")] == ["metrics-rank0.jsonl"]


def weights_after_drops(rank: int, config: Config) -> dict[str, torch.Tensor]:
    kept: dict[str, torch.Tensor] = {}
    collect = Pipeline.collect_state

    def collect_and_keep(pipeline: Pipeline) -> dict[str, torch.Tensor]:
        found = collect(pipeline)
        kept.update({name: value.detach().clone() for name, value in pipeline.named_parameters().items()})
        return found

    Pipeline.collect_state = collect_and_keep  # type: ignore[method-assign]
    train(config, Launch(rank, config.num_ranks, rank), is_quiet=True)
    return kept


def test_replicas_drop_the_rate_together(tmp_path: Path):
    """Each replica sees other samples and so another loss; if they decided alone, their weights would part."""
    options = "--optimizer.scheduler drop_on_rise --data.max_bytes 800 --data_parallel.degree 2 --training.steps 30"
    arguments = [*GPT, *words(f"{options} --optimizer.lr 0.05 --training.folder"), str(tmp_path)]
    one, other = run_local_ranks(weights_after_drops, 2, parse(arguments))
    saved = SavedCheckpoint(list_checkpoints(folder_of(tmp_path))[-1])
    assert saved.state.progress["rate"]["num_drops"] > 0
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def test_another_horizon_goes_on_with_new_readouts(four_stages: Path, tmp_path: Path):
    arguments = [*FOUR, *words("--training.steps 4 --parallel.stages 1 --horizon.size 1")]
    train_locally([*arguments, "--checkpoints.resume", str(four_stages / "begun")], tmp_path)
    (resumed,) = [line for line in read_metrics(tmp_path, 0) if line["event"] == "resume"]
    assert resumed["step"] == 3
    assert {name.split(".")[1] for name in resumed["new_weights"]} == {"1"}


def damage(checkpoint: Path, how: str) -> None:
    file = sorted(checkpoint.glob("*.safetensors"))[-1]
    content = bytearray(file.read_bytes())
    if how == "a flipped bit":
        content[-9] ^= 1
        file.write_bytes(content)
    elif how == "a truncated file":
        file.write_bytes(content[:-100])
    elif how == "a strange file":
        shutil.copy(file, checkpoint / "shard-00099-model-00001-of-00001.safetensors")
    elif how == "a missing file":
        file.unlink()
    else:
        (checkpoint / "state.json").write_text('{"format": 1}')


DAMAGES = ["a flipped bit", "a truncated file", "a missing file", "a strange file", "an unreadable state"]


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_for_an_older_one(how: str, four_stages: Path, tmp_path: Path):
    shutil.copytree(four_stages, tmp_path / "run")
    newest = list_checkpoints(folder_of(tmp_path / "run"))
    assert [step_of(path) for path in newest] == [3, 6]
    damage(newest[-1], how)
    assert find_damage(newest[-1]) is not None
    saved, damages = newest_undamaged(newest)
    assert saved is not None
    assert saved.state.step == 3
    assert len(damages) == 1


@pytest.mark.parametrize("how", DAMAGES)
def test_without_an_undamaged_one_nothing_is_started(how: str, four_stages: Path, tmp_path: Path):
    shutil.copytree(four_stages / "begun", tmp_path / "run")
    (only,) = list_checkpoints(folder_of(tmp_path / "run"))
    damage(only, how)
    before = (tmp_path / "run" / "metrics-rank0.jsonl").read_text()
    with pytest.raises(ValueError, match=r"no checkpoint of .*run is undamaged; set checkpoints.resume: never"):
        train_locally([*FOUR, "--training.steps", "6"], tmp_path / "run")
    assert (tmp_path / "run" / "metrics-rank0.jsonl").read_text() == before
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--model.width 32", "is of another model: it has .*'width': 16.* the configuration .*'width': 32"),
        ("--optimizer.name sgd", "is of another optimizer: it has adamw, the configuration sgd"),
        ("--seed 1", "the saved data state has seed 0 but this run 1"),
        ("--checkpoints.resume nowhere", "checkpoints.resume: nowhere holds no checkpoint"),
        ("--checkpoints.keep 0", "checkpoints.keep 0 is out of range"),
        ("--checkpoints.every -1", "checkpoints.every -1 is out of range"),
    ],
)
def test_what_does_not_fit_is_said(change: str, message: str, four_stages: Path, tmp_path: Path):
    shutil.copytree(four_stages / "begun", tmp_path / "run")
    with pytest.raises(ValueError, match=message):
        train_locally([*FOUR, "--training.steps", "6", *words(change)], tmp_path / "run")
    assert [step_of(path) for path in list_checkpoints(folder_of(tmp_path / "run"))] == [3]


def test_the_newest_are_kept_and_a_new_start_removes_them(tmp_path: Path):
    arguments = [*GPT, *words("--training.steps 5 --checkpoints.every 1 --checkpoints.keep 2")]
    train_locally(arguments, tmp_path)
    folder = folder_of(tmp_path)
    assert [path.name for path in sorted(folder.iterdir())] == ["step-00000004", "step-00000005"]
    train_locally([*arguments, *words("--checkpoints.resume never --checkpoints.every 0")], tmp_path)
    assert list(folder.iterdir()) == []


def test_a_step_back_drops_what_came_after_and_a_borrowed_start_is_made_once(tmp_path: Path):
    arguments = [*GPT, *words("--training.steps 5 --checkpoints.every 1 --checkpoints.keep 9")]
    train_locally(arguments, tmp_path / "run")
    # Written differently, still the same folder.
    back = tmp_path / "run" / ".." / "run" / "checkpoints" / "step-00000002"
    train_locally([*arguments, *words("--checkpoints.every 0 --checkpoints.resume"), str(back)], tmp_path / "run")
    assert [step_of(path) for path in list_checkpoints(folder_of(tmp_path / "run"))] == [1, 2]
    borrowed = [*arguments, "--checkpoints.resume", str(tmp_path / "run")]
    for _ in range(2):  # the second time it goes on from its own, which is complete
        train_locally(borrowed, tmp_path / "other")
    lines = read_metrics(tmp_path / "other", 0)
    assert [line["step"] for line in lines if line["event"] == "resume"] == [2, 5]
    assert [line["step"] for line in lines if line["event"] == "step"] == [3, 4, 5]


@pytest.mark.parametrize("steps", ["3", "2"])
def test_a_finished_run_is_only_evaluated_again(steps: str, four_stages: Path, tmp_path: Path, capsys):
    shutil.copytree(four_stages / "begun", tmp_path / "run")
    train_locally([*FOUR, "--training.steps", steps], tmp_path / "run")
    lines = read_metrics(tmp_path / "run", 0)[-4:]
    assert [line["event"] for line in lines] == ["start", "resume", "evaluation", "end"]
    assert [line["step"] for line in lines[1:]] == [3, 3, 3]
    assert "is already after step 3; raise training.steps" in capsys.readouterr().err


def test_one_step_that_is_left_is_trained_and_scored_once(tmp_path: Path, capsys):
    for steps in ("1", "2"):
        train_locally([*GPT, "--training.steps", steps, "--checkpoints.every", "1"], tmp_path)
    lines = read_metrics(tmp_path, 0)
    scored = [(line["event"], line["step"]) for line in lines if line["event"] in ("step", "evaluation", "end")]
    assert scored == [(event, step) for step in (1, 2) for event in ("step", "evaluation", "end")]
    said = capsys.readouterr().err
    assert "nothing left to train" not in said
    assert "could not be saved" not in said
    # What a step holds is counted once.
    counted = [line["step"] for line in lines if line["event"] == "step" and "live_bytes" in line]
    assert counted == [1, 2]  # each was the first of its process


def test_a_save_that_fails_stops_nothing_and_is_said(tmp_path: Path):
    tmp_path.joinpath("checkpoints").write_text("a file where the folder should be")
    arguments = [*GPT, *words("--training.steps 3 --checkpoints.every 1 --parallel.stages 2")]
    with pytest.raises(LocalRankError, match="training has ended, but its last checkpoint could not be saved"):
        train_locally(arguments, tmp_path)
    lines = read_metrics(tmp_path, 0)
    failures = [line["failure"] for line in lines if line["event"] == "saved"]
    assert len(failures) == 3
    assert all("NotADirectoryError" in failure for failure in failures)
    events = [line["event"] for line in lines]
    assert events.count("step") == 3
    assert events[-1] == "end"


@pytest.fixture
def killed_run(tmp_path: Path) -> Path:
    """A run on 2 ranks by torchrun, killed after its second checkpoint."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["launch/train.py", *GPT, *words("--parallel.stages 2 --horizon 1 --training.steps 100000")]
    command += ["--checkpoints.every", "3", "--training.folder", str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and len(list_checkpoints(folder_of(tmp_path / "run"))) < 2:
            time.sleep(0.02)
    finally:
        # torchrun first: it would start other processes for dead ones, which have sessions of their own.
        process.kill()
        process.wait(10)
        subprocess.run(["pkill", "-KILL", "-f", str(tmp_path / "run")], check=False)
    return tmp_path / "run"


def test_a_killed_run_goes_on_from_its_last_checkpoint(killed_run: Path, tmp_path: Path):
    last = step_of(list_checkpoints(folder_of(killed_run))[-1])
    arguments = [*GPT, *words(f"--parallel.stages 2 --horizon 1 --training.steps {last + 4}")]
    train_locally(arguments, killed_run)
    train_locally(arguments, tmp_path / "whole")
    assert losses(tmp_path / "whole", 2).items() <= losses(killed_run, 2).items()
    assert not list(folder_of(killed_run).glob("*.partial"))
    state = json.loads((list_checkpoints(folder_of(killed_run))[-1] / "state.json").read_text())
    assert state["step"] == last + 4
