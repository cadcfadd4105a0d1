"""Training as a user runs it: `launch/train.py` by python and by torchrun."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mpc_dist.runtime.executor import StepRecord
from mpc_dist.schedule import parse_action
from mpc_dist.training.config import ConfigParser
from mpc_dist.training.loop import measure_bubble
from mpc_dist.training.metrics import MetricsFile, metrics_path, read_metrics
from mpc_dist.training.optimizer import DropOnRise, build_scheduler
from mpc_dist.training.sections import HorizonConfig, OptimizerConfig
from mpc_dist.windows import backprop, cumulative, loco, sliding, tumbling
from tests.conftest import ROOT

SMALL = (
    "--config configs/gpt_train.yaml --model.num_blocks 4 --model.width 16 --data.context 16 --data.max_bytes 30000 "
    "--training.steps 4 --training.log_every 1 --training.eval_every 2 --training.eval_batches 2 "
    "--training.precision float64"
).split()


def launch(num_ranks: int, *arguments: str, fails: bool = False) -> subprocess.CompletedProcess[str]:
    python = [sys.executable]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command = [*(torchrun if num_ranks > 1 else python), "launch/train.py", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180)
    assert (done.returncode != 0) == fails, done.stderr
    return done


def losses(folder: Path, num_ranks: int) -> dict[tuple[int, str], float]:
    """Every training loss, by step and boundary."""
    found: dict[tuple[int, str], float] = {}
    for rank in range(num_ranks):
        for line in read_metrics(folder, rank):
            if line["event"] == "step":
                found |= {(line["step"], boundary): loss for boundary, loss in line["losses"].items()}
    return found


def test_two_ranks_and_one_process_train_alike(tmp_path: Path):
    """The same windows in blocks: the partition must not matter, dropout included."""
    windows = "--horizon.windows sliding --horizon.size 2 --horizon.unit blocks --model.dropout 0.2".split()
    for name, stages in (("one", 1), ("two", 2)):
        folder = ["--training.folder", str(tmp_path / name), "--parallel.stages", str(stages)]
        launch(stages, *SMALL, *windows, *folder)
    one, two = losses(tmp_path / "one", 1), losses(tmp_path / "two", 2)
    assert set(one) == set(two)
    assert len(one) == 4 * 3  # four steps, readouts at boundaries 2, 3 and 4
    for key, loss in one.items():
        assert two[key] == pytest.approx(loss, rel=1e-9)


def test_a_run_reports_what_it_did(tmp_path: Path):
    done = launch(2, *SMALL, "--training.folder", str(tmp_path))
    assert "test loss" in done.stdout
    first = read_metrics(tmp_path, 0)
    events = [line["event"] for line in first if line["event"] != "timeline"]
    steps = ["step", "step", "evaluation"]
    assert events == ["start", *steps, *steps, "checkpoint", "saved", "end"]
    assert [line["step"] for line in first if line["event"] == "timeline"] == [1, 2, 3, 4]
    assert first[0]["config"]["horizon"] == {
        "windows": "sliding",
        "size": 1,
        "unit": "stages",
        "mode": "fixed",
        "every": 100,
    }
    assert first[0]["partition"] == [2, 2]
    assert first[0]["windows"] == [[[2, 1.0]], [[2, 1.0]], [[4, 1.0]], [[4, 1.0]]]
    again, _ = ConfigParser(["--config", str(tmp_path / "config.yaml")], prog="test", description="").parse()
    assert json.loads(json.dumps(again.as_dict())) == first[0]["config"]
    step: dict[str, Any] = first[1]
    assert step["live_bytes"] > 0
    assert step["in_flight"] == 1
    assert 0 <= step["bubble"] < 1
    assert step["samples_per_second"] > 0
    scores = {key: value for rank in (0, 1) for key, value in read_metrics(tmp_path, rank)[-1]["scores"].items()}
    assert set(scores) == {"2", "4"}
    assert all(0 <= score["accuracy"] <= 1 for score in scores.values())


def test_replicas_and_stages_together_with_the_papers_rule(tmp_path: Path):
    options = "--parallel.stages 2 --data_parallel.degree 2 --optimizer.scheduler drop_on_rise --batch_size 8".split()
    folder = ["--training.folder", str(tmp_path), "--data.max_bytes", "800", "--data.context", "8"]
    launch(4, *SMALL, *folder, *options, "--training.steps", "12", "--training.clip_norm", "1.0")
    assert len(read_metrics(tmp_path, 3)) > 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "1 processes were started, but 2 stages x 1 replicas need 2; start 2"),
        (["--horizon", "3"], "horizon.size 3 exceeds the 2 stages of this run; use 1..2"),
        (["--parallel.partition", "[1,2]"], "partition 1|2 has 3 blocks but the model 4"),
        (["--parallel.microbatches", "3"], "batch_size 16 cannot be cut into 3 equal micro-batches"),
        (["--optimizer.scheduler", "CosinLR"], "unknown optimizer.scheduler 'CosinLR'; did you mean"),
    ],
)
def test_what_is_wrong_is_said_once_before_anything_is_written(arguments, message, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["train.py", *SMALL, *arguments, "--training.folder", str(tmp_path / "run")])
    assert runpy.run_path("launch/train.py")["main"]() == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("train.py: error") == 1
    assert not (tmp_path / "run").exists()


def test_a_launcher_that_says_nonsense_is_refused(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("RANK", "first")
    monkeypatch.setattr(sys, "argv", ["train.py", *SMALL])
    assert runpy.run_path("launch/train.py")["main"]() == 2
    assert "RANK, WORLD_SIZE and LOCAL_RANK must be whole numbers" in capsys.readouterr().err


def test_a_shared_head_trains_on_two_ranks(tmp_path: Path):
    launch(2, *SMALL, "--readout.kind", "shared", "--training.folder", str(tmp_path))
    assert {boundary for _, boundary in losses(tmp_path, 2)} == {"2", "4"}


def test_horizons_in_stages_and_in_blocks():
    sizes = (2, 1, 3)
    assert HorizonConfig("backprop").build(sizes) == backprop(6)
    assert HorizonConfig("sliding", 2, "blocks").build(sizes) == sliding(6, 2)
    assert HorizonConfig("tumbling", 4, "blocks").build(sizes) == tumbling(6, 4)
    assert HorizonConfig("cumulative", 3, "blocks").build(sizes) == cumulative(6, 3)
    assert HorizonConfig("loco", None, "blocks").build(sizes) == loco(6)
    assert [aims[0][0] for aims in HorizonConfig("sliding", 1).build(sizes).targets] == [2, 2, 3, 6, 6, 6]
    with pytest.raises(ValueError, match=r"horizon\.size must be a whole number, got None"):
        HorizonConfig("sliding")


def test_the_papers_rule_drops_the_rate_when_an_epochs_loss_rose():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    rule = DropOnRise(optimizer)
    rates = []
    for loss in (3.0, 2.0, 2.5, 2.4, 2.6):
        rule.end_epoch(loss)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([1, 1, 0.9, 0.9, 0.81])
    later = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    again = DropOnRise(later)
    again.load_state_dict(rule.state_dict())
    assert later.param_groups[0]["lr"] == pytest.approx(0.81)
    assert again.state_dict() == {"last": 2.6, "num_drops": 2}
    again.end_epoch(2.7)
    assert later.param_groups[0]["lr"] == pytest.approx(0.729)


def test_any_scheduler_of_torch_is_stepped_and_bad_arguments_are_named():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    config = OptimizerConfig(scheduler="StepLR", scheduler_arguments={"step_size": 1, "gamma": 0.5})
    step = build_scheduler(config, optimizer)
    optimizer.step()
    step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(ValueError, match=r"optimizer\.scheduler_arguments do not fit StepLR"):
        build_scheduler(OptimizerConfig(scheduler="StepLR"), optimizer)


def test_the_end_of_a_metrics_file_can_be_read_alone(tmp_path: Path):
    file = MetricsFile(tmp_path, 0)
    for step in range(100):
        file.write(event="step", step=step, text="ä" * (step % 7))
    whole = read_metrics(tmp_path, 0)
    assert len(whole) == 100
    size = metrics_path(tmp_path, 0).stat().st_size
    for last_bytes in (0, 1, 50, *range(300, 320), size, 2 * size):
        found = read_metrics(tmp_path, 0, last_bytes=last_bytes)
        assert found == whole[len(whole) - len(found) :]
    assert read_metrics(tmp_path, 0, last_bytes=size) == whole
    assert 1 <= len(read_metrics(tmp_path, 0, last_bytes=300)) < 10
    assert read_metrics(tmp_path, 1, last_bytes=300) == []


def test_the_bubble_is_the_share_of_a_step_without_work():
    assert measure_bubble(StepRecord()) == 0.0
    forward, backward = parse_action("F0.0"), parse_action("B0.0")
    record = StepRecord(moments=[(forward, 11.0, 12.0), (backward, 13.0, 14.0)], beginning=10.0)
    assert record.busy_seconds == 2.0
    assert measure_bubble(record) == 0.5
    record.started = 13.0  # what another clock might give is no bubble below zero
    assert measure_bubble(record) == 0.0
